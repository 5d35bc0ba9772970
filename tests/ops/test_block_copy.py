# SPDX-License-Identifier: Apache-2.0
"""copy_blocks and swap_blocks copy whole blocks, and check every pair before the first byte."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    DTYPES,
    NUM_BLOCKS,
    huge_tensor,
    make_caches,
    random_bits,
    same_bits,
)

from paged_kv import ops, reference

LAYOUTS = ["vllm", "nhd", "hnd", "slices"]
BAD_PAIRS = [
    ([[0, 1], [2, NUM_BLOCKS]], "destination block in"),
    ([[0, 1], [NUM_BLOCKS, 2]], "source block in"),
    ([[0, 1], [-1, 2]], "source block in"),
    ([[0, 1], [2, -1]], "destination block in"),
    ([[0, 1], [2, 2**40]], "destination block in"),
    ([[0, 1], [2, 1]], "distinct destinations"),
]


def layer_caches(layout, num_layers, dtype, block_size=16):
    layers = [
        make_caches(layout, block_size=block_size, num_kv_heads=2, head_size=32, dtype=dtype)
        for _ in range(num_layers)
    ]
    return [layer[0] for layer in layers], [layer[1] for layer in layers]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_equals_reference(backend, layout, dtype):
    caches = layer_caches(layout, 3, dtype)
    expected = [[cache.clone() for cache in part] for part in caches]
    mapping = torch.tensor([[4, 0], [1, 3], [4, 2]])
    reference.copy_blocks(*expected, mapping)
    backend.copy_blocks(*caches, mapping)
    for part, wanted_part in zip(caches, expected, strict=True):
        for cache, wanted in zip(part, wanted_part, strict=True):
            assert same_bits(cache, wanted)


def test_copy_does_not_touch_what_lies_between_the_slices(backend):
    """Copying keys of a shared tensor leaves the values beside them."""
    keys, values = layer_caches("slices", 1, torch.float32)
    before = values[0].clone()
    other = torch.zeros_like(keys[0])
    backend.copy_blocks(keys, [other], torch.tensor([[1, 2]]))
    assert same_bits(keys[0][2], keys[0][1])
    assert same_bits(values[0], before)


def test_copy_takes_layers_of_different_shape_and_dtype(backend):
    keys = [random_bits(5, 3, dtype=torch.float32), torch.arange(10, dtype=torch.uint8).view(5, 2)]
    values = [random_bits(7, 2, 2, dtype=torch.float16), torch.arange(6, dtype=torch.int64)]
    backend.copy_blocks(keys, values, torch.tensor([[4, 0]]))
    for cache in (*keys, *values):
        assert torch.equal(cache[0].view(-1).view(torch.uint8), cache[4].view(-1).view(torch.uint8))


def test_copy_of_nothing(backend):
    backend.copy_blocks([], [], torch.tensor([[0, 1]]))
    cache = random_bits(5, 3, dtype=torch.float32)
    before = cache.clone()
    backend.copy_blocks([cache], [cache.clone()], torch.empty(0, 2, dtype=torch.int64))
    assert same_bits(cache, before)


@pytest.mark.parametrize(("pairs", "message"), [*BAD_PAIRS, ([[0, 1], [1, 2]], "both source and")])
def test_copy_with_a_bad_pair_changes_nothing(pairs, message):
    caches = layer_caches("nhd", 2, torch.float32)
    before = [[cache.clone() for cache in part] for part in caches]
    with pytest.raises(RuntimeError, match=message):
        ops.copy_blocks(*caches, torch.tensor(pairs))
    for part, wanted_part in zip(caches, before, strict=True):
        for cache, wanted in zip(part, wanted_part, strict=True):
            assert same_bits(cache, wanted)


def test_copy_refuses_bad_arguments(backend):
    keys, values = layer_caches("nhd", 2, torch.float32)
    mapping = torch.tensor([[0, 1]])
    with pytest.raises(RuntimeError, match="value_caches: expected 2 tensors"):
        backend.copy_blocks(keys, values[:1], mapping)
    with pytest.raises(RuntimeError, match="block_mapping: expected dtype"):
        backend.copy_blocks(keys, values, mapping.int())
    with pytest.raises(RuntimeError, match="block_mapping: expected shape"):
        backend.copy_blocks(keys, values, torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match=r"block_mapping: expected shape \[num_pairs, 2\]"):
        backend.copy_blocks(keys, values, torch.tensor([[0, 1, 2]]))
    with pytest.raises(RuntimeError, match=r"value_caches\[1\]: is written"):
        backend.copy_blocks(keys, [values[0], values[1][:1].expand(5, 16, 2, 32)], mapping)
    with pytest.raises(RuntimeError, match=r"key_caches\[0\]: expected shape"):
        backend.copy_blocks([torch.tensor(1.0)], [values[0]], mapping)
    with pytest.raises(RuntimeError, match="requires grad"):
        ops.copy_blocks([keys[0].clone().requires_grad_()], [values[0]], mapping)


def test_copy_offsets_are_64_bit(host_backend):
    cache = huge_tensor(5, 2**30 + 8, dtype=torch.float32)
    cache[3, -4:] = 1.5
    host_backend.copy_blocks([cache[:, -4:]], [torch.zeros(5, 4)], torch.tensor([[3, 4]]))
    assert cache[4, -4:].tolist() == [1.5] * 4
    assert not cache[0, -8:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_swap_equals_reference(backend, dtype):
    src, dst = random_bits(5, 16, 2, 32, dtype=dtype), random_bits(9, 16, 2, 32, dtype=dtype)
    expected = dst.clone()
    mapping = torch.tensor([[0, 8], [4, 0], [0, 3]])
    block_bytes = src.stride(0) * src.element_size()
    reference.swap_blocks(src, expected, block_bytes, mapping)
    backend.swap_blocks(src, dst, block_bytes, mapping)
    assert same_bits(dst, expected)


def test_swap_out_and_in_restores_the_block(backend):
    cache = make_caches("hnd", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float16)[0]
    host = torch.zeros(2, 2, 16, 32, dtype=torch.float16).transpose(1, 2)
    block_bytes = cache.stride(0) * 2
    before = cache.clone()
    backend.swap_blocks(cache, host, block_bytes, torch.tensor([[3, 1]]))
    assert same_bits(host[1], before[3])
    cache[3] = 0.0
    backend.swap_blocks(host, cache, block_bytes, torch.tensor([[1, 3]]))
    assert same_bits(cache, before)


@pytest.mark.parametrize(("pairs", "message"), BAD_PAIRS)
def test_swap_with_a_bad_pair_changes_nothing(backend, pairs, message):
    src, dst = random_bits(5, 8, dtype=torch.float32), random_bits(5, 8, dtype=torch.float32)
    before = dst.clone()
    with pytest.raises(RuntimeError, match=message):
        backend.swap_blocks(src, dst, 8 * 4, torch.tensor(pairs))
    assert same_bits(dst, before)


def test_swap_refuses_bad_arguments(backend):
    src, dst = torch.zeros(5, 8), torch.zeros(5, 8)
    mapping = torch.tensor([[0, 1]])
    for size in (0, -32, -(2**63)):
        with pytest.raises(RuntimeError, match="block_size_in_bytes: expected more than 0"):
            backend.swap_blocks(src, dst, size, mapping)
    with pytest.raises(RuntimeError, match="src: expected a multiple of 48"):
        backend.swap_blocks(src, dst, 48, mapping)
    with pytest.raises(RuntimeError, match="dst: expected dtype"):
        backend.swap_blocks(src, dst.half(), 32, mapping)
    with pytest.raises(RuntimeError, match="src: expected one dense piece"):
        backend.swap_blocks(torch.zeros(5, 9)[:, :8], dst, 32, mapping)
    with pytest.raises(RuntimeError, match="dst: expected one dense piece"):
        backend.swap_blocks(src, torch.zeros(5, 9)[:, :8], 32, mapping)
    with pytest.raises(RuntimeError, match="dst: is written"):
        backend.swap_blocks(src, torch.zeros(1, 8).expand(5, 8), 32, mapping)
    with pytest.raises(RuntimeError, match="dst: expected memory of its own"):
        backend.swap_blocks(src, src[2:], 32, mapping)
    with pytest.raises(RuntimeError, match="block_mapping: expected shape"):
        backend.swap_blocks(src, dst, 32, torch.tensor([[0], [1]]))


def test_swap_between_halves_of_one_tensor():
    both = random_bits(10, 8, dtype=torch.float32)
    ops.swap_blocks(both[:5], both[5:], 32, torch.tensor([[1, 1]]))
    assert same_bits(both[6], both[1])


def test_copy_with_ids_out_of_range_leaves_those_pairs_out_on_the_device(device_backend):
    keys, values = layer_caches("hnd", 2, torch.float16)
    expected = [[cache.clone() for cache in part] for part in (keys, values)]
    reference.copy_blocks(*expected, torch.tensor([[1, 0], [3, 2]]))
    pairs = [[1, 0], [NUM_BLOCKS, 4], [-1, 4], [4, NUM_BLOCKS], [4, -(2**40)], [3, 2]]
    device_backend.copy_blocks(keys, values, torch.tensor(pairs))
    for part, wanted_part in zip((keys, values), expected, strict=True):
        for cache, wanted in zip(part, wanted_part, strict=True):
            assert same_bits(cache, wanted)


@pytest.mark.parametrize("num_layers", [32, 33, 70])
def test_copy_in_more_caches_than_a_launch_takes(backend, num_layers):
    caches = [[random_bits(4, 24, dtype=torch.float16) for _ in range(num_layers)] for _ in "kv"]
    expected = [[cache.clone() for cache in part] for part in caches]
    mapping = torch.tensor([[3, 0], [1, 2]])
    reference.copy_blocks(*expected, mapping)
    backend.copy_blocks(*caches, mapping)
    for part, wanted_part in zip(caches, expected, strict=True):
        for cache, wanted in zip(part, wanted_part, strict=True):
            assert same_bits(cache, wanted)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 1024, 1025, 8200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copy_of_any_width_and_alignment(backend, dtype, width):
    """16 bytes at a time, 4 or 1; blocks of one piece of work, a bit more, and many."""
    for first in (0, 1):
        keys, values = (random_bits(5, 2, width + first, dtype=dtype)[..., first:] for _ in "kv")
        wide = keys._base[..., :first].clone()
        expected = [[keys.clone()], [values.clone()]]
        mapping = torch.tensor([[0, 4], [2, 1]])
        reference.copy_blocks(*expected, mapping)
        backend.copy_blocks([keys], [values], mapping)
        assert same_bits(keys, expected[0][0])
        assert same_bits(values, expected[1][0])
        assert same_bits(keys._base[..., :first], wide)


def test_copy_refuses_blocks_of_too_many_pieces_on_the_device(device_backend):
    """Six dimensions, each with a gap behind it."""
    cache = torch.zeros(3, *(3,) * 6)[(slice(None), *(slice(0, 2),) * 6)]
    with pytest.raises(RuntimeError, match="at most 4 dimensions of a block"):
        device_backend.copy_blocks([cache], [cache.clone()], torch.tensor([[0, 1]]))


@pytest.mark.parametrize(
    "pairs",
    [
        [[0, 3], [1, 4], [2, 5], [4, 1], [3, 0]],  # a run, then pairs backwards
        [[2, 6], [3, 7], [3, 8], [4, 2]],  # a source twice
        [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]],  # the whole pool
        [],
    ],
)
def test_swap_of_runs(backend, pairs):
    src, dst = random_bits(5, 24, dtype=torch.float16), random_bits(9, 24, dtype=torch.float16)
    expected = dst.clone()
    mapping = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
    reference.swap_blocks(src, expected, 48, mapping)
    backend.swap_blocks(src, dst, 48, mapping)
    assert same_bits(dst, expected)
