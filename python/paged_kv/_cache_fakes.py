# SPDX-License-Identifier: Apache-2.0
"""Kernels of the cache ops for fake tensors: they check shapes and compute nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)
from paged_kv._cache_panels import KEY_PANELS_NUM_DIMS, has_panels
from paged_kv._fake_checks import (
    FLOAT_DTYPES,
    NamedSizes,
    check_cache_dtype,
    check_dtype,
    check_kv_cache_dtype,
    check_panels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__: list[str] = []


def _check(sizes: NamedSizes, tensor: Tensor, name: str, dtype: torch.dtype, *dims: str) -> None:
    sizes.check(tensor, name, *dims)
    check_dtype(tensor, name, dtype)


def _check_at_least(name: str, size: int, minimum: int) -> None:
    torch._check(size >= minimum, lambda: f"{name}: expected at least {minimum}, got {size}")


def _check_new_tokens(
    key: Tensor, value: Tensor, slot_mapping: Tensor, kv_cache_dtype: str
) -> NamedSizes:
    check_kv_cache_dtype(kv_cache_dtype, key.device)
    sizes = NamedSizes()
    check_dtype(key, "key", *FLOAT_DTYPES)
    sizes.check(key, "key", "num_key_tokens", "num_kv_heads", "head_size")
    _check(sizes, value, "value", key.dtype, "num_value_tokens", "num_kv_heads", "head_size")
    _check(sizes, slot_mapping, "slot_mapping", torch.int64, "num_tokens")
    _check_at_least("key", sizes["num_key_tokens"], sizes["num_tokens"])
    _check_at_least("value", sizes["num_value_tokens"], sizes["num_tokens"])
    return sizes


@torch.library.register_fake("paged_kv::reshape_and_cache")
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    sizes = _check_new_tokens(key, value, slot_mapping, kv_cache_dtype)
    key_dims = ("num_blocks", "num_kv_heads", "head_size / x", "block_size", "x")
    value_dims = ("num_blocks", "num_kv_heads", "head_size", "block_size")
    sizes.check(key_cache, "key_cache", *key_dims)
    check_cache_dtype(key_cache, "key_cache", kv_cache_dtype, key.dtype)
    sizes.check(value_cache, "value_cache", *value_dims)
    check_cache_dtype(value_cache, "value_cache", kv_cache_dtype, key.dtype)
    torch._check(
        sizes["x"] * key_cache.element_size() == 16
        and sizes["head_size / x"] * sizes["x"] == sizes["head_size"],
        lambda: (
            f"key_cache: expected x of 16 bytes and head_size = {sizes['head_size']}, got "
            f"{list(key_cache.shape)}"
        ),
    )
    check_dtype(k_scale, "k_scale", torch.float32)
    check_dtype(v_scale, "v_scale", torch.float32)


@torch.library.register_fake("paged_kv::reshape_and_cache_flash")
def _reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    sizes = _check_new_tokens(key, value, slot_mapping, kv_cache_dtype)
    dims = ("num_blocks", "block_size", "num_kv_heads", "head_size")
    are_panels = has_panels(key_cache) or has_panels(value_cache)
    for cache, name in ((key_cache, "key_cache"), (value_cache, "value_cache")):
        check_cache_dtype(cache, name, kv_cache_dtype, key.dtype)
        if are_panels:
            check_panels(cache, name, sizes, is_key=name == "key_cache")
        else:
            sizes.check(cache, name, *dims)
    check_dtype(k_scale, "k_scale", torch.float32)
    check_dtype(v_scale, "v_scale", torch.float32)


def _check_block_mapping(block_mapping: Tensor) -> None:
    sizes = NamedSizes()
    _check(sizes, block_mapping, "block_mapping", torch.int64, "num_pairs", "2")
    torch._check(
        sizes["2"] == 2,
        lambda: f"block_mapping: expected shape [num_pairs, 2], got {list(block_mapping.shape)}",
    )


@torch.library.register_fake("paged_kv::copy_blocks")
def _copy_blocks(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], block_mapping: Tensor
) -> None:
    torch._check(
        len(key_caches) == len(value_caches),
        lambda: f"value_caches: expected {len(key_caches)} tensors, got {len(value_caches)}",
    )
    _check_block_mapping(block_mapping)


@torch.library.register_fake("paged_kv::swap_blocks")
def _swap_blocks(src: Tensor, dst: Tensor, block_size_in_bytes: int, block_mapping: Tensor) -> None:
    check_dtype(dst, "dst", src.dtype)
    torch._check(
        block_size_in_bytes > 0,
        lambda: f"block_size_in_bytes: expected more than 0, got {block_size_in_bytes}",
    )
    _check_block_mapping(block_mapping)


@torch.library.register_fake("paged_kv::gather_cache")
def _gather_cache(
    cache: Tensor,
    out: Tensor,
    block_tables: Tensor,
    cu_seq_lens: Tensor,
    seq_starts: Tensor | None = None,
    kv_cache_dtype: str = "auto",
    scale: Tensor | None = None,
) -> None:
    sizes = NamedSizes()
    check_dtype(out, "out", *FLOAT_DTYPES)
    check_cache_dtype(cache, "cache", kv_cache_dtype, out.dtype)
    sizes.check(out, "out", "num_out_tokens", "num_kv_heads", "head_size")
    if has_panels(cache):
        check_panels(cache, "cache", sizes, is_key=cache.dim() == KEY_PANELS_NUM_DIMS)
    else:
        sizes.check(cache, "cache", "num_blocks", "block_size", "num_kv_heads", "head_size")
    torch._check(sizes["block_size"] > 0, lambda: "cache: expected block_size of at least 1, got 0")
    _check(sizes, block_tables, "block_tables", torch.int32, "num_seqs", "max_blocks")
    sizes.bind("num_seqs + 1", sizes["num_seqs"] + 1)
    _check(sizes, cu_seq_lens, "cu_seq_lens", torch.int32, "num_seqs + 1")
    if seq_starts is not None:
        _check(sizes, seq_starts, "seq_starts", torch.int32, "num_seqs")
    if scale is not None:
        check_dtype(scale, "scale", torch.float32)


@torch.library.register_fake("paged_kv::compute_slot_mapping")
def _compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_tables: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    idx_mapping: Tensor | None = None,
) -> None:
    sizes = NamedSizes()
    _check(sizes, query_start_loc, "query_start_loc", torch.int32, "num_seqs + 1")
    _check(sizes, positions, "positions", torch.int64, "num_positions")
    _check(sizes, block_tables, "block_tables", torch.int32, "num_rows", "max_blocks")
    _check(sizes, slot_mapping, "slot_mapping", torch.int64, "max_num_tokens")
    torch._check(block_size > 0, lambda: f"block_size: expected more than 0, got {block_size}")
    if idx_mapping is not None:
        sizes.bind("num_seqs", sizes["num_seqs + 1"] - 1)
        _check(sizes, idx_mapping, "idx_mapping", torch.int32, "num_seqs")


@torch.library.register_fake("paged_kv::apply_block_table_writes")
def _apply_block_table_writes(
    table: Tensor, rows: Tensor, starts: Tensor, cu_lens: Tensor, contents: Tensor
) -> None:
    sizes = NamedSizes()
    _check(sizes, table, "table", torch.int32, "max_num_reqs", "max_blocks")
    for tensor, name in ((rows, "rows"), (starts, "starts"), (cu_lens, "cu_lens")):
        _check(sizes, tensor, name, torch.int32, "num_writes")
    _check(sizes, contents, "contents", torch.int32, "num_contents")


@torch.library.register_fake("paged_kv::gather_block_tables")
def _gather_block_tables(
    table: Tensor, idx_mapping: Tensor, num_blocks: Tensor, out: Tensor
) -> None:
    sizes = NamedSizes()
    _check(sizes, table, "table", torch.int32, "max_num_reqs", "max_blocks")
    _check(sizes, idx_mapping, "idx_mapping", torch.int32, "num_reqs")
    _check(sizes, num_blocks, "num_blocks", torch.int32, "max_num_reqs")
    _check(sizes, out, "out", torch.int32, "num_out_rows", "num_out_columns")
