# SPDX-License-Identifier: Apache-2.0
"""A step of our scheduler without a model: 256 decoding requests, scheduled and taken in."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from engine_work import NUM_CONTEXT_TOKENS, NUM_REQUESTS, NUM_STEPS, SCHEDULER_STEP
from paged_kv import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager
from paged_kv.engine import InputBatch, Request, SamplingParams, Scheduler, SchedulerConfig
from paged_kv.hashing import get_request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NUM_REQUESTS", "SCHEDULER_STEP", "step_sampler"]

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 16


def step_sampler(num_requests: int = NUM_REQUESTS) -> Callable[[], float]:
    """A function that gives the CPU seconds of a step, the mean of `NUM_STEPS`."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype="float32")
    config = KVCacheConfig(100_000, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE, BLOCK_SIZE)
    budget = num_requests * (NUM_CONTEXT_TOKENS + BLOCK_SIZE)
    batch = InputBatch(
        manager,
        max_num_seqs=num_requests,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
    )
    limits = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
    scheduler = Scheduler(manager, batch, limits)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN)
    hasher = get_request_block_hasher(BLOCK_SIZE)
    for i in range(num_requests):
        # Lengths are spread, so that each step fills as many blocks.
        prompt = range(1000 * i, 1000 * i + NUM_CONTEXT_TOKENS + i % BLOCK_SIZE)
        scheduler.add_request(
            Request(str(i), list(prompt), params, max_num_tokens=MAX_MODEL_LEN, block_hasher=hasher)
        )
    tokens = np.full(num_requests, 7, np.int32)

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), tokens)

    step()  # the prompts

    def sample() -> float:
        start = time.thread_time()
        for _ in range(NUM_STEPS):
            step()
        return (time.thread_time() - start) / NUM_STEPS

    return sample
