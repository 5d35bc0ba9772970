# SPDX-License-Identifier: Apache-2.0
"""A sequence on its way through the engine: its tokens, how far it has come, how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paged_kv.request
from paged_kv.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from paged_kv.engine.sampling_params import SamplingParams
    from paged_kv.hashing import RequestBlockHasher

__all__ = ["Request", "RequestStatus", "finish_reason"]

NO_ROW = -1

_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


def finish_reason(status: RequestStatus) -> str | None:
    """``"stop"``, ``"length"``, ``"abort"``, ``"error"``, or None if not finished."""
    return _FINISH_REASONS.get(status)


class Request(paged_kv.request.Request):
    """One sequence: `paged_kv.Request` with what the engine has to know about its end.

    A prompt of which several completions are wanted is as many requests: the first computes the
    prompt, the others are forked from it (`Scheduler.add_request`).

    Args:
        request_id: Unique among the requests of an engine.
        prompt_token_ids: The prompt, at least one token.
        sampling_params: How to sample and when to stop.
        max_num_tokens: Prompt and output together never exceed this.
        eos_token_ids: Ids that end it, unless it ignores them.
        prompt: The prompt's text or None.
        index: Which of the completions of its prompt this is.
        priority: Lower is served sooner, under the policy ``"priority"``.
        arrival_time: Seconds; None: now.
        block_hasher: None: its blocks cannot be cached.

    Attributes:
        row: Its row in the `InputBatch` while it runs, else -1.
        num_cached_tokens: Tokens that the prefix cache gave when it was first admitted, -1 before.
        stop_reason: Stop string or stop token id that ended it.

    Source:
        vLLM 0.32 ``v1/request.py::Request``.
    """

    sampling_params: SamplingParams

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        max_num_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
        prompt: str | None = None,
        index: int = 0,
        priority: int = 0,
        arrival_time: float | None = None,
        block_hasher: RequestBlockHasher | None = None,
    ) -> None:
        super().__init__(
            request_id,
            prompt_token_ids,
            sampling_params,
            priority=priority,
            arrival_time=arrival_time,
            block_hasher=block_hasher,  # type: ignore[arg-type]
        )
        self.prompt = prompt
        self.index = index
        self.max_num_tokens = max_num_tokens
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.end_token_ids = self.eos_token_ids | frozenset(sampling_params.stop_token_ids or ())
        self.row = NO_ROW
        self.num_cached_tokens = -1
        self.stop_reason: int | str | None = None

    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32]:
        """The prompt's ids."""
        return self.all_token_ids[: self.num_prompt_tokens]

    def preempt(self) -> None:
        """Start again: nothing of it is computed, in as far as it is known here."""
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        self.spec_token_ids = []
        self.status = RequestStatus.PREEMPTED

    def finish_by(self, token_id: int) -> None:
        """Set `status` and `stop_reason`, after its last token ended it."""
        if token_id not in self.end_token_ids:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return
        self.status = RequestStatus.FINISHED_STOPPED
        if token_id not in self.eos_token_ids:
            self.stop_reason = token_id
