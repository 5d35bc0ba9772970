# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from paged_kv.engine import RequestStatus, Scheduler


@pytest.fixture
def make_scheduler(make_manager):
    def make(*, max_num_seqs=16, max_num_batched_tokens=8192, **kwargs):
        return Scheduler(
            make_manager(**kwargs),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )

    return make


def step(scheduler):
    """Schedule and finish a step in which each sampled token is 0; return {id: tokens}."""
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    scheduler.kv_cache_manager.block_pool.check_integrity()
    for item in output.scheduled:
        if item.request.num_computed_tokens == item.request.num_tokens:
            item.request.append_output_token_ids(0)
    return {item.request.request_id: item.num_scheduled_tokens for item in output.scheduled}


def add(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)


def test_prompts_longer_than_the_budget_are_computed_in_chunks(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=2000)
    add(scheduler, *(make_request(range(i, i + 5000), request_id=str(i)) for i in range(3)))
    assert step(scheduler) == {"0": 5000, "1": 3192}
    assert step(scheduler) == {"0": 1, "1": 1808, "2": 5000}
    assert step(scheduler) == {"0": 1, "1": 1, "2": 1}


def test_a_chunk_that_needs_no_block_reports_none(make_scheduler, make_request):
    scheduler = make_scheduler(max_num_batched_tokens=16, max_num_seqs=1, block_size=32)
    add(scheduler, make_request(32, block_size=32))
    first = scheduler.schedule()
    samples_token = first.scheduled[0].samples_token
    scheduler.update_from_output(first)
    second = scheduler.schedule()
    assert first.scheduled[0].new_block_ids == [1]
    assert first.scheduled[0].is_new
    assert not samples_token
    assert second.scheduled[0].new_block_ids == []
    assert second.scheduled[0].samples_token


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
    assert output.preempted_req_ids == ["b"]
    assert [item.request.request_id for item in output.scheduled] == ["a"]
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
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
    scheduled = step(scheduler)
    # One of its two full blocks was reused by the first request: 16 of 33 tokens are left.
    assert scheduled == {"100": 17}
    assert second.num_cached_tokens == 0, "what the first admission found must stay on record"


def test_a_waiting_request_that_does_not_fit_stops_the_scan(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=6)
    add(scheduler, make_request(32, request_id="a", max_tokens=1))
    step(scheduler)
    add(
        scheduler,
        make_request(range(100, 164), request_id="big"),
        make_request(range(200, 204), request_id="small"),
    )
    assert list(step(scheduler)) == ["a"]


def test_a_prompt_is_admitted_only_if_all_of_it_fits(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=16)
    add(scheduler, make_request(16, request_id="a"))
    step(scheduler)
    # 4 of 5 blocks are free, the prompt needs 5 though its first chunk needs 1.
    add(scheduler, make_request(range(100, 172), request_id="b"))
    assert list(step(scheduler)) == ["a"]


def test_a_request_that_can_never_fit_is_refused(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=3)
    with pytest.raises(ValueError, match="may grow to 33 tokens, the KV cache holds 32"):
        scheduler.add_request(make_request(25, max_tokens=8))
    assert not scheduler.has_unfinished_requests()
    add(scheduler, make_request(24, max_tokens=8, request_id="a"))
    assert step(scheduler) == {"a": 24}


def test_a_request_id_is_used_once_at_a_time(make_scheduler, make_request):
    scheduler = make_scheduler()
    add(scheduler, make_request(4, request_id="a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request(4, request_id="a"))


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_abort_frees_blocks_in_every_state(when, make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=5)
    keeper, victim = (make_request(range(i, i + 32), request_id=str(i)) for i in (0, 100))
    add(scheduler, keeper, victim)
    for _ in range({"waiting": 0, "running": 1, "preempted": 2}[when]):
        step(scheduler)
    scheduler.finish_requests(["100", "nobody"], RequestStatus.FINISHED_ABORTED)
    assert victim.status.finish_reason == "abort"
    scheduler.finish_requests(["0"], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv_cache_manager.get_block_usage().num_used == 0
    assert scheduler.schedule().finished_req_ids == ["100", "0"]
    assert scheduler.schedule().finished_req_ids == []


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "at least max_num_seqs, got 7 < 8"),
    ],
)
def test_wrong_limits_are_refused(kwargs, message, make_scheduler):
    with pytest.raises(ValueError, match=message):
        make_scheduler(**kwargs)
