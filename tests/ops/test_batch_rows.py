# SPDX-License-Identifier: Apache-2.0
"""RequestBatch over the tables of `paged_kv.block_table`: a step is in the rows that are sent."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from cache_cases import int32

import paged_kv
from paged_kv import _block_tables, _device_rows, block_table
from paged_kv.block_table import BlockTable, BlockTables, MultiGroupBlockTable


@pytest.fixture(autouse=True)
def _ops_of_backend(backend, monkeypatch):
    """The ops that the classes call. On a GPU, ``Backend`` moves the arguments there and back."""
    for module in (block_table, _block_tables, _device_rows):
        monkeypatch.setattr(module, "ops", backend)


def make_manager() -> paged_kv.KVCacheManager:
    """A group of full attention with blocks of 16 tokens, and one with a window of a block."""
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    specs = [
        paged_kv.FullAttentionSpec(**shape),
        paged_kv.SlidingWindowSpec(sliding_window=16, **shape),
    ]
    groups = [paged_kv.KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
    config = paged_kv.KVCacheConfig(32, [], groups)
    return paged_kv.KVCacheManager(config, 128, 16, 16, enable_caching=False)


def step(batch: paged_kv.RequestBatch, row: int, num_tokens: int) -> None:
    assert len(batch.allocate_slots(np.array([row], np.int32), num_tokens)) == 0
    batch.check_integrity()


def test_a_step_of_a_batch_lands_in_the_rows_that_are_committed():
    """Including blocks that leave a window, and rows of requests that end."""
    manager = make_manager()
    tables = MultiGroupBlockTable(3, 64, None, "cpu", [16, 16], [8, 8], [16, 8])
    pointers = [table.get_cpu_tensor().data_ptr() for table in tables]
    batch = paged_kv.RequestBatch(manager, tables)
    request = paged_kv.Request("a", range(120))
    batch.add(request, 2)
    step(batch, 2, 20)
    assert [table.host_table.dirty(3) for table in tables] == [(1, 2), (1, 4)]
    tables.commit_block_table(3)
    assert tables[0].get_device_tensor(3)[2].tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert tables[1].get_device_tensor(3)[2, :6].tolist() == [6, 7, 8, 9, 0, 0]
    assert [table.host_table.dirty(3) for table in tables] == [(0, 0), (0, 0)]

    step(batch, 2, 20)
    step(batch, 2, 8)
    assert manager.get_block_ids("a")[1][:1] == [0], "it has left the window"
    tables.commit_block_table(3)
    for group, (table, ratio) in enumerate(zip(tables, (1, 2), strict=True)):
        ids = manager.get_block_ids("a")[group]
        expected = [ratio * block + part for block in ids for part in range(ratio)]
        row = table.get_device_tensor(3)[2].tolist()
        assert row == expected + [0] * (len(row) - len(expected))

    batch.free(np.array([2], np.int32))
    tables.commit_block_table(3)
    assert all(not table.get_device_tensor(3).any() for table in tables)
    assert [table.get_cpu_tensor().data_ptr() for table in tables] == pointers


def test_a_batch_keeps_the_memory_of_its_tables_alive():
    manager = make_manager()
    tables = MultiGroupBlockTable(2, 64, None, "cpu", [16, 16], [8, 8])
    batch = paged_kv.RequestBatch(manager, tables)
    del tables
    batch.add(paged_kv.Request("a", range(20)), 0)
    gc.collect()
    step(batch, 0, 20)


def test_a_batch_stages_writes_of_block_tables():
    manager = make_manager()
    tables = BlockTables([16, 16], 4, 64, [8, 8], "cpu")
    batch = paged_kv.RequestBatch(manager, tables.host_tables)
    batch.add(paged_kv.Request("a", range(20)), 3)
    step(batch, 3, 20)
    tables.apply_staged_writes()
    gathered = tables.gather_block_tables(int32(3), num_reqs_padded=1)
    assert [table[0, :3].tolist() for table in gathered] == [[1, 2, 0], [3, 4, 0]]


def test_what_is_no_table_is_refused_by_a_batch():
    manager = make_manager()
    table = BlockTable(16, 3, 8, max_num_batched_tokens=6)
    with pytest.raises(TypeError, match="expected a BlockTable, got int"):
        paged_kv.RequestBatch(manager, [table, 3])
    with pytest.raises(TypeError):
        paged_kv.RequestBatch(manager, table)
    with pytest.raises(ValueError, match="given twice"):
        paged_kv.RequestBatch(manager, [table, table.host_table])
    with pytest.raises(ValueError, match="one for each of the 2 cache groups, got 1"):
        paged_kv.RequestBatch(manager, [table])
