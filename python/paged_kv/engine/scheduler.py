# SPDX-License-Identifier: Apache-2.0
"""Decides which requests run in the next step and how many tokens of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged_kv.engine.request import Request, RequestStatus
from paged_kv.engine.request_lists import RequestLists
from paged_kv.engine.scheduler_output import SchedulerOutput
from paged_kv.engine.step_plan import StepPlan

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.engine.input_batch import Rows

__all__ = ["Scheduler"]


class Scheduler(RequestLists):
    """Continuous batching: each step takes the tokens that it can of every request.

    Policy only: it owns the order of requests, the manager owns the blocks. There is no prefill
    and no decode phase: a request has tokens, of which some are computed, and each step lets the
    second number catch up with the first.

    - Running requests go first, in the order in which they were admitted; what is left of the
      token budget admits waiting requests in the order of the policy.
    - The first waiting request that does not fit stops the scan, so that small ones behind it
      cannot starve it.
    - When a running request needs a block and there is none, the last to be admitted (policy
      ``"fcfs"``) or the least important one (``"priority"``) is preempted: it loses its blocks and
      waits again. A step that preempts admits nobody.

    One step is in flight at a time: `schedule`, then `update_from_output`.

    Cost: the running requests of a step are handled by a few vector operations and one call of the
    core (`InputBatch`); O(1) Python work only for each request that is admitted, preempted or
    finished.

    Args:
        kv_cache_manager: The manager of all requests.
        batch: Rows of the running requests; as many requests can run.
        config: Limits and policy.

    Source:
        vLLM 0.32 ``v1/core/sched/scheduler.py::Scheduler``, whose decisions it takes.
    """

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and allocate its blocks.

        Returns:
            Work for at most ``max_num_batched_tokens`` tokens; without any only if no request is
            left, if none that waits fits, or if the last that runs has given up its own blocks.
        """
        step = StepPlan(self.config.max_num_batched_tokens, self._long_prefill_threshold())
        num_preempted = len(self._preempted)
        self._schedule_running(step)
        if len(self._preempted) == num_preempted:
            self._schedule_waiting(step)
        return self._finish_schedule(step)

    def fork_requests(
        self, output: SchedulerOutput
    ) -> tuple[list[tuple[Request, int]], list[tuple[int, int]]]:
        """Start the further completions of prompts that the step has computed.

        Call between the forward pass and `update_from_output`. A fork shares the blocks of its
        prompt; the last one, if it is not full, is copied. Forks for which there is no row or no
        block wait, and find the prompt in the prefix cache.

        Args:
            output: The step. Forks are appended to it: they get a token from the logits of their
                prompt.

        Returns:
            Each fork with the place, among the requests that sample, of the one it was forked from;
            and the copies to make, ``(source block, destination block)``.
        """
        if not self._forks:
            return [], []
        started: list[tuple[Request, int]] = []
        copies: list[tuple[int, int]] = []
        for place, parent in enumerate(output.sampling_requests()):
            for fork in self._forks.pop(parent.request_id, ()):
                if self._fork(parent, fork, copies):
                    started.append((fork, place))
                elif not fork.is_finished():
                    self.waiting.add(fork)
        if started:
            output.append_forks([fork for fork, _ in started])
        return started, copies

    def update_from_output(self, output: SchedulerOutput, token_ids: Rows) -> list[Request]:
        """Append the tokens that a step has sampled, and take out the requests that they end.

        Args:
            output: The step.
            token_ids: int32, one for each of ``output.sampling_requests()``.

        Returns:
            The requests that have finished, in order; their blocks are free.
        """
        rows = output.rows if output.samples.all() else output.rows[output.samples]
        if self._finished_req_ids:  # since the schedule
            is_left = np.array([not r.is_finished() for r in output.sampling_requests()], np.bool_)
            rows, token_ids = rows[is_left], token_ids[is_left]
        if not len(rows):
            return []
        is_end = self._batch.append_token_ids(rows, token_ids)
        places = np.flatnonzero(is_end)
        if not len(places):
            return []
        finished = self._batch.requests_of(rows[places])
        for request, token_id in zip(finished, token_ids[places].tolist(), strict=True):
            request.finish_by(token_id)
            self._release(request)
        self._remove_from_queues(finished)
        return finished

    # ---- running requests

    def _long_prefill_threshold(self) -> int:
        """0: no limit. A request that is alone starves nobody."""
        is_alone = len(self.running) + len(self.waiting) <= 1
        return 0 if is_alone else self.config.long_prefill_token_threshold

    def _schedule_running(self, step: StepPlan) -> None:
        """Schedule requests that hold blocks, preempting others where blocks are short."""
        idx = 0
        while idx < len(self.running) and step.budget > 0:
            rows = self.running_rows()[idx:]
            counts = step.share_out(self._num_wanted_tokens(rows, step.threshold))
            places = np.flatnonzero(counts)
            if len(places) < len(rows):
                rows, counts = rows[places], counts[places]
            if not len(rows):
                return
            num_served = self._batch.allocate_slots(rows, counts)
            step.add(rows[:num_served], counts[:num_served])
            if num_served == len(rows):
                return
            idx += int(places[num_served])
            request = self.running[idx]
            if not self._make_room(request, int(counts[num_served]), step):
                return
            idx = self.running.index(request) + 1

    def _num_wanted_tokens(self, rows: Rows, threshold: int) -> npt.NDArray[np.int64]:
        batch = self._batch
        wanted = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        if threshold > 0:
            np.minimum(wanted, threshold, out=wanted)
        return wanted

    def _make_room(self, request: Request, num_tokens: int, step: StepPlan) -> bool:
        """Preempt until the request gets its slots; False: it had to go itself."""
        rows, counts = np.array([request.row], np.int32), np.array([num_tokens], np.int32)
        while True:
            victim = self._choose_victim()
            num_computed_tokens = victim.num_computed_tokens - step.remove(victim.row)
            self._preempt(victim, num_computed_tokens=num_computed_tokens)
            if victim is request:
                return False
            if self._batch.allocate_slots(rows, counts):
                step.add(rows, counts)
                return True

    def _choose_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_time))
        return self.running[-1]

    # ---- waiting requests

    def _schedule_waiting(self, step: StepPlan) -> None:
        while len(self.waiting) and step.budget > 0 and self._batch.num_free_rows > 0:
            request = self.waiting.peek()
            num_swapped_tokens = self.swap_space.num_computed_tokens(request.request_id)
            hit = self.kv_cache_manager.empty_kv_cache_blocks
            num_hit_tokens = 0
            if num_swapped_tokens == 0:
                # The hit comes first: it decides how many tokens are left to schedule.
                hit, num_hit_tokens, request.shared_prefix_boundary = (
                    self.kv_cache_manager.get_computed_blocks(request)
                )
            num_computed_tokens = num_hit_tokens + num_swapped_tokens
            num_new_tokens = self._num_admitted_tokens(request, num_computed_tokens, step)
            if num_new_tokens == 0:
                return
            blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=hit,
                num_external_computed_tokens=num_swapped_tokens,
                full_sequence_must_fit=self.config.reserve_full_prompt,
                has_scheduled_reqs=bool(self.running),
            )
            if blocks is None:
                return
            self._admit(request, num_computed_tokens, num_new_tokens, step)

    def _num_admitted_tokens(
        self, request: Request, num_computed_tokens: int, step: StepPlan
    ) -> int:
        """How many tokens of a waiting request to compute; 0: nothing more is admitted."""
        num_tokens = request.num_tokens - num_computed_tokens
        if 0 < step.threshold < num_tokens:
            num_tokens = step.threshold
        if num_tokens > step.budget and not self.config.enable_chunked_prefill:
            return 0
        return min(num_tokens, step.budget)

    def _admit(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        step: StepPlan,
    ) -> None:
        self.waiting.pop()
        if self.swap_space.num_computed_tokens(request.request_id):
            block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
            step.blocks_to_swap_in += self.swap_space.swap_in(request.request_id, block_ids)
        if request.status == RequestStatus.PREEMPTED:
            step.resumed.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens + num_new_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
        self._start(request)
        step.admitted.append(request)
        step.add(np.array([request.row], np.int32), np.array([num_new_tokens], np.int32))

    def _fork(self, parent: Request, fork: Request, copies: list[tuple[int, int]]) -> bool:
        if fork.is_finished() or self._batch.num_free_rows == 0:
            return False
        new_copies = self.kv_cache_manager.fork(parent, fork)
        if new_copies is None:
            return False
        copies += [(source, destination) for _group, source, destination in new_copies]
        fork.status = RequestStatus.RUNNING
        fork.num_cached_tokens = parent.num_cached_tokens
        self._start(fork)
        return True

    # ---- the end of a step's schedule

    def _finish_schedule(self, step: StepPlan) -> SchedulerOutput:
        batch = self._batch
        rows, counts = step.rows_and_counts()
        num_admitted = len(step.admitted)
        computed_after = batch.num_computed_tokens[rows]
        num_tokens = batch.num_tokens[rows]
        samples = computed_after >= num_tokens
        output = SchedulerOutput(
            requests=batch.requests_of(rows),
            rows=rows,
            num_scheduled_tokens=counts,
            num_computed_tokens=computed_after - counts,
            num_running=len(rows) - num_admitted,
            resumed=step.resumed,
            preempted=self._preempted,
            finished_req_ids=self._finished_req_ids,
            blocks_to_swap_out=self.swap_space.take_copies(),
            blocks_to_swap_in=step.blocks_to_swap_in,
            samples=samples,
        )
        self._preempted, self._finished_req_ids = [], []
        return output
