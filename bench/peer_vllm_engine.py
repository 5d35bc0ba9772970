# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on the work of the engine suite: run by `bench_engine` with vLLM's Python.

The engine runs in this process, without another one for its core. Its CPU backend takes blocks of
32 tokens and multiples of them; 128 is its default, and is kept.
"""

from __future__ import annotations

import copy
import os
import time
from typing import TYPE_CHECKING

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from vllm import LLM, SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import engine_work
from engine_worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Vllm(engine_work.Engine):
    """vLLM's LLM over token ids."""

    def __init__(self, model: str, dtype: str) -> None:
        self.llm = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=engine_work.MAX_MODEL_LEN,
            max_num_seqs=engine_work.MAX_NUM_SEQS,
            max_num_batched_tokens=engine_work.MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=True,
        )

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> int:
        """All prompts in one call."""
        params = SamplingParams(
            temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = self.llm.generate(inputs, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)


def scheduler_step(engine: Vllm) -> Callable[[], float]:
    """A scheduler like the engine's: CPU seconds to schedule a step and take in its output."""
    num_requests, block_size = engine_work.NUM_REQUESTS, 16
    config = copy.deepcopy(engine.llm.llm_engine.vllm_config)
    budget = num_requests * (engine_work.NUM_CONTEXT_TOKENS + block_size)
    limits = config.scheduler_config
    limits.max_num_seqs, limits.max_num_batched_tokens = num_requests, budget
    config.cache_config.block_size, config.cache_config.num_gpu_blocks = block_size, 100_000
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=3, head_size=64, dtype=torch.float32
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(100_000, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        hash_block_size=block_size,
        log_stats=False,
    )
    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block_size, sha256_cbor)
    params = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
    for i in range(num_requests):
        # Lengths are spread, so that each step fills as many blocks.
        num_tokens = engine_work.NUM_CONTEXT_TOKENS + i % block_size
        prompt = list(range(1000 * i, 1000 * i + num_tokens))
        scheduler.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
    names = [str(i) for i in range(num_requests)]
    index = {name: i for i, name in enumerate(names)}
    tokens = [[7] for _ in names]

    def step() -> None:
        output = scheduler.schedule()
        scheduler.update_from_output(output, ModelRunnerOutput(names, index, tokens))

    step()  # the prompts

    def sample() -> float:
        start = time.thread_time()
        for _ in range(engine_work.NUM_STEPS):
            step()
        return (time.thread_time() - start) / engine_work.NUM_STEPS

    return sample


if __name__ == "__main__":
    serve(Vllm, {engine_work.SCHEDULER_STEP: scheduler_step})
