# SPDX-License-Identifier: Apache-2.0
"""BlockManager: what each call gives, takes and refuses."""

from __future__ import annotations

import pytest
import torch

from paged_kv import OutOfBlocksError
from paged_kv.minivllm import BlockManager


def snapshot(manager: BlockManager, *request_ids: str):
    tables = [(manager.block_table(r), manager.num_tokens(r)) for r in request_ids]
    return manager.num_free_blocks, manager.fragmentation_ratio(), tables


def test_null_block_is_counted_but_never_handed_out():
    manager = BlockManager(num_blocks=5, block_size=2)
    assert manager.num_free_blocks == 4
    assert sorted(manager.prefill_allocate("a", 8)) == [1, 2, 3, 4]
    assert manager.num_free_blocks == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_prefill_takes_the_blocks_that_the_prompt_needs(num_tokens, num_blocks):
    manager = BlockManager(num_blocks=10, block_size=16)
    table = manager.prefill_allocate("a", num_tokens)
    assert len(table) == num_blocks
    assert manager.num_free_blocks == 9 - num_blocks
    assert manager.block_table("a") == table
    assert manager.num_tokens("a") == num_tokens


def test_decode_takes_a_block_only_when_the_last_one_is_full():
    manager = BlockManager(num_blocks=10, block_size=4)
    table = manager.prefill_allocate("a", 3)
    assert manager.decode_append("a") == table[0] * 4 + 3
    assert manager.block_table("a") == table

    slot = manager.decode_append("a")
    new_table = manager.block_table("a")
    assert new_table[:1] == table
    assert len(new_table) == 2
    assert slot == new_table[1] * 4
    assert manager.num_free_blocks == 7


def test_slot_is_block_id_times_block_size_plus_offset():
    """Position 18 of a request on blocks [P0, P1] lies in P1 at offset 2."""
    manager = BlockManager(num_blocks=10, block_size=16)
    table = manager.prefill_allocate("a", 25)
    slots = manager.slot_mapping("a", 0, 25)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [table[i // 16] * 16 + i % 16 for i in range(25)]
    assert manager.slot_mapping("a", 18, 19).tolist() == [table[1] * 16 + 2]
    assert manager.slot_mapping("a", 25, 25).shape == (0,)


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (2, 1), (0, 6), (6, 6)])
def test_slot_mapping_covers_only_tokens_that_have_a_slot(start, end):
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.prefill_allocate("a", 5)
    with pytest.raises(IndexError, match=rf"<= 5 .*got {start}, {end}"):
        manager.slot_mapping("a", start, end)


def test_fragmentation_is_the_share_of_empty_slots_in_held_blocks():
    manager = BlockManager(num_blocks=10, block_size=16)
    assert manager.fragmentation_ratio() == 0.0
    manager.prefill_allocate("a", 25)
    assert manager.fragmentation_ratio() == (2 * 16 - 25) / (2 * 16)
    manager.prefill_allocate("b", 16)
    assert manager.fragmentation_ratio() == (3 * 16 - 41) / (3 * 16)
    manager.decode_append("b")
    assert manager.fragmentation_ratio() == (4 * 16 - 42) / (4 * 16)
    manager.free_request("a")
    assert manager.fragmentation_ratio() == (2 * 16 - 17) / (2 * 16)
    manager.free_request("b")
    assert manager.fragmentation_ratio() == 0.0


def test_prompt_that_does_not_fit_changes_nothing():
    manager = BlockManager(num_blocks=4, block_size=4)
    manager.prefill_allocate("a", 5)
    before = snapshot(manager, "a")
    with pytest.raises(OutOfBlocksError):
        manager.prefill_allocate("b", 5)
    assert snapshot(manager, "a") == before
    with pytest.raises(ValueError, match="'b' holds no blocks"):
        manager.block_table("b")
    assert len(manager.prefill_allocate("b", 4)) == 1


def test_token_that_does_not_fit_changes_nothing():
    manager = BlockManager(num_blocks=3, block_size=2)
    manager.prefill_allocate("a", 2)
    manager.prefill_allocate("b", 2)
    before = snapshot(manager, "a", "b")
    with pytest.raises(OutOfBlocksError):
        manager.decode_append("a")
    assert snapshot(manager, "a", "b") == before

    manager.free_request("b")
    assert manager.decode_append("a") == manager.block_table("a")[1] * 2


def test_request_id_in_use_is_refused():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.prefill_allocate("a", 5)
    before = snapshot(manager, "a")
    with pytest.raises(ValueError, match="'a' already holds blocks"):
        manager.prefill_allocate("a", 1)
    assert snapshot(manager, "a") == before


def test_freed_request_id_and_its_blocks_can_be_used_again():
    manager = BlockManager(num_blocks=4, block_size=4)
    table = manager.prefill_allocate("a", 12)
    manager.free_request("a")
    assert sorted(manager.prefill_allocate("a", 12)) == sorted(table)


def test_freeing_twice_is_refused_and_frees_nothing():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.prefill_allocate("a", 5)
    manager.prefill_allocate("b", 5)
    manager.free_request("a")
    before = snapshot(manager, "b")
    with pytest.raises(ValueError, match="'a' holds no blocks"):
        manager.free_request("a")
    assert snapshot(manager, "b") == before


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.decode_append("x"),
        lambda m: m.free_request("x"),
        lambda m: m.block_table("x"),
        lambda m: m.num_tokens("x"),
        lambda m: m.slot_mapping("x", 0, 1),
    ],
)
def test_unknown_request_is_refused_by_name(call):
    manager = BlockManager(num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match="request_id: 'x' holds no blocks"):
        call(manager)


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_empty_prompt_is_refused(num_tokens):
    manager = BlockManager(num_blocks=8, block_size=4)
    with pytest.raises(ValueError, match=f"num_tokens: expected at least 1, got {num_tokens}"):
        manager.prefill_allocate("a", num_tokens)
    assert manager.num_free_blocks == 7


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "message"),
    [
        (1, 16, "num_blocks: expected at least 2 .*null block.*got 1"),
        (-3, 16, "num_blocks: expected at least 2"),
        (8, 0, "block_size: expected at least 1, got 0"),
    ],
)
def test_sizes_that_hold_no_token_are_refused(num_blocks, block_size, message):
    with pytest.raises(ValueError, match=message):
        BlockManager(num_blocks, block_size)


def test_returned_table_is_a_copy():
    manager = BlockManager(num_blocks=8, block_size=4)
    manager.prefill_allocate("a", 5).clear()
    assert len(manager.block_table("a")) == 2
