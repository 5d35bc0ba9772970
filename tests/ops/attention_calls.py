# SPDX-License-Identifier: Apache-2.0
"""Runs the attention ops on the inputs of a case, with poisoned outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from cache_cases import huge_tensor
from torch import Tensor

from paged_kv import ops, reference
from paged_kv.reference import PARTITION_SIZE

if TYPE_CHECKING:
    from paged_kv.testing import AttentionCase, AttentionInputs


def options_of(case: AttentionCase, inputs: AttentionInputs) -> dict:
    return {
        "causal": case.causal,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks,
    }


def positional(inputs: AttentionInputs) -> tuple:
    """The arguments of paged_attention_varlen that follow ``out``."""
    return (
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        inputs.query_start_loc,
        inputs.seq_lens,
        inputs.block_tables,
        inputs.scale,
    )


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


FAR_STRIDE = 2**31 + 64
"""Elements between the tokens of `far_apart`."""


def far_apart(inputs: AttentionInputs) -> tuple[AttentionInputs, Tensor]:
    """The same inputs more than 2^31 elements into their tensors (sparse memory), and an output.

    The output is like the query; between two tokens of both are `FAR_STRIDE` elements.
    """
    num_blocks = inputs.key_cache.shape[0]
    first = 2**31 // inputs.key_cache[0].numel() + 1
    far = {}
    for name in ("key_cache", "value_cache"):
        near = getattr(inputs, name)
        far[name] = huge_tensor(first + num_blocks, *near.shape[1:], dtype=near.dtype)
        far[name][first:] = near
    num_tokens, num_heads, head_size = inputs.query.shape
    token_size = num_heads * head_size
    strides = (FAR_STRIDE, head_size, 1)
    query, out = (
        huge_tensor(
            (num_tokens - 1) * FAR_STRIDE + token_size, dtype=inputs.query.dtype
        ).as_strided(inputs.query.shape, strides)
        for _ in range(2)
    )
    query.copy_(inputs.query)
    tables = inputs.block_tables + first
    tables[inputs.block_tables >= num_blocks] = -1
    return replace(inputs, query=query, block_tables=tables, **far), out


def varlen(
    case: AttentionCase, inputs: AttentionInputs, *, backend=ops, **kwargs
) -> tuple[Tensor, Tensor]:
    """``paged_attention_varlen``: out and lse."""
    num_tokens, num_heads, _ = inputs.query.shape
    out = poisoned(*inputs.query.shape, dtype=inputs.query.dtype)
    lse = poisoned(num_heads, num_tokens, dtype=torch.float32)
    cache_options = {
        "kv_cache_dtype": case.kv_cache_dtype,
        "k_scale": inputs.k_scale,
        "v_scale": inputs.v_scale,
    }
    backend.paged_attention_varlen(
        out, *positional(inputs), lse=lse, **options_of(case, inputs) | cache_options | kwargs
    )
    return out, lse


def decode_arguments(case: AttentionCase, inputs: AttentionInputs) -> tuple:
    """The arguments of paged_attention_v1 that follow ``out``."""
    return (
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        case.num_kv_heads,
        inputs.scale,
        inputs.block_tables,
        inputs.seq_lens,
        case.block_size,
        max(case.seq_lens, default=0),
        inputs.alibi_slopes,
        case.kv_cache_dtype,
        inputs.k_scale,
        inputs.v_scale,
    )


def v1(case: AttentionCase, inputs: AttentionInputs, *blocksparse: int, backend=ops) -> Tensor:
    out = poisoned(*inputs.query.shape, dtype=inputs.query.dtype)
    backend.paged_attention_v1(out, *decode_arguments(case, inputs), *blocksparse)
    return out


def partition_buffers(case: AttentionCase, num_partitions: int | None = None) -> tuple:
    if num_partitions is None:
        num_partitions = -(-max(case.seq_lens, default=0) // PARTITION_SIZE)
    shape = (len(case.seq_lens), case.num_heads, num_partitions)
    return (
        poisoned(*shape, dtype=torch.float32),
        poisoned(*shape, dtype=torch.float32),
        poisoned(*shape, case.head_size, dtype=case.dtype),
    )


def v2(
    case: AttentionCase, inputs: AttentionInputs, *blocksparse: int, backend=ops
) -> tuple[Tensor, tuple]:
    """``paged_attention_v2``: out and its buffers."""
    out = poisoned(*inputs.query.shape, dtype=inputs.query.dtype)
    buffers = partition_buffers(case)
    backend.paged_attention_v2(out, *buffers, *decode_arguments(case, inputs), *blocksparse)
    return out, buffers


def decode(version: str, case: AttentionCase, inputs: AttentionInputs, *args, backend) -> Tensor:
    """The output of ``paged_attention_v1`` or ``_v2``, as ``version`` says."""
    if version == "v1":
        return v1(case, inputs, *args, backend=backend)
    return v2(case, inputs, *args, backend=backend)[0]


def dequantised(case: AttentionCase, inputs: AttentionInputs) -> AttentionInputs:
    """The same inputs, their caches as the kernel sees them."""
    if case.kv_cache_dtype == "auto":
        return inputs
    head_dim = 1 if case.layout in ("vllm", "panels") else -2

    def values(cache: Tensor, scale: Tensor) -> Tensor:
        return reference.dequantize_kv(cache, case.kv_cache_dtype, scale, head_dim=head_dim)

    return replace(
        inputs,
        key_cache=values(inputs.key_cache, inputs.k_scale),
        value_cache=values(inputs.value_cache, inputs.v_scale),
    )


def reference_arguments(case: AttentionCase, inputs: AttentionInputs) -> tuple:
    """The positional arguments of the references of v1 and v2: caches as the kernel sees them."""
    seen = dequantised(case, inputs)
    caches = (seen.key_cache, seen.value_cache)
    return (inputs.query, *caches, inputs.scale, inputs.block_tables, inputs.seq_lens)
