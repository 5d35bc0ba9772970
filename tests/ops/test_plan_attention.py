# SPDX-License-Identifier: Apache-2.0
"""The op around the planner; the planner's properties are tested in attention_planner_test.cpp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv import ops

HEADER, PIECE = 8, 8


def plan_of(query_lens, seq_lens, num_heads=8, num_kv_heads=2, head_size=64, num_slots=32):
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    size = ops.attention_plan_size(
        len(query_lens), sum(query_lens), num_heads, num_kv_heads, head_size, num_slots
    )
    plan = torch.full((size + 5,), -7, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    ops.plan_attention(starts, lens, num_heads, num_kv_heads, head_size, num_slots, plan[:size])
    assert (plan[size:] == -7).all()
    return plan


@settings(max_examples=100, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20_000)), max_size=12),
    num_slots=st.integers(1, 300),
    heads=st.sampled_from([(8, 8), (8, 2), (71, 1), (9, 3)]),
)
def test_each_query_and_key_is_covered_once(lens, num_slots, heads):
    query_lens, extra = [q for q, _ in lens], [e for _, e in lens]
    seq_lens = [q + e for q, e in zip(query_lens, extra, strict=True)]
    plan = plan_of(query_lens, seq_lens, *heads, num_slots=num_slots)
    version, num_seqs, slots, num_pieces = plan[:4].tolist()
    assert (version, num_seqs) == (1, len(lens))
    slot_begin = plan[HEADER : HEADER + slots + 1].tolist()
    assert slot_begin == sorted(slot_begin)
    assert (slot_begin[0], slot_begin[-1]) == (0, num_pieces)

    first = HEADER + slots + 1
    pieces = plan[first : first + PIECE * num_pieces].view(-1, PIECE).tolist()
    covered = [0] * len(lens)
    for seq, _, num_queries, key_begin, key_end, *_ in pieces:
        covered[seq] += num_queries * (key_end - key_begin)
    assert covered == [q * s for q, s in zip(query_lens, seq_lens, strict=True)]


def test_a_short_buffer_is_refused():
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    size = ops.attention_plan_size(1, 1, 8, 2, 64, 32)
    plan = torch.full((size - 1,), -7, dtype=torch.int32)
    with pytest.raises(
        RuntimeError, match=f"plan: expected at least {size} elements, got {size - 1}"
    ):
        ops.plan_attention(starts, lens, 8, 2, 64, 32, plan)
    assert (plan == -7).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [-1]), r"seq_lens\[0\]: expected >= 0"),
        (([1], [5], 8, 3), "num_heads: expected a multiple of num_kv_heads = 3"),
        (([1], [5], 8, 2, 64, 0), "num_slots: expected >= 1"),
        (([1], [5], 8, 2, 64, 2**31), "num_slots: expected <= 2147483647"),
        (([1], [5], 2**31, 1), "num_heads: expected <= 2147483647"),
        # Refused before memory for 2**31 slots, or 2**31 tiles, is taken.
        (([1], [5], 8, 1, 64, 2**31 - 1), "plan: expected at least .* got 1000"),
        (([2**31 - 1], [5], 2**20, 1), "plan: expected at least .* got 1000"),
    ],
)
def test_names_the_bad_argument(arguments, message):
    query_lens, seq_lens, *sizes = arguments
    sizes += [8, 2, 64, 32][len(sizes) :]
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    plan = torch.full((1000,), -7, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.plan_attention(starts, torch.tensor(seq_lens, dtype=torch.int32), *sizes, plan)
    assert (plan == -7).all()
