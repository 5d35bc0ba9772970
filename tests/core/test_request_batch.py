# SPDX-License-Identifier: Apache-2.0
"""RequestBatch: refusals, rows, lifetimes, bad arguments. Equality with single calls: property."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from paged_kv import (
    BlockTable,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    RequestBatch,
    RequestStatus,
    SlidingWindowSpec,
    get_request_block_hasher,
)

SHAPE = {"block_size": 4, "num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(sliding_window=4, **SHAPE)


def rows(*values):
    return np.array(values, np.int32)


def make_table(block_size=4, max_num_reqs=4, max_num_blocks_per_req=16):
    return BlockTable(block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens=1)


def make(specs=(FULL,), num_blocks=10):
    groups = [KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)]
    manager = KVCacheManager(KVCacheConfig(num_blocks, [], groups), 64, 4, 4)
    tables = [make_table() for _ in specs]
    return manager, tables, RequestBatch(manager, tables)


def make_request(name, num_tokens=4):
    request = Request(name, range(num_tokens), block_hasher=get_request_block_hasher(4))
    request.status = RequestStatus.RUNNING
    return request


def test_a_step_allocates_counts_and_writes_rows():
    _, [table], batch = make()
    requests = [make_request("a"), make_request("b", 6)]
    for row, request in enumerate(requests):
        batch.add(request, row)
    assert batch.allocate_slots(rows(1, 0), rows(6, 4)).tolist() == []
    assert [request.num_computed_tokens for request in requests] == [4, 6]
    assert table.get_numpy_array()[:2, :3].tolist() == [[3, 0, 0], [1, 2, 0]]


def test_a_refused_request_keeps_what_it_has_and_those_after_it_are_served():
    manager, [table], batch = make(num_blocks=4)
    requests = [make_request("a", 4), make_request("b", 8), make_request("c", 2)]
    for row, (request, num_tokens) in enumerate(zip(requests, (4, 4, 2), strict=True)):
        batch.add(request, row)
        assert not batch.allocate_slots(rows(row), num_tokens).size
    assert batch.allocate_slots(rows(0, 1, 2), 1).tolist() == [0, 1]
    assert [request.num_computed_tokens for request in requests] == [4, 4, 3]
    assert table.num_blocks_per_row.tolist() == [1, 1, 1, 0]
    assert manager.block_pool.get_num_free_blocks() == 0


def test_a_scheduler_can_preempt_and_go_on_where_it_was_refused():
    _, [table], batch = make(num_blocks=4)
    requests = [make_request(name) for name in "abc"]
    for row, request in enumerate(requests):
        batch.add(request, row)
    running = rows(0, 1, 2)
    assert not batch.allocate_slots(running, 4).size
    batch.append_output_token_ids(running, rows(7, 8, 9))

    [refused] = batch.allocate_slots(running, 1, stop_at_refusal=True)
    assert refused == 0
    batch.free(rows(2))  # the last one makes room for the first
    [refused] = batch.allocate_slots(rows(0, 1), 1, stop_at_refusal=True)
    assert refused == 1
    assert [request.num_computed_tokens for request in requests] == [5, 4, 4]
    assert table.get_numpy_array()[:3, :2].tolist() == [[1, 3], [2, 0], [0, 0]]


def test_blocks_that_left_a_window_leave_the_row_even_if_the_request_is_refused():
    manager, [table], batch = make([WINDOW], num_blocks=4)
    request = make_request("a", 12)
    batch.add(request, 0)
    assert not batch.allocate_slots(rows(0), 12).size
    batch.append_output_token_ids(rows(0), rows(7))
    assert table.get_numpy_array()[0, :4].tolist() == [1, 2, 3, 0]
    assert batch.allocate_slots(rows(0), 1, reserved_blocks=3).tolist() == [0]
    assert table.get_numpy_array()[0, :4].tolist() == [0, 0, 3, 0]
    assert manager.get_block_ids("a") == ([0, 0, 3],)


def test_blocks_leave_a_window_one_after_the_other():
    manager, [table], batch = make([WINDOW])
    batch.add(make_request("a", 8), 0)
    assert not batch.allocate_slots(rows(0), 8).size
    for num_null in (1, 2, 3):
        batch.append_output_token_ids(rows(0), rows(7, 7, 7, 7), rows(4))
        assert not batch.allocate_slots(rows(0), 4).size
        [ids] = manager.get_block_ids("a")
        assert ids.count(0) == num_null
        assert table.get_numpy_array()[0, : len(ids)].tolist() == ids


def test_slots_from_the_manager_reach_the_row_with_the_next_step():
    manager, [table], batch = make()
    request = make_request("a", 8)
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    batch.add(request, 2)
    assert table.get_numpy_array()[2, :3].tolist() == [1, 0, 0]
    manager.allocate_slots(request, 1)
    request.num_computed_tokens = 5
    assert not batch.allocate_slots(rows(2), 3).size
    assert table.get_numpy_array()[2, :3].tolist() == [1, 2, 0]


def test_a_removed_request_keeps_its_blocks_and_a_freed_one_does_not():
    manager, [table], batch = make()
    batch.add(make_request("a"), 0)
    assert not batch.allocate_slots(rows(0), 4).size
    batch.remove(0)
    assert manager.get_block_ids("a") == ([1],)
    assert not table.get_numpy_array().any()
    batch.add(make_request("a"), 1)
    assert table.get_numpy_array()[1, 0] == 1
    batch.free(rows(1))
    assert manager.usage == 0
    assert batch.num_reqs == 0


def test_a_row_is_used_again_from_its_beginning():
    _, [table], batch = make()
    batch.add(make_request("a", 8), 0)
    assert not batch.allocate_slots(rows(0), 8).size
    batch.free(rows(0))
    batch.add(make_request("b"), 0)
    batch.check_integrity()
    assert not batch.allocate_slots(rows(0), 4).size
    assert table.get_numpy_array()[0, :3].tolist() == [3, 0, 0]


def test_tokens_are_given_to_each_request():
    _, _, batch = make()
    requests = [make_request("a"), make_request("b")]
    for row, request in enumerate(requests):
        batch.add(request, row)
    batch.append_output_token_ids(rows(1, 0), rows(5, 6, 7), rows(2, 1))
    assert [request.output_token_ids.tolist() for request in requests] == [[7], [5, 6]]


def test_the_batch_keeps_alive_what_it_refers_to():
    """A hasher in Python reads attributes of the request's Python object."""
    seen = []

    def hasher(request):
        seen.append(request.sampling_params)
        return []

    manager, tables, batch = make()
    batch.add(Request("a", [1], "params", block_hasher=hasher), 0)
    del manager, tables
    gc.collect()
    batch.append_output_token_ids(rows(0), rows(7))
    assert seen == ["params", "params"]


