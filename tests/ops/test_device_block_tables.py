# SPDX-License-Identifier: Apache-2.0
"""BlockTable, MultiGroupBlockTable and BlockTables: host rows and their copy on a device.

The classes run with the ops of each backend, so the CUDA kernels are under test too.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cache_cases import int32

import paged_kv
from paged_kv import _block_tables, _device_rows, block_table, reference
from paged_kv.block_table import BlockTable, BlockTables, MultiGroupBlockTable
from paged_kv.testing import ABSURD_BLOCK_ID

STALE_SLOT = 10**12


@pytest.fixture(autouse=True)
def _ops_of_backend(backend, monkeypatch):
    """The ops that the classes call. On a GPU, ``Backend`` moves the arguments there and back."""
    for module in (block_table, _block_tables, _device_rows):
        monkeypatch.setattr(module, "ops", backend)
    if backend.name != "cpu":
        _send_to_device(monkeypatch)


def _send_to_device(monkeypatch):
    """Commits to tables on the CPU go through the ops, as if they lay elsewhere."""
    monkeypatch.setattr(_device_rows, "lies_on_host", lambda device: False)


def make_table(**options) -> BlockTable:
    options = {"block_size": 16, "max_num_reqs": 3, "max_num_blocks_per_req": 4} | options
    return BlockTable(max_num_batched_tokens=6, **options)


def committed(table: BlockTable, num_reqs: int = 3) -> list[list[int]]:
    table.commit_block_table(num_reqs)
    return table.get_device_tensor(num_reqs).tolist()


def test_device_rows_are_those_of_the_last_commit():
    table = make_table()
    table.add_row([1, 2], 0)
    assert table.get_device_tensor(1).tolist() == [[0] * 4]
    assert table.get_cpu_tensor()[0].tolist() == [1, 2, 0, 0]
    assert committed(table) == [[1, 2, 0, 0], [0] * 4, [0] * 4]
    table.append_row([3], 0)
    table.append_row([9], 2)
    assert committed(table, 1) == [[1, 2, 3, 0]]
    assert table.get_device_tensor(3)[2].tolist() == [0] * 4
    assert committed(table)[2] == [9, 0, 0, 0]


def test_host_tensor_array_and_rows_are_one_memory():
    table = make_table()
    pointer = table.get_cpu_tensor().data_ptr()
    table.add_row([5], 1)
    array = table.get_numpy_array()
    assert array.ctypes.data == pointer
    assert array.tolist() == table.get_cpu_tensor().tolist() == [[0] * 4, [5, 0, 0, 0], [0] * 4]


def test_a_reused_row_leaves_no_old_blocks_on_the_device():
    """A long request, then a short one in its row."""
    table = make_table()
    table.add_row([1, 2, 3, 4], 0)
    committed(table)
    table.clear_row(0)
    table.add_row([7], 0)
    assert committed(table)[0] == [7, 0, 0, 0]
    table.clear()
    assert table.get_device_tensor(3).tolist() == [[0] * 4] * 3
    assert table.num_blocks_per_row.tolist() == [0] * 3
    assert committed(table) == [[0] * 4] * 3


def test_tables_that_look_alike_are_told_apart():
    """Equal first block, equal count, another middle: the device must follow."""
    table = make_table(max_num_blocks_per_req=5)
    for row in ([9, 1, 4, 3, 2], [9, 1, 2, 3, 4]):
        table.add_row(row, 0)
        assert committed(table)[0] == row


def test_blocks_that_left_a_window_leave_the_device_too():
    """The host puts the null block in their place; others may own them at the next step."""
    table = make_table()
    table.add_row([3, 4, 5], 1)
    committed(table)
    table.replace_blocks([0, 0], 1, 0)
    assert committed(table)[1] == [0, 0, 5, 0]
    table.append_row([3], 1)
    assert committed(table)[1] == [0, 0, 5, 3]
    with pytest.raises(ValueError, match="cannot replace 2 blocks from block 3 on"):
        table.replace_blocks([1, 2], 1, 3)


def test_kernel_blocks_are_multiplied_once():
    """Blocks of 64 tokens, kernels that work on 16: ids stay below 4 * num_blocks."""
    table = make_table(block_size=64, kernel_block_size=16)
    table.append_row([1], 0)
    committed(table)
    table.append_row([2], 0)
    table.replace_blocks([3], 0, 0)
    assert committed(table)[0] == [12, 13, 14, 15, 8, 9, 10, 11] + [0] * 8
    table.compute_slot_mapping(1, int32(0, 3), torch.tensor([0, 63, 64]))
    assert table.slot_mapping.tolist() == [3 * 64, 3 * 64 + 63, 2 * 64, -1, -1, -1]


def test_rows_move_and_swap_on_the_device():
    table = make_table()
    table.add_row([1, 2, 3], 0)
    table.add_row([4], 1)
    committed(table)
    table.move_row(0, 2)
    assert committed(table) == [[0] * 4, [4, 0, 0, 0], [1, 2, 3, 0]]
    table.swap_row(1, 2)
    assert committed(table) == [[0] * 4, [1, 2, 3, 0], [4, 0, 0, 0]]


def test_slots_after_the_last_token_are_padding():
    table = make_table()
    table.add_row([3, 7], 0)
    table.add_row([5], 1)
    committed(table)
    table.slot_mapping.fill_(STALE_SLOT)
    starts = int32(0, 2, 3, ABSURD_BLOCK_ID)
    table.compute_slot_mapping(2, starts, torch.tensor([15, 18, 0]))
    assert table.slot_mapping.tolist() == [63, 114, 80, -1, -1, -1]
    with pytest.raises(RuntimeError, match="query_start_loc: expected at least 4 entries, got 2"):
        table.compute_slot_mapping(3, int32(0, 2), torch.tensor([0, 0]))


def test_nothing_is_sent_when_nothing_has_changed(monkeypatch):
    table = make_table()
    table.add_row([1], 0)
    committed(table)
    monkeypatch.setattr(torch, "empty", None)  # a staging buffer would need it
    assert committed(table)[0] == [1, 0, 0, 0]


def test_a_failed_commit_is_made_good_by_the_next(monkeypatch):
    _send_to_device(monkeypatch)
    table = make_table()
    table.add_row([1], 0)
    with monkeypatch.context() as patch:
        patch.setattr(_device_rows, "ops", None)
        with pytest.raises(AttributeError):
            table.commit_block_table(1)
    assert committed(table)[0] == [1, 0, 0, 0]


def test_random_changes_reach_the_device():
    """After each commit the first rows are the host's, and the others what they were."""
    rng = np.random.default_rng(0)
    table = make_table(max_num_reqs=5, max_num_blocks_per_req=6)
    expected = table.get_cpu_tensor().clone()
    for _ in range(300):
        row, other = rng.integers(0, 5, 2).tolist()
        ids = rng.integers(1, 100, rng.integers(0, 7))
        held = int(table.num_blocks_per_row[row])
        changes = (
            lambda row=row, ids=ids: table.add_row(ids, row),
            lambda row=row, ids=ids, held=held: table.append_row(ids[: 6 - held], row),
            lambda row=row, ids=ids, held=held: table.replace_blocks(ids[:held], row, 0),
            lambda row=row: table.clear_row(row),
            lambda row=row, other=other: table.move_row(row, other),
            lambda row=row, other=other: table.swap_row(row, other),
        )
        changes[rng.integers(0, len(changes))]()
        if rng.integers(0, 3) == 0:
            num_reqs = int(rng.integers(0, 6))
            table.commit_block_table(num_reqs)
            expected[:num_reqs] = table.get_cpu_tensor()[:num_reqs]
        assert torch.equal(table.get_device_tensor(5), expected)


