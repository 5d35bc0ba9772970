# SPDX-License-Identifier: Apache-2.0
"""``PagedAttention``: the cache of one layer in layout ``vllm``, written and read with the ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv import ops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["PARTITION_SIZE", "PagedAttention", "num_partitions", "use_v1"]

PARTITION_SIZE = 512
"""Tokens a partition of ``paged_attention_v2``."""

_MAX_V1_SEQ_LEN = 8192
_ENOUGH_ROWS = 512


def num_partitions(max_seq_len: int) -> int:
    """Returns how many partitions ``paged_attention_v2`` needs for ``max_seq_len`` tokens.

    Example:
        >>> num_partitions(512), num_partitions(513)
        (1, 2)
    """
    return max(1, -(-max_seq_len // PARTITION_SIZE))


def use_v1(max_seq_len: int, num_seqs: int, num_heads: int) -> bool:
    """Returns whether a decode step should run ``paged_attention_v1`` rather than ``v2``.

    v1 handles a (sequence, head) in one go and v2 in partitions, whose results it must join. So v1
    is for contexts of one partition, and for batches with enough (sequence, head) pairs to keep
    the machine busy, unless the context is so long that one go takes too long.

    Args:
        max_seq_len: Tokens of the longest sequence.
        num_seqs: Sequences in the batch.
        num_heads: Query heads.

    Source:
        vLLM 0.6 attention/ops/paged_attn.py PagedAttention.forward_decode.

    Example:
        >>> use_v1(512, 1, 8), use_v1(513, 1, 8), use_v1(513, 65, 8), use_v1(8193, 65, 8)
        (True, False, True, False)
    """
    if max_seq_len > _MAX_V1_SEQ_LEN:
        return False
    return num_partitions(max_seq_len) == 1 or num_seqs * num_heads > _ENOUGH_ROWS


class PagedAttention:
    """The steps of paged attention under vLLM's names, for caches in layout ``vllm``.

    All methods are static. ``kv_cache`` is one tensor a layer with keys and values
    (:meth:`get_kv_cache_shape`); ``key_cache`` and ``value_cache`` are its two halves
    (:meth:`split_kv_cache`).

    Source:
        vLLM 0.6 attention/ops/paged_attn.py PagedAttention. Here ``forward_prefix`` reads the
        step's keys and values from the cache, and scales are float32 tensors.

    Example:
        >>> import torch
        >>> from paged_kv.attention import PagedAttention
        >>> kv_cache = torch.zeros(PagedAttention.get_kv_cache_shape(4, 16, 1, 8))
        >>> key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, 1, 8)
        >>> key, one, slots = torch.ones(2, 1, 8), torch.ones(1), torch.tensor([32, 33])
        >>> PagedAttention.write_to_paged_cache(
        ...     key, 3 * key, key_cache, value_cache, slots, "auto", one, one
        ... )
        >>> tables, lens = torch.tensor([[2]], dtype=torch.int32), torch.tensor([2]).int()
        >>> out = PagedAttention.forward_decode(
        ...     key[:1], key_cache, value_cache, tables, lens, 2, "auto", 1, 1.0, None, one, one
        ... )
        >>> out[0, 0, :2].tolist()
        [3.0, 3.0]
    """

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Returns the head sizes that every backend has."""
        return [32, 64, 80, 96, 112, 120, 128, 192, 256]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Returns the shape of one layer's ``kv_cache``: ``[2, num_blocks, elements a block]``."""
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def split_kv_cache(
        kv_cache: Tensor, num_kv_heads: int, head_size: int
    ) -> tuple[Tensor, Tensor]:
        """Returns the key cache and the value cache in ``kv_cache``, as views.

        Args:
            kv_cache: ``[2, num_blocks, block_size * num_kv_heads * head_size]``, each of the two
                halves contiguous.
            num_kv_heads: Heads of the keys and values.
            head_size: A multiple of x = 16 bytes' worth of elements.

        Returns:
            Key cache ``[num_blocks, num_kv_heads, head_size / x, block_size, x]`` and value cache
            ``[num_blocks, num_kv_heads, head_size, block_size]``.

        Raises:
            ValueError: ``kv_cache`` has another shape, or ``head_size`` is not a multiple of x.
        """
        x = 16 // kv_cache.element_size()
        if head_size % x != 0:
            msg = f"head_size: expected a multiple of {x} (16 bytes), got {head_size}"
            raise ValueError(msg)
        if (
            kv_cache.dim() != 3
            or kv_cache.shape[0] != 2
            or kv_cache.shape[2] % (num_kv_heads * head_size) != 0
        ):
            msg = (
                "kv_cache: expected shape [2, num_blocks, block_size * num_kv_heads * head_size] "
                f"with {num_kv_heads} heads of size {head_size}, got {list(kv_cache.shape)}"
            )
            raise ValueError(msg)
        num_blocks = kv_cache.shape[1]
        block_size = kv_cache.shape[2] // (num_kv_heads * head_size)
        key_cache = kv_cache[0].view(num_blocks, num_kv_heads, head_size // x, block_size, x)
        value_cache = kv_cache[1].view(num_blocks, num_kv_heads, head_size, block_size)
        return key_cache, value_cache

    @staticmethod
    def write_to_paged_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        v_scale: Tensor,
    ) -> None:
        """Writes the keys and values of new tokens: see :func:`paged_kv.ops.reshape_and_cache`."""
        ops.reshape_and_cache(
            key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
        )

    @staticmethod
    def forward_decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: Tensor | None,
        k_scale: Tensor,
        v_scale: Tensor,
        tp_rank: int = 0,
        blocksparse_local_blocks: int = 0,
        blocksparse_vert_stride: int = 0,
        blocksparse_block_size: int = 64,
        blocksparse_head_sliding_step: int = 0,
    ) -> Tensor:
        """Attention of one query a sequence to its cached keys, this step's included.

        Runs ``paged_attention_v1`` or ``v2``, as :func:`use_v1` says.

        Args:
            query: ``[num_seqs, num_heads, head_size]``.
            key_cache: From :meth:`split_kv_cache`.
            value_cache: As ``key_cache``.
            block_tables: ``[num_seqs, max_blocks]`` int32.
            seq_lens: ``[num_seqs]`` int32, the current token included.
            max_seq_len: Largest of ``seq_lens``, or more.
            kv_cache_dtype: As :func:`paged_kv.ops.paged_attention_v1`.
            num_kv_heads: Heads of the cache.
            scale: Factor of ``q.k``.
            alibi_slopes: ``[num_heads]`` float32, or None.
            k_scale: float32, one element or ``[num_kv_heads]``.
            v_scale: As ``k_scale``.
            tp_rank: As for :func:`paged_kv.ops.paged_attention_v1`, like the rest.
            blocksparse_local_blocks: Likewise.
            blocksparse_vert_stride: Likewise.
            blocksparse_block_size: Likewise.
            blocksparse_head_sliding_step: Likewise.

        Returns:
            ``[num_seqs, num_heads, head_size]``, new, in the dtype of ``query``.

        Raises:
            RuntimeError: As :func:`paged_kv.ops.paged_attention_v1`.
        """
        output = torch.empty_like(query)
        num_seqs, num_heads, head_size = query.shape
        arguments = (
            query,
            key_cache,
            value_cache,
            num_kv_heads,
            scale,
            block_tables,
            seq_lens,
            value_cache.shape[3],  # block_size
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
        if use_v1(max_seq_len, num_seqs, num_heads):
            ops.paged_attention_v1(output, *arguments)
            return output
        partitions = (num_seqs, num_heads, num_partitions(max_seq_len))
        exp_sums = query.new_empty(partitions, dtype=torch.float32)
        max_logits = torch.empty_like(exp_sums)
        tmp_out = query.new_empty(*partitions, head_size)
        ops.paged_attention_v2(output, exp_sums, max_logits, tmp_out, *arguments)
        return output

    @staticmethod
    def forward_prefix(
        query: Tensor,
        key: Tensor,  # noqa: ARG004  (vLLM's argument; see the docstring)
        value: Tensor,  # noqa: ARG004
        kv_cache_dtype: str,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens_tensor: Tensor,
        max_query_len: int,
        alibi_slopes: Tensor | None,
        sliding_window: int | None,
        k_scale: Tensor,
        v_scale: Tensor,
        scale: float | None = None,
    ) -> Tensor:
        """Causal attention of prompts, or parts of them, to the cache: prefill.

        Call it after :meth:`write_to_paged_cache`: also the step's own keys and values are read
        from the cache.

        Args:
            query: ``[num_tokens, num_heads, head_size]``: the tokens of all sequences in a row.
            key: Not read: the cache has the step's keys. Kept for vLLM's argument order.
            value: As ``key``.
            kv_cache_dtype: As :func:`paged_kv.ops.paged_attention_varlen`.
            key_cache: From :meth:`split_kv_cache`.
            value_cache: As ``key_cache``.
            block_tables: ``[num_seqs, max_blocks]`` int32.
            query_start_loc: ``[num_seqs + 1]`` int32, starts at 0.
            seq_lens_tensor: ``[num_seqs]`` int32: cached tokens, this step's included.
            max_query_len: Largest number of queries of a sequence, or more.
            alibi_slopes: ``[num_heads]`` float32, or None.
            sliding_window: Number of keys seen, the query's own included; None or 0: all.
            k_scale: float32, one element or ``[num_kv_heads]``.
            v_scale: As ``k_scale``.
            scale: Factor of ``q.k``; None: ``1 / sqrt(head_size)``.

        Returns:
            ``[num_tokens, num_heads, head_size]``, new, in the dtype of ``query``. Rows of padding
            after the last token are not initialised.

        Raises:
            RuntimeError: As :func:`paged_kv.ops.paged_attention_varlen`.
        """
        output = torch.empty_like(query)
        ops.paged_attention_varlen(
            output,
            query,
            key_cache,
            value_cache,
            query_start_loc,
            seq_lens_tensor,
            block_tables,
            query.shape[-1] ** -0.5 if scale is None else scale,
            sliding_window=sliding_window or 0,
            alibi_slopes=alibi_slopes,
            kv_cache_dtype=kv_cache_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            max_query_len=max_query_len,
        )
        return output

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copies blocks of keys and values from one pool to another.

        Args:
            src_kv_cache: ``[2, num_blocks, elements a block]``, contiguous.
            dst_kv_cache: As ``src_kv_cache``; ``num_blocks`` may differ. Mutated.
            src_to_dst: ``[n, 2]`` int64 on the CPU: block of the source, block of the destination.

        Raises:
            RuntimeError: As :func:`paged_kv.ops.swap_blocks`.
        """
        block_size_in_bytes = src_kv_cache.stride(1) * src_kv_cache.element_size()
        for src, dst in zip(src_kv_cache, dst_kv_cache, strict=True):
            ops.swap_blocks(src, dst, block_size_in_bytes, src_to_dst)

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Tensor], src_to_dists: Tensor) -> None:
        """Copies blocks inside each layer's cache: see :func:`paged_kv.ops.copy_blocks`.

        Args:
            kv_caches: One ``[2, num_blocks, elements a block]`` a layer. Mutated.
            src_to_dists: ``[n, 2]`` int64: source and destination block.

        Raises:
            RuntimeError: As :func:`paged_kv.ops.copy_blocks`.
        """
        ops.copy_blocks(
            [kv_cache[0] for kv_cache in kv_caches],
            [kv_cache[1] for kv_cache in kv_caches],
            src_to_dists,
        )
