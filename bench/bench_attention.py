# SPDX-License-Identifier: Apache-2.0
"""paged_attention_varlen against torch's SDPA on the same keys and values, contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import paged_kv.ops
from cases import DECODE, PREFILL, AttentionCase
from timing import Row, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def rows(num_samples: int) -> Iterator[Row]:
    """Decode steps, rated in bytes of KV a second; prefill chunks, rated in operations a second."""
    for case in DECODE:
        yield _row(case, num_samples, work=case.kv_bytes, unit="GB/s")
    for case in PREFILL:
        yield _row(case, num_samples, work=case.flops, unit="GFLOP/s")


def _row(case: AttentionCase, num_samples: int, *, work: int, unit: str) -> Row:
    paged, sdpa = _candidates(case)
    torch.testing.assert_close(
        paged(), sdpa(), atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype]
    )
    timings = time_interleaved({"ours": paged, "peer": sdpa}, num_samples)
    return Row(
        case=str(case),
        ours=timings["ours"],
        peer="torch SDPA on contiguous KV",
        peer_timing=timings["peer"],
        rate=work / timings["ours"].median_s / 1e9,
        rate_unit=unit,
    )


def _candidates(case: AttentionCase):  # noqa: ANN202  (two functions that return the output)
    torch.manual_seed(0)
    blocks_per_seq = case.num_blocks // case.num_seqs
    cache_shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    key_cache, value_cache = (torch.randn(cache_shape).to(case.dtype) for _ in range(2))
    block_tables = torch.randperm(case.num_blocks).view(case.num_seqs, blocks_per_seq).int()
    num_tokens = case.num_seqs * case.query_len
    query = torch.randn(num_tokens, case.num_heads, case.head_size).to(case.dtype)
    query_start_loc = torch.arange(0, num_tokens + 1, case.query_len, dtype=torch.int32)
    seq_lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32)
    scale = case.head_size**-0.5
    out = torch.empty_like(query)

    def paged() -> torch.Tensor:
        paged_kv.ops.paged_attention_varlen(
            out, query, key_cache, value_cache, query_start_loc, seq_lens, block_tables, scale
        )
        return out

    def contiguous(cache: torch.Tensor) -> torch.Tensor:
        tokens = cache[block_tables.long()].flatten(1, 2)[:, : case.seq_len]
        return tokens.transpose(1, 2).contiguous()

    key, value = contiguous(key_cache), contiguous(value_cache)
    query_bhqd = query.view(case.num_seqs, case.query_len, case.num_heads, case.head_size)
    query_bhqd = query_bhqd.transpose(1, 2).contiguous()
    mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool)
    mask = mask.tril(case.seq_len - case.query_len)
    is_decode = case.query_len == 1
    is_causal = case.query_len == case.seq_len

    def sdpa() -> torch.Tensor:
        result = F.scaled_dot_product_attention(
            query_bhqd,
            key,
            value,
            attn_mask=None if is_decode or is_causal else mask,
            is_causal=is_causal and not is_decode,
            scale=scale,
            enable_gqa=case.num_heads != case.num_kv_heads,
        )
        return result.transpose(1, 2).reshape(query.shape)

    return paged, sdpa
