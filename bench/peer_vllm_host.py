# SPDX-License-Identifier: Apache-2.0
"""The host suite's work in vLLM: run by `bench_host` with the Python of vLLM's environment.

Answers each line of standard input, the name of a case, with the seconds of one sample.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.block_table import BlockTable

import host_cases

if TYPE_CHECKING:
    from collections.abc import Callable


class Vllm(host_cases.Library):
    """vLLM, as its own scheduler and worker call it."""

    BlockPool = BlockPool
    KVCacheManager = KVCacheManager
    KVCacheConfig = KVCacheConfig
    KVCacheGroupSpec = KVCacheGroupSpec
    FullAttentionSpec = FullAttentionSpec
    SlidingWindowSpec = SlidingWindowSpec
    dtype = torch.bfloat16

    def __init__(self) -> None:
        init_none_hash(sha256_cbor)
        self._hasher = get_request_block_hasher(host_cases.BLOCK_SIZE, sha256_cbor)
        self._sampling_params = SamplingParams(max_tokens=1_000_000)

    def to_token_ids(self, tokens: range) -> list[int]:
        """Tokens as a list, which is what vLLM's front end gives."""
        return list(tokens)

    def make_request(self, name: str, token_ids: Any) -> Request:
        """A request that is running."""
        request = Request(name, token_ids, self._sampling_params, None, block_hasher=self._hasher)
        request.status = RequestStatus.RUNNING
        return request

    def make_decode_step(
        self, manager: Any, requests: list[Request], width: int
    ) -> Callable[[], None]:
        """The calls that vLLM's scheduler and model runner make, and nothing else of them."""
        tables = [
            self.make_table(len(requests), width) for _ in manager.kv_cache_config.kv_cache_groups
        ]
        for row, request in enumerate(requests):
            all_ids = manager.get_block_ids(request.request_id)
            for table, ids in zip(tables, all_ids, strict=True):
                table.add_row(ids, row)
        numbered = list(enumerate(requests))

        def step() -> None:
            for row, request in numbered:
                request.append_output_token_ids(7)
                blocks = manager.allocate_slots(request, 1)
                request.num_computed_tokens += 1
                new_ids = blocks.get_block_ids(allow_none=True)
                if new_ids is None:
                    continue
                for table, ids in zip(tables, new_ids, strict=False):
                    table.append_row(ids, row)

        return step

    def make_table(self, num_rows: int, width: int) -> BlockTable:
        """A table on the CPU."""
        return BlockTable(
            block_size=host_cases.BLOCK_SIZE,
            max_num_reqs=num_rows,
            max_num_blocks_per_req=width,
            max_num_batched_tokens=num_rows,
            pin_memory=False,
            device=torch.device("cpu"),
            cp_kv_cache_interleave_size=1,
        )


def main() -> None:
    """Serves samples until standard input ends."""
    # What others print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    library = Vllm()
    name, samples = None, iter(())
    for line in sys.stdin:
        if line.strip() != name:
            name = line.strip()
            samples = host_cases.start(name, library)
        print(next(samples), file=answers, flush=True)


if __name__ == "__main__":
    main()
