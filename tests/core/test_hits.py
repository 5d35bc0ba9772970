# SPDX-License-Identifier: Apache-2.0
"""Which hits KVCacheManager finds and takes over: windows, groups, EAGLE, retention."""

from __future__ import annotations

import pytest
from core.kv_managers import BLOCK, full, make_request, window

from paged_kv import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    get_request_block_hasher,
)


def make_manager(*specs, num_blocks=64, retention=None, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    config = KVCacheConfig(num_blocks, [], groups, retention)
    return KVCacheManager(config, 1024, max(sizes), min(sizes), **options)


def run(manager, request, *, keep=False):
    """Compute all tokens of a request; returns its blocks in each group."""
    blocks, num_hits, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, blocks)
    request.num_computed_tokens = request.num_tokens
    ids = manager.get_block_ids(request.request_id)
    if not keep:
        manager.free(request)
    return ids


def hit(manager, num_tokens):
    """Number of tokens and blocks of each group."""
    blocks, num_hits, _ = manager.get_computed_blocks(make_request("hit", num_tokens))
    return num_hits, blocks.get_block_ids()


def hashed(manager, ids):
    """Positions of the blocks that can be found."""
    blocks = manager.block_pool.blocks
    return [i for i, block_id in enumerate(ids) if blocks[block_id].block_hash is not None]


def test_equal_prompts_share_before_their_blocks_are_computed():
    """Both may be admitted to one step: blocks are found as soon as they have been allocated."""
    manager = make_manager(full())
    manager.allocate_slots(make_request("a", 100), 100)
    assert hit(manager, 100) == (96, ([1, 2, 3, 4, 5, 6],))


def test_a_window_needs_its_last_blocks_only():
    manager = make_manager(window(32))
    run(manager, make_request("a", 160))
    assert hit(manager, 161) == (160, ([0] * 8 + [9, 10],))


def test_a_window_is_looked_for_from_the_right():
    """A single block at the end is no hit; a run that is too short is one at the beginning."""
    manager = make_manager(window(32))
    run(manager, make_request("a", 160))
    manager.evict_blocks([9])
    assert hit(manager, 161) == (128, ([0] * 6 + [7, 8],))
    manager.evict_blocks([2, 3, 5, 7])
    assert hit(manager, 161) == (16, ([1],))


def test_the_end_of_a_windows_hit_is_aligned_with_larger_blocks():
    manager = make_manager(full(32), window(32))
    ids = run(manager, make_request("a", 160))
    assert hit(manager, 150)[0] == 128
    manager.evict_blocks([ids[1][7]])
    assert hit(manager, 150)[0] == 96
    assert [len(blocks) for blocks in hit(manager, 150)[1]] == [3, 6]


def test_retention_keeps_what_the_prompt_itself_would_hit():
    manager = make_manager(window(32), retention=0)
    ids = run(manager, make_request("a", 160))
    assert hashed(manager, ids[0]) == [7, 8]
    assert [hit(manager, n)[0] for n in (160, 200, 100)] == [144, 144, 0]


def test_retention_keeps_for_eagle_what_a_longer_prompt_would_hit_too():
    """A whole prompt that goes on drops another block than the prompt alone, sent again."""
    manager = make_manager(window(32), retention=0, use_eagle=True)
    ids = run(manager, make_request("a", 160))
    assert hashed(manager, ids[0]) == [6, 7, 8, 9]
    assert [hit(manager, n)[0] for n in (160, 200)] == [128, 144]


def test_retention_keeps_the_end_of_a_prefix_that_two_prompts_share():
    """The first miss tells where; from the second prompt on it is a hit."""
    manager = make_manager(full(), window(32), retention=0)
    run(manager, make_request("a", 160))
    tokens = [*range(100), *range(5000, 5060)]
    second = Request("b", tokens, block_hasher=get_request_block_hasher(BLOCK))
    assert manager.get_computed_blocks(second)[1:] == (0, 96)
    ids = run(manager, second)
    assert hashed(manager, ids[1]) == [4, 5, 7, 8]
    assert hit(manager, 110)[0] == 96


def test_a_retention_interval_keeps_the_end_of_each_segment():
    manager = make_manager(window(32), retention=64)
    ids = run(manager, make_request("a", 160))
    assert hashed(manager, ids[0]) == [2, 3, 6, 7, 8]
    assert [hit(manager, n)[0] for n in (70, 100, 140)] == [64, 64, 128]


def test_a_block_leaves_a_window_with_its_last_token():
    """The query at position 47 sees 16 .. 47; what leaves at once is reused from the right."""
    manager = make_manager(window(32), num_blocks=8)
    run(manager, make_request("a", 100), keep=True)
    manager.remove_skipped_blocks("a", 46)
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5, 6, 7],)
    manager.remove_skipped_blocks("a", 47)
    assert manager.get_block_ids("a") == ([0, 2, 3, 4, 5, 6, 7],)
    manager.remove_skipped_blocks("a", 79)
    assert manager.get_block_ids("a") == ([0, 0, 0, 4, 5, 6, 7],)
    assert manager.block_pool.dump()[0] == [1, 3, 2]


