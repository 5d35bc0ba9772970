# SPDX-License-Identifier: Apache-2.0
"""BlockTable (docs/invariants.md, V51 to V54)."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from paged_kv import BlockPool, BlockTable, get_block_table_width


def make_table(block_size: int = 16, kernel_block_size: int | None = None) -> BlockTable:
    return BlockTable(
        block_size,
        max_num_reqs=3,
        max_num_blocks_per_req=4,
        max_num_batched_tokens=40,
        kernel_block_size=kernel_block_size,
    )


def rows(table: BlockTable) -> list[list[int]]:
    table.check_integrity()
    return table.get_numpy_array().tolist()


def map_slots(table: BlockTable, lens: list[int], positions: list[int]) -> list[int]:
    starts = np.cumsum([0, *lens]).astype(np.int32)
    table.compute_slot_mapping(len(lens), starts, np.array(positions, dtype=np.int64))
    return table.slot_mapping.tolist()


def test_classic_example_position_18_of_request_1():
    """Block size 16, 25 tokens on blocks P3 and P7: position 18 is slot 7 * 16 + 2."""
    table = make_table()
    table.add_row([3, 7], 0)
    slots = map_slots(table, [25], list(range(25)))
    assert slots[:16] == list(range(48, 64))
    assert slots[18] == 7 * 16 + 2
    assert slots[16:25] == list(range(112, 121))


def test_every_slot_after_the_last_token_is_padding():
    table = make_table()
    table.add_row([3, 7], 0)
    table.add_row([5], 1)
    map_slots(table, [32], list(range(32)))
    slots = map_slots(table, [1, 2], [31, 3, 4])
    assert slots == [7 * 16 + 15, 5 * 16 + 3, 5 * 16 + 4] + [-1] * 37
    assert map_slots(table, [], []) == [-1] * 40


def test_rows_are_appended_replaced_and_cleared_without_stale_entries():
    table = make_table()
    table.append_row([1, 2], 0)
    table.append_row([3], 0)
    assert rows(table)[0] == [1, 2, 3, 0]
    assert table.num_blocks_per_row.tolist() == [3, 0, 0]
    table.add_row([9], 0)
    assert rows(table)[0] == [9, 0, 0, 0]
    table.append_row([], 0)
    table.append_row([8], 1)
    table.clear_row(0)
    assert rows(table) == [[0] * 4, [8, 0, 0, 0], [0] * 4]
    table.clear()
    assert rows(table) == [[0] * 4] * 3
    assert table.num_blocks_per_row.tolist() == [0, 0, 0]


def test_moving_a_row_empties_its_old_place():
    table = make_table()
    table.add_row([1, 2, 3], 0)
    table.add_row([4, 5, 6, 7], 2)
    table.move_row(0, 2)
    assert rows(table) == [[0] * 4, [0] * 4, [1, 2, 3, 0]]
    table.move_row(2, 2)
    assert rows(table)[2] == [1, 2, 3, 0]


def test_swapping_rows_swaps_their_lengths():
    table = make_table()
    table.add_row([1, 2, 3], 0)
    table.add_row([4], 1)
    table.swap_row(0, 1)
    assert rows(table)[:2] == [[4, 0, 0, 0], [1, 2, 3, 0]]
    assert table.num_blocks_per_row.tolist() == [1, 3, 0]
    table.append_row([5], 0)
    table.swap_row(1, 1)
    assert rows(table)[:2] == [[4, 5, 0, 0], [1, 2, 3, 0]]


def test_kernel_blocks_are_parts_of_a_managers_block_and_multiplied_once():
    table = make_table(64, 16)
    table.append_row([1], 0)
    table.append_row([2], 0)
    assert table.width == 16
    assert rows(table)[0] == [4, 5, 6, 7, 8, 9, 10, 11] + [0] * 8
    assert table.num_blocks_per_row.tolist() == [8, 0, 0]
    coarse = make_table(64)
    coarse.append_row([1, 2], 0)
    positions = [0, 15, 16, 63, 64, 127]
    assert map_slots(table, [6], positions) == map_slots(coarse, [6], positions)


def test_a_full_row_refuses_more_before_anything_changes():
    table = make_table(32, 16)
    table.append_row([1, 2, 3], 0)
    before = rows(table)
    with pytest.raises(ValueError, match="room for 4 blocks, cannot add 2 to 3"):
        table.append_row([4, 5], 0)
    with pytest.raises(ValueError, match="cannot add 5 to 0"):
        table.add_row([1] * 5, 0)
    for bad in ([-1], [1, 2**30]):
        with pytest.raises(ValueError, match="block id"):
            table.append_row(bad, 1)
    assert rows(table) == before
    table.append_row([4], 0)


@pytest.mark.parametrize("row", [-1, 3])
def test_unknown_rows_are_refused(row):
    table = make_table()
    for call in (
        lambda: table.append_row([1], row),
        lambda: table.add_row([1], row),
        lambda: table.clear_row(row),
        lambda: table.move_row(0, row),
        lambda: table.swap_row(row, 0),
    ):
        with pytest.raises(IndexError, match=r"must be in \[0, 3\)"):
            call()


def test_positions_outside_a_rows_blocks_are_refused():
    table = make_table()
    table.add_row([3], 0)
    table.add_row([4, 5], 1)
    map_slots(table, [1], [3])
    before = table.slot_mapping.copy()
    for lens, positions in (([1], [16]), ([1, 1], [0, 32]), ([1], [-1]), ([0, 0, 1], [0])):
        with pytest.raises(ValueError, match="positions"):
            map_slots(table, lens, positions)
    with pytest.raises(ValueError, match="num_reqs must be in"):
        map_slots(table, [0] * 4, [])
    with pytest.raises(ValueError, match="query_start_loc"):
        map_slots(table, [2], [0])
    with pytest.raises(TypeError):
        table.compute_slot_mapping(1, np.array([0, 1]), np.array([0]))
    assert (table.slot_mapping == before).all()


def test_views_are_stable_and_keep_the_table_alive():
    table = make_table()
    view, slots = table.get_numpy_array(), table.slot_mapping
    assert (view.dtype, view.shape, view.flags.c_contiguous) == (np.int32, (3, 4), True)
    assert (slots.dtype, slots.shape) == (np.int64, (40,))
    table.append_row([6], 1)
    map_slots(table, [0, 1], [2])
    del table
    gc.collect()
    assert view[1].tolist() == [6, 0, 0, 0]
    assert slots[0] == 6 * 16 + 2


def test_commit_copies_whole_rows_and_nothing_else():
    table = make_table()
    table.add_row([1, 2, 3, 4], 0)
    table.add_row([5], 1)
    out = np.full((3, 4), 99, dtype=np.int32)
    table.commit_block_table(2, out)
    assert out.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0], [99] * 4]


def test_commit_copies_content_whatever_was_committed_before():
    """Same first block, same length, another middle: the mirror must follow."""
    table = BlockTable(16, 1, 5, 8)
    out = np.zeros((1, 5), dtype=np.int32)
    for row in ([1, 4, 3, 2, 5], [1, 2, 3, 4, 5]):
        table.add_row(row, 0)
        table.commit_block_table(1, out)
        assert out[0].tolist() == row


def test_commit_refuses_other_targets():
    table = make_table()
    with pytest.raises(ValueError, match="expected room for 3 rows"):
        table.commit_block_table(3, np.zeros((2, 4), dtype=np.int32))
    with pytest.raises(ValueError, match="out: expected"):
        table.commit_block_table(1, np.zeros((2, 5), dtype=np.int32))
    for bad in (np.zeros((3, 4)), np.zeros((3, 8), dtype=np.int32)[:, ::2], [[0] * 4] * 3):
        with pytest.raises(TypeError):
            table.commit_block_table(1, bad)


def test_rows_may_lie_in_memory_of_the_caller():
    memory = np.full((3, 4), 99, dtype=np.int32)
    table = BlockTable(16, 3, 4, 8, memory=memory)
    table.append_row([1, 2], 1)
    assert memory.tolist() == [[0] * 4, [1, 2, 0, 0], [0] * 4]
    view = table.get_numpy_array()
    assert view.ctypes.data == memory.ctypes.data
    del memory, table
    gc.collect()
    assert view[1].tolist() == [1, 2, 0, 0]


def test_memory_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="memory: expected 3 rows of 4 entries, got 8 entries"):
        BlockTable(16, 3, 4, 8, memory=np.zeros((2, 4), dtype=np.int32))
    frozen = np.zeros((3, 4), dtype=np.int32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        BlockTable(16, 3, 4, 8, memory=frozen)
    for bad in (np.zeros((3, 4)), np.zeros((3, 8), dtype=np.int32)[:, ::2]):
        with pytest.raises(TypeError):
            BlockTable(16, 3, 4, 8, memory=bad)


def test_what_changed_is_read_once():
    table = make_table()
    table.append_row([3, 7], 1)
    assert table.dirty(3) == (1, 2)
    assert table.dirty(1) == (0, 0)
    out = np.zeros(5, dtype=np.int32)
    table.read_dirty(3, out)
    assert out.tolist() == [1, 0, 2, 3, 7]
    table.mark_clean(3)
    table.replace_blocks([9], 1, 1)
    out = np.zeros(4, dtype=np.int32)
    table.read_dirty(3, out)
    assert out.tolist() == [1, 1, 1, 9]
    for call in (
        lambda: table.read_dirty(3, np.zeros(3, dtype=np.int32)),
        lambda: table.dirty(4),
        lambda: table.mark_clean(-1),
        lambda: table.replace_blocks([1, 2], 1, 1),
    ):
        with pytest.raises(ValueError, match=r"out: expected|num_reqs must|cannot replace"):
            call()
    assert table.dirty(3) == (1, 1)


def test_all_changes_since_the_last_reading_are_read():
    """As one run of entries for each row; what changed before stays clean."""
    table = make_table()
    table.append_row([3, 7, 8], 1)
    table.mark_clean(3)
    table.append_row([4], 1)
    table.append_row([6], 2)
    table.replace_blocks([9], 1, 1)
    assert table.dirty(3) == (2, 4)
    out = np.zeros(3 * 2 + 4, dtype=np.int32)
    table.read_dirty(3, out)
    assert out.tolist() == [1, 2, 1, 0, 3, 4, 9, 8, 4, 6]
    table.mark_clean(2)
    assert table.dirty(3) == (1, 1)
    table.clear_row(1)
    assert table.dirty(3) == (2, 5)


def test_a_copy_on_the_host_follows_in_one_call():
    table = make_table()
    table.append_row([3, 7], 1)
    copy = np.zeros((3, 4), dtype=np.int32)
    assert not table.commit_dirty(1, copy)
    assert table.commit_dirty(3, copy)
    assert copy.tolist() == rows(table)
    assert not table.commit_dirty(3, copy)
    table.append_row([9], 1)
    frozen = copy.copy()
    frozen.flags.writeable = False
    for bad in (np.zeros((2, 4), dtype=np.int32), frozen):
        with pytest.raises(ValueError, match=r"out: expected 3 rows|not writeable"):
            table.commit_dirty(3, bad)
    for bad in (np.zeros((3, 4)), np.zeros((3, 8), dtype=np.int32)[:, ::2]):
        with pytest.raises(TypeError):
            table.commit_dirty(3, bad)
    assert table.dirty(3) == (1, 1)


def test_checks_raise_what_the_writes_would():
    table = make_table()
    table.append_row([1, 2, 3], 0)
    table.check_append_row([4], 0)
    table.check_add_row([4, 5, 6, 7], 0)
    with pytest.raises(ValueError, match="cannot add 2 to 3"):
        table.check_append_row([4, 5], 0)
    with pytest.raises(ValueError, match="block id"):
        table.check_add_row([-1], 0)
    with pytest.raises(IndexError):
        table.check_add_row([1], 3)
    assert rows(table)[0] == [1, 2, 3, 0]


def test_width_is_rounded_to_tiles_of_tokens():
    assert get_block_table_width(5, 16) == 8
    assert get_block_table_width(5, 48) == 8
    assert get_block_table_width(5, 16, token_alignment=None) == 5
    with pytest.raises(ValueError, match="token_alignment"):
        get_block_table_width(5, 16, token_alignment=0)


@pytest.mark.parametrize(
    "args", [(0, 1, 1, 1), (16, 0, 1, 1), (16, 1, 0, 1), (16, 1, 1, 0), (16, 1, 1, 1, 5)]
)
def test_bad_constructor_arguments_are_refused(args):
    with pytest.raises(ValueError, match="must"):
        BlockTable(*args)


def test_blocks_may_come_as_handles():
    pool = BlockPool(5, False, 16)
    table = make_table()
    table.append_row(pool.get_new_blocks(2), 0)
    table.append_row(pool.get_new_block_ids(1), 0)
    assert rows(table)[0] == [1, 2, 3, 0]
