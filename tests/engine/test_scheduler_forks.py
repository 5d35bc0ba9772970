# SPDX-License-Identifier: Apache-2.0
"""Several completions of a prompt: shared blocks, the wait for room, and drafts."""

from __future__ import annotations

from engine.scheduler_steps import finish_step, step, tokens_of

from paged_kv.engine import RequestStatus
from paged_kv.engine.speculative_scheduler import SpeculativeScheduler


def test_forks_share_the_prompt_and_copy_its_last_block(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=20)
    parent, *forks = (make_request(40, request_id=str(i), index=i) for i in range(3))
    scheduler.add_request(parent, forks)
    output = scheduler.schedule()
    assert tokens_of(output) == {"0": 40}
    started, copies = scheduler.fork_requests(output)
    assert started == [(forks[0], 0), (forks[1], 0)]
    tables = [scheduler.kv_cache_manager.get_block_ids(str(i))[0] for i in range(3)]
    assert tables[1][:2] == tables[2][:2] == tables[0][:2]
    assert copies == [(tables[0][2], tables[1][2]), (tables[0][2], tables[2][2])]
    assert len({table[2] for table in tables}) == 3
    assert output.sampling_requests() == [parent, *forks]
    finish_step(scheduler, output)
    assert step(scheduler) == {"0": 1, "1": 1, "2": 1}


def test_forks_for_which_there_is_no_room_wait(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=2)
    parent, *forks = (make_request(20, request_id=str(i), index=i) for i in range(3))
    scheduler.add_request(parent, forks)
    output = scheduler.schedule()
    started, _ = scheduler.fork_requests(output)
    assert [fork.request_id for fork, _ in started] == ["1"]
    assert [request.request_id for request in scheduler.waiting] == ["2"]
    finish_step(scheduler, output)


def test_forks_of_an_aborted_prompt_compute_it_themselves(make_scheduler, make_request):
    scheduler = make_scheduler(num_blocks=20)
    parent, *forks = (make_request(20, request_id=str(i), index=i) for i in range(3))
    scheduler.add_request(parent, forks)
    scheduler.finish_requests(["0", "2"], RequestStatus.FINISHED_ABORTED)
    assert step(scheduler) == {"1": 20}
    assert not forks[0].is_finished()
    assert forks[1].is_finished()


def test_drafts_of_a_fork_do_not_depend_on_who_had_its_row(make_scheduler, make_request):
    plain = make_scheduler(max_num_batched_tokens=40, num_blocks=40)
    scheduler = SpeculativeScheduler(
        plain.kv_cache_manager, plain._batch, plain.config, num_draft_tokens=2
    )
    parent, fork = make_request(16, request_id="parent"), make_request(16, request_id="fork")
    scheduler.add_request(parent, [fork])
    scheduler.add_request(make_request(range(100, 200), request_id="long"))
    output = scheduler.schedule()
    row = scheduler.requests["long"].row
    scheduler.finish_requests(["long"], RequestStatus.FINISHED_ABORTED)  # while it prefills
    scheduler.fork_requests(output)
    assert fork.row == row
    scheduler.update_draft_token_ids({"fork": [5, 6]})
    assert fork.spec_token_ids == [5, 6]
