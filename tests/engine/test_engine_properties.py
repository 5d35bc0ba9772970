# SPDX-License-Identifier: Apache-2.0
"""Random requests on a tiny pool, without a model: bookkeeping holds after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_managers import make_core_manager

from paged_kv.engine import (
    InputBatch,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
)
from paged_kv.hashing import get_request_block_hasher


@dataclass(frozen=True)
class Case:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    caching: bool
    policy: str
    window: int | None
    num_swap_blocks: int
    threshold: int
    seed: int


CASES = st.builds(
    Case,
    block_size=st.sampled_from([1, 2, 4]),
    num_blocks=st.integers(4, 20),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 24),
    caching=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    window=st.sampled_from([None, 3, 6]),
    num_swap_blocks=st.sampled_from([0, 5, 40]),
    threshold=st.sampled_from([0, 5]),
    seed=st.integers(0, 2**32),
)


class Simulation:
    """Drives a scheduler as an engine would, with random tokens for a model.

    `slots` is what the cache holds: for each group and slot the prefix that the slot's token ends.
    So attention would read wrong keys exactly if `check_content` fails.
    """

    def __init__(self, case: Case) -> None:
        self.rng = random.Random(case.seed)
        self.case = case
        num_groups = 1 if case.window is None else 2
        self.capacity = (case.num_blocks - 1 - num_groups) // num_groups * case.block_size
        self.manager = make_core_manager(
            case.num_blocks,
            case.block_size,
            case.window,
            max_model_len=max(self.capacity, 1),
            enable_caching=case.caching,
        )
        batch = InputBatch(
            self.manager,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.budget,
            max_model_len=max(self.capacity, 1),
        )
        self.batch = batch
        self.scheduler = Scheduler(
            self.manager,
            batch,
            SchedulerConfig(
                max_num_batched_tokens=case.budget,
                max_model_len=self.capacity,
                policy=case.policy,
                long_prefill_token_threshold=case.threshold,
                num_swap_blocks=case.num_swap_blocks,
            ),
        )
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.swapped: dict[tuple[int, int], tuple[int, ...]] = {}
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
        priority = self.rng.randint(0, 2)
        requests = [
            Request(
                f"{self.num_added}/{index}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=max_tokens),
                max_num_tokens=num_tokens + max_tokens,
                index=index,
                priority=priority,
                arrival_time=float(self.num_added),
                block_hasher=get_request_block_hasher(self.case.block_size),
            )
            for index in range(self.rng.choice([1, 1, 1, 3]))
        ]
        self.num_added += 1
        self.scheduler.add_request(requests[0], requests[1:])

    def step(self) -> None:
        output = self.scheduler.schedule()
        # A request that preempts itself ends the step: the next one has its blocks.
        assert output.requests or output.preempted, "a step without work would never end"
        assert output.total_num_scheduled_tokens <= self.case.budget
        assert len(self.scheduler.running) <= self.case.max_num_seqs
        if output.preempted:
            assert not output.admitted
        self.check_blocks()
        self.copy_swapped(output)
        shares = list(
            zip(
                output.requests,
                output.num_computed_tokens.tolist(),
                output.num_scheduled_tokens.tolist(),
                strict=True,
            )
        )
        for request, start, count in shares:
            self.store(request, start, count)
        for request, start, count in shares:
            self.check_content(request, start + count)
        _, copies = self.scheduler.fork_requests(output)
        self.copy_blocks(copies)
        requests = output.sampling_requests()
        token_ids = np.array([self.rng.randint(0, 1) for _ in requests], np.int32)
        self.scheduler.update_from_output(output, token_ids)
        self.batch.check_integrity()

    def abort_one(self) -> None:
        request_id = self.rng.choice(list(self.scheduler.requests))
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def held_slots(self, request: Request, start: int, end: int):
        """``(group, slot, position)`` of the tokens for which a group still holds a block."""
        size = self.case.block_size
        for group, block_ids in enumerate(self.manager.get_block_ids(request.request_id)):
            for position in range(start, end):
                block_id = block_ids[position // size]
                if block_id:
                    yield group, block_id * size + position % size, position

    def store(self, request: Request, start: int, num_tokens: int) -> None:
        tokens = request.all_token_ids.tolist()
        for group, slot, position in self.held_slots(request, start, start + num_tokens):
            # Memory is shared by the groups: a block belongs to one of them.
            for other in range(2):
                self.slots.pop((other, slot), None)
            self.slots[group, slot] = tuple(tokens[: position + 1])

    def check_content(self, request: Request, num_tokens: int) -> None:
        """Every slot that attention may read holds the token of this very prefix."""
        tokens = request.all_token_ids.tolist()
        seen = [0, 0]
        for group, slot, position in self.held_slots(request, 0, num_tokens):
            assert self.slots[group, slot] == tuple(tokens[: position + 1])
            seen[group] += 1
        assert seen[0] == num_tokens
        if self.case.window is not None:
            assert seen[1] >= min(num_tokens, self.case.window)

    def copy_blocks(self, copies) -> None:
        for source, destination in copies:
            self.copy_block(self.slots, source, self.slots, destination)

    def copy_swapped(self, output) -> None:
        for source, destination in output.blocks_to_swap_out:
            self.copy_block(self.slots, source, self.swapped, destination)
        for source, destination in output.blocks_to_swap_in:
            self.copy_block(self.swapped, source, self.slots, destination)

    def copy_block(self, sources, source, destinations, destination) -> None:
        size = self.case.block_size
        for group in range(2):
            for offset in range(size):
                content = sources.get((group, source * size + offset))
                destinations.pop((group, destination * size + offset), None)
                if content is not None:
                    destinations[group, destination * size + offset] = content

    def check_blocks(self) -> None:
        self.manager.check_integrity()
        self.batch.check_integrity()
        held = {
            block_id
            for request in self.scheduler.running
            for block_ids in self.manager.get_block_ids(request.request_id)
            for block_id in block_ids
        } - {0}
        num_free = self.manager.block_pool.get_num_free_blocks()
        assert num_free + len(held) == self.case.num_blocks - 1
        for request in self.scheduler.waiting:
            assert not any(self.manager.get_block_ids(request.request_id))


@settings(max_examples=200, deadline=None)
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
    assert simulation.manager.block_pool.get_num_free_blocks() == case.num_blocks - 1
    assert simulation.scheduler.swap_space.num_used_blocks == 0
