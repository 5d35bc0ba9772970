# SPDX-License-Identifier: Apache-2.0
"""Host core against vLLM's: the same calls on the same input, in two processes that take turns.

vLLM lives in an environment of its own (see `peer`)::

    python bench/run.py --suite host --peer vllm --peer-python vllm-env/bin/python

`host_cases` says what each case times, `peer_vllm_host` how vLLM is called.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import host_cases
import paged_kv
from paged_kv.block_table import BlockTable
from peer import Peer
from timing import Row, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER = Path(__file__).with_name("peer_vllm_host.py")


class PagedKV(host_cases.Library):
    """paged_kv. A decode step goes through RequestBatch."""

    BlockPool = paged_kv.BlockPool
    KVCacheManager = paged_kv.KVCacheManager
    KVCacheConfig = paged_kv.KVCacheConfig
    KVCacheGroupSpec = paged_kv.KVCacheGroupSpec
    FullAttentionSpec = paged_kv.FullAttentionSpec
    SlidingWindowSpec = paged_kv.SlidingWindowSpec
    dtype = "bfloat16"

    def __init__(self) -> None:
        self._hasher = paged_kv.get_request_block_hasher(host_cases.BLOCK_SIZE)

    def to_token_ids(self, tokens: range) -> np.ndarray:
        """Tokens as an int32 buffer."""
        return np.array(tokens, np.int32)

    def make_request(self, name: str, token_ids: Any) -> paged_kv.Request:
        """A request that is running."""
        request = paged_kv.Request(name, token_ids, block_hasher=self._hasher)
        request.status = paged_kv.RequestStatus.RUNNING
        return request

    def make_decode_step(
        self, manager: Any, requests: list[paged_kv.Request], width: int
    ) -> Callable[[], None]:
        """Two calls: the tokens of the last step, and the slots of this one."""
        num_groups = len(manager.kv_cache_config.kv_cache_groups)
        shape = (host_cases.BLOCK_SIZE, len(requests), width, len(requests))
        tables = [paged_kv.BlockTable(*shape) for _ in range(num_groups)]
        batch = paged_kv.RequestBatch(manager, tables)
        for row, request in enumerate(requests):
            batch.add(request, row)
        rows = np.arange(len(requests), dtype=np.int32)
        tokens = np.full(len(requests), 7, np.int32)

        def step() -> None:
            batch.append_output_token_ids(rows, tokens)
            if batch.allocate_slots(rows, 1).size:
                raise RuntimeError(host_cases.TOO_SMALL)

        return step

    def make_table(self, num_rows: int, width: int) -> BlockTable:
        """A table on the CPU, whose commits copy what has changed."""
        return BlockTable(host_cases.BLOCK_SIZE, num_rows, width, num_rows)


# What a row calls its case, and how much of what its rate counts one sample is.
SIZE = host_cases.FULL_SIZE
ROWS = {
    "pool_construction": (f"BlockPool of {SIZE.num_pool_blocks:,} blocks", SIZE.num_pool_blocks),
    "allocate_and_cache": (f"allocate and cache {SIZE.num_prompt_blocks:,} blocks", 2048),
    "hit_lookup": (f"look up {SIZE.num_prompt_blocks:,} cached blocks", 2048),
    "free": (f"free {SIZE.num_prompt_blocks:,} blocks", 2048),
    "hash_prompt": ("request of 32,768 tokens, hashed", 2048),
    "decode_one_group": ("decode step of 256 requests, 1 group", 256),
    "decode_six_groups": ("decode step of 256 requests, 1 + 5 groups", 256),
    "commit_block_table": ("commit a block table of 256 x 4096", 256),
}


def rows(num_samples: int, peer_python: Path) -> Iterator[Row]:
    """One row a case of `host_cases`."""
    torch.set_num_threads(1)
    library = PagedKV()
    with closing(Peer(peer_python, WORKER)) as peer:
        for name, (case, amount) in ROWS.items():
            samples = host_cases.start(name, library)
            ours, theirs = [], []
            for _ in range(num_samples):
                ours.append(next(samples))
                theirs.append(peer.sample(name))
            timing = summary(ours)
            yield Row(
                case=case,
                ours=timing,
                references={"vLLM": summary(theirs)},
                rate=amount / timing.median_s / 1e6,
                rate_unit="M/s",
            )
