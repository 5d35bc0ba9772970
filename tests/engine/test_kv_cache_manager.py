# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest


def run(manager, request):
    """Admit a request, compute all its tokens; return the number of tokens it hit."""
    blocks, num_hit = manager.get_computed_blocks(request)
    allocated = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, blocks)
    assert allocated is not None
    request.num_computed_tokens = request.num_tokens
    manager.block_pool.check_integrity()
    return num_hit


def state(manager):
    return manager.block_pool.dump()


def test_a_request_gets_blocks_for_its_tokens_and_gives_them_back(make_manager, make_request):
    manager, request = make_manager(), make_request(25)
    run(manager, request)
    assert manager.get_block_ids(request.request_id) == ([1, 2],)
    assert manager.usage == pytest.approx(0.2)
    manager.free(request)
    assert manager.get_block_ids(request.request_id) == ([],)
    usage = manager.get_block_usage()
    assert (usage.num_used, usage.num_idle_cached, usage.num_free) == (0, 1, 9)


def test_decode_takes_a_block_only_when_the_last_one_is_full(make_manager, make_request):
    manager, request = make_manager(), make_request(15)
    run(manager, request)
    taken = []
    for token_id in range(20):
        request.append_output_token_ids(token_id)
        taken.append(len(manager.allocate_slots(request, 1).get_block_ids()[0]))
        request.num_computed_tokens += 1
    assert taken == [0] + [1] + 15 * [0] + [1] + 2 * [0]


def test_a_fully_cached_prompt_recomputes_its_last_block(make_manager, make_request):
    manager = make_manager()
    run(manager, make_request(48))
    assert manager.get_computed_blocks(make_request(48))[1] == 32
    assert manager.get_computed_blocks(make_request(49))[1] == 48
    assert manager.get_computed_blocks(make_request(16))[1] == 0


def test_block_size_one_recomputes_the_last_token(make_manager, make_request):
    manager = make_manager(block_size=1)
    run(manager, make_request(5, block_size=1))
    assert manager.get_computed_blocks(make_request(5, block_size=1))[1] == 4


def test_requests_share_a_prefix_while_the_first_still_runs(make_manager, make_request):
    manager = make_manager(num_blocks=21)
    first, second = make_request(100), make_request([*range(96), 7, 7, 7, 7])
    run(manager, first)
    assert run(manager, second) == 96
    ids = [manager.get_block_ids(r.request_id)[0] for r in (first, second)]
    assert ids[0][:6] == ids[1][:6]
    assert ids[0][6] != ids[1][6]
    assert manager.block_pool.dump()[1][ids[0][0]] == 2
    manager.free(first)
    assert manager.get_block_usage().num_used == 7
    manager.free(second)
    assert manager.get_block_usage().num_used == 0


def test_idle_hits_count_against_the_free_blocks(make_manager, make_request):
    # 10 free blocks, 5 of them hits: 6 more do not fit, 5 more do.
    manager = make_manager()
    first = make_request(80)
    run(manager, first)
    manager.free(first)
    before = state(manager)
    too_long = make_request(11 * 16)
    blocks, num_hit = manager.get_computed_blocks(too_long)
    assert num_hit == 80
    assert manager.allocate_slots(too_long, 6 * 16, num_hit, blocks) is None
    assert state(manager) == before
    fits = make_request(10 * 16)
    blocks, num_hit = manager.get_computed_blocks(fits)
    assert len(manager.allocate_slots(fits, 5 * 16, num_hit, blocks).get_block_ids()[0]) == 5
    manager.block_pool.check_integrity()


def test_adopted_hits_survive_the_allocation_that_follows(make_manager, make_request):
    """The hits are the oldest free blocks, so taking new ones first would evict them."""
    manager = make_manager()
    first, filler = make_request(32), make_request(range(1000, 1128))
    for request in (first, filler):
        run(manager, request)
        manager.free(request)
    hit_ids = [b.block_id for b in manager.get_computed_blocks(make_request(100))[0].blocks[0]]
    longer = make_request(100)
    assert run(manager, longer) == 32
    ids = manager.get_block_ids(longer.request_id)[0]
    assert ids[:2] == hit_ids
    assert len(set(ids)) == 7


def test_a_hit_stops_at_the_first_block_that_was_lost(make_manager, make_request):
    for lost, expected in ((0, 0), (2, 32), (4, 64)):
        manager, request = make_manager(), make_request(80)
        run(manager, request)
        manager.block_pool.evict_blocks([manager.get_block_ids(request.request_id)[0][lost]])
        assert manager.get_computed_blocks(make_request(81))[1] == expected


