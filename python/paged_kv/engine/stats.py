# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine and a picture of its blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["BlockMap", "EngineStats", "RequestBlocks"]


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine was made.

    Attributes:
        num_requests: Requests added.
        num_finished_requests: Requests that ended, aborted ones included.
        num_prompt_tokens: Prompt tokens of admitted requests.
        num_cached_prompt_tokens: Those of them that came from the prefix cache.
        num_generated_tokens: Tokens sampled.
        num_steps: Steps.
        num_preemptions: Times a request lost its blocks, to be recomputed or swapped in again.
        step_seconds: Time spent in scheduling, forward passes and sampling.
        peak_num_used_blocks: Most blocks that requests held at once.
        peak_fragmentation: Share of the slots of those blocks that held no token, at that time.
    """

    num_requests: int = 0
    num_finished_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    step_seconds: float = 0.0
    peak_num_used_blocks: int = 0
    peak_fragmentation: float = 0.0

    @property
    def generated_tokens_per_second(self) -> float:
        """Generated tokens over the time spent in steps; 0 before the first step."""
        return self.num_generated_tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """The block table of one running request.

    Attributes:
        request_id: Whose it is.
        block_ids: For each KV cache group its blocks in the order of its tokens; 0 where it holds
            none any more.
        num_tokens: Tokens that have been stored in them.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Who holds which block, at one moment.

    Attributes:
        num_blocks: Blocks in the pool, the null block included.
        block_size: Tokens per block.
        requests: Running requests, oldest first.
        idle_cached_block_ids: Blocks that nobody holds and the prefix cache can still find.
    """

    num_blocks: int
    block_size: int
    requests: tuple[RequestBlocks, ...]
    idle_cached_block_ids: frozenset[int]

    def owners(self) -> dict[int, list[str]]:
        """The requests that hold each block; blocks that nobody holds are left out."""
        owners: dict[int, list[str]] = {}
        for request in self.requests:
            for block_id in itertools.chain(*request.block_ids):
                if block_id != 0:
                    owners.setdefault(block_id, []).append(request.request_id)
        return owners