def test_groups_have_their_own_widths_and_blocks():
    tables = MultiGroupBlockTable(2, 4, None, "cpu", [16, 48], [5, 5], [16, 16])
    assert len(tables) == 2
    assert [tables[i].get_device_tensor(2).shape for i in (0, 1)] == [(2, 8), (2, 24)]
    tables.add_row(([1, 2], [3]), 0)
    tables.append_row((iter([4]), []), 0)
    tables.commit_block_table(1)
    assert tables[0].get_device_tensor(1)[0, :4].tolist() == [1, 2, 4, 0]
    assert tables[1].get_device_tensor(1)[0, :4].tolist() == [9, 10, 11, 0]
    tables.compute_slot_mapping(1, int32(0, 2), torch.tensor([0, 47]))
    assert tables[0].slot_mapping.tolist() == [16, 4 * 16 + 15, -1, -1]
    assert tables[1].slot_mapping.tolist() == [144, 144 + 47, -1, -1]
    tables.move_row(0, 1)
    tables.swap_row(0, 1)
    tables.clear_row(1)
    tables.commit_block_table(2)
    assert tables[0].get_device_tensor(2)[:, 0].tolist() == [1, 0]
    tables.clear()
    assert tables[1].get_device_tensor(2).sum() == 0


def test_a_row_that_one_group_refuses_changes_no_group():
    tables = MultiGroupBlockTable(2, 4, None, "cpu", [128, 128], [2, 1])
    tables.add_row(([1], [2]), 0)
    for write in (tables.append_row, tables.add_row):
        with pytest.raises(ValueError, match="room for 1 blocks"):
            write(([5], [6, 7]), 0)
    with pytest.raises(ValueError, match="block_ids: expected 2 entries, one a group, got 1"):
        tables.add_row(([1],), 0)
    with pytest.raises(ValueError, match="max_num_blocks: expected 1 entries"):
        MultiGroupBlockTable(2, 4, None, "cpu", [16], [1, 1])
    assert [tables[i].get_numpy_array()[0, 0] for i in (0, 1)] == [1, 2]