def test_the_chunks_of_a_prompt_are_cached_as_they_are_computed(make_manager, make_request):
    manager, request = make_manager(), make_request(64)
    manager.allocate_slots(request, 40)
    request.num_computed_tokens = 40
    assert manager.get_computed_blocks(make_request(64))[1] == 32
    manager.allocate_slots(request, 24)
    assert manager.get_computed_blocks(make_request(65))[1] == 64


def test_generated_tokens_are_cached_too(make_manager, make_request):
    manager, request = make_manager(), make_request(30)
    run(manager, request)
    for token_id in (30, 31, 32):
        request.append_output_token_ids(token_id)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    assert manager.get_computed_blocks(make_request(40))[1] == 32


def test_a_request_that_may_not_read_the_cache_still_fills_it(make_manager, make_request):
    manager = make_manager()
    run(manager, make_request(32))
    silent = make_request(range(100, 132), skip_reading_prefix_cache=True)
    assert run(manager, silent) == 0
    again = make_request(range(100, 132), skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(again)[1] == 0
    assert manager.get_computed_blocks(make_request(range(100, 133)))[1] == 32


def test_without_caching_nothing_is_found(make_manager, make_request):
    manager = make_manager(enable_caching=False)
    run(manager, make_request(48))
    assert manager.get_computed_blocks(make_request(48))[1] == 0
    assert manager.get_idle_cached_block_ids() == frozenset()


def test_lookahead_slots_stop_at_the_longest_request(make_manager, make_request):
    manager, request = make_manager(max_model_len=40), make_request(38)
    manager.allocate_slots(request, 38, num_lookahead_tokens=30)
    assert len(manager.get_block_ids(request.request_id)[0]) == 3


def test_lookahead_slots_are_kept_and_not_cached(make_manager, make_request):
    manager, request = make_manager(), make_request(15)
    assert len(manager.allocate_slots(request, 15, num_lookahead_tokens=5).get_block_ids()[0]) == 2
    request.num_computed_tokens = 15
    request.append_output_token_ids(15)
    assert manager.allocate_slots(request, 1).get_block_ids() == ([],)
    assert manager.get_computed_blocks(make_request(33))[1] == 16


def test_the_whole_prompt_must_fit_when_asked(make_manager, make_request):
    manager = make_manager()
    request = make_request(11 * 16)
    before = state(manager)
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=True) is None
    assert state(manager) == before
    assert manager.allocate_slots(request, 16) is not None


def test_too_few_blocks_is_none_and_changes_nothing(make_manager, make_request):
    manager, first, second = make_manager(num_blocks=4), make_request(32), make_request(40)
    run(manager, first)
    before = state(manager)
    assert manager.allocate_slots(second, 40) is None
    assert state(manager) == before
    assert manager.get_block_ids(second.request_id) == ([],)


def test_freeing_an_unknown_or_freed_request_does_nothing(make_manager, make_request):
    manager, request = make_manager(), make_request(20)
    manager.free(request)
    run(manager, request)
    manager.free(request)
    before = state(manager)
    manager.free(request)
    assert state(manager) == before


def test_a_prefix_is_evicted_from_its_end(make_manager, make_request):
    manager = make_manager(num_blocks=6)
    first = make_request(80)
    run(manager, first)
    manager.free(first)
    run(manager, make_request(range(900, 932)))
    assert manager.get_computed_blocks(make_request(81))[1] == 48


def test_reset_works_only_when_no_block_is_held(make_manager, make_request):
    manager, request = make_manager(), make_request(32)
    run(manager, request)
    assert not manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request(33))[1] == 32
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request(33))[1] == 0


def test_wrong_calls_are_refused(make_manager, make_request):
    manager, request = make_manager(), make_request(40)
    with pytest.raises(ValueError, match="num_new_tokens must be at least 1, got 0"):
        manager.allocate_slots(request, 0)
    run(manager, request)
    hits, num_hit = manager.get_computed_blocks(make_request(40))
    with pytest.raises(ValueError, match="prefix hits came too late"):
        manager.allocate_slots(request, 1, num_hit, hits)
    with pytest.raises(ValueError, match="must be 32 for 2 blocks, got 16"):
        manager.allocate_slots(make_request(40), 8, 16, hits)
    for num_blocks in (-1, 0, 1):
        with pytest.raises(ValueError, match="num_blocks must be at least 2"):
            make_manager(num_blocks=num_blocks)
    with pytest.raises(ValueError, match="block_size must be at least 1"):
        make_manager(block_size=0)


def test_fragmentation_counts_a_shared_block_once(make_manager, make_request):
    manager = make_manager(num_blocks=21)
    first, second = make_request(37), make_request([*range(32), 5])
    run(manager, first)
    run(manager, second)
    usage = manager.get_slot_usage([first, second])
    assert usage.num_used_blocks == 4
    assert usage.fragmentation == pytest.approx((11 + 15) / 64)
