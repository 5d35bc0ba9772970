# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights, which are nearly all of a decoder's work on a CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)
from paged_kv._model_ops import IN_FEATURES_UNIT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TILE_ROWS", "Linear", "in_fixed_tiles", "is_for_op", "linear"]

TILE_ROWS = 16
"""Rows of each product of `in_fixed_tiles`."""


class Linear(nn.Module):
    """``y = x @ weight.T + bias``, without the random initialisation of ``torch.nn.Linear``.

    Args:
        in_features: last dimension of the input.
        out_features: last dimension of the output.
        bias: add a bias.

    Attributes:
        batch_invariant: see `linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.batch_invariant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, in_features]`` to ``[rows, out_features]``."""
        return linear(x, self.weight, self.bias, batch_invariant=self.batch_invariant)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` by the fastest way on the device.

    On a CPU that is :func:`paged_kv.ops.linear`, which gives a row the same bits in any batch. A
    CPU with units for 16-bit products computes these faster through torch, which doesn't.

    Args:
        x: ``[rows, in_features]``.
        weight: ``[out_features, in_features]``, in the dtype of `x`, or in fewer bits as
            :func:`~paged_kv.models.weight_memory.narrow_if_exact` leaves it.
        bias: ``[out_features]``, or None.
        batch_invariant: give a row the same bits whatever rows come with it.

    Returns:
        ``[rows, out_features]`` in the dtype of `x`.
    """
    needs_op = batch_invariant or weight.dtype != x.dtype or not _has_units_for(weight.dtype)
    if needs_op and is_for_op(weight):
        out = x.new_empty(x.shape[0], weight.shape[0])
        torch.ops.paged_kv.linear(out, x, weight, bias)
        return out
    if batch_invariant:
        return in_fixed_tiles(lambda tile: functional.linear(tile, weight, bias), x)
    return functional.linear(x, weight, bias)


def in_fixed_tiles(
    product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Compute `product` on `TILE_ROWS` rows at a time, the last tile filled up with zeros.

    Libraries choose how to sum by the number of rows, so that a row's last bits depend on how many
    come with it. With one shape for all products they don't.

    Args:
        product: maps ``[TILE_ROWS, in_features]`` to ``[TILE_ROWS, out_features]``, row by row.
        x: ``[rows, in_features]``.

    Returns:
        ``[rows, out_features]``.

    Notes:
        Cost: one row costs as much as `TILE_ROWS`, and many rows about twice what they cost in one
        product.
    """
    rows = x.shape[0]
    if rows == 0:
        return product(x)
    padding = -rows % TILE_ROWS
    padded = functional.pad(x, (0, 0, 0, padding)) if padding else x.contiguous()
    tiles = [product(tile) for tile in torch.split(padded, TILE_ROWS)]
    return torch.cat(tiles)[:rows]


def is_for_op(weight: torch.Tensor) -> bool:
    """Whether :func:`paged_kv.ops.linear` takes such a matrix; if not, torch multiplies."""
    in_features = weight.shape[1]
    return weight.is_cpu and in_features > 0 and in_features % IN_FEATURES_UNIT == 0


@cache
def _has_units_for(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype`, not only in float32, and torch makes use of that."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
