# SPDX-License-Identifier: Apache-2.0
"""Plain torch and Python forms of the cache ops, exported by ``reference``.

They have the arguments of the ops and change the same tensors, one token or block after the other:
read them to learn what an op does. They check nothing. A cache of a ``kv_cache_dtype`` other
than ``auto`` is uint8 or torch's float8, or int8.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from paged_kv._cache_panels import KEY_PANELS_NUM_DIMS, PANEL_DIMS, PANEL_TOKENS, as_nhd
from paged_kv._quantization import dequantize_kv, quantize_kv

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "apply_block_table_writes",
    "compute_slot_mapping",
    "copy_blocks",
    "gather_block_tables",
    "gather_cache",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]


def _stored(
    new_tokens: Tensor, cache: Tensor, kv_cache_dtype: str, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """New tokens and their cache, both in the dtype that is copied."""
    if kv_cache_dtype == "auto" or scale is None:
        return new_tokens, cache
    stored = quantize_kv(new_tokens, kv_cache_dtype, scale)
    return stored.view(torch.uint8), cache.view(torch.uint8)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new tokens into a cache of layout ``vllm``: see ``ops.reshape_and_cache``."""
    _, num_kv_heads, num_chunks, block_size, x = key_cache.shape
    key, key_cache = _stored(key, key_cache, kv_cache_dtype, k_scale)
    value, value_cache = _stored(value, value_cache, kv_cache_dtype, v_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        key_cache[block, :, :, offset, :] = key[token].reshape(num_kv_heads, num_chunks, x)
        value_cache[block, :, :, offset] = value[token]


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes new tokens into an nhd, hnd or panels cache: see ``ops.reshape_and_cache_flash``."""
    key, key_cache = _stored(key, key_cache, kv_cache_dtype, k_scale)
    value, value_cache = _stored(value, value_cache, kv_cache_dtype, v_scale)
    if key_cache.dim() == KEY_PANELS_NUM_DIMS:
        _write_panels(key, value, key_cache, value_cache, slot_mapping)
        return
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        key_cache[block, offset] = key[token]
        value_cache[block, offset] = value[token]


def _write_panels(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    _, num_kv_heads, num_groups, num_units, _, x = key_cache.shape
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, num_groups * PANEL_TOKENS)
        group, lane = divmod(offset, PANEL_TOKENS)
        units = key[token].reshape(num_kv_heads, num_units, x)
        key_cache[block, :, group, :, lane, :] = units
        chunks = value[token].reshape(num_kv_heads, -1, PANEL_DIMS)
        value_cache[block, :, group, :, lane // x, :, lane % x] = chunks


def copy_blocks(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor
) -> None:
    """Copies whole blocks inside each cache: see ``ops.copy_blocks``."""
    for cache in (*key_caches, *value_caches):
        for src, dst in block_mapping.tolist():
            cache[dst] = cache[src]


def swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    """Copies whole blocks between contiguous tensors: see ``ops.swap_blocks``."""
    src_blocks = src.view(-1).view(torch.uint8).view(-1, block_size_in_bytes)
    dst_blocks = dst.view(-1).view(torch.uint8).view(-1, block_size_in_bytes)
    for src_block, dst_block in block_mapping.tolist():
        dst_blocks[dst_block] = src_blocks[src_block]


def gather_cache(
    cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    scale: Tensor | None = None,
) -> None:
    """Reads cached tokens into a contiguous tensor: see ``ops.gather_cache``."""
    cache = as_nhd(cache)
    block_size = cache.shape[1]
    for seq, (begin, end) in enumerate(pairwise(cu_seq_lens.tolist())):
        start = 0 if seq_starts is None else int(seq_starts[seq])
        for row in range(begin, end):
            block_idx, offset = divmod(start + row - begin, block_size)
            token = cache[int(block_tables[seq, block_idx]), offset]
            if kv_cache_dtype != "auto" and scale is not None:
                token = dequantize_kv(token, kv_cache_dtype, scale)
            out[row] = token


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    idx_mapping: Tensor | None = None,
) -> None:
    """Computes the slot of each token: see ``ops.compute_slot_mapping``."""
    slot_mapping.fill_(-1)
    for seq, (begin, end) in enumerate(pairwise(query_start_loc.tolist())):
        row = seq if idx_mapping is None else int(idx_mapping[seq])
        if row < 0:
            continue
        for token in range(begin, end):
            block_idx, offset = divmod(int(positions[token]), block_size)
            slot_mapping[token] = int(block_tables[row, block_idx]) * block_size + offset


def apply_block_table_writes(
    table: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, contents: Tensor
) -> None:
    """Applies staged changes to a block table: see ``ops.apply_block_table_writes``."""
    begin = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), cu_lens.tolist(), strict=True):
        table[row, start : start + end - begin] = contents[begin:end]
        begin = end


def gather_block_tables(
    table: Tensor, idx_mapping: Tensor, num_blocks: Tensor, out: Tensor
) -> None:
    """Gathers table rows into batch order: see ``ops.gather_block_tables``."""
    out[len(idx_mapping) :] = 0
    for i, row in enumerate(idx_mapping.tolist()):
        if row < 0:
            out[i] = 0
            continue
        width = int(num_blocks[row])
        out[i, :width] = table[row, :width]
