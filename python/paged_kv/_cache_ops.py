# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of the paged cache: wrappers of ``torch.ops.paged_kv``, exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "copy_blocks",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes the keys and values of new tokens into a cache of layout ``vllm``.

    Args:
        key: ``[>= num_tokens, num_kv_heads, head_size]``, f32/f16/bf16. Tokens past ``num_tokens``
            are padding and are not read.
        value: As ``key``.
        key_cache: ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``; x = 16 bytes'
            worth of elements. Dtype of ``key``, or as ``kv_cache_dtype`` says. Any strides. Must
            not share memory with ``key``.
        value_cache: ``[num_blocks, num_kv_heads, head_size, block_size]``, as ``key_cache``.
        slot_mapping: ``[num_tokens]`` int64; slot = block_id * block_size + offset. A negative
            slot is skipped. Slots should be distinct; of equal ones, either token wins, on CUDA
            piece by piece.
        kv_cache_dtype: ``"auto"``: the cache holds elements as they are. ``"fp8"`` (=
            ``"fp8_e4m3"``), ``"fp8_e4m3"``, ``"fp8_e5m2"``: the cache is uint8 or torch's float8
            and holds ``reference.quantize_kv(key, kv_cache_dtype, k_scale)``. ``"int8"``, on the
            CPU only: likewise, and the cache is int8.
        k_scale: float32, one element or ``[num_kv_heads]``. Not used for ``"auto"``.
        v_scale: As ``k_scale``.

    Mutates:
        ``key_cache``, ``value_cache``, in the slots named and nowhere else.

    Raises:
        RuntimeError: Shape, dtype or device mismatch, another ``kv_cache_dtype``, ``head_size``
            not a multiple of x; on the CPU a slot past the end of the cache. On CUDA, where slots
            cannot be seen without waiting for the device, such a token is skipped.

    Notes:
        Cost: reads and writes 2 * num_kv_heads * head_size elements a token, in parallel over
        tokens. Runs of consecutive slots in one block are cheapest: their values are transposed
        together.

    Source:
        vLLM 0.32 reshape_and_cache.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> key_cache = torch.zeros(4, 1, 2, 16, 4)  # 4 blocks of 16 tokens, head_size 8
        >>> value_cache = torch.zeros(4, 1, 8, 16)
        >>> key, one = torch.arange(8.0).view(1, 1, 8), torch.ones(1)
        >>> slots = torch.tensor([2 * 16 + 5])
        >>> ops.reshape_and_cache(key, key, key_cache, value_cache, slots, "auto", one, one)
        >>> key_cache[2, 0, :, 5].tolist()
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
        >>> value_cache[2, 0, :, 5].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    torch.ops.paged_kv.reshape_and_cache.default(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes the keys and values of new tokens into a cache of layout nhd, hnd or panels.

    Args:
        key: ``[>= num_tokens, num_kv_heads, head_size]``, f32/f16/bf16. Tokens past ``num_tokens``
            are padding and are not read.
        value: As ``key``.
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``. Dtype of ``key``, or as
            ``kv_cache_dtype`` says. Any strides: an hnd cache is passed as
            ``cache.transpose(1, 2)``, and slices of one tensor that holds keys and values do as
            well. Or, on the CPU, panels: ``[num_blocks, num_kv_heads, block_size / 16,
            head_size / x, 16, x]``, x = 2 for bfloat16 and 1 for other dtypes, contiguous from the
            third dimension on. Must not share memory with ``key``.
        value_cache: As ``key_cache``; panels are ``[num_blocks, num_kv_heads, block_size / 16,
            head_size / 16, 16 / x, 16, x]``.
        slot_mapping: ``[num_tokens]`` int64; slot = block_id * block_size + offset. A negative
            slot is skipped. Slots should be distinct; of equal ones, either token wins, on CUDA
            piece by piece.
        kv_cache_dtype: ``"auto"``: the cache holds elements as they are. ``"fp8"`` (=
            ``"fp8_e4m3"``), ``"fp8_e4m3"``, ``"fp8_e5m2"``: the cache is uint8 or torch's float8
            and holds ``reference.quantize_kv(key, kv_cache_dtype, k_scale)``. ``"int8"``, on the
            CPU only: likewise, and the cache is int8.
        k_scale: float32, one element or ``[num_kv_heads]``. Not used for ``"auto"``.
        v_scale: As ``k_scale``.

    Mutates:
        ``key_cache``, ``value_cache``, in the slots named and nowhere else.

    Raises:
        RuntimeError: Shape, dtype or device mismatch, another ``kv_cache_dtype``, panels that are
            not contiguous, whose ``head_size`` is not a multiple of 16, or on CUDA; on the CPU a
            slot past the end of the cache. On CUDA, where slots cannot be seen without waiting for
            the device, such a token is skipped.

    Notes:
        Cost: reads and writes 2 * num_kv_heads * head_size elements a token, in parallel over
        tokens; at the speed of memcpy where heads are contiguous. In panels, tokens that follow
        each other in a group of 16 are written together.

    Source:
        vLLM 0.32 reshape_and_cache_flash.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> cache = torch.zeros(2, 4, 16, 1, 2)  # keys and values of 4 blocks of 16 tokens
        >>> key, one = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.ones(1)
        >>> slots = torch.tensor([2 * 16 + 5, -1])  # the second token is padding
        >>> ops.reshape_and_cache_flash(key, -key, cache[0], cache[1], slots, "auto", one, one)
        >>> cache[:, 2, 5, 0].tolist()
        [[1.0, 2.0], [-1.0, -2.0]]
        >>> int(cache.count_nonzero())
        4
    """
    torch.ops.paged_kv.reshape_and_cache_flash.default(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def copy_blocks(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copies whole blocks inside the caches of all layers, as copy-on-write needs it.

    Args:
        key_caches: One tensor a layer, ``[num_blocks, ...]``: any layout, dtype and strides.
        value_caches: As many, likewise.
        block_mapping: ``[num_pairs, 2]`` int64 on the device of the caches: source and destination
            block of each pair. A destination may not appear twice nor be a source: the pairs have
            no order.

    Mutates:
        ``key_caches``, ``value_caches``, in the destination blocks.

    Raises:
        RuntimeError: Lists of different length; on the CPU a block id out of range, a destination
            used twice or also a source. On CUDA, where ids cannot be seen without waiting for the
            device, a pair out of range is left out, and such a destination gets a mixture; there
            blocks of more than 4 dimensions with gaps, or of more than 2^31 bytes, are refused.

    Notes:
        Cost: one memcpy a pair and cache where a block is dense, in parallel over both. On CUDA one
        launch for each 64 caches that are alike.

    Source:
        vLLM 0.6 csrc/cache_kernels.cu copy_blocks.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> key_cache, value_cache = torch.arange(4.0).view(4, 1), torch.arange(4.0).view(4, 1)
        >>> ops.copy_blocks([key_cache], [value_cache], torch.tensor([[1, 0], [1, 3]]))
        >>> key_cache.flatten().tolist()
        [1.0, 1.0, 2.0, 1.0]
    """
    torch.ops.paged_kv.copy_blocks.default(list(key_caches), list(value_caches), block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copies whole blocks from one cache tensor to another.

    Block i is the bytes ``i * block_size_in_bytes`` and on of a tensor's memory, whatever its
    shape; ``block_size_in_bytes`` is ``cache.stride(0) * cache.element_size()`` where blocks are
    the outermost dimension.

    Args:
        src: Dense (no gaps in memory), any shape, on the CPU or a CUDA device.
        dst: As ``src``, of its dtype; not the same memory. The number of blocks may differ. On the
            CPU or a CUDA device; if both are on one, on the same.
        block_size_in_bytes: Divides the size of both.
        block_mapping: ``[num_pairs, 2]`` int64 on the CPU: block of ``src``, block of ``dst``. A
            block of ``dst`` may not appear twice.

    Mutates:
        ``dst``, in the destination blocks.

    Raises:
        RuntimeError: A block id out of range, a destination used twice, a tensor with gaps,
            another dtype, memory that overlaps.

    Notes:
        Cost: one memcpy a pair, in parallel. With CUDA: one cudaMemcpyAsync on the current stream
        for each run of pairs that follow each other on both sides. It does not wait, so CPU memory
        must live, unchanged, until the stream is past the copy; pin it, else the driver copies it
        through a buffer of its own.

    Source:
        vLLM 0.32 swap_blocks.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> cache, host = torch.arange(8.0).view(4, 2), torch.zeros(2, 2)
        >>> ops.swap_blocks(cache, host, 2 * 4, torch.tensor([[3, 0], [1, 1]]))
        >>> host.tolist()
        [[6.0, 7.0], [2.0, 3.0]]
    """
    torch.ops.paged_kv.swap_blocks.default(src, dst, block_size_in_bytes, block_mapping)


def gather_cache(
    cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    scale: Tensor | None = None,
) -> None:
    """Reads the cached tokens of each sequence into one contiguous tensor.

    Args:
        cache: Key or value cache, ``[num_blocks, block_size, num_kv_heads, head_size]``, dtype of
            ``out`` or as ``kv_cache_dtype`` says, any strides (layouts nhd and hnd). On the CPU
            also keys or values in panels, see :func:`reshape_and_cache_flash`.
        out: ``[>= cu_seq_lens[-1], num_kv_heads, head_size]``, f32/f16/bf16. Must not share memory
            with ``cache``.
        block_tables: ``[num_seqs, max_blocks]`` int32. Entries that no token needs are not read.
        cu_seq_lens: ``[num_seqs + 1]`` int32, starts at 0: sequence s fills the rows
            ``cu_seq_lens[s]`` to ``cu_seq_lens[s + 1]``.
        seq_starts: ``[num_seqs]`` int32, the first token that is read of each sequence; need not
            be a multiple of the block size. None: 0.
        kv_cache_dtype: ``"auto"``: the cache holds elements as they are. ``"fp8"`` (=
            ``"fp8_e4m3"``), ``"fp8_e4m3"``, ``"fp8_e5m2"``: the cache is uint8 or torch's float8,
            and out gets ``reference.dequantize_kv(cache, kv_cache_dtype, scale)``. ``"int8"``, on
            the CPU only: likewise, and the cache is int8.
        scale: float32, one element or ``[num_kv_heads]``. Not used for ``"auto"``.

    Mutates:
        ``out``, the first ``cu_seq_lens[-1]`` rows.

    Raises:
        RuntimeError: Shape, dtype or device mismatch, another ``kv_cache_dtype``; on the CPU a
            block id out of range, a table or ``out`` too short. On CUDA, where values cannot be
            seen without waiting for the device, rows of such tokens are left alone.

    Notes:
        Cost: reads and writes num_kv_heads * head_size elements a token, in parallel over tokens.

    Source:
        vLLM 0.32 cp_gather_cache; there ``seq_starts`` must be a multiple of the block size.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> cache = torch.arange(8.0).view(4, 2, 1, 1)  # 4 blocks of 2 tokens
        >>> out = torch.empty(5, 1, 1)
        >>> tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
        >>> ops.gather_cache(cache, out, tables, torch.tensor([0, 3, 5], dtype=torch.int32))
        >>> out.flatten().tolist()
        [6.0, 7.0, 2.0, 4.0, 5.0]
    """
    torch.ops.paged_kv.gather_cache.default(
        cache, out, block_tables, cu_seq_lens, seq_starts, kv_cache_dtype, scale
    )
