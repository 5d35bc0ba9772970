# SPDX-License-Identifier: Apache-2.0
"""Slot mapping, staged block table writes and gathering of rows."""

from __future__ import annotations

import pytest
import torch
from cache_cases import huge_tensor, int32
from ops.backends import Backend

from paged_kv import ops, reference
from paged_kv.testing import ABSURD_BLOCK_ID

STALE = 77


def stale_slots(n):
    return torch.full((n,), STALE, dtype=torch.int64)


def test_worked_example(backend):
    """25 tokens on blocks 3 and 7 of 16 tokens: position 18 is in slot 7 * 16 + 2."""
    slots = stale_slots(25)
    backend.compute_slot_mapping(int32(0, 25), torch.arange(25), int32(3, 7).view(1, 2), slots, 16)
    assert slots.tolist() == [*range(48, 64), *range(112, 121)]
    assert slots[18] == 7 * 16 + 2


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
@pytest.mark.parametrize("mapped", [False, True], ids=["row per sequence", "idx_mapping"])
def test_slot_mapping_equals_reference(backend, block_size, mapped):
    """Ragged batch with an empty sequence and a padding row; unused entries are absurd."""
    tables = torch.full((6, 9), ABSURD_BLOCK_ID, dtype=torch.int32)
    lens, contexts = [4, 0, 7, 1], [0, 5, 2 * block_size, 3 * block_size - 1]
    rows = [5, 0, -1, 2] if mapped else [0, 1, 2, 3]
    positions = []
    for row, length, context in zip(rows, lens, contexts, strict=True):
        span = torch.arange(context, context + length)
        if row < 0:
            span = span * 0 - 2**60
        elif length:
            used = slice(context // block_size, (context + length - 1) // block_size + 1)
            tables[row, used] = torch.randint(0, 2**31 - 1, tables[row, used].shape).int()
        positions.append(span)
    arguments = {
        "query_start_loc": torch.tensor([0, *lens]).cumsum(0).int(),
        "positions": torch.cat([*positions, torch.tensor([-(2**62)])]),  # one of padding
        "block_tables": tables,
        "block_size": block_size,
        "idx_mapping": int32(*rows) if mapped else None,
    }
    if block_size == 1:
        tables[:] = torch.randint(0, 2**31 - 1, tables.shape).int()
    slots, expected = stale_slots(20), stale_slots(20)
    reference.compute_slot_mapping(**arguments, slot_mapping=expected)
    backend.compute_slot_mapping(**arguments, slot_mapping=slots)
    assert torch.equal(slots, expected)
    assert (slots[sum(lens) :] == -1).all()


def test_slot_mapping_honours_strides(backend):
    tables = int32(3, 9, 7, 9).view(1, 4)[:, ::2]
    positions = torch.tensor([[0, 15, 16, 18], [99] * 4]).t()[:, 0]
    backing = stale_slots(12)
    backend.compute_slot_mapping(int32(0, 9, 4)[::2], positions, tables, backing[::2], 16)
    assert backing[::2].tolist() == [48, 63, 112, 114, -1, -1]
    assert (backing[1::2] == STALE).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"query_start_loc": int32(0, 2, 1), "block_tables": int32(3, 7, 3, 7).view(2, 2)},
            "query_start_loc: expected not to decrease",
        ),
        ({"query_start_loc": int32(1, 2)}, "query_start_loc: expected to start at 0"),
        ({"query_start_loc": int32(0, 3)}, "positions: expected at least 3"),
        ({"query_start_loc": int32()}, "query_start_loc: expected"),
        ({"query_start_loc": torch.tensor([0, 2])}, "query_start_loc: expected dtype"),
        ({"query_start_loc": int32(0, 1, 2)}, "block_tables: expected at least 2 rows"),
        ({"slot_mapping": stale_slots(1)}, "slot_mapping: expected at least 2"),
        ({"slot_mapping": stale_slots(4).int()}, "slot_mapping: expected dtype"),
        ({"slot_mapping": stale_slots(1).expand(4)}, "slot_mapping: is written"),
        ({"positions": torch.tensor([0, 32])}, r"positions\[1\].*got 32"),
        ({"positions": torch.tensor([0, -1])}, r"positions\[1\].*got -1"),
        ({"positions": torch.tensor([0, 2**63 - 1])}, r"positions\[1\]"),
        ({"positions": torch.tensor([0, 1]).int()}, "positions: expected dtype"),
        ({"block_tables": int32(-1, 7).view(1, 2)}, r"block_tables\[0, 0\]"),
        ({"block_tables": int32(3, 7)}, "block_tables: expected shape"),
        ({"idx_mapping": int32(1)}, r"idx_mapping\[0\]: expected a row"),
        ({"idx_mapping": int32(-2)}, r"idx_mapping\[0\]: expected a row"),
        ({"idx_mapping": int32(0, 0)}, "idx_mapping: expected 1 entries"),
        ({"block_size": 0}, "block_size: expected"),
        ({"block_size": -16}, "block_size: expected"),
        ({"block_size": 2**62}, "block_size: expected"),
    ],
)
def test_slot_mapping_refuses_bad_arguments(changes, message):
    arguments = {
        "query_start_loc": int32(0, 2),
        "positions": torch.tensor([0, 18]),
        "block_tables": int32(3, 7).view(1, 2),
        "slot_mapping": stale_slots(4),
        "block_size": 16,
    } | changes
    with pytest.raises(RuntimeError, match=message):
        ops.compute_slot_mapping(**arguments)
    assert (arguments["slot_mapping"] == STALE).all()