def test_a_hasher_that_raises_takes_the_tokens_of_all_requests_back():
    def fail(request):
        if request.num_output_tokens:
            raise LookupError(request.request_id)
        return []

    _, _, batch = make()
    hashed = Request("a", [1, 2, 3], block_hasher=get_request_block_hasher(4))
    failing = Request("b", [1], block_hasher=fail)
    batch.add(hashed, 0)
    batch.add(failing, 1)
    with pytest.raises(LookupError, match="b"):
        batch.append_output_token_ids(rows(0, 1), rows(4, 5))
    assert (hashed.num_tokens, failing.num_tokens, len(hashed.block_hashes)) == (3, 1, 0)
    batch.append_output_token_ids(rows(0), rows(4))
    assert (hashed.num_tokens, len(hashed.block_hashes)) == (4, 1)


def test_an_empty_step_does_nothing():
    _, _, batch = make()
    batch.append_output_token_ids(rows(), rows())
    assert batch.allocate_slots(rows(), 1).tolist() == []
    batch.free(rows())


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], "expected one for each of the 1 cache groups, got 0"),
        ([make_table(block_size=8)], "blocks of 4 tokens, got 8"),
        ([make_table(max_num_blocks_per_req=15)], "at least 16 blocks, got 15"),
    ],
)
def test_tables_must_fit_the_groups(tables, message):
    manager, _, _ = make()
    with pytest.raises(ValueError, match=message):
        RequestBatch(manager, tables)


@pytest.mark.parametrize("tables", [[None], [3], None, make_table()])
def test_only_tables_are_taken(tables):
    manager, _, _ = make()
    with pytest.raises(TypeError):
        RequestBatch(manager, tables)


def test_a_table_serves_one_group():
    manager, [table, _], _ = make([FULL, WINDOW])
    with pytest.raises(ValueError, match="given twice"):
        RequestBatch(manager, [table, table])


def test_bad_additions_change_nothing():
    _, [table], batch = make()
    request = make_request("a")
    batch.add(request, 0)
    table.append_row([5], 3)
    for row, message in ((0, "has a request"), (1, "in the batch already"), (4, r"\[0, 4\)")):
        with pytest.raises((ValueError, IndexError), match=message):
            batch.add(request, row)
    with pytest.raises(ValueError, match="not empty"):
        batch.add(make_request("b"), 3)
    with pytest.raises(ValueError, match="no request"):
        batch.remove(1)
    assert batch.num_reqs == 1


def test_a_request_that_was_freed_elsewhere_is_noticed():
    manager, _, batch = make()
    request = make_request("a")
    batch.add(request, 0)
    assert not batch.allocate_slots(rows(0), 4).size
    manager.free(request)
    with pytest.raises(ValueError, match="given back its blocks"):
        batch.allocate_slots(rows(0), 1)
    batch.free(rows(0))


def test_arrays_are_taken_as_they_are():
    """No hidden conversion of another dtype."""
    _, _, batch = make()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        batch.allocate_slots(np.array([0], np.int64), 1)
    with pytest.raises(ValueError, match="one dimension"):
        batch.free(np.zeros((1, 1), np.int32))