def make_tables(device="cpu", **options) -> BlockTables:
    """Two groups: blocks of 16 tokens, and of 64 that kernels see as 4 of 16."""
    return BlockTables([16, 64], 4, 6, [4, 2], device, kernel_block_sizes=[16, 16], **options)


def test_staged_writes_show_after_they_are_applied():
    tables = make_tables()
    tables.append_block_ids(3, ([5, 6], [2]), overwrite=True)
    rows = int32(3)
    assert [t.tolist() for t in tables.gather_block_tables(rows, 1)] == [[[0] * 4], [[0] * 8]]
    tables.apply_staged_writes()
    first, second = tables.gather_block_tables(rows, 1)
    assert first[0, :2].tolist() == [5, 6]
    assert second[0, :4].tolist() == [8, 9, 10, 11]
    assert tables.num_blocks.tolist() == [[0, 0, 0, 2], [0, 0, 0, 4]]
    tables.append_block_ids(3, ([7], []), overwrite=False)
    tables.apply_staged_writes()
    assert tables.gather_block_tables(rows, 1)[0][0, :3].tolist() == [5, 6, 7]
    tables.append_block_ids(3, ([9], [1]), overwrite=True)
    tables.replace_block_ids(3, 1, [0], 0)
    tables.apply_staged_writes()
    assert tables.num_blocks.tolist() == [[0, 0, 0, 1], [0, 0, 0, 4]]
    first, second = tables.gather_block_tables(rows, 1)
    assert (first[0, 0].item(), second[0, :4].tolist()) == (9, [0, 1, 2, 3])
    tables.clear_row(3)
    tables.apply_staged_writes()
    assert tables.num_blocks.sum() == 0


def test_gathered_rows_follow_the_batch_and_padding_rows_are_null():
    tables = make_tables()
    for row in range(4):
        tables.append_block_ids(row, ([row + 1] * 3, [row + 1]), overwrite=True)
    tables.apply_staged_writes()
    for table in tables.input_block_tables:
        table.fill_(ABSURD_BLOCK_ID)
    first, second = tables.gather_block_tables(int32(2, -1, 0), 4)
    assert first.data_ptr() == tables.input_block_tables[0].data_ptr()
    assert first[0, :3].tolist() == [3, 3, 3]
    assert first[[1, 3]].tolist() == [[0] * 4] * 2
    assert second[2, :4].tolist() == [4, 5, 6, 7]
    out = [torch.full_like(table, ABSURD_BLOCK_ID) for table in tables.input_block_tables]
    tables.gather_block_tables(int32(1), 1, out)
    assert out[0][0, :3].tolist() == [2, 2, 2]
    assert (out[0][1:] == ABSURD_BLOCK_ID).all()
    for num_reqs_padded in (0, 5):
        with pytest.raises(ValueError, match=r"num_reqs_padded must be in \[1, 4\]"):
            tables.gather_block_tables(int32(1), num_reqs_padded)
    with pytest.raises(ValueError, match="out: expected 2 tensors"):
        tables.gather_block_tables(int32(1), 1, out[:1])


def test_slot_mappings_of_each_group_equal_the_reference():
    tables = make_tables(slot_mapping_enabled=[True, True])
    tables.append_block_ids(0, ([1, 2], [1]), overwrite=True)
    tables.append_block_ids(2, ([7, 3], [5]), overwrite=True)
    tables.apply_staged_writes()
    rows, starts, positions = int32(2, -1, 0), int32(0, 2, 3, 5), torch.tensor([16, 31, 9, 0, 15])
    tables.slot_mappings.fill_(STALE_SLOT)
    slots = tables.compute_slot_mappings(rows, starts, positions, 6)
    expected = torch.empty_like(slots)
    for ids, row in zip(
        (int32(1, 2, 0, 0, 7, 3), int32(*range(4, 8), *[0] * 4, *range(20, 24))),
        expected,
        strict=True,
    ):
        reference.compute_slot_mapping(starts, positions, ids.view(3, -1), row, 16, rows)
    assert torch.equal(slots, expected)
    assert slots[0].tolist() == [48, 63, -1, 16, 31, -1]
    out = torch.full((2, 9), STALE_SLOT)
    assert torch.equal(tables.compute_slot_mappings(rows, starts, positions, 6, out), expected)
    assert (out[:, 5:] == -1).all()


