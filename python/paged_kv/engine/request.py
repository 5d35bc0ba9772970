# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the engine: its tokens and how far it has come."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

from paged_kv._core import BlockHashList

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["BlockHasher", "Request", "RequestStatus"]

BlockHasher: TypeAlias = "Callable[[Request], BlockHashList]"
"""Returns the hashes of the request's full blocks that are not in ``block_hashes`` yet."""


class RequestStatus(enum.IntEnum):
    """Where a request stands; everything after ``PREEMPTED`` is finished.

    Source:
        vLLM 0.32 ``v1/request.py::RequestStatus``.
    """

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()

    @property
    def is_finished(self) -> bool:
        """Whether the request will not run again."""
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> str | None:
        """``"stop"``, ``"length"``, ``"abort"``, or ``None`` if not finished."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}


class Request:
    """Tokens, progress and sampling state of one request.

    Attributes:
        request_id: Unique among the requests of an engine.
        prompt: The prompt's text or ``None``.
        sampling_params: How to sample and when to stop.
        max_num_tokens: Prompt and output together never exceed this.
        num_prompt_tokens: Tokens of the prompt.
        all_token_ids: Prompt and output tokens. Append through :meth:`append_output_token_ids`.
        block_hashes: Hash of each full block of ``all_token_ids``.
        num_computed_tokens: Tokens whose keys and values are in the cache, hits included.
        num_cached_tokens: Tokens that the prefix cache gave when the request was first admitted,
            -1 before that.
        num_preemptions: Times it lost its blocks, to be computed again.
        skip_reading_prefix_cache: Never reuse cached blocks; own blocks are still cached.
        status: Where the request stands.
        stop_reason: Stop string or stop token id that ended it.

    Source:
        vLLM 0.32 ``v1/request.py::Request``.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        max_num_tokens: int,
        prompt: str | None = None,
        block_hasher: BlockHasher | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling_params = sampling_params
        self.max_num_tokens = max_num_tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self.all_token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.block_hashes = BlockHashList()
        self._block_hasher = block_hasher
        self._hash_new_blocks()

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt's ids."""
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the generated ids."""
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_id: int) -> None:
        """Add a generated token and hash the block that it fills, if it fills one."""
        self.all_token_ids.append(token_id)
        self._hash_new_blocks()

    def _hash_new_blocks(self) -> None:
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))
