# SPDX-License-Identifier: Apache-2.0
"""paged_attention_v1 and _v2, with vLLM's argument lists: wrappers exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention_v1", "paged_attention_v2"]


def paged_attention_v1(
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
    """Attention of one query a sequence, its last token, to the paged cache.

    Args:
        out: ``[num_seqs, num_heads, head_size]``, dtype of ``query``, last dim dense.
        query: ``[num_seqs, num_heads, head_size]``, f32/f16/bf16, last dim dense; may be a slice of
            a fused qkv tensor.
        key_cache: x-packed ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``, x = 16
            bytes of elements. On the CPU the other layouts of
            :func:`paged_kv.ops.paged_attention_varlen` work too.
        value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``; other layouts likewise.
        num_kv_heads: As in the caches.
        scale: Factor of ``q.k``.
        block_tables: ``[num_seqs, max_blocks]`` int32; entries past a sequence's blocks may hold
            anything.
        seq_lens: ``[num_seqs]`` int32; 0 gives zeros.
        block_size: Tokens a block, as in the caches.
        max_seq_len: Upper bound of ``seq_lens``; -1: from the shapes.
        alibi_slopes: ``[num_heads]`` float32; adds ``slope * (key_pos - query_pos)``. Or None.
        kv_cache_dtype: ``auto``: the caches have the dtype of ``query``. ``fp8`` (=
            ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2``: uint8 or torch's float8 dtype. ``int8``: the
            same, on the CPU only.
        k_scale: Not used with ``auto``; float32, one element or ``[num_kv_heads]``. A key is
            ``element * scale``.
        v_scale: As ``k_scale``.
        tp_rank: Which shard of all heads these are, for the block-sparse pattern.
        blocksparse_local_blocks: Last blocks of the pattern that every head sees.
        blocksparse_vert_stride: A head sees every so many-th block; <= 1: all, no sparsity.
        blocksparse_block_size: Tokens a block of the pattern, a multiple of ``block_size``.
        blocksparse_head_sliding_step: By how many blocks the pattern starts later from head to
            head; negative: from kv head to kv head.

    Mutates:
        ``out``.

    Raises:
        RuntimeError: As :func:`paged_kv.ops.paged_attention_varlen`. On CUDA also: ``max_seq_len``
            is beyond what shared memory holds (about 57,000 tokens on sm_90), a ``block_size`` that
            is no multiple of 8, a ``head_size`` that is not one of
            :meth:`paged_kv.attention.PagedAttention.get_supported_head_sizes`, or caches that are
            not aligned to 16 bytes.

    Notes:
        Cost and determinism: as :func:`paged_kv.ops.paged_attention_varlen`. On the CPU any length
        works. On CUDA values are not checked: a sequence is cut at what its row of
        ``block_tables`` and ``max_seq_len`` hold, and blocks whose ids are out of range are not
        visible.

    Source:
        vLLM 0.6 csrc/attention/paged_attention_v1.cu (arguments and meaning).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> key_cache, value_cache = torch.zeros(2, 1, 2, 16, 4), torch.ones(2, 1, 8, 16)
        >>> query, out, one = torch.zeros(1, 1, 8), torch.empty(1, 1, 8), torch.ones(1)
        >>> tables = torch.tensor([[1]], dtype=torch.int32)
        >>> lens = torch.tensor([5], dtype=torch.int32)
        >>> ops.paged_attention_v1(
        ...     out, query, key_cache, value_cache, 1, 1.0, tables, lens, 16, 5, None, "auto",
        ...     one, one,
        ... )
        >>> out[0, 0, :2].tolist()
        [1.0, 1.0]
    """
    torch.ops.paged_kv.paged_attention_v1.default(
        out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )


def paged_attention_v2(
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
    """:func:`paged_attention_v1` in partitions of 512 keys that run at the same time.

    Each partition's result is written to the buffers, then they are joined. Partitions past a
    sequence's end are left alone. ``tmp_out`` has the dtype of ``query``, so 16-bit results are
    rounded twice.

    Args:
        out: As for v1.
        exp_sums: ``[num_seqs, num_heads, max_partitions]`` float32: sum of exp(logit - max) of each
            partition. ``max_partitions >= ceil(max(seq_lens) / 512)``.
        max_logits: As ``exp_sums``: the largest logit; -inf if the partition has no visible key.
        tmp_out: ``[num_seqs, num_heads, max_partitions, head_size]``, dtype of ``query``, last dim
            dense: each partition's result.
        query: As for v1.
        key_cache: As for v1.
        value_cache: As for v1.
        num_kv_heads: As for v1.
        scale: As for v1.
        block_tables: As for v1.
        seq_lens: As for v1.
        block_size: As for v1.
        max_seq_len: As for v1.
        alibi_slopes: As for v1.
        kv_cache_dtype: As for v1.
        k_scale: As for v1.
        v_scale: As for v1.
        tp_rank: As for v1.
        blocksparse_local_blocks: As for v1.
        blocksparse_vert_stride: As for v1.
        blocksparse_block_size: As for v1.
        blocksparse_head_sliding_step: As for v1.

    Mutates:
        ``out``, ``exp_sums``, ``max_logits``, ``tmp_out``.

    Raises:
        RuntimeError: As for v1, but any length works; too few partitions for ``seq_lens`` (CPU) or
            ``max_seq_len`` (CUDA).

    Source:
        vLLM 0.6 csrc/attention/paged_attention_v2.cu (arguments and meaning).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> key_cache, value_cache = torch.zeros(38, 1, 2, 16, 4), torch.ones(38, 1, 8, 16)
        >>> query, out, one = torch.zeros(1, 1, 8), torch.empty(1, 1, 8), torch.ones(1)
        >>> exp_sums, max_logits = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2)
        >>> tmp_out = torch.empty(1, 1, 2, 8)
        >>> tables = torch.arange(38, dtype=torch.int32)[None]
        >>> lens = torch.tensor([600], dtype=torch.int32)
        >>> ops.paged_attention_v2(
        ...     out, exp_sums, max_logits, tmp_out, query, key_cache, value_cache, 1, 1.0, tables,
        ...     lens, 16, 600, None, "auto", one, one,
        ... )
        >>> exp_sums.tolist()  # all logits are 0: the number of keys
        [[[512.0, 88.0]]]
    """
    torch.ops.paged_kv.paged_attention_v2.default(
        out,
        exp_sums,
        max_logits,
        tmp_out,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
    )
