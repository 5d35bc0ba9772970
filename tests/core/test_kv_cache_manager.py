# SPDX-License-Identifier: Apache-2.0
"""KVCacheManager: rules one by one, and bad arguments. Whole runs: tests/traces."""

from __future__ import annotations

import pytest
from core.kv_managers import BLOCK, SHAPE, full, make_request, window

from paged_kv import (
    ChunkedLocalAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheMetricsCollector,
    Request,
    RequestStatus,
)


def chunked(size, block_size=BLOCK):
    return ChunkedLocalAttentionSpec(block_size=block_size, attention_chunk_size=size, **SHAPE)


def make_manager(*specs, num_blocks=32, retention=None, **options):
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs or [full()])]
    options = {
        "max_model_len": 1024,
        "scheduler_block_size": max(group.kv_cache_spec.block_size for group in groups),
        "hash_block_size": min(group.kv_cache_spec.block_size for group in groups),
        **options,
    }
    return KVCacheManager(KVCacheConfig(num_blocks, [], groups, retention), **options)


def state(manager, *requests):
    tables = [manager.get_block_ids(request.request_id) for request in requests]
    return manager.block_pool.dump(), tables


def run(manager, request):
    """Admit a request and compute all of its tokens."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    taken = manager.allocate_slots(request, request.num_tokens - num_hits, num_hits, blocks)
    assert taken is not None
    request.num_computed_tokens = request.num_tokens
    return num_hits


def test_a_cached_prompt_leaves_its_last_token_to_compute():
    manager = make_manager()
    first = make_request("a", 48)
    assert run(manager, first) == 0
    assert manager.get_block_ids("a") == ([1, 2, 3],)
    assert run(manager, make_request("b", 48)) == 32
    assert manager.get_block_ids("b") == ([1, 2, 4],)


def test_skipping_the_cache_reads_nothing_and_writes_all_the_same():
    manager = make_manager(log_stats=True)
    params = type("Params", (), {"skip_reading_prefix_cache": True})()
    run(manager, make_request("a", 48))
    skipping = make_request("b", 64, sampling_params=params)
    assert not manager.prefix_cache_lookup_enabled(skipping)
    assert run(manager, skipping) == 0
    manager.record_prefix_cache_stats(skipping, 0)
    assert manager.make_prefix_cache_stats().requests == 0
    assert run(manager, make_request("c", 65)) == 64


def test_blocks_outside_the_window_become_null_blocks():
    manager = make_manager(window(32))
    request = make_request("a", 100)
    run(manager, request)
    request.append_output_token_ids(1)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("a")[0][:4] == [0, 0, 0, 0]
    assert manager.block_pool.get_num_free_blocks() == 31 - 3


def test_blocks_of_steps_under_way_are_kept():
    manager = make_manager(window(32))
    request = make_request("a", 100)
    run(manager, request)
    request.num_in_flight_tokens = 100
    manager.allocate_slots(request, 1)
    assert 0 not in manager.get_block_ids("a")[0]


def test_a_refused_allocation_gives_back_what_left_the_window_and_no_more():
    manager = make_manager(window(32), num_blocks=8)
    request = make_request("a", 80)
    run(manager, request)
    assert manager.allocate_slots(request, 200) is None
    assert manager.get_block_ids("a") == ([0, 0, 0, 4, 5],)
    manager.check_integrity()


def test_a_chunk_before_the_last_counts_as_a_hit():
    manager = make_manager(chunked(64))
    blocks, num_hits, _ = manager.get_computed_blocks(make_request("a", 100))
    assert (num_hits, blocks.get_block_ids()) == (64, ([0, 0, 0, 0],))


def test_groups_agree_on_the_shortest_hit():
    manager = make_manager(full(), window(32), num_blocks=64)
    run(manager, make_request("a", 160))
    manager.evict_blocks([manager.get_block_ids("a")[1][8]])
    blocks, num_hits, boundary = manager.get_computed_blocks(make_request("b", 161))
    assert num_hits == 128
    assert [len(ids) for ids in blocks.get_block_ids()] == [8, 8]
    assert boundary == 160


def test_eagle_drops_the_last_block_of_a_hit():
    manager = make_manager(use_eagle=True)
    run(manager, make_request("a", 100))
    hits = [manager.get_computed_blocks(make_request(str(n), n))[1] for n in (100, 97, 96)]
    assert hits == [80, 80, 64]


def test_slots_end_at_max_model_len():
    manager = make_manager(max_model_len=40)
    request = make_request("a", 38)
    manager.allocate_slots(request, 38, num_lookahead_tokens=30)
    assert len(manager.get_block_ids("a")[0]) == 3


def test_drafts_are_not_cached():
    manager = make_manager()
    request = make_request("a", 15)
    manager.allocate_slots(request, 20)
    assert manager.block_pool.dump()[2] == {}


def test_tokens_from_outside_are_cached_when_they_have_arrived():
    manager = make_manager()
    request = make_request("a", 65)
    taken = manager.allocate_slots(
        request, 0, num_external_computed_tokens=64, delay_cache_blocks=True
    )
    assert taken.get_block_ids() == ([],)
    assert len(manager.get_block_ids("a")[0]) == 4
    assert manager.block_pool.dump()[2] == {}
    manager.cache_blocks(request, 64)
    assert len(manager.block_pool.dump()[2]) == 4


def test_the_watermark_counts_for_admissions_beside_others():
    manager = make_manager(num_blocks=11, watermark=0.3)
    request = make_request("a", 128)
    assert manager.allocate_slots(request, 128) is None
    request.status = RequestStatus.PREEMPTED
    assert manager.allocate_slots(request, 128) is None
    assert manager.allocate_slots(request, 128, has_scheduled_reqs=False) is not None
    manager.free(request)
    request.status = RequestStatus.RUNNING
    assert manager.allocate_slots(request, 128) is not None


def test_a_request_that_cannot_fit_whole_is_not_begun():
    manager = make_manager(num_blocks=5)
    request = make_request("a", 100)
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 16, reserved_blocks=4) is None
    assert manager.allocate_slots(request, 16) is not None


def test_hits_that_nobody_holds_use_up_free_blocks():
    manager = make_manager(num_blocks=11)
    request = make_request("a", 80)
    run(manager, request)
    manager.free(request)
    longer = make_request("b", 176)
    blocks, num_hits, _ = manager.get_computed_blocks(longer)
    before = state(manager, longer)
    assert manager.allocate_slots(longer, 96, num_hits, blocks) is None
    assert state(manager, longer) == before
    assert manager.allocate_slots(longer, 80, num_hits, blocks) is not None


def test_freeing_twice_or_an_unknown_request_does_nothing():
    manager = make_manager()
    request = make_request("a", 20)
    manager.free(request)
    run(manager, request)
    manager.free(request)
    manager.free(request)
    assert manager.get_block_ids("a") == ([],)
    assert manager.usage == 0.0
    assert manager.pop_blocks_for_free(request) == []


def test_popped_blocks_stay_held_until_they_are_freed():
    manager = make_manager()
    request = make_request("a", 20)
    run(manager, request)
    popped = manager.pop_blocks_for_free(request)
    assert manager.block_pool.get_num_free_blocks() == 29
    manager.block_pool.free_blocks(reversed(popped))
    assert manager.block_pool.get_num_free_blocks() == 31


def test_requests_are_known_by_their_id():
    """Another object of the same id continues; another manager knows nothing of it."""
    manager, other = make_manager(), make_manager()
    run(manager, make_request("a", 20))
    manager.free(make_request("a", 20))
    assert manager.usage == 0.0
    request = make_request("b", 20)
    run(manager, request)
    other.free(request)
    assert other.get_block_ids("b") == ([],)
    assert manager.get_block_ids("b") == ([1, 2],) or len(manager.get_block_ids("b")[0]) == 2
    manager.free(request)
    run(other, request)
    assert other.usage > 0.0
    assert manager.usage == 0.0


def test_a_row_that_is_reused_does_not_remember():
    manager = make_manager()
    first, second = make_request("a", 20), make_request("b", 40)
    run(manager, first)
    manager.free(first)
    run(manager, second)
    manager.free(first)
    assert len(manager.get_block_ids("b")[0]) == 3
    assert manager.get_block_ids("a") == ([],)


def test_statistics_since_the_last_report():
    manager = make_manager(log_stats=True)
    request = make_request("a", 48)
    manager.record_prefix_cache_stats(request, 32)
    request.num_preemptions = 1
    manager.record_prefix_cache_stats(request, 16)
    assert manager.reset_prefix_cache()
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (1, 48, 32, True)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 48, 16)
    assert manager.make_prefix_cache_stats().requests == 0
    assert make_manager().make_prefix_cache_stats() is None


def test_metrics_tell_the_life_of_a_block():
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    manager = make_manager(num_blocks=4, metrics_collector=collector)
    for name in ("a", "b", "c"):
        request = make_request(name, 33)
        run(manager, request)
        manager.free(request)
    assert collector.drain_events()[0].lifetime_seconds > 0
    for name in ("d", "e", "f"):
        request = make_request(name, 33, cache_salt=name)
        run(manager, request)
        manager.free(request)
    events = collector.drain_events()
    assert max(len(event.reuse_gaps_seconds) for event in events) >= 1
    assert all(event.lifetime_seconds >= event.idle_seconds >= 0 for event in events)
    assert collector.drain_events() == []


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, float("nan")])
def test_a_bad_sample_rate_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate"):
        KVCacheMetricsCollector(rate)


def test_a_hit_can_be_shortened():
    manager = make_manager()
    run(manager, make_request("a", 64))
    blocks, _, _ = manager.get_computed_blocks(make_request("b", 80))
    assert manager.truncate_computed_blocks(blocks, 32).get_block_ids() == ([1, 2],)
    for num_tokens in (-16, 8, 80):
        with pytest.raises(ValueError, match="num_computed_tokens"):
            manager.truncate_computed_blocks(blocks, num_tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_new_tokens": 0}, "num_new_tokens must be positive"),
        ({"num_new_tokens": -1}, "num_new_tokens"),
        ({"num_new_tokens": 2**41}, "num_new_tokens"),
        ({"num_new_tokens": 1, "num_new_computed_tokens": -1}, "num_new_computed_tokens"),
        ({"num_new_tokens": 1, "num_lookahead_tokens": -1}, "num_lookahead_tokens"),
        ({"num_new_tokens": 1, "num_external_computed_tokens": -1}, "num_external"),
        ({"num_new_tokens": 1, "reserved_blocks": -1}, "reserved_blocks"),
        ({"num_new_tokens": 1, "num_external_computed_tokens": 2000}, "max_model_len"),
        ({"num_new_tokens": 1, "new_computed_blocks": KVCacheBlocks(([], []))}, "1 groups, got 2"),
    ],
)
def test_a_bad_allocation_changes_nothing(arguments, message):
    manager = make_manager()
    request = make_request("a", 40)
    before = state(manager, request)
    with pytest.raises(ValueError, match=message):
        manager.allocate_slots(request, **arguments)
    assert state(manager, request) == before


def test_a_hit_for_a_request_that_holds_blocks_is_refused():
    manager = make_manager()
    run(manager, make_request("a", 64))
    request = make_request("b", 64)
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    run(manager, request)
    before = state(manager, request)
    with pytest.raises(ValueError, match="holds no blocks"):
        manager.allocate_slots(request, 1, num_hits, blocks)
    assert state(manager, request) == before


def test_a_hit_of_another_pool_is_refused():
    other = make_manager()
    run(other, make_request("a", 64))
    blocks, num_hits, _ = other.get_computed_blocks(make_request("b", 64))
    manager = make_manager()
    with pytest.raises(ValueError, match="another pool"):
        manager.allocate_slots(make_request("b", 64), 1, num_hits, blocks)


def test_a_request_without_hashes_cannot_be_cached():
    manager = make_manager()
    request = Request("a", list(range(40)))
    before = state(manager, request)
    with pytest.raises(ValueError, match="block hasher"):
        manager.allocate_slots(request, 40)
    assert state(manager, request) == before
    assert make_manager(enable_caching=False).allocate_slots(request, 40) is not None


def test_blocks_beyond_the_tokens_cannot_be_cached():
    manager = make_manager()
    request = make_request("a", 40)
    run(manager, request)
    with pytest.raises(ValueError, match="block hash"):
        manager.cache_blocks(request, 64)
    with pytest.raises(ValueError, match="num_computed_tokens"):
        manager.cache_blocks(request, -1)


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([full()], {"scheduler_block_size": 24}, "scheduler_block_size"),
        ([full()], {"hash_block_size": 0}, "hash_block_size"),
        ([full()], {"hash_block_size": 8}, "hash_block_size must be its block size"),
        ([full(32), full(16)], {"hash_block_size": 32}, "hash_block_size"),
        ([full()], {"retention": 16}, "no effect"),
        ([window(32)], {"retention": 8}, "multiple of scheduler_block_size"),
        ([window(32)], {"retention": -16}, "multiple of scheduler_block_size"),
        ([chunked(64)], {"use_eagle": True}, "EAGLE"),
        ([full(), chunked(64)], {"use_eagle": True}, "EAGLE"),
        ([full(32), chunked(64)], {}, "one block size"),
        ([full()], {"watermark": -0.1}, "watermark"),
        ([full()], {"watermark": 1.5}, "watermark"),
        ([full()], {"max_model_len": 0}, "max_model_len"),
        ([full()], {"max_in_flight_tokens": -1}, "max_in_flight_tokens"),
        ([full()], {"num_prefill_lookahead": -1}, "num_prefill_lookahead"),
        ([full()], {"num_prefill_lookahead": 17, "use_eagle": True}, "num_prefill_lookahead"),
        ([full()], {"num_blocks": 0}, "num_gpu_blocks"),
        ([full()], {"num_blocks": 2**31}, "num_blocks"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(specs, options, message):
    with pytest.raises(ValueError, match=message):
        make_manager(*specs, **options)


def test_without_caching_there_may_be_no_groups():
    manager = KVCacheManager(KVCacheConfig(1, [], []), 16, 16, 16, enable_caching=False)
    request = make_request("a", 20)
    assert manager.allocate_slots(request, 20).get_block_ids() == ()
    with pytest.raises(ValueError, match="at least one cache group"):
        KVCacheManager(KVCacheConfig(1, [], []), 16, 16, 16)