def test_three_groups_go_on_until_all_agree():
    """What the last group loses, the second must look up again: one round is not enough."""
    manager = make_manager(full(), window(32), window(64))
    ids = run(manager, make_request("a", 160))
    manager.evict_blocks([ids[2][8], ids[1][6]])
    num_hits, blocks = hit(manager, 161)
    assert num_hits == 96
    assert blocks == (ids[0][:6], [0] * 4 + ids[1][4:6], [0, 0, *ids[2][2:6]])


@pytest.mark.parametrize(("use_eagle", "num_cached"), [(False, 4), (True, 5)])
def test_a_hybrid_caches_up_to_where_a_hit_can_end(use_eagle, num_cached):
    """Beside blocks of 32 tokens a hit ends at a multiple of 32; EAGLE needs a block behind it."""
    manager = make_manager(full(32), window(64), use_eagle=use_eagle)
    ids = run(manager, make_request("a", 90))
    assert hashed(manager, ids[1]) == list(range(num_cached))


def test_eagle_drops_one_block_in_each_group():
    manager = make_manager(full(), window(32), use_eagle=True)
    ids = run(manager, make_request("a", 160))
    num_hits, blocks = hit(manager, 161)
    assert num_hits == 144
    assert blocks == (ids[0][:9], [0] * 7 + ids[1][7:9])


def test_eagle_drops_again_at_a_shorter_hit():
    """The block that was dropped for a longer hit says nothing of the shorter one."""
    manager = make_manager(full(), window(32), use_eagle=True)
    ids = run(manager, make_request("a", 160))
    manager.evict_blocks([ids[0][7]])
    num_hits, blocks = hit(manager, 161)
    assert num_hits == 96
    assert blocks == (ids[0][:6], [0] * 4 + ids[1][4:6])


def test_tokens_from_outside_evict_no_groups_hit():
    """All groups hold their hits before any takes new blocks, though the hits are next in line."""
    manager = make_manager(full(), window(1024), num_blocks=25)
    hits = run(manager, make_request("a", 32))
    run(manager, make_request("b", 160, first_token=1000))
    request = make_request("c", 128)
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    assert (num_hits, blocks.get_block_ids()) == (32, hits)
    assert manager.allocate_slots(
        request, 0, num_hits, blocks, num_external_computed_tokens=64, delay_cache_blocks=True
    )
    tables = manager.get_block_ids("c")
    assert [table[:2] for table in tables] == list(hits)
    assert len({*tables[0], *tables[1]}) == 12
    manager.check_integrity()


def test_a_window_counts_once_when_the_whole_request_must_fit():
    """A request longer than the pool fits, since it never holds more than its window and a step."""
    manager = make_manager(window(32), num_blocks=8, max_in_flight_tokens=32)
    request = make_request("a", 300)
    assert manager.allocate_slots(request, 32, full_sequence_must_fit=True) is not None
    longer = make_manager(window(32), num_blocks=5, max_in_flight_tokens=32)
    assert longer.allocate_slots(request, 32, full_sequence_must_fit=True) is None


def test_groups_are_freed_one_after_the_other_each_last_block_first():
    orders = []
    for free in (
        lambda manager, request: manager.free(request),
        lambda manager, request: manager.block_pool.free_blocks(
            reversed(manager.pop_blocks_for_free(request))
        ),
    ):
        manager = make_manager(full(), window(1024), num_blocks=10)
        request = make_request("a", 48)
        assert run(manager, request, keep=True) == ([1, 2, 3], [4, 5, 6])
        free(manager, request)
        orders.append(manager.block_pool.dump()[0])
    assert orders == [[7, 8, 9, 3, 2, 1, 6, 5, 4], [7, 8, 9, 6, 5, 4, 3, 2, 1]]


def test_a_group_that_dropped_a_block_looks_again_when_another_has_shortened_the_hit():
    """At 160 tokens the window of EAGLE has the block that it drops, at 96 it has not."""
    specs = [full(), window(32), window(64)]
    groups = [KVCacheGroupSpec([str(i)], spec, i == 1) for i, spec in enumerate(specs)]
    manager = KVCacheManager(KVCacheConfig(64, [], groups), 1024, BLOCK, BLOCK)
    ids = run(manager, make_request("a", 160))
    manager.evict_blocks([ids[1][6]])
    assert hit(manager, 161)[0] == 144
    manager.evict_blocks([ids[2][6]])
    num_hits, blocks = hit(manager, 161)
    assert num_hits == 80
    assert blocks == (ids[0][:5], [0] * 3 + ids[1][3:5], [0, *ids[2][1:5]])
