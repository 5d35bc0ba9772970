# SPDX-License-Identifier: Apache-2.0
"""Places by lifetime: nothing in use at the same time overlaps, and memory is used again."""

from __future__ import annotations

import random

import pytest
import torch

from paged_kv.engine.arena import Arena, Lifetime, place_by_lifetime

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(20))
def test_what_is_in_use_at_once_does_not_overlap(seed):
    rng = random.Random(seed)
    lifetimes = []
    for _ in range(60):
        first = rng.randrange(40)
        lifetimes.append(Lifetime(first, first + rng.choice([0, 1, 2, 20]), rng.randrange(500)))
    offsets, size = place_by_lifetime(lifetimes)
    places = list(zip(offsets, lifetimes, strict=True))
    for i, (begin, one) in enumerate(places):
        assert begin % 64 == 0
        assert begin + one.num_bytes <= size
        for other_begin, other in places[:i]:
            if one.first <= other.last and other.first <= one.last:
                end, other_end = begin + one.num_bytes, other_begin + other.num_bytes
                assert end <= other_begin or other_end <= begin


def test_a_chain_of_any_length_needs_two_places():
    """As layers do, each of which reads what the one before has written."""
    chain = [Lifetime(i, i + 1, 1000) for i in range(100)]
    offsets, size = place_by_lifetime(chain)
    assert offsets == [0, 1024] * 50
    assert size == 2048


def test_the_lowest_gap_that_fits_is_taken():
    lifetimes = [Lifetime(0, 1, 64), Lifetime(0, 9, 64), Lifetime(2, 3, 65), Lifetime(2, 3, 64)]
    assert place_by_lifetime(lifetimes) == ([0, 64, 128, 0], 256)


def test_nothing_needs_nothing():
    assert place_by_lifetime([]) == ([], 0)
    assert Arena(CPU).num_bytes == 0


def test_tensors_are_as_those_they_replace_and_follow_the_arena():
    arena = Arena(CPU)
    arena.reserve(256)
    view = torch.empty(4, 6, dtype=torch.bfloat16)[1:3, ::2].t()
    tensor = arena.tensor_like(view, 64)
    assert (tensor.dtype, tensor.shape, tensor.stride()) == (view.dtype, view.shape, view.stride())
    begin = tensor.untyped_storage().data_ptr()
    assert tensor.data_ptr() == begin + 64 + 2 * view.storage_offset()
    arena.reserve(1 << 22)
    assert arena.num_bytes == 1 << 22
    whole = arena.tensor_like(torch.zeros(1 << 21, dtype=torch.bfloat16), 0)
    whole.zero_()
    tensor.fill_(3.0)
    assert (whole == 3.0).sum() == tensor.numel()
    arena.reserve(64)
    assert arena.num_bytes == 1 << 22, "it does not shrink"
