# SPDX-License-Identifier: Apache-2.0
"""Kernels of the attention ops for fake tensors: they check shapes and compute nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)
from paged_kv._cache_panels import has_panels
from paged_kv._fake_checks import (
    FLOAT_DTYPES,
    NamedSizes,
    check_cache_dtype,
    check_dtype,
    check_kv_cache_dtype,
    check_panels,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []

_MAX_HEAD_SIZE = 256


def _check_query(out: Tensor, query: Tensor, sizes: NamedSizes) -> None:
    sizes.check(query, "query", "num_tokens", "num_heads", "head_size")
    check_dtype(query, "query", *FLOAT_DTYPES)
    sizes.check(out, "out", "num_tokens", "num_heads", "head_size")
    check_dtype(out, "out", query.dtype)
    torch._check(
        1 <= sizes["head_size"] <= _MAX_HEAD_SIZE,
        lambda: f"query: expected a head_size in [1, {_MAX_HEAD_SIZE}], got {sizes['head_size']}",
    )


def _check_strided_cache(key_cache: Tensor, value_cache: Tensor, sizes: NamedSizes) -> None:
    """Of every layout but panels."""
    if key_cache.dim() == 5:
        x = 16 // key_cache.element_size()
        torch._check(
            sizes["head_size"] % x == 0,
            lambda: (
                f"key_cache: this layout needs a head_size that is a multiple of x = {x}, got "
                f"{sizes['head_size']}"
            ),
        )
        sizes.bind("x", x)
        sizes.bind("head_size/x", sizes["head_size"] // x)
        key_dims = ["num_blocks", "num_kv_heads", "head_size/x", "block_size", "x"]
        value_dims = ["num_blocks", "num_kv_heads", "head_size", "block_size"]
    else:
        key_dims = value_dims = ["num_blocks", "block_size", "num_kv_heads", "head_size"]
    sizes.check(key_cache, "key_cache", *key_dims)
    sizes.check(value_cache, "value_cache", *value_dims)


def _check_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    sizes: NamedSizes,
) -> None:
    check_cache_dtype(key_cache, "key_cache", kv_cache_dtype, dtype)
    check_cache_dtype(value_cache, "value_cache", kv_cache_dtype, dtype)
    if has_panels(key_cache) or has_panels(value_cache):
        check_panels(key_cache, "key_cache", sizes, is_key=True)
        check_panels(value_cache, "value_cache", sizes, is_key=False)
    else:
        _check_strided_cache(key_cache, value_cache, sizes)
    torch._check(sizes["block_size"] >= 1, lambda: "key_cache: expected a block_size >= 1, got 0")
    torch._check(
        sizes["num_heads"] >= 1
        and sizes["num_kv_heads"] >= 1
        and sizes["num_heads"] % sizes["num_kv_heads"] == 0,
        lambda: (
            f"query: expected num_heads to be a multiple of num_kv_heads = "
            f"{sizes['num_kv_heads']}, got {sizes['num_heads']}"
        ),
    )


def _check_batch(seq_lens: Tensor, block_tables: Tensor, sizes: NamedSizes) -> None:
    sizes.check(seq_lens, "seq_lens", "num_seqs")
    check_dtype(seq_lens, "seq_lens", torch.int32)
    sizes.check(block_tables, "block_tables", "num_seqs", "max_blocks")
    check_dtype(block_tables, "block_tables", torch.int32)


def _check_per_head(tensor: Tensor | None, name: str, sizes: NamedSizes) -> None:
    if tensor is not None:
        sizes.check(tensor, name, "num_heads")
        check_dtype(tensor, name, torch.float32)


@torch.library.register_fake("paged_kv::paged_attention_varlen")
def _paged_attention_varlen(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    causal: bool = True,
    sliding_window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    max_query_len: int = -1,
    max_seq_len: int = -1,
    plan: Tensor | None = None,
    workspace: Tensor | None = None,
    split_tokens: int = 0,
) -> None:
    sizes = NamedSizes()
    check_kv_cache_dtype(kv_cache_dtype, query.device)
    _check_query(out, query, sizes)
    _check_cache(key_cache, value_cache, kv_cache_dtype, query.dtype, sizes)
    _check_batch(seq_lens, block_tables, sizes)
    sizes.bind("num_seqs + 1", sizes["num_seqs"] + 1)
    sizes.check(query_start_loc, "query_start_loc", "num_seqs + 1")
    check_dtype(query_start_loc, "query_start_loc", torch.int32)
    _check_per_head(alibi_slopes, "alibi_slopes", sizes)
    _check_per_head(sinks, "sinks", sizes)
    if lse is not None:
        sizes.check(lse, "lse", "num_heads", "num_tokens")
        check_dtype(lse, "lse", torch.float32)
    if plan is not None:
        check_dtype(plan, "plan", torch.int32)


def _check_decode(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
) -> NamedSizes:
    sizes = NamedSizes()
    check_kv_cache_dtype(kv_cache_dtype, query.device)
    _check_query(out, query, sizes)
    sizes.bind("num_kv_heads", num_kv_heads)
    sizes.bind("block_size", block_size)
    _check_cache(key_cache, value_cache, kv_cache_dtype, query.dtype, sizes)
    sizes.bind("num_seqs", sizes["num_tokens"])
    _check_batch(seq_lens, block_tables, sizes)
    _check_per_head(alibi_slopes, "alibi_slopes", sizes)
    return sizes


@torch.library.register_fake("paged_kv::paged_attention_v1")
def _paged_attention_v1(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    _check_decode(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        block_tables,
        seq_lens,
        block_size,
        alibi_slopes,
        kv_cache_dtype,
    )


@torch.library.register_fake("paged_kv::paged_attention_v2")
def _paged_attention_v2(
    out: Tensor,
    exp_sums: Tensor,
    max_logits: Tensor,
    tmp_out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    sizes = _check_decode(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        block_tables,
        seq_lens,
        block_size,
        alibi_slopes,
        kv_cache_dtype,
    )
    for tensor, name in ((exp_sums, "exp_sums"), (max_logits, "max_logits")):
        sizes.check(tensor, name, "num_tokens", "num_heads", "max_partitions")
        check_dtype(tensor, name, torch.float32)
    sizes.check(tmp_out, "tmp_out", "num_tokens", "num_heads", "max_partitions", "head_size")
    check_dtype(tmp_out, "tmp_out", query.dtype)


@torch.library.register_fake("paged_kv::merge_attn_states")
def _merge_attn_states(
    output: Tensor,
    output_lse: Tensor | None,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
) -> None:
    sizes = NamedSizes()
    check_dtype(output, "output", *FLOAT_DTYPES)
    for tensor, name in (
        (output, "output"),
        (prefix_output, "prefix_output"),
        (suffix_output, "suffix_output"),
    ):
        sizes.check(tensor, name, "num_tokens", "num_heads", "head_size")
        check_dtype(tensor, name, output.dtype)
    lses = [(prefix_lse, "prefix_lse"), (suffix_lse, "suffix_lse")]
    if output_lse is not None:
        lses.append((output_lse, "output_lse"))
    for lse, name in lses:
        sizes.check(lse, name, "num_heads", "num_tokens")
        check_dtype(lse, name, torch.float32)


@torch.library.register_fake("paged_kv::plan_attention")
def _plan_attention(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_slots: int,
    plan: Tensor,
) -> None:
    sizes = NamedSizes()
    sizes.check(seq_lens, "seq_lens", "num_seqs")
    sizes.bind("num_seqs + 1", sizes["num_seqs"] + 1)
    sizes.check(query_start_loc, "query_start_loc", "num_seqs + 1")
    sizes.check(plan, "plan", "plan_size")
    for tensor, name in (
        (seq_lens, "seq_lens"),
        (query_start_loc, "query_start_loc"),
        (plan, "plan"),
    ):
        check_dtype(tensor, name, torch.int32)
