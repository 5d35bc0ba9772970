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

SCALE = torch.ones(1)


def rows(num_samples: int) -> Iterator[Row]:
    """Writers of both layouts with runs of slots and scattered slots, and block copies."""
    case = WRITES[0]
    shape = (case.num_tokens, case.num_kv_heads, case.head_size)
    key, value = torch.randn(shape), torch.randn(shape)
    x = 16 // key.element_size()
    flash = torch.zeros(2, case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    packed_key = torch.zeros(
        case.num_blocks, case.num_kv_heads, case.head_size // x, case.block_size, x
    )
    packed_value = torch.zeros(case.num_blocks, case.num_kv_heads, case.head_size, case.block_size)
    num_bytes = 2 * key.nbytes
    source, target = torch.randn(num_bytes // 4), torch.empty(num_bytes // 4)

    def plain_copy() -> None:
        target.copy_(source)

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
        peer="Tensor.copy_ of as many bytes",
        peer_timing=timings["peer"],
        rate=num_bytes / timings["ours"].median_s / 1e9,
        rate_unit="GB/s",
    )
