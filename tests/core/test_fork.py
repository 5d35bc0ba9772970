# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager.fork from Python: results, sharing, errors. All rules: tests/cpp/fork_test.cpp."""

from __future__ import annotations

import gc

import pytest
from core.kv_managers import full, make_request, window

from paged_kv import BlockTable, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, RequestBatch

BLOCK = 4


def make_manager(*specs, num_blocks=32, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, 64, scheduler_block_size=BLOCK, hash_block_size=BLOCK, **options)


def request(name, num_tokens, **arguments):
    return make_request(name, num_tokens, block_size=BLOCK, **arguments)


def run(manager, request):
    num_new_tokens = request.num_tokens - request.num_computed_tokens
    assert manager.allocate_slots(request, num_new_tokens) is not None
    request.num_computed_tokens = request.num_tokens


def state(manager, *requests):
    tables = [manager.get_block_ids(request.request_id) for request in requests]
    return manager.block_pool.dump(), tables, [r.num_computed_tokens for r in requests]


def test_full_blocks_are_shared_and_the_part_filled_one_of_each_group_is_copied():
    manager = make_manager(full(BLOCK), window(6, BLOCK))
    parent, child = request("a", 10), request("b", 10)
    run(manager, parent)
    assert manager.fork(parent, child) == [(0, 3, 7), (1, 6, 8)]
    assert manager.get_block_ids("b") == ([1, 2, 7], [4, 5, 8])
    assert child.num_computed_tokens == 10
    manager.check_integrity()


def test_slots_after_the_computed_tokens_stay_the_parents():
    manager = make_manager(full(BLOCK))
    parent, child = request("a", 6), request("b", 6)
    assert manager.allocate_slots(parent, 6, num_lookahead_tokens=8) is not None
    parent.num_computed_tokens = 6
    assert manager.fork(parent, child) == [(0, 2, 5)]
    assert manager.get_block_ids("b") == ([1, 5],)


def test_a_copy_is_cached_when_the_child_fills_it():
    """The parent's step, under way, had cached two blocks that the fork comes before."""
    manager = make_manager(full(BLOCK))
    parent, child = request("a", 10), request("b", 10)
    run(manager, parent)
    parent.num_computed_tokens = 6
    manager.fork(parent, child)
    assert manager.block_pool.blocks[4].block_hash is None
    run(manager, child)
    assert manager.block_pool.blocks[4].block_hash is not None


def test_a_full_pool_refuses_and_changes_nothing():
    manager = make_manager(full(BLOCK), num_blocks=3)
    parent, child = request("a", 6), request("b", 6)
    run(manager, parent)
    before = state(manager, parent, child)
    assert manager.fork(parent, child) is None
    assert state(manager, parent, child) == before


def test_parent_and_children_diverge_and_leave_nothing():
    manager = make_manager(full(BLOCK), window(6, BLOCK), num_blocks=64)
    family = [request(str(i), 10) for i in range(5)]
    run(manager, family[0])
    for child in family[1:]:
        assert manager.fork(family[0], child) is not None
    for step in range(12):
        for i, member in enumerate(family):
            member.append_output_token_ids(100 * i + step)
            run(manager, member)
    tables = [manager.get_block_ids(member.request_id) for member in family]
    assert all(table[0][:2] == [1, 2] for table in tables)
    assert len({block for table in tables for block in table[0][2:]}) == 5 * 4
    for member in family:
        manager.free(member)
        manager.check_integrity()
    assert manager.usage == 0.0


def test_a_child_of_other_tokens_or_keys_is_refused():
    manager = make_manager(full(BLOCK))
    parent = request("a", 10)
    child = request("b", 10)
    with pytest.raises(ValueError, match="parent: request a holds no blocks"):
        manager.fork(parent, child)
    run(manager, parent)
    for wrong, message in (
        (parent, "child: request a holds blocks already"),
        (request("c", 9), "child: request c must begin with the 10 computed tokens"),
        (request("d", 10, first_token=1), "child: request d must begin with the 10"),
        (request("e", 10, cache_salt="salt"), "another adapter, salt or input"),
    ):
        before = state(manager, parent, wrong)
        with pytest.raises(ValueError, match=message):
            manager.fork(parent, wrong)
        assert state(manager, parent, wrong) == before
    parent.num_computed_tokens = 0
    with pytest.raises(ValueError, match="must have computed some of its 10 tokens"):
        manager.fork(parent, child)


def test_a_child_outlives_its_parent_and_a_batch_runs_it():
    manager = make_manager(full(BLOCK))
    parent, child = request("a", 6), request("b", 6)
    run(manager, parent)
    manager.fork(parent, child)
    manager.free(parent)
    del parent
    gc.collect()
    table = BlockTable(BLOCK, max_num_reqs=2, max_num_blocks_per_req=16, max_num_batched_tokens=1)
    batch = RequestBatch(manager, [table])
    batch.add(child, 1)
    assert table.get_numpy_array()[1, :3].tolist() == [1, 3, 0]
    batch.check_integrity()
