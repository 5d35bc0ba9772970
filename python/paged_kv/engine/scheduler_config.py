# SPDX-License-Identifier: Apache-2.0
"""Limits and policy of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paged_kv.engine.request_queue import SchedulingPolicy

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policy of a scheduler.

    Attributes:
        max_num_batched_tokens: Most tokens in one step.
        max_model_len: Most tokens of a request.
        policy: ``"fcfs"``: in the order of arrival; ``"priority"``: by priority, then arrival.
        enable_chunked_prefill: A prompt that is longer than what is left of a step's tokens is
            computed in pieces; else it waits until it fits into a step whole.
        long_prefill_token_threshold: Most tokens of one request in a step that it shares with
            others; 0: no limit.
        reserve_full_prompt: Admit a request only if all its tokens would fit, not just the first
            chunk (vLLM: ``scheduler_reserve_full_isl``).
        num_swap_blocks: Blocks in the host's memory; preempted requests leave their keys and values
            there if they fit, to be copied back instead of computed again. 0: all are recomputed.
        evict_uncomputed_blocks: Take blocks out of the prefix cache that a step would have filled
            if its request had not been preempted. False does what vLLM does, which lets requests
            find blocks that were never computed (only with the policy ``"priority"``).
    """

    max_num_batched_tokens: int
    max_model_len: int
    policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_prompt: bool = True
    num_swap_blocks: int = 0
    evict_uncomputed_blocks: bool = True
