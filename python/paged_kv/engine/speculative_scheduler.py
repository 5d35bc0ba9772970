# SPDX-License-Identifier: Apache-2.0
"""Scheduling of requests whose next tokens somebody has guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paged_kv.engine.request import NO_ROW
from paged_kv.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from paged_kv._core import KVCacheManager
    from paged_kv.engine.input_batch import InputBatch, Rows
    from paged_kv.engine.request import Request
    from paged_kv.engine.scheduler_config import SchedulerConfig
    from paged_kv.engine.scheduler_output import SchedulerOutput
    from paged_kv.engine.step_plan import StepPlan

__all__ = ["SpeculativeScheduler"]

_PAD_TOKEN = -1


class SpeculativeScheduler(Scheduler):
    """A scheduler whose steps check drafts.

    Between steps `update_draft_token_ids` gives the drafts of each request; the next step computes
    them behind the request's last token, and `update_from_accepted` takes those that were right.
    `paged_kv.engine.LLMEngine` makes no drafts: this is for engines that do.

    Args:
        kv_cache_manager: As `Scheduler`.
        batch: As `Scheduler`.
        config: As `Scheduler`.
        num_draft_tokens: Most drafts of a request.

    Source:
        vLLM 0.32 ``v1/core/sched/scheduler.py::Scheduler``, whose decisions it takes.
    """

    def __init__(
        self,
        kv_cache_manager: KVCacheManager,
        batch: InputBatch,
        config: SchedulerConfig,
        *,
        num_draft_tokens: int,
    ) -> None:
        super().__init__(kv_cache_manager, batch, config)
        self._max_num_draft_tokens = num_draft_tokens
        # By row of the batch, as the counters of `InputBatch`.
        self._num_draft_tokens = np.zeros(batch.num_rows, np.int64)
        self._is_prefilling = np.zeros(batch.num_rows, np.bool_)

    def update_draft_token_ids(self, draft_token_ids: Mapping[str, Sequence[int]]) -> None:
        """Set the drafts that the next step is to check. Requests that still prefill get none."""
        for request_id, drafts in draft_token_ids.items():
            request = self.requests.get(request_id)
            if request is None or request.row == NO_ROW:
                continue
            if self._is_prefilling[request.row]:
                drafts = ()
            request.spec_token_ids = list(drafts)
            self._num_draft_tokens[request.row] = len(drafts)

    def update_from_accepted(
        self, output: SchedulerOutput, token_ids: Mapping[str, Sequence[int]]
    ) -> list[Request]:
        """`update_from_output` of a step with drafts.

        Args:
            output: The step.
            token_ids: For each request that sampled: the drafts that were accepted and the token
                after them. Tokens behind one that ends the request are dropped.

        Returns:
            As `update_from_output`.
        """
        finished = []
        for request in output.requests:
            new_ids = token_ids.get(request.request_id)
            if not new_ids:
                continue
            self._take_back_rejected(request, output, len(new_ids) - 1)
            row = np.array([request.row], np.int32)
            for token_id in new_ids:
                if self._batch.append_token_ids(row, np.array([token_id], np.int32))[0]:
                    request.finish_by(token_id)
                    self._release(request)
                    finished.append(request)
                    break
        self._remove_from_queues(finished)
        return finished

    def _start(self, request: Request) -> None:
        super()._start(request)
        self._num_draft_tokens[request.row] = 0
        self._is_prefilling[request.row] = False

    def _take_back_rejected(
        self, request: Request, output: SchedulerOutput, num_accepted: int
    ) -> None:
        drafts = output.draft_token_ids.get(request.request_id)
        if drafts is not None and len(drafts) > num_accepted:
            num_rejected = len(drafts) - num_accepted
            num_computed_tokens = request.num_computed_tokens - num_rejected
            self._batch.set_num_computed_tokens(request, num_computed_tokens)

    def _num_wanted_tokens(self, rows: Rows, threshold: int) -> npt.NDArray[np.int64]:
        batch = self._batch
        computed = batch.num_computed_tokens[rows]
        wanted = batch.num_tokens[rows] + self._num_draft_tokens[rows] - computed
        # A draft must not lie past the longest request.
        np.minimum(wanted, self.config.max_model_len - 1 - computed, out=wanted)
        return np.minimum(wanted, threshold) if threshold > 0 else wanted

    def _num_admitted_tokens(
        self, request: Request, num_computed_tokens: int, step: StepPlan
    ) -> int:
        """Steps in which all requests have equally many tokens are what a model likes best.

        So a request that comes to decode beside others has its one token padded with drafts.
        """
        num_padded = 1 + self._max_num_draft_tokens
        num_tokens = request.num_tokens - num_computed_tokens
        if num_tokens != 1 or num_computed_tokens + num_padded + 1 > self.config.max_model_len:
            return super()._num_admitted_tokens(request, num_computed_tokens, step)
        rows, _ = step.rows_and_counts()
        rows = rows[: len(rows) - len(step.admitted)]
        if self._is_prefilling[rows].any() or not (len(rows) or num_computed_tokens):
            return super()._num_admitted_tokens(request, num_computed_tokens, step)
        return num_padded if num_padded <= step.budget else 0

    def _finish_schedule(self, step: StepPlan) -> SchedulerOutput:
        """Put the drafts that fit into the step in its output; all are used up."""
        output = super()._finish_schedule(step)
        computed = output.num_computed_tokens + output.num_scheduled_tokens
        num_drafts = (computed - self._batch.num_tokens[output.rows]).tolist()
        for i, (request, count) in enumerate(zip(output.requests, num_drafts, strict=True)):
            if count <= 0:
                continue
            is_padded = i >= output.num_running
            drafts = [_PAD_TOKEN] * count if is_padded else request.spec_token_ids[:count]
            output.draft_token_ids[request.request_id] = drafts
            request.spec_token_ids = []
        for request in output.requests[: output.num_running]:
            request.spec_token_ids = []
        self._num_draft_tokens[output.rows] = 0
        self._is_prefilling[output.rows] = ~output.samples
        return output
