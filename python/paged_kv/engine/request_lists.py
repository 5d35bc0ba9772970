# SPDX-License-Identifier: Apache-2.0
"""The requests of a scheduler: which there are, which run, which wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged_kv.engine.request import NO_ROW, Request, RequestStatus
from paged_kv.engine.request_queue import make_request_queue
from paged_kv.engine.swap_space import SwapSpace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paged_kv._core import KVCacheManager
    from paged_kv.engine.input_batch import InputBatch, Rows
    from paged_kv.engine.scheduler_config import SchedulerConfig

__all__ = ["RequestLists"]


class RequestLists:
    """Requests as they come, go, and lose their blocks; `Scheduler` decides when.

    A request is in `running`, and has a row and blocks, or in `waiting`, or is a fork that waits
    for its prompt.

    Args:
        kv_cache_manager: The manager of all requests.
        batch: Rows of the running requests; as many requests can run.
        config: Limits and policy.

    Attributes:
        requests: All requests that have not finished, by id.
        running: Those that hold blocks, in the order in which they are served.
        waiting: Those that wait, in the order in which they will be admitted.
        swap_space: Where preempted requests leave their blocks.
    """

    def __init__(
        self, kv_cache_manager: KVCacheManager, batch: InputBatch, config: SchedulerConfig
    ) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.config = config
        self.requests: dict[str, Request] = {}
        self.waiting = make_request_queue(config.policy)
        self.running: list[Request] = []
        self._batch = batch
        self._block_sizes = [
            group.kv_cache_spec.block_size
            for group in kv_cache_manager.kv_cache_config.kv_cache_groups
        ]
        self.swap_space = SwapSpace(config.num_swap_blocks, self._block_sizes)
        self._running_rows: Rows | None = None  # those of `running`; None: to be made anew
        self._forks: dict[str, Sequence[Request]] = {}
        self._preempted: list[Request] = []
        self._finished_req_ids: list[str] = []

    def add_request(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queue a request.

        Args:
            request: Computes the prompt.
            forks: Further completions of the same prompt. They start once it has been computed, on
                the same blocks.

        Raises:
            ValueError: An id is in use.
        """
        for each in (request, *forks):
            if each.request_id in self.requests:
                msg = f"request id {each.request_id!r} is in use"
                raise ValueError(msg)
        self.requests.update((each.request_id, each) for each in (request, *forks))
        if forks:
            self._forks[request.request_id] = forks
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """Take requests out and free their blocks. Ids that are not known are skipped.

        Args:
            request_ids: Requests in any state.
            status: A finished status.

        Returns:
            The requests that were taken out, in order.
        """
        finished = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in finished:
            request.status = status
            self._release(request)
        self._remove_from_queues(finished)
        for request in finished:
            for fork in self._forks.pop(request.request_id, ()):
                if not fork.is_finished():  # the prompt was never computed: it has to, on its own
                    self.waiting.add(fork)
        return finished

    def abort_all_requests(self) -> None:
        """Take out every request, whatever state a failed step has left it in."""
        for request in self.requests.values():
            request.status = RequestStatus.FINISHED_ABORTED
            if request.row != NO_ROW:
                self._batch.free(request)
            self.kv_cache_manager.free(request)  # one that a step was about to admit
        self.swap_space.clear()
        self.requests.clear()
        self.waiting = make_request_queue(self.config.policy)
        self.running, self._running_rows = [], None
        self._forks.clear()
        self._preempted, self._finished_req_ids = [], []

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Number of running and of waiting requests."""
        return len(self.running), len(self.waiting)

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached content, e.g. after the weights changed.

        Args:
            reset_running_requests: Preempt all running requests, to be computed again; else nothing
                happens while any request holds blocks.

        Returns:
            Whether it was done.
        """
        if reset_running_requests:
            while self.running:
                self._preempt(self.running[-1], may_swap=False)
        if not self.kv_cache_manager.reset_prefix_cache():
            return False
        self.swap_space.clear()  # what was swapped is as old as what was cached
        return True

    def _start(self, request: Request) -> None:
        self._batch.add(request)
        self.running.append(request)
        self._running_rows = None

    def _preempt(
        self, victim: Request, *, may_swap: bool = True, num_computed_tokens: int | None = None
    ) -> None:
        """Take a running request's blocks; it waits from now on.

        Args:
            victim: A running request.
            may_swap: Its keys and values may go to the swap space.
            num_computed_tokens: Tokens that are really in the cache; None: all that count as such.
        """
        if num_computed_tokens is None:
            num_computed_tokens = victim.num_computed_tokens
        swaps = may_swap and self.config.num_swap_blocks > 0
        evicts = (
            self.config.evict_uncomputed_blocks and num_computed_tokens < victim.num_computed_tokens
        )
        if swaps or evicts:  # to list the blocks costs a pass over them
            block_ids = self.kv_cache_manager.get_block_ids(victim.request_id)
            if swaps:
                self.swap_space.swap_out(victim.request_id, block_ids, num_computed_tokens)
            if evicts:
                self._evict_uncomputed_blocks(block_ids, num_computed_tokens)
        self._batch.free(victim)
        self.running.remove(victim)
        self._running_rows = None
        victim.preempt()
        self.waiting.put_back(victim)
        self._preempted.append(victim)

    def _evict_uncomputed_blocks(
        self, tables: tuple[list[int], ...], num_computed_tokens: int
    ) -> None:
        """A step does not take place: what it would have filled must not be found."""
        for block_ids, block_size in zip(tables, self._block_sizes, strict=True):
            uncomputed = block_ids[num_computed_tokens // block_size :]
            self.kv_cache_manager.evict_blocks([i for i in uncomputed if i != 0])

    def running_rows(self) -> Rows:
        """Rows of the running requests, in order. Cost: nothing if none has come or gone."""
        if self._running_rows is None:
            self._running_rows = np.array([request.row for request in self.running], np.int32)
        return self._running_rows

    def _release(self, request: Request) -> None:
        """Free what a request holds; the caller takes it out of the queues."""
        if request.row != NO_ROW:
            self._batch.free(request)
        self.swap_space.discard(request.request_id)
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)

    def _remove_from_queues(self, requests: list[Request]) -> None:
        if not requests:
            return
        gone = set(requests)
        num_running = len(self.running)
        self.running = [request for request in self.running if request not in gone]
        self._running_rows = None
        if num_running - len(self.running) < len(gone):
            self.waiting.remove(gone)
