# SPDX-License-Identifier: Apache-2.0
"""Host core: block pool and block hashing, against the same work in Python's own containers."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

import paged_kv
from timing import Row, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BLOCKS = 100_000
BLOCKS_PER_REQUEST = 128
BLOCK_SIZE = 16
PROMPT_TOKENS = 32_768


def rows(num_samples: int) -> Iterator[Row]:
    """Allocation and release of one request's blocks; hashes of one long prompt."""
    yield _allocate_and_free(num_samples)
    yield _hash_prompt(num_samples)


def _allocate_and_free(num_samples: int) -> Row:
    pool = paged_kv.BlockPool(NUM_BLOCKS, True, BLOCK_SIZE)
    free = deque(range(1, NUM_BLOCKS))
    ref_counts = [0] * NUM_BLOCKS

    def ours() -> None:
        pool.free_blocks(pool.get_new_block_ids(BLOCKS_PER_REQUEST))

    def plain_python() -> None:
        blocks = [free.popleft() for _ in range(BLOCKS_PER_REQUEST)]
        for block in blocks:
            ref_counts[block] += 1
        for block in blocks:
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                free.appendleft(block)

    timings = time_interleaved({"ours": ours, "peer": plain_python}, num_samples)
    return Row(
        case=f"allocate and free {BLOCKS_PER_REQUEST} of {NUM_BLOCKS:,} blocks",
        ours=timings["ours"],
        references={"a deque and a list of counts in Python": timings["peer"]},
        rate=BLOCKS_PER_REQUEST / timings["ours"].median_s / 1e6,
        rate_unit="Mblocks/s",
    )


def _hash_prompt(num_samples: int) -> Row:
    tokens = np.random.default_rng(0).integers(0, 49_152, PROMPT_TOKENS, dtype=np.int64)
    token_list = tokens.tolist()
    num_blocks = PROMPT_TOKENS // BLOCK_SIZE

    def ours() -> None:
        paged_kv.hash_blocks(tokens, BLOCK_SIZE)

    def hashlib_chain() -> None:
        """SHA-256 over text: hashlib's speed without the cost of an exact encoding."""
        parent = b""
        for i in range(num_blocks):
            block = token_list[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            parent = hashlib.sha256(parent + repr(block).encode()).digest()

    timings = time_interleaved({"ours": ours, "peer": hashlib_chain}, num_samples)
    return Row(
        case=f"hash {num_blocks:,} blocks of {BLOCK_SIZE} tokens",
        ours=timings["ours"],
        references={"hashlib.sha256 over repr() of each block": timings["peer"]},
        rate=num_blocks / timings["ours"].median_s / 1e6,
        rate_unit="Mblocks/s",
    )
