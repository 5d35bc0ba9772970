# SPDX-License-Identifier: Apache-2.0
"""The work of one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.engine.request import Request

__all__ = ["SchedulerOutput"]


@dataclass(slots=True, eq=False)
class SchedulerOutput:
    """Which requests run in a step, and what has to be copied before it.

    Requests that ran before come first, in the order in which they run, then those admitted now.
    Arrays are parallel to `requests`.

    Attributes:
        rows: int32, the requests' rows in the `InputBatch`.
        num_scheduled_tokens: int32, tokens to compute of each request, drafts included.
        num_computed_tokens: int64, tokens computed before the step: where its share begins.
        num_running: So many of the requests ran before.
        resumed: Those of the others that had been preempted.
        preempted: Requests that lost their blocks since the last step.
        finished_req_ids: Requests that ended since the last step.
        blocks_to_swap_out: ``(block of the cache, block of the swap space)``, to be copied first.
        blocks_to_swap_in: ``(block of the swap space, block of the cache)``, to be copied next.
        samples: bool, whether the step computes the last token of the request, so that a new one
            follows.
        draft_token_ids: For requests that have any: the drafts among their tokens, the last ones;
            -1 pads a request that has none.
    """

    requests: list[Request]
    rows: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]
    num_computed_tokens: npt.NDArray[np.int64]
    num_running: int
    resumed: list[Request]
    preempted: list[Request]
    finished_req_ids: list[str]
    blocks_to_swap_out: list[tuple[int, int]]
    blocks_to_swap_in: list[tuple[int, int]]
    samples: npt.NDArray[np.bool_]
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return int(self.num_scheduled_tokens.sum())

    @property
    def admitted(self) -> list[Request]:
        """Requests admitted in this step, for the first time or again, and forks started in it."""
        return self.requests[self.num_running :]

    def sampling_requests(self) -> list[Request]:
        """The requests that get a new token, in order."""
        if self.samples.all():
            return self.requests
        return [r for r, samples in zip(self.requests, self.samples, strict=True) if samples]

    def append_forks(self, forks: list[Request]) -> None:
        """Add requests that compute nothing in this step and get a token all the same."""
        nothing = np.zeros(len(forks), np.int32)
        self.requests = [*self.requests, *forks]
        self.rows = np.concatenate([self.rows, np.array([fork.row for fork in forks], np.int32)])
        self.num_scheduled_tokens = np.concatenate([self.num_scheduled_tokens, nothing])
        self.num_computed_tokens = np.concatenate([self.num_computed_tokens, nothing])
        self.samples = np.concatenate([self.samples, np.ones(len(forks), np.bool_)])
