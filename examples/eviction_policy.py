# SPDX-License-Identifier: Apache-2.0
"""Another eviction policy than LRU, and what it does to the hit rate.

The load: agents whose long instructions are shared by many requests, among requests with long
documents that nobody asks about twice. Under LRU the documents push the instructions out of the
cache. The policy below keeps what was found at least once: blocks that never were go to the front
of the free queue, so that documents reuse one another's blocks.

Where it loses: instructions must be asked for again while their blocks still exist, and what was
found once is kept even if nobody ever asks for it again. Run it with ``python``.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from paged_kv import (
    FreePlace,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    get_request_block_hasher,
)

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE, NUM_BLOCKS, NUM_RUNNING = 16, 400, 4
NUM_REQUESTS, NUM_AGENTS, INSTRUCTION_TOKENS, DOCUMENT_TOKENS = 600, 6, 320, 1200


def keep_what_was_found(block: KVCacheBlock) -> FreePlace:
    """Blocks that were never found in the cache are reused first."""
    return FreePlace.BACK if block.num_hits > 0 else FreePlace.FRONT


def prompts() -> list[np.ndarray]:
    """Every other prompt is a document; the others begin with the instructions of an agent."""
    choose = random.Random(0)
    instructions = [
        np.arange(INSTRUCTION_TOKENS) + agent * INSTRUCTION_TOKENS for agent in range(NUM_AGENTS)
    ]
    result, next_token = [], NUM_AGENTS * INSTRUCTION_TOKENS
    for i in range(NUM_REQUESTS):
        num_new = DOCUMENT_TOKENS if i % 2 else 40
        new = np.arange(next_token, next_token + num_new)
        next_token += num_new
        result.append(new if i % 2 else np.concatenate([choose.choice(instructions), new]))
    return result


def hit_rate(policy: Callable[[KVCacheBlock], FreePlace] | None) -> float:
    """Share of the instructions' tokens that are found in the cache."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype="float32")
    manager = KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer.0"], spec)]),
        max_model_len=4096,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        eviction_policy=policy,
    )
    hasher = get_request_block_hasher(BLOCK_SIZE)
    running: deque[Request] = deque()
    num_found = 0
    for i, tokens in enumerate(prompts()):
        if len(running) == NUM_RUNNING:
            manager.free(running.popleft())
        request = Request(str(i), tokens, block_hasher=hasher)
        blocks, num_hits, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, len(tokens) - num_hits, num_hits, blocks) is None:
            msg = "the pool is too small for the requests that run"
            raise RuntimeError(msg)
        running.append(request)
        num_found += num_hits
    manager.check_integrity()
    return num_found / (NUM_REQUESTS // 2 * INSTRUCTION_TOKENS)


lru = hit_rate(None)
kept = hit_rate(keep_what_was_found)
print(f"instructions found in the cache: LRU {lru:.1%}, keep what was found {kept:.1%}")
if kept <= lru:
    msg = "the policy should win on this load"
    raise RuntimeError(msg)