def test_writes_equal_reference(backend):
    """Writes of several lengths, two that overlap, one of length 0; other entries stay."""
    table = torch.randint(0, 100, (6, 10), dtype=torch.int32)
    expected = table.clone()
    writes = [int32(4, 0, 4, 5), int32(0, 9, 1, 10), int32(5, 6, 9, 9), int32(*range(200, 210))]
    reference.apply_block_table_writes(expected, *writes)
    backend.apply_block_table_writes(table, *writes)
    assert torch.equal(table, expected)
    assert table[4, :5].tolist() == [200, 206, 207, 208, 204]


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        (([0, 6], [0, 0], [1, 2], [1, 2]), r"rows\[1\]"),
        (([0, -1], [0, 0], [1, 2], [1, 2]), r"rows\[1\]"),
        (([0, 1], [0, 10], [1, 2], [1, 2]), r"starts\[1\]"),
        (([0, 1], [0, -1], [1, 2], [1, 2]), r"starts\[1\]"),
        (([0, 1], [0, 2**31 - 1], [1, 2], [1, 2]), r"starts\[1\]"),
        (([0, 1], [0, 0], [1, 0], [1, 2]), "cu_lens: expected not to decrease"),
        (([0, 1], [0, 0], [1, 3], [1, 2]), "contents: expected at least"),
        (([0, 1], [0], [1, 2], [1, 2]), "starts: expected num_writes"),
        (([0, 1], [0, 0], [1], [1, 2]), "cu_lens: expected num_writes"),
    ],
)
def test_bad_writes_change_nothing(writes, message):
    table = torch.full((6, 10), STALE, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.apply_block_table_writes(table, *(int32(*ids) for ids in writes))
    assert (table == STALE).all()


def test_gathered_rows_equal_reference(backend):
    """Real rows up to num_blocks with stale entries behind, padding rows zero."""
    table = torch.randint(1, 100, (6, 10), dtype=torch.int32)
    out = torch.full((7, 12), STALE, dtype=torch.int32)
    expected = out.clone()
    arguments = table, int32(3, -1, 0, 5, 3), int32(10, 0, 0, 4, 0, 1)
    reference.gather_block_tables(*arguments, expected)
    backend.gather_block_tables(*arguments, out)
    assert torch.equal(out, expected)
    assert out[0].tolist() == table[3, :4].tolist() + [STALE] * 8
    assert not out[[1, 5, 6]].any()


@pytest.mark.parametrize(
    ("idx_mapping", "num_blocks", "out_shape", "message"),
    [
        ([0, 2], [1, 1], (2, 3), r"idx_mapping\[1\]"),
        ([0, -2], [1, 1], (2, 3), r"idx_mapping\[1\]"),
        ([0, 1], [1, 4], (2, 4), r"num_blocks\[1\]"),
        ([0, 1], [1, 3], (2, 2), r"num_blocks\[1\]"),
        ([0, 1], [1, -1], (2, 3), r"num_blocks\[1\]"),
        ([0, 1], [1], (2, 3), "num_blocks: expected max_num_reqs"),
        ([0, 1, 0], [1, 1], (2, 3), "out: expected at least 3 rows"),
    ],
)
def test_bad_gather_changes_nothing(idx_mapping, num_blocks, out_shape, message):
    table = torch.ones(2, 3, dtype=torch.int32)
    out = torch.full(out_shape, STALE, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        ops.gather_block_tables(table, int32(*idx_mapping), int32(*num_blocks), out)
    assert (out == STALE).all()


def test_transposed_tables(backend):
    table = torch.zeros(10, 6, dtype=torch.int32).t()
    backend.apply_block_table_writes(table, int32(4), int32(2), int32(3), int32(7, 8, 9))
    assert table[4].tolist() == [0, 0, 7, 8, 9, 0, 0, 0, 0, 0]
    out = torch.zeros(10, 2, dtype=torch.int32).t()
    backend.gather_block_tables(table, int32(4), int32(0, 0, 0, 0, 5, 0), out)
    assert out[0].tolist() == table[4].tolist()


def test_many_writes_to_few_rows(backend):
    """More writes than a warp has lanes, rows longer than a block has threads, most overlapping."""
    generator = torch.Generator().manual_seed(1)
    table = torch.zeros(5, 700, dtype=torch.int32)
    expected = table.clone()
    lengths = torch.randint(0, 300, (100,), generator=generator)
    writes = [
        torch.randint(0, 5, (100,), generator=generator).int(),
        torch.randint(0, 400, (100,), generator=generator).int(),
        lengths.cumsum(0).int(),
        torch.randint(1, 2**31 - 1, (int(lengths.sum()),), generator=generator).int(),
    ]
    reference.apply_block_table_writes(expected, *writes)
    backend.apply_block_table_writes(table, *writes)
    assert torch.equal(table, expected)


def test_slot_mapping_of_long_prefills(backend):
    """More tokens than a block has threads, and more padding."""
    tables = torch.arange(200, dtype=torch.int32).view(2, 100).flip(0)
    positions = torch.cat([torch.arange(5, 705), torch.arange(900)])
    slots, expected = stale_slots(2500), stale_slots(2500)
    arguments = int32(0, 700, 1600), positions, tables
    reference.compute_slot_mapping(*arguments, expected, 16)
    backend.compute_slot_mapping(*arguments, slots, 16)
    assert torch.equal(slots, expected)


def test_slot_mapping_beyond_32_bits(backend):
    """Positions and slots are 64 bits wide, whatever the block size."""
    slots, block_size = stale_slots(3), 2**31 - 1
    positions = torch.tensor([block_size + 5, block_size - 1, 2 * block_size - 1])
    tables = int32(3, 7).view(1, 2)
    backend.compute_slot_mapping(int32(0, 3), positions, tables, slots, block_size)
    assert slots.tolist() == [7 * block_size + 5, 4 * block_size - 1, 8 * block_size - 1]
    tables = torch.full((1, 2**21), 2**31 - 1, dtype=torch.int32)
    positions = torch.tensor([2**32 - 1, 2**33 - 1, 2**33 - 4096])
    backend.compute_slot_mapping(int32(0, 3), positions, tables, slots, 4096)
    assert slots.tolist() == [2**43 - 1, 2**43 - 1, 2**43 - 4096]


@pytest.mark.parametrize("size", [2**31, 2**32 + 1])
def test_sizes_beyond_a_grid_are_refused(size):
    """A grid counts in 32 bits; 2^32 + 1 must not become 1."""
    emulated = Backend("emulated")
    zeros = torch.zeros(1, dtype=torch.int32)
    slots = stale_slots(3)
    with pytest.raises(RuntimeError, match=f"query_start_loc: size: {size + 1} is out of range"):
        emulated.compute_slot_mapping(
            zeros.expand(size + 1), torch.arange(3), zeros.expand(size, 1), slots, 16
        )
    assert (slots == STALE).all()
    many = zeros.expand(size)
    with pytest.raises(RuntimeError, match=f"rows: size: {size} is out of range"):
        emulated.apply_block_table_writes(torch.zeros(1, 1).int(), many, many, many, zeros)
    out = huge_tensor(size, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"out: number of rows: {size} is out of range"):
        emulated.gather_block_tables(zeros.view(1, 1), zeros, zeros, out.view(size, 1))
    with pytest.raises(RuntimeError, match=f"out: expected at most 16776960 columns, got {size}"):
        emulated.gather_block_tables(zeros.view(1, 1), zeros, zeros, out.view(1, size))


def test_empty_batches(backend):
    slots = stale_slots(3)
    no_ids = int32()
    backend.compute_slot_mapping(int32(0), torch.arange(0), int32().view(0, 4), slots, 16)
    assert slots.tolist() == [-1] * 3
    table = int32(1, 2).view(1, 2)
    backend.apply_block_table_writes(table, no_ids, no_ids, no_ids, no_ids)
    assert table.tolist() == [[1, 2]]
    backend.gather_block_tables(table, no_ids, int32(2), int32().view(0, 2))
    out = int32(5, 6).view(1, 2)
    backend.gather_block_tables(table, no_ids, int32(2), out)
    assert out.tolist() == [[0, 0]]


def test_device_maps_bad_positions_to_no_slot(device_backend):
    """The host does not see the values: what is out of range gets the padding slot."""
    tables = int32(3, -1, 7, 8).view(2, 2)
    positions = torch.tensor([0, -1, 32, 18, 2**63 - 1, 5, 6, 7])
    slots = stale_slots(9)
    device_backend.compute_slot_mapping(
        int32(0, 5, 6, 7, 8), positions, tables, slots, 16, int32(0, 2, -7, 1)
    )
    assert slots.tolist() == [48, -1, -1, -1, -1, -1, -1, 7 * 16 + 7, -1]
    slots = stale_slots(4)  # starts out of range: nothing outside the tensors is touched
    device_backend.compute_slot_mapping(int32(-5, 100), positions, tables, slots, 16, int32(1))
    assert slots.tolist() == [7 * 16, -1, -1, 8 * 16 + 2]
    slots = stale_slots(6)  # more tokens than positions
    device_backend.compute_slot_mapping(int32(0, 4), positions[:2], tables, slots, 16, int32(1))
    assert slots.tolist() == [7 * 16, -1, -1, -1, -1, -1]


def test_device_cuts_bad_writes_at_the_table(device_backend):
    table = torch.zeros(3, 4, dtype=torch.int32)
    writes = int32(0, 3, -1, 1, 2, 2), int32(3, 0, 0, -1, 4, 2), int32(2, 4, 6, 8, 9, 20)
    device_backend.apply_block_table_writes(table, *writes, int32(*range(10, 21)))
    assert table.tolist() == [[0, 0, 0, 10], [0] * 4, [0, 0, 19, 20]]


def test_device_cuts_bad_gathers(device_backend):
    table = int32(1, 2, 3, 4).view(2, 2)
    out = torch.full((4, 3), STALE, dtype=torch.int32)
    device_backend.gather_block_tables(table, int32(0, 1, 2, -3), int32(9, -4), out)
    assert out.tolist() == [[1, 2, STALE], [STALE] * 3, [0] * 3, [0] * 3]
