# SPDX-License-Identifier: Apache-2.0
"""Attention of ragged batches, its plan and its merge: wrappers exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention_plan_size", "merge_attn_states", "paged_attention_varlen", "plan_attention"]


def paged_attention_varlen(
    out: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
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
    """Attention of a batch of ragged sequences to the paged cache: prefill, decode or both.

    The queries of a sequence are its last tokens: query ``i`` of ``q`` has position
    ``seq_len - q + i``. Their keys and values are in the cache already. A logit is
    ``scale * q.k``, then softcap, then ALiBi, then the mask; ``sinks`` add one logit per head to
    the denominator. A query that sees no key gives zeros and LSE -inf.

    Args:
        out: ``[num_tokens, num_heads, head_size]``, dtype of ``query``, last dim dense. Rows past
            ``query_start_loc[-1]`` (padding) are left alone.
        query: ``[num_tokens, num_heads, head_size]``, f32/f16/bf16, last dim dense; may be a slice
            of a fused qkv tensor. ``head_size`` <= 256.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of any strides (hnd is a
            transposed view), x-packed ``[num_blocks, num_kv_heads, head_size / x, block_size,
            x]``, x = 16 bytes of elements, or, on the CPU, panels: ``[num_blocks, num_kv_heads,
            block_size / 16, head_size / x, 16, x]``, x = 2 for bfloat16, else 1. Dtype of
            ``query``.
        value_cache: As ``key_cache``; with an x-packed one
            ``[num_blocks, num_kv_heads, head_size, block_size]``, with panels ``[num_blocks,
            num_kv_heads, block_size / 16, head_size / 16, 16 / x, 16, x]``.
        query_start_loc: ``[num_seqs + 1]`` int32, first query of each sequence; starts at 0.
        seq_lens: ``[num_seqs]`` int32, keys of each sequence, this step's tokens included.
        block_tables: ``[num_seqs, max_blocks]`` int32. Entries past a sequence's blocks, and those
            before its sliding window, may hold anything.
        scale: Factor of ``q.k``.
        causal: Whether a query sees no key after its own position.
        sliding_window: Number of keys seen, the query's own included; 0 = all. Bounds the keys
            before the query only.
        softcap: ``softcap * tanh(logit / softcap)``; 0 = off.
        alibi_slopes: ``[num_heads]`` float32; adds ``slope * (key_pos - query_pos)``.
        sinks: ``[num_heads]`` float32 logits. -inf: no sink; inf takes all weight: zeros, LSE inf.
        lse: ``[num_heads, num_tokens]`` float32: log of the sum of exp(logit), the sink included.
        kv_cache_dtype: ``auto``: the caches have the dtype of ``query``. ``fp8`` (=
            ``fp8_e4m3``), ``fp8_e4m3``, ``fp8_e5m2``: uint8 or torch's float8 dtype. ``int8``.
        k_scale: Not used with ``auto``; float32, one element or ``[num_kv_heads]``. A key is
            ``element * scale``.
        v_scale: As ``k_scale``.
        max_query_len: Upper bound of the queries of a sequence; -1: from the shapes.
        max_seq_len: Upper bound of ``seq_lens``; -1: from the shapes.
        plan: What :func:`plan_attention` wrote for this batch. No kernel needs one yet.
        workspace: Scratch memory. No kernel needs any yet.
        split_tokens: > 0 fixes how keys are split, so that results do not depend on the batch. The
            CPU kernel's never do.

    Mutates:
        ``out``, ``lse``, ``workspace``.

    Raises:
        RuntimeError: Shape, dtype or stride mismatch; ``query_start_loc`` that does not start at 0,
            decreases or ends past ``num_tokens``; a length past its bound or the table's row; the
            id of a used block out of range. Nothing is written then.

    Notes:
        Cost: ``4 * head_size * num_heads`` flops a visible (query, key) pair; each tile of queries
        reads its keys and values once for all heads of a kv head. Results are the same bits for
        any number of threads, any batch around a sequence, any chunking of its prompt and any
        placement of its blocks.

    Source:
        vLLM 0.32 flash_attn_varlen_func (arguments); arXiv 2205.14135 (online softmax).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> cache = torch.zeros(4, 16, 1, 8)  # 4 blocks of 16 tokens, 1 kv head
        >>> query, out = torch.zeros(3, 2, 8), torch.empty(3, 2, 8)
        >>> starts = torch.tensor([0, 1, 3], dtype=torch.int32)  # a decode and a prefill of 2
        >>> lens = torch.tensor([20, 2], dtype=torch.int32)
        >>> tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
        >>> lse = torch.empty(2, 3)
        >>> ops.paged_attention_varlen(out, query, cache, cache, starts, lens, tables, 1.0, lse=lse)
        >>> lse[0].exp().round().tolist()  # all logits are 0: the number of keys seen
        [20.0, 1.0, 2.0]
    """
    torch.ops.paged_kv.paged_attention_varlen.default(
        out,
        query,
        key_cache,
        value_cache,
        query_start_loc,
        seq_lens,
        block_tables,
        scale,
        causal,
        sliding_window,
        softcap,
        alibi_slopes,
        sinks,
        lse,
        kv_cache_dtype,
        k_scale,
        v_scale,
        max_query_len,
        max_seq_len,
        plan,
        workspace,
        split_tokens,
    )


def attention_plan_size(
    num_seqs: int,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_slots: int,
) -> int:
    """Elements that :func:`plan_attention` needs at most for a batch of this size.

    Args:
        num_seqs: Sequences of the batch.
        num_tokens: Queries of the batch, all sequences together.
        num_heads: Heads of the query.
        num_kv_heads: Heads of the cache.
        head_size: Elements of a head.
        num_slots: As for :func:`plan_attention`.

    Returns:
        A bound for all lengths, so that a buffer of that size serves every step.

    Example:
        >>> attention_plan_size(4, 4, 32, 8, 128, 264)
        330
    """
    walk_slots = max(num_slots // num_kv_heads, 1)
    rows_per_tile = 128 if head_size <= 128 else 64
    queries_per_tile = max(rows_per_tile // (num_heads // num_kv_heads), 1)
    max_pieces = num_seqs + num_tokens // queries_per_tile + walk_slots - 1
    return 8 + walk_slots + 1 + 8 * max_pieces


def plan_attention(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_slots: int,
    plan: Tensor,
) -> None:
    """Cuts the attention of a batch into pieces that fill a device evenly.

    The plan serves :func:`paged_attention_varlen` for all layers of a step. Its form is in
    docs/attention_plan.md.

    Args:
        query_start_loc: ``[num_seqs + 1]`` int32, as for :func:`paged_attention_varlen`.
        seq_lens: ``[num_seqs]`` int32.
        num_heads: Heads of the query.
        num_kv_heads: Heads of the cache.
        head_size: Elements of a head.
        num_slots: Thread blocks that the device runs at the same time.
        plan: ``[n]`` int32, contiguous, n >= :func:`attention_plan_size`; what is too much is left
            alone.

    Mutates:
        ``plan``.

    Raises:
        RuntimeError: Bad starts, lengths or sizes; a plan that is too short.

    Notes:
        Cost: O((tiles + num_slots) log(units)) integer operations, tiles of 128 rows of queries and
        units of 128 keys.

    Source:
        FlashMLA get_decoding_sched_meta; FlashInfer 0.2 plan().

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> starts = torch.tensor([0, 1], dtype=torch.int32)
        >>> lens = torch.tensor([8192], dtype=torch.int32)
        >>> plan = torch.zeros(ops.attention_plan_size(1, 1, 8, 1, 128, 16), dtype=torch.int32)
        >>> ops.plan_attention(starts, lens, 8, 1, 128, 16, plan)
        >>> int(plan[3])  # one sequence, cut into a piece for each slot
        16
    """
    torch.ops.paged_kv.plan_attention.default(
        query_start_loc, seq_lens, num_heads, num_kv_heads, head_size, num_slots, plan
    )


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Joins attention over a prefix and over a suffix of the keys into attention over both.

    A side whose LSE is -inf (or +inf) has no keys and is not read. If neither has, the result is
    zeros with LSE -inf.

    Args:
        output: ``[num_tokens, num_heads, head_size]``, f32/f16/bf16, last dim dense.
        prefix_output: As ``output``.
        prefix_lse: ``[num_heads, num_tokens]`` float32, natural log.
        suffix_output: As ``output``.
        suffix_lse: As ``prefix_lse``.
        output_lse: As ``prefix_lse``; None if it is not needed.

    Mutates:
        ``output``, ``output_lse``. ``output`` may be ``prefix_output`` or ``suffix_output``.

    Raises:
        RuntimeError: Shape, dtype or stride mismatch.

    Notes:
        Cost: reads both outputs once. The argument order is vLLM's Python one;
        ``torch.ops.paged_kv.merge_attn_states`` has ``output_lse`` in second place.

    Source:
        Section 2.2 of arXiv 2501.01005; vLLM 0.32 merge_attn_states.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> output = torch.empty(1, 1, 2)
        >>> one, three = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 3.0)
        >>> ops.merge_attn_states(output, one, torch.zeros(1, 1), three, torch.zeros(1, 1))
        >>> output.tolist()
        [[[2.0, 2.0]]]
    """
    torch.ops.paged_kv.merge_attn_states.default(
        output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse
    )
