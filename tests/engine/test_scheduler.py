# SPDX-License-Identifier: Apache-2.0
"""Order, budget, preemption and swapping; what vLLM decides is in tests/traces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine.scheduler_steps import add, finish_step, num_used_blocks, step, tokens_of

from paged_kv.engine import RequestStatus
from paged_kv.engine.request import finish_reason


def test_prompts_longer_than_the_budget_are_computed_in_chunks(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=2000)
    add(scheduler, *(make_request(range(i, i + 5000), request_id=str(i)) for i in range(3)))
    assert step(scheduler) == {"0": 5000, "1": 3192}
    assert step(scheduler) == {"0": 1, "1": 1808, "2": 5000}
    assert step(scheduler) == {"0": 1, "1": 1, "2": 1}


def test_without_chunks_a_prompt_waits_for_a_step_that_has_room(make_scheduler, make_request):
    scheduler = make_scheduler(
        num_blocks=2000, max_num_batched_tokens=100, enable_chunked_prefill=False
    )
    add(scheduler, *(make_request(range(i, i + 60), request_id=str(i)) for i in range(2)))
    assert step(scheduler) == {"0": 60}
    assert step(scheduler) == {"0": 1, "1": 60}


def test_a_long_prompt_beside_others_is_cut_short(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=2000, long_prefill_token_threshold=32)
    add(scheduler, make_request(100, request_id="a"))
    assert step(scheduler) == {"a": 100}, "there is nobody to starve"
    add(scheduler, make_request(range(500, 600), request_id="b"))
    assert step(scheduler) == {"a": 1, "b": 32}


def test_only_requests_whose_last_token_is_computed_sample(make_scheduler, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=1, block_size=32)
    add(scheduler, make_request(32, block_size=32))
    first = scheduler.schedule()
    assert first.samples.tolist() == [False]
    assert first.num_running == 0
    finish_step(scheduler, first)
    second = scheduler.schedule()
    assert second.samples.tolist() == [True]
    assert second.num_computed_tokens.tolist() == [16]
    assert second.num_running == 1


def test_equal_prompts_share_within_one_step(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=40)
    add(scheduler, make_request(100, request_id="a"), make_request(100, request_id="b"))
    assert step(scheduler) == {"a": 100, "b": 4}
    assert scheduler.requests["b"].num_cached_tokens == 96


def test_no_more_requests_run_than_allowed(make_scheduler, make_request):
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=64)
    add(scheduler, *(make_request(4, request_id=c) for c in "abc"))
    assert list(step(scheduler)) == ["a", "b"]
    assert scheduler.get_request_counts() == (2, 1)
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_STOPPED)
    assert list(step(scheduler)) == ["b", "c"]


def test_the_youngest_is_preempted_and_nobody_admitted_in_that_step(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5)
    requests = [
        make_request(range(i * 100, i * 100 + 32), request_id=c) for i, c in enumerate("ab")
    ]
    add(scheduler, *requests)
    assert step(scheduler) == {"a": 32, "b": 32}
    add(scheduler, make_request(range(500, 510), request_id="c"))
    output = scheduler.schedule()
    assert [request.request_id for request in output.preempted] == ["b"]
    assert tokens_of(output) == {"a": 1}
    assert [request.request_id for request in scheduler.waiting] == ["b", "c"]
    victim = requests[1]
    assert victim.status == RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert scheduler.kv_cache_manager.get_block_ids("b") == ([],)


def test_a_preempted_request_resumes_with_what_is_left_of_its_prefix(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5)
    first, second = (make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100))
    add(scheduler, first, second)
    step(scheduler)
    step(scheduler)  # preempts the second, whose blocks stay findable until they are reused
    scheduler.finish_requests(["0"], RequestStatus.FINISHED_STOPPED)
    assert second.num_output_tokens == 1
    output = scheduler.schedule()
    # One of its two full blocks was reused by the first request: 16 of 33 tokens are left.
    assert tokens_of(output) == {"100": 17}
    assert output.resumed == [second]
    assert second.num_cached_tokens == 0, "what the first admission found must stay on record"


def test_a_preemption_lists_no_blocks_without_a_swap_space(make_scheduler, make_request):
    """That is a pass over the block tables, for nothing."""

    class Unlisted:
        def __init__(self, manager):
            self._manager = manager

        def __getattr__(self, name):
            assert name != "get_block_ids"
            return getattr(self._manager, name)

    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, make_request(32, request_id="a"), make_request(range(90, 122), request_id="b"))
    step(scheduler)
    scheduler.kv_cache_manager = Unlisted(scheduler.kv_cache_manager)
    assert step(scheduler) == {"a": 1}
    assert scheduler.requests["b"].status == RequestStatus.PREEMPTED


def test_the_least_important_request_is_preempted(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=7, policy="priority")
    add(
        scheduler,
        make_request(range(100, 132), request_id="low", priority=2),
        make_request(range(200, 232), request_id="high", priority=0),
        make_request(range(300, 332), request_id="middle", priority=1),
    )
    assert list(step(scheduler)) == ["high", "middle", "low"]
    output = scheduler.schedule()
    assert [request.request_id for request in output.preempted] == ["low"]
    assert list(tokens_of(output)) == ["high", "middle"]


def test_what_a_cancelled_share_of_a_step_would_have_filled_is_not_found(
    make_scheduler, make_request
):
    """The victim was served before the request that needs its block: its token is not computed."""
    scheduler = make_scheduler(num_blocks=4, policy="priority")
    victim = make_request(range(100, 131), request_id="victim", priority=1, max_tokens=9)
    add(scheduler, victim)
    step(scheduler)  # 31 tokens of 32, and a token
    add(scheduler, make_request(range(200, 216), request_id="other", priority=0, max_tokens=9))
    assert step(scheduler) == {"victim": 1, "other": 16}
    # Now the victim needs a third block and there is none: it goes itself. Its second block was
    # computed in the last step.
    output = scheduler.schedule()
    assert [request.request_id for request in output.preempted] == ["victim"]
    finish_step(scheduler, output)
    manager = scheduler.kv_cache_manager
    assert manager.get_computed_blocks(victim)[1] in (16, 32)


def test_a_block_whose_last_token_was_cancelled_is_evicted(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=4, policy="priority")
    early = make_request(range(100, 115), request_id="early", priority=1, max_tokens=9)
    add(scheduler, early)
    step(scheduler)  # 15 computed, 16 tokens: its next token fills its block
    add(scheduler, make_request(range(200, 231), request_id="late", priority=0, max_tokens=9))
    output = scheduler.schedule()
    assert tokens_of(output) == {"early": 1, "late": 31}
    finish_step(scheduler, output)
    # `early` takes the last block's slot count to 17: needs a block, has none to take: preempted.
    output = scheduler.schedule()
    assert early in output.preempted
    assert scheduler.kv_cache_manager.get_computed_blocks(early)[1] == 16


def test_a_waiting_request_that_does_not_fit_stops_the_scan(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, make_request(32, request_id="a", max_tokens=1))
    add(
        scheduler,
        make_request(range(100, 164), request_id="big"),
        make_request(range(200, 204), request_id="small"),
    )
    assert list(step(scheduler)) == ["a"]


def test_a_prompt_is_admitted_only_if_all_of_it_fits(make_scheduler, make_request):
    def second_step(**options):
        scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=16, **options)
        add(scheduler, make_request(16, request_id="a"))
        step(scheduler)
        # 4 of 5 blocks are free, the prompt needs 5 though its first chunk needs 1.
        add(scheduler, make_request(range(100, 172), request_id="b"))
        return list(step(scheduler))

    assert second_step() == ["a"]
    assert second_step(reserve_full_prompt=False) == ["a", "b"]


def test_a_request_id_is_used_once_at_a_time(make_scheduler, make_request):
    scheduler = make_scheduler()
    add(scheduler, make_request(4, request_id="a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request(4, request_id="a"))


def test_tokens_and_lengths_end_requests(make_scheduler, make_request):
    scheduler = make_scheduler()
    requests = [make_request([i], request_id=str(i), max_tokens=2) for i in range(4)]
    requests[1].end_token_ids = frozenset({7, 8})  # one of them an end token of the model
    requests[1].eos_token_ids = frozenset({8})
    requests[2].end_token_ids = requests[2].eos_token_ids = frozenset({8})
    add(scheduler, *requests)
    output = scheduler.schedule()
    finished = scheduler.update_from_output(output, np.array([7, 7, 8, 8], np.int32))
    assert [request.request_id for request in finished] == ["1", "2"]
    assert [finish_reason(request.status) for request in finished] == ["stop", "stop"]
    assert [request.stop_reason for request in finished] == [7, None]
    finished = finish_step(scheduler, scheduler.schedule())
    assert [request.request_id for request in finished] == ["0", "3"]
    assert {finish_reason(request.status) for request in finished} == {"length"}
    assert num_used_blocks(scheduler) == 0


def test_end_tokens_of_a_request_that_is_gone_are_compared_no_more(make_scheduler, make_request):
    scheduler = make_scheduler()
    batch = scheduler._batch
    greedy = make_request(10).sampling_params
    many = dataclasses.replace(greedy, stop_token_ids=tuple(range(100, 1100)))
    few = dataclasses.replace(greedy, stop_token_ids=(5, 6))
    requests = [make_request(range(i, i + 10), request_id=str(i), params=p)
                for i, p in enumerate((many, few, greedy))]  # fmt: skip
    widths = []
    for request in (*requests[:2], requests[2]):
        scheduler.add_request(request)
        scheduler.schedule()
        widths.append(batch._end_token_ids.shape[1])
        if request is requests[1]:
            scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
    assert widths == [1000, 1000, 2]
    rows = np.array([request.row for request in requests[1:]], np.int32)
    assert batch.append_token_ids(rows, np.array([6, 6], np.int32)).tolist() == [True, False]


@pytest.mark.parametrize("when", ["waiting", "running", "preempted", "scheduled"])
def test_abort_frees_blocks_in_every_state(when, make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5)
    keeper, victim = (make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100))
    add(scheduler, keeper, victim)
    if when == "scheduled":
        output = scheduler.schedule()
        scheduler.finish_requests(["100", "nobody"], RequestStatus.FINISHED_ABORTED)
        finish_step(scheduler, output)
        assert keeper.num_output_tokens == 1
    else:
        for _ in range({"waiting": 0, "running": 1, "preempted": 2}[when]):
            step(scheduler)
        scheduler.finish_requests(["100", "nobody"], RequestStatus.FINISHED_ABORTED)
    assert finish_reason(victim.status) == "abort"
    scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests()
    assert num_used_blocks(scheduler) == 0
    assert scheduler.schedule().finished_req_ids == ["100", "0"]
    assert scheduler.schedule().finished_req_ids == []


# ---- swapping


@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
def test_a_preempted_request_comes_back_from_the_swap_space(make_scheduler, make_request, window):
    num_blocks = 7 if window is None else 13
    scheduler = make_scheduler(num_blocks=num_blocks, num_swap_blocks=20, window=window)
    first, second = (
        make_request(range(i, i + 40), request_id=str(i), max_tokens=40) for i in (0, 1000)
    )
    add(scheduler, first, second)
    step(scheduler)
    output = None
    while not scheduler.waiting:
        assert len(scheduler.running) == 2, "nobody is preempted"
        before = scheduler.kv_cache_manager.get_block_ids("1000")
        num_computed_tokens = second.num_computed_tokens
        output = scheduler.schedule()
        if not scheduler.waiting:
            finish_step(scheduler, output)
    held = [block_id for table in before for block_id in table if block_id]
    assert sorted(source for source, _ in output.blocks_to_swap_out) == sorted(held)
    places = dict(output.blocks_to_swap_out)
    assert scheduler.swap_space.num_used_blocks == len(held)
    finish_step(scheduler, output)

    scheduler.finish_requests(["0"], RequestStatus.FINISHED_STOPPED)
    output = scheduler.schedule()
    assert output.resumed == [second]
    # All is back but the token that was not computed.
    assert output.num_computed_tokens.tolist() == [num_computed_tokens]
    after = scheduler.kv_cache_manager.get_block_ids("1000")
    expected = [
        (places[old], new)
        for old_table, new_table in zip(before, after, strict=True)
        for old, new in zip(old_table, new_table, strict=False)
        if new and old
    ]
    assert output.blocks_to_swap_in == expected
    assert scheduler.swap_space.num_used_blocks == 0
    finish_step(scheduler, output)


def test_what_does_not_fit_into_the_swap_space_is_recomputed(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5, num_swap_blocks=1)
    add(scheduler, *(make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100)))
    step(scheduler)
    output = scheduler.schedule()
    assert len(output.preempted) == 1
    assert output.blocks_to_swap_out == []
    assert scheduler.swap_space.num_used_blocks == 0


def test_aborting_a_swapped_request_frees_its_swap_blocks(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5, num_swap_blocks=10)
    add(scheduler, *(make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100)))
    step(scheduler)
    finish_step(scheduler, scheduler.schedule())
    assert scheduler.swap_space.num_used_blocks == 2
    scheduler.finish_requests(["100"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.swap_space.num_used_blocks == 0


def test_a_reset_forgets_what_was_swapped(make_scheduler, make_request):
    """Its keys and values are as old as those in the prefix cache."""
    scheduler = make_scheduler(num_blocks=5, num_swap_blocks=10)
    add(scheduler, *(make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100)))
    step(scheduler)
    finish_step(scheduler, scheduler.schedule())
    assert not scheduler.reset_prefix_cache()
    assert scheduler.swap_space.num_used_blocks == 2
    scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.reset_prefix_cache()
    assert scheduler.swap_space.num_used_blocks == 0
    assert step(scheduler) == {"100": 33}


def test_a_reset_of_running_requests_forgets_what_was_swapped(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5, num_swap_blocks=10)
    add(scheduler, *(make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100)))
    step(scheduler)
    finish_step(scheduler, scheduler.schedule())
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scheduler.swap_space.num_used_blocks == 0
    assert list(step(scheduler)) == ["0"]


# ---- forks


def test_an_unknown_policy_is_refused(make_scheduler):
    with pytest.raises(ValueError, match="policy must be one of fcfs, priority, got 'random'"):
        make_scheduler(policy="random")