def test_a_group_without_slots_is_all_padding():
    tables = make_tables(slot_mapping_enabled=[False, True])
    tables.append_block_ids(0, ([1], [1]), overwrite=True)
    tables.apply_staged_writes()
    tables.slot_mappings.fill_(STALE_SLOT)
    slots = tables.compute_slot_mappings(int32(0), int32(0, 1), torch.tensor([3]), 2)
    assert slots.tolist() == [[-1, -1], [67, -1]]
    assert (tables.slot_mappings[0] == -1).all()


def test_a_full_row_is_refused_before_anything_is_staged():
    tables = make_tables()
    tables.append_block_ids(1, ([1], [1]), overwrite=True)
    tables.apply_staged_writes()
    with pytest.raises(ValueError, match="room for 2 blocks, cannot add 2 to 1"):
        tables.append_block_ids(1, ([2], [2, 3]), overwrite=False)
    with pytest.raises(IndexError, match="row_idx must be in"):
        tables.append_block_ids(4, ([2], [2]), overwrite=True)
    tables.apply_staged_writes()
    assert tables.num_blocks.tolist() == [[0, 1, 0, 0], [0, 4, 0, 0]]
    with pytest.raises(RuntimeError, match="query_start_loc: expected at least 2 entries, got 1"):
        tables.compute_slot_mappings(int32(1), int32(0), torch.tensor([0]), 1)
    with pytest.raises(RuntimeError, match=r"out: expected \[2, >= 7\], got \[2, 6\]"):
        tables.compute_slot_mappings(int32(1), int32(0, 1), torch.tensor([0]), 7)
    with pytest.raises(ValueError, match="slot_mapping_enabled: expected 2 entries"):
        make_tables(slot_mapping_enabled=[True])


def test_dummy_tensors_are_those_of_a_real_step_without_blocks():
    """A graph captured with them must read and write the null block alone when replayed."""
    tables = make_tables()
    for table in tables.input_block_tables:
        table.fill_(ABSURD_BLOCK_ID)
    tables.slot_mappings.fill_(STALE_SLOT)
    dummies = tables.get_dummy_block_tables(3)
    assert [d.data_ptr() for d in dummies] == [t.data_ptr() for t in tables.input_block_tables]
    assert [int(d.abs().sum()) for d in dummies] == [0, 0]
    assert tables.get_dummy_slot_mappings(2).tolist() == [[-1, -1]] * 2
    assert (tables.slot_mappings == -1).all()


@pytest.mark.parametrize("sizes", [(0, 1, 1, 1), (16, 0, 1, 1), (16, 1, 0, 1), (16, -1, 1, 1)])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be in"):
        BlockTable(*sizes)
    with pytest.raises(ValueError, match="must divide"):
        BlockTable(16, 1, 1, 1, kernel_block_size=5)
    with pytest.raises(ValueError, match="must be in"):
        BlockTable(16, 1, 1, 1, kernel_block_size=0)


def test_tensors_of_another_device_are_made_and_used_there(monkeypatch):
    """On the meta device, which has shapes and no memory; an op refuses tensors of two devices."""
    for module in (block_table, _block_tables, _device_rows):
        monkeypatch.setattr(module, "ops", paged_kv.ops)
    table = make_table(device="meta")
    table.add_row([1, 2], 0)
    table.commit_block_table(1)
    starts, positions = int32(0, 1).to("meta"), torch.tensor([3], device="meta")
    table.compute_slot_mapping(1, starts, positions)
    assert (table.slot_mapping.device.type, table.slot_mapping.shape) == ("meta", (6,))
    assert table.get_cpu_tensor().device.type == "cpu"
    tables = make_tables(device="meta")
    tables.append_block_ids(0, ([1], [1]), overwrite=True)
    tables.apply_staged_writes()
    rows = int32(0).to("meta")
    gathered = tables.gather_block_tables(rows, 2)
    assert [(t.device.type, t.shape) for t in gathered] == [("meta", (2, 4)), ("meta", (2, 8))]
    assert tables.compute_slot_mappings(rows, starts, positions, 5).shape == (2, 5)
