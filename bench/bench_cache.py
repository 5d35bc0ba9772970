# SPDX-License-Identifier: Apache-2.0
"""Cache writers and copies against a plain copy of the same bytes: the bound of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv.ops
from cases import WRITES
from timing import Row, time_interleaved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cases import WriteCase

SCALE = torch.ones(1)


def rows(num_samples: int) -> Iterator[Row]:
    """Writers, block copies and gathers, of caches as they are and of quantised ones."""
    yield from _rows_as_they_are(num_samples)
    yield from _quantised_rows(num_samples)


def _rows_as_they_are(num_samples: int) -> Iterator[Row]:
    case = WRITES[0]
    shape = (case.num_tokens, case.num_kv_heads, case.head_size)
    key, value = torch.randn(shape), torch.randn(shape)
    x = 16 // key.element_size()
    flash = torch.zeros(2, case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    packed_key = torch.zeros(
        case.num_blocks, case.num_kv_heads, case.head_size // x, case.block_size, x
    )
    packed_value = torch.zeros(case.num_blocks, case.num_kv_heads, case.head_size, case.block_size)
    panels = paged_kv.allocate_kv_cache(*flash.shape[1:], dtype=key.dtype, layout="panels")
    num_bytes = 2 * key.nbytes
    plain_copy = _plain_copy(num_bytes)
    torch.manual_seed(0)
    for case in WRITES:
        name = "scattered slots" if case.scattered else "runs of slots"
        slot_mapping = case.slot_mapping()
        yield _row(
            f"reshape_and_cache_flash, {name}",
            lambda s=slot_mapping: paged_kv.ops.reshape_and_cache_flash(
                key, value, flash[0], flash[1], s, "auto", SCALE, SCALE
            ),
            plain_copy,
            num_bytes,
            num_samples,
        )
        yield _row(
            f"reshape_and_cache_flash into panels, {name}",
            lambda s=slot_mapping: paged_kv.ops.reshape_and_cache_flash(
                key, value, *panels, s, "auto", SCALE, SCALE
            ),
            plain_copy,
            num_bytes,
            num_samples,
        )
        yield _row(
            f"reshape_and_cache, {name}",
            lambda s=slot_mapping: paged_kv.ops.reshape_and_cache(
                key, value, packed_key, packed_value, s, "auto", SCALE, SCALE
            ),
            plain_copy,
            num_bytes,
            num_samples,
        )
    half = case.num_tokens // case.block_size
    mapping = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1)
    yield _row(
        "copy_blocks",
        lambda: paged_kv.ops.copy_blocks([flash[0]], [flash[1]], mapping),
        plain_copy,
        num_bytes,
        num_samples,
    )
    out, tables, cu_seq_lens = torch.empty(shape), *_one_sequence(case)
    yield _row(
        "gather_cache",
        lambda: paged_kv.ops.gather_cache(flash[0], out, tables, cu_seq_lens),
        _plain_copy(out.nbytes),
        out.nbytes,
        num_samples,
    )


def _quantised_rows(num_samples: int) -> Iterator[Row]:
    """float32 tokens: an element is 4 bytes on one side and 1 on the other, so 2.5 of a copy."""
    case = WRITES[0]
    shape = (case.num_tokens, case.num_kv_heads, case.head_size)
    key, value, out = torch.randn(shape), torch.randn(shape), torch.empty(shape)
    num_bytes = key.numel() * 5 // 2
    slot_mapping, (tables, cu_seq_lens) = case.slot_mapping(), _one_sequence(case)
    b, s, h, d = case.num_blocks, case.block_size, case.num_kv_heads, case.head_size
    for kv_cache_dtype, dtype in (("fp8", torch.uint8), ("int8", torch.int8)):
        caches = torch.zeros(2, b, s, h, d, dtype=dtype)
        packed_key = torch.zeros(b, h, d // 16, s, 16, dtype=dtype)
        packed_value = torch.zeros(b, h, d, s, dtype=dtype)
        arguments = (slot_mapping, kv_cache_dtype, SCALE, SCALE)
        yield _row(
            f"reshape_and_cache_flash, {kv_cache_dtype}",
            lambda c=caches, a=arguments: paged_kv.ops.reshape_and_cache_flash(
                key, value, c[0], c[1], *a
            ),
            _plain_copy(2 * num_bytes),
            2 * num_bytes,
            num_samples,
        )
        yield _row(
            f"reshape_and_cache, {kv_cache_dtype}",
            lambda k=packed_key, v=packed_value, a=arguments: paged_kv.ops.reshape_and_cache(
                key, value, k, v, *a
            ),
            _plain_copy(2 * num_bytes),
            2 * num_bytes,
            num_samples,
        )
        yield _row(
            f"gather_cache, {kv_cache_dtype}",
            lambda c=caches, f=kv_cache_dtype: paged_kv.ops.gather_cache(
                c[0], out, tables, cu_seq_lens, None, f, SCALE
            ),
            _plain_copy(num_bytes),
            num_bytes,
            num_samples,
        )


def _one_sequence(case: WriteCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table and cu_seq_lens of all tokens, their blocks in random order."""
    order = torch.randperm(case.num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order[: -(-case.num_tokens // case.block_size)].int().view(1, -1)
    return tables, torch.tensor([0, case.num_tokens], dtype=torch.int32)


def _plain_copy(num_bytes: int) -> Callable[[], object]:
    source, target = torch.randn(num_bytes // 4), torch.empty(num_bytes // 4)
    return lambda: target.copy_(source)


def _row(
    case: str,
    ours: Callable[[], object],
    plain_copy: Callable[[], object],
    num_bytes: int,
    num_samples: int,
) -> Row:
    timings = time_interleaved({"ours": ours, "peer": plain_copy}, num_samples)
    return Row(
        case=case,
        ours=timings["ours"],
        references={"Tensor.copy_ of as many bytes": timings["peer"]},
        rate=num_bytes / timings["ours"].median_s / 1e9,
        rate_unit="GB/s",
    )
