# SPDX-License-Identifier: Apache-2.0
"""The order in which waiting requests are admitted."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paged_kv.engine.request import Request

__all__ = ["FCFSRequestQueue", "PriorityRequestQueue", "RequestQueue", "SchedulingPolicy"]

SchedulingPolicy: TypeAlias = Literal["fcfs", "priority"]


class RequestQueue(Protocol):
    """Requests that wait, next one first.

    Source:
        vLLM 0.32 ``v1/core/sched/request_queue.py``.
    """

    def add(self, request: Request) -> None:
        """Queue a request that has just arrived."""

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted: before all others, where order of arrival rules."""

    def peek(self) -> Request:
        """The next request, which stays."""

    def pop(self) -> Request:
        """Take the next request out."""

    def remove(self, requests: set[Request]) -> None:
        """Take requests out, wherever they are. O(length)."""

    def __len__(self) -> int:
        """Number of requests."""

    def __iter__(self) -> Iterator[Request]:
        """The requests, next one first."""


class FCFSRequestQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """O(1)."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """O(1)."""
        self._requests.appendleft(request)

    def peek(self) -> Request:
        """O(1)."""
        return self._requests[0]

    def pop(self) -> Request:
        """O(1)."""
        return self._requests.popleft()

    def remove(self, requests: set[Request]) -> None:
        """O(length)."""
        self._requests = deque(request for request in self._requests if request not in requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityRequestQueue:
    """By ``(priority, arrival_time, request_id)``, least first; preempted ones like any other."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, str, Request]] = []

    def add(self, request: Request) -> None:
        """O(log length)."""
        entry = (request.priority, request.arrival_time, request.request_id, request)
        heapq.heappush(self._heap, entry)

    def put_back(self, request: Request) -> None:
        """O(log length)."""
        self.add(request)

    def peek(self) -> Request:
        """O(1)."""
        return self._heap[0][-1]

    def pop(self) -> Request:
        """O(log length)."""
        return heapq.heappop(self._heap)[-1]

    def remove(self, requests: set[Request]) -> None:
        """O(length)."""
        self._heap = [entry for entry in self._heap if entry[-1] not in requests]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap))


def make_request_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The queue of a policy.

    Raises:
        ValueError: No such policy.
    """
    if policy not in _QUEUES:
        msg = f"policy must be one of {', '.join(_QUEUES)}, got {policy!r}"
        raise ValueError(msg)
    return _QUEUES[policy]()


_QUEUES: dict[str, type[FCFSRequestQueue | PriorityRequestQueue]] = {
    "fcfs": FCFSRequestQueue,
    "priority": PriorityRequestQueue,
}
