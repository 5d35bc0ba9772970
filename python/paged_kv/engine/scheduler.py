# SPDX-License-Identifier: Apache-2.0
"""Decides which requests run in the next step and how many tokens of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paged_kv.engine.request import Request, RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paged_kv.engine.kv_cache_manager import KVCacheManager

__all__ = ["ScheduledRequest", "Scheduler", "SchedulerOutput"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request's share of a step.

    Attributes:
        request: The request; its ``num_computed_tokens`` is where the share begins.
        num_scheduled_tokens: Tokens to compute in this step.
        new_block_ids: Blocks to append to the request's block table. When ``is_new``, all of its
            blocks, hits included.
        is_new: Whether the request was admitted in this step, for the first time or again.
    """

    request: Request
    num_scheduled_tokens: int
    new_block_ids: list[int]
    is_new: bool

    @property
    def samples_token(self) -> bool:
        """Whether the step computes the request's last token, so that a new one follows."""
        end = self.request.num_computed_tokens + self.num_scheduled_tokens
        return end == self.request.num_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """The work of one step.

    Attributes:
        scheduled: Requests that run: those that ran before, oldest first, then admitted ones.
        preempted_req_ids: Requests that lost their blocks in this step.
        finished_req_ids: Requests that ended since the last step.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    finished_req_ids: list[str] = field(default_factory=list)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(item.num_scheduled_tokens for item in self.scheduled)


class Scheduler:
    """First come, first served, with continuous batching and chunked prefill.

    Policy only: it owns the order of requests, the manager owns the blocks.

    - Running requests go first, oldest first; what is left of the token budget admits waiting
      requests in order of arrival. Prompts longer than the budget are computed in chunks.
    - A request is admitted when its whole prompt fits into free blocks; the first that does not
      fit stops the scan, so that small late requests cannot starve it.
    - When a running request needs a block and there is none, the youngest running request is
      preempted: it loses its blocks and goes back to the head of the waiting queue, to be
      recomputed. A step that preempts admits nobody.

    Invariant: each request alone fits into the pool (:meth:`add_request` refuses others), so the
    oldest running request always advances.

    Source:
        vLLM 0.32 ``v1/core/sched/scheduler.py::Scheduler``.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        if max_num_seqs < 1:
            msg = f"max_num_seqs must be at least 1, got {max_num_seqs}"
            raise ValueError(msg)
        if max_num_batched_tokens < max_num_seqs:
            msg = (
                "max_num_batched_tokens must be at least max_num_seqs, got "
                f"{max_num_batched_tokens} < {max_num_seqs}"
            )
            raise ValueError(msg)
        self.kv_cache_manager = kv_cache_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._finished_req_ids: list[str] = []

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: The id is taken, or the request can never fit into the pool.
        """
        if request.request_id in self.requests:
            msg = f"request id {request.request_id!r} is in use"
            raise ValueError(msg)
        capacity = self.kv_cache_manager.num_token_slots
        if request.max_num_tokens > capacity:
            msg = (
                f"request {request.request_id!r} may grow to {request.max_num_tokens} tokens, "
                f"the KV cache holds {capacity}"
            )
            raise ValueError(msg)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work and allocate its blocks.

        Returns:
            Work for at most ``max_num_batched_tokens`` tokens; empty only if no request is left.
        """
        output = SchedulerOutput(finished_req_ids=self._finished_req_ids)
        self._finished_req_ids = []
        budget = self._schedule_running(output, self.max_num_batched_tokens)
        if not output.preempted_req_ids:
            self._schedule_waiting(output, budget)
        return output

    def update_from_output(self, output: SchedulerOutput) -> None:
        """Record that a step's tokens were computed. Call before new tokens are appended."""
        for item in output.scheduled:
            item.request.num_computed_tokens += item.num_scheduled_tokens

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """Take requests out and free their blocks. Ids that are not known are skipped.

        Args:
            request_ids: Requests in any state.
            status: A finished status.
        """
        for request_id in request_ids:
            request = self.requests.pop(request_id, None)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            request.status = status
            self.kv_cache_manager.free(request)
            self._finished_req_ids.append(request_id)

    def abort_all_requests(self) -> None:
        """Take out every request, whatever state a failed step has left it in."""
        for request in self.requests.values():
            request.status = RequestStatus.FINISHED_ABORTED
            self.kv_cache_manager.free(request)
        self.requests.clear()
        self.waiting.clear()
        self.running.clear()
        self._finished_req_ids.clear()

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Number of running and of waiting requests."""
        return len(self.running), len(self.waiting)

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        """Schedule requests that hold blocks, preempting from the tail; return what is left."""
        idx = 0
        while idx < len(self.running) and budget > 0:
            request = self.running[idx]
            num_new_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            new_block_ids = self._allocate_or_preempt(request, num_new_tokens, output)
            if new_block_ids is None:
                break  # the request itself was the youngest
            output.scheduled.append(
                ScheduledRequest(request, num_new_tokens, new_block_ids, is_new=False)
            )
            budget -= num_new_tokens
            idx += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        manager = self.kv_cache_manager
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # The hit comes first: it decides how many tokens are left to schedule.
            hit_blocks, num_hit_tokens = manager.get_computed_blocks(request)
            num_new_tokens = min(request.num_tokens - num_hit_tokens, budget)
            new_blocks = manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=hit_blocks,
                full_sequence_must_fit=True,
            )
            if new_blocks is None:
                break
            self._admit(request, num_hit_tokens)
            block_ids = manager.get_block_ids(request.request_id)[0]
            output.scheduled.append(
                ScheduledRequest(request, num_new_tokens, block_ids, is_new=True)
            )
            budget -= num_new_tokens

    def _admit(self, request: Request, num_hit_tokens: int) -> None:
        self.waiting.popleft()
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_hit_tokens

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, output: SchedulerOutput
    ) -> list[int] | None:
        while True:
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_blocks is not None:
                return [block.block_id for block in new_blocks.blocks[0]]
            victim = self.running.pop()
            self._preempt(victim)
            output.preempted_req_ids.append(victim.request_id)
            if victim is request:
                return None

    def _preempt(self, victim: Request) -> None:
        self.kv_cache_manager.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = RequestStatus.PREEMPTED
        self.waiting.appendleft(victim)
