# SPDX-License-Identifier: Apache-2.0
"""CPU attention of vLLM 0.32: run by `bench_attention` with the Python of vLLM's environment.

Called as `vllm.v1.attention.backends.cpu_attn` does: the cache is [num_blocks, num_kv_heads, 2 *
block_size, head_size], keys before values; the instruction set is the one it would choose. The
scheduler's metadata are made once, outside of what is timed, as vLLM makes them once a step for all
layers. Its backend takes blocks of 32 tokens and multiples: a case of smaller ones runs with 32.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm._custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from attention_inputs import check, make_inputs, make_sdpa, may_stay_cached
from cases import DECODE, MIXED, PREFILL, AttentionCase
from timing import call_sampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attention_inputs import Inputs

BLOCK_SIZE = 32
CASES = {str(case): case for case in (*DECODE, *PREFILL, *MIXED)}


def unsupported() -> float:
    """The sample of a case that vLLM's backend refuses."""
    return float("nan")


def make_sampler(case: AttentionCase) -> Callable[[], float]:
    """Samples of vLLM's op; its result was checked."""
    case = replace(case, block_size=-(-case.block_size // BLOCK_SIZE) * BLOCK_SIZE)
    if case.kv_cache_dtype not in CPUAttentionBackend.supported_kv_cache_dtypes:
        return unsupported
    try:
        isa = _get_attn_isa(case.dtype, case.block_size, case.head_size, case.kv_cache_dtype)
    except NotImplementedError:
        return unsupported
    inputs = make_inputs(case)
    attention = make_attention(inputs, isa)
    check(attention(), make_sdpa(inputs)())
    return call_sampler(attention, warm_up=may_stay_cached(case))


def make_attention(inputs: Inputs, isa: str) -> Callable[[], Tensor]:
    """A call of vLLM's op over a cache that it has written itself."""
    case = inputs.case
    shape = (case.num_blocks, case.num_kv_heads, 2 * case.block_size, case.head_size)
    key_cache, value_cache = torch.zeros(shape, dtype=case.cache_dtype).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        *inputs.new_tokens(),
        key_cache,
        value_cache,
        inputs.slot_mapping(),
        isa,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=case.num_seqs,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_size,
        seq_lens=inputs.seq_lens,
        dtype=case.dtype,
        query_start_loc=inputs.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    out = torch.empty_like(inputs.query)

    def call() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query=inputs.query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=out,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            scale=inputs.scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=inputs.block_tables,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
            kv_cache_dtype=case.kv_cache_dtype,
        )
        return out

    return call


def main() -> None:
    """Serves samples until standard input ends."""
    # What others print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    name, sampler = None, unsupported
    for line in sys.stdin:
        if line.strip() != name:
            name = line.strip()
            sampler = unsupported  # frees the tensors of the case before
            sampler = make_sampler(CASES[name])
        print(sampler(), file=answers, flush=True)


if __name__ == "__main__":
    main()
