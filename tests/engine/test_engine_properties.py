# SPDX-License-Identifier: Apache-2.0
"""Random requests on a tiny pool, without a model: bookkeeping holds after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv.engine import KVCacheManager, Request, RequestStatus, SamplingParams, Scheduler
from paged_kv.hashing import get_request_block_hasher


@dataclass(frozen=True)
class Case:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    caching: bool
    seed: int


CASES = st.builds(
    Case,
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(2, 14),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 24),
    caching=st.booleans(),
    seed=st.integers(0, 2**32),
)


class Simulation:
    """Drives a scheduler as an engine would, with random tokens for a model."""

    def __init__(self, case: Case) -> None:
        self.rng = random.Random(case.seed)
        self.case = case
        self.capacity = (case.num_blocks - 1) * case.block_size
        self.manager = KVCacheManager(
            num_blocks=case.num_blocks,
            block_size=case.block_size,
            max_model_len=self.capacity,
            enable_caching=case.caching,
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=case.max_num_seqs, max_num_batched_tokens=case.budget
        )
        # What the cache holds, by slot: the prefix that the slot's token ends.
        self.slots: dict[int, tuple[int, ...]] = {}
        self.num_added = 0

    def add_request(self) -> None:
        max_tokens = self.rng.randint(1, 6)
        longest_prompt = self.capacity - max_tokens
        if longest_prompt < 1:
            return
        num_tokens = self.rng.randint(1, min(longest_prompt, 20))
        # Few ids: prompts often share prefixes.
        prompt = [0] * self.rng.randint(0, num_tokens)
        prompt += [self.rng.randint(0, 1) for _ in range(num_tokens - len(prompt))]
        request = Request(
            str(self.num_added),
            prompt,
            SamplingParams(temperature=0.0, max_tokens=max_tokens),
            max_num_tokens=num_tokens + max_tokens,
            block_hasher=get_request_block_hasher(self.case.block_size),
        )
        self.num_added += 1
        self.scheduler.add_request(request)

    def step(self) -> None:
        output = self.scheduler.schedule()
        assert output.scheduled, "a step without work would never end"
        assert output.total_num_scheduled_tokens <= self.case.budget
        assert len(self.scheduler.running) <= self.case.max_num_seqs
        if output.preempted_req_ids:
            assert not any(item.is_new for item in output.scheduled)
        self.check_blocks()
        for item in output.scheduled:
            self.store(item.request, item.num_scheduled_tokens)
        for item in output.scheduled:
            self.check_content(item.request, item.num_scheduled_tokens)
        self.scheduler.update_from_output(output)
        for item in output.scheduled:
            request = item.request
            if request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(self.rng.randint(0, 1))
                if request.num_tokens == request.max_num_tokens:
                    self.finish(request)

    def finish(self, request: Request) -> None:
        self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_STOPPED)

    def abort_one(self) -> None:
        request_id = self.rng.choice(list(self.scheduler.requests))
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def slot(self, request: Request, position: int) -> int:
        block_ids = self.manager.get_block_ids(request.request_id)[0]
        size = self.case.block_size
        return block_ids[position // size] * size + position % size

    def store(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        for position in range(start, start + num_tokens):
            prefix = tuple(request.all_token_ids[: position + 1])
            self.slots[self.slot(request, position)] = prefix

    def check_content(self, request: Request, num_tokens: int) -> None:
        """Every slot that attention will read holds the token of this very prefix."""
        for position in range(request.num_computed_tokens + num_tokens):
            expected = tuple(request.all_token_ids[: position + 1])
            assert self.slots[self.slot(request, position)] == expected

    def check_blocks(self) -> None:
        self.manager.block_pool.check_integrity()
        usage = self.manager.get_block_usage()
        held = {
            b for r in self.scheduler.running for b in self.manager.get_block_ids(r.request_id)[0]
        }
        assert usage.num_used == len(held)
        assert usage.num_used + usage.num_idle_cached + usage.num_free == self.case.num_blocks - 1
        for request in self.scheduler.waiting:
            assert self.manager.get_block_ids(request.request_id) == ([],)


@settings(max_examples=150, deadline=None)
@given(CASES)
def test_random_requests_leave_every_block_free(case):
    simulation = Simulation(case)
    for _ in range(60):
        if simulation.rng.random() < 0.4:
            simulation.add_request()
        if simulation.scheduler.has_unfinished_requests():
            if simulation.rng.random() < 0.05:
                simulation.abort_one()
            if simulation.scheduler.has_unfinished_requests():
                simulation.step()
    num_steps = 0
    while simulation.scheduler.has_unfinished_requests():
        simulation.step()
        num_steps += 1
        assert num_steps < 2000, "requests starve"
    usage = simulation.manager.get_block_usage()
    assert usage.num_used == 0
    assert simulation.manager.usage == 0.0
    simulation.manager.block_pool.check_integrity()
