# SPDX-License-Identifier: Apache-2.0
"""Events of KVCacheManager: what each call reports, and when."""

from __future__ import annotations

from core.kv_managers import full, make_request, window

from paged_kv import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
)


def make_manager(*specs, num_blocks=32, retention=None, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    sizes = [group.kv_cache_spec.block_size for group in groups]
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], groups, retention), 1024, max(sizes), min(sizes),
        enable_kv_cache_events=True, use_int_block_hashes=False, **options,
    )  # fmt: skip


def removed(events):
    assert all(isinstance(event, BlockRemoved) for event in events)
    return [block_hash for event in events for block_hash in event.block_hashes]


def test_a_stored_event_names_the_blocks_and_what_they_follow():
    manager = make_manager(full())
    request = make_request("a", 70)
    hashes = list(request.block_hashes)
    manager.allocate_slots(request, 40)
    request.num_computed_tokens = 40
    [first] = manager.take_events()
    manager.allocate_slots(request, 30)
    [second] = manager.take_events()
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == (hashes[:2], None)
    assert (second.block_hashes, second.parent_block_hash) == (hashes[2:4], hashes[1])
    assert list(second.token_ids) == list(range(32, 64))
    assert len(second.extra_keys) == 2
    assert manager.take_events() == []


def test_blocks_that_are_not_cached_are_not_named():
    """Tokens and parent are those of the whole range all the same."""
    manager = make_manager(window(32), retention=0)
    request = make_request("a", 160)
    hashes = list(request.block_hashes)
    manager.allocate_slots(request, 48)
    request.num_computed_tokens = 48
    [nothing] = manager.take_events()
    assert nothing.block_hashes == []
    assert list(nothing.token_ids) == list(range(48))
    manager.allocate_slots(request, 112)
    [stored] = manager.take_events()
    assert (stored.block_hashes, stored.parent_block_hash) == (hashes[7:9], hashes[2])
    assert list(stored.token_ids) == list(range(48, 160))


def test_each_group_reports_its_blocks():
    manager = make_manager(full(), window(32))
    manager.allocate_slots(make_request("a", 32), 32)
    assert [event.group_idx for event in manager.take_events()] == [0, 1]


def test_a_block_is_removed_when_it_is_reused_and_not_when_it_is_freed():
    manager = make_manager(full(), num_blocks=4)
    request = make_request("a", 48)
    hashes = list(request.block_hashes)
    manager.allocate_slots(request, 48)
    manager.take_events()
    manager.free(request)
    assert manager.take_events() == []
    manager.allocate_slots(make_request("b", 20, first_token=1000), 20)
    *evicted, stored = manager.take_events()
    assert removed(evicted) == [hashes[2], hashes[1]]
    assert isinstance(stored, BlockStored)


def test_an_eviction_is_reported():
    manager = make_manager(full())
    request = make_request("a", 48)
    manager.allocate_slots(request, 48)
    manager.take_events()
    manager.evict_blocks([2])
    manager.evict_blocks([2])
    assert removed(manager.take_events()) == [request.block_hashes[1]]


def test_a_reset_is_reported_if_it_happens():
    manager = make_manager(full())
    request = make_request("a", 48)
    manager.allocate_slots(request, 48)
    manager.take_events()
    assert not manager.reset_prefix_cache()
    assert manager.take_events() == []
    manager.free(request)
    assert manager.reset_prefix_cache()
    [event] = manager.take_events()
    assert isinstance(event, AllBlocksCleared)


def test_the_key_of_a_part_gives_way_to_that_of_the_whole_block():
    """The end of a prompt inside a block of 32 tokens has a name of its own until it is full."""
    manager = make_manager(full(32), window(32), use_eagle=True)
    request = make_request("a", 50)
    manager.allocate_slots(request, 50)
    request.num_computed_tokens = 50
    part = request.block_hashes[2]
    assert part in [name for event in manager.take_events() for name in event.block_hashes]
    request.append_output_token_ids(list(range(50, 70)))
    manager.allocate_slots(request, 20)
    [event] = [event for event in manager.take_events() if isinstance(event, BlockRemoved)]
    assert (event.block_hashes, event.group_idx) == ([part], 0)
    block = manager.block_pool.blocks[manager.get_block_ids("a")[0][1]]
    assert block.block_hash[:32] == request.block_hashes[3]
    manager.check_integrity()
