# SPDX-License-Identifier: Apache-2.0
"""Steps of a scheduler without a model."""

from __future__ import annotations

import numpy as np


def finish_step(scheduler, output):
    """Let every request that samples get token 0."""
    num_tokens = len(output.sampling_requests())
    finished = scheduler.update_from_output(output, np.zeros(num_tokens, np.int32))
    scheduler.kv_cache_manager.check_integrity()
    scheduler._batch.check_integrity()
    return finished


def tokens_of(output):
    ids = [request.request_id for request in output.requests]
    return dict(zip(ids, output.num_scheduled_tokens.tolist(), strict=True))


def step(scheduler):
    """Schedule and finish a step; return {id: tokens}."""
    output = scheduler.schedule()
    finish_step(scheduler, output)
    return tokens_of(output)


def add(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)


def num_used_blocks(scheduler):
    manager = scheduler.kv_cache_manager
    return manager.kv_cache_config.num_blocks - 1 - manager.block_pool.get_num_free_blocks()
