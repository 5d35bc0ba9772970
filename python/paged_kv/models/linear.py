# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights, which are nearly all of a decoder's work on a CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)
from paged_kv.weight_panels import is_in_panels, unpack_weight

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TILE_ROWS",
    "Linear",
    "has_units_for",
    "in_fixed_tiles",
    "is_in_usable_panels",
    "linear",
]

TILE_ROWS = 16
"""Rows of each product of `in_fixed_tiles`."""


class Linear(nn.Module):
    """``y = x @ weight.T + bias``, without the random initialisation of ``torch.nn.Linear``.

    Args:
        in_features: last dimension of the input.
        out_features: last dimension of the output.
        bias: add a bias.

    Attributes:
        weight: ``[out_features, in_features]``, or in panels once the model's weights are prepared.
        batch_invariant: see `linear`.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.out_features = out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.batch_invariant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, in_features]`` to ``[rows, out_features]``."""
        return linear(
            x,
            self.weight,
            self.bias,
            out_features=self.out_features,
            batch_invariant=self.batch_invariant,
        )

    def plain_weight(self) -> torch.Tensor:
        """``[out_features, in_features]``: the weight itself, or a copy if it is in panels."""
        return unpack_weight(self.weight.detach(), out_features=self.out_features)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_features: int,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``: of weights in panels by :func:`paged_kv.ops.linear`, else by torch.

    The op gives a row the same bits in any batch. torch does so only in tiles of one size, which
    are slower.

    Args:
        x: ``[rows, in_features]``.
        weight: ``[out_features, in_features]`` in the dtype of `x`, or from
            :func:`~paged_kv.weight_panels.pack_weight` in any dtype.
        bias: ``[out_features]``, or None.
        out_features: rows of the weight.
        batch_invariant: give a row the same bits whatever rows come with it.

    Returns:
        ``[rows, out_features]`` in the dtype of `x`.

    Raises:
        RuntimeError: the weight was moved or converted after it was laid in panels.
    """
    if is_in_usable_panels(weight):
        out = x.new_empty(x.shape[0], out_features)
        torch.ops.paged_kv.linear(out, x, weight, bias)
        return out
    if batch_invariant:
        return in_fixed_tiles(lambda tile: functional.linear(tile, weight, bias), x)
    return functional.linear(x, weight, bias)


def is_in_usable_panels(weight: torch.Tensor) -> bool:
    """Whether the op takes `weight`; if not, it is in rows.

    Raises:
        RuntimeError: it is in panels that were moved or converted since.
    """
    if weight.dim() == 2:
        return False
    if is_in_panels(weight) and weight.is_cpu:
        return True
    msg = (
        f"weight: expected rows, or panels on a CPU; got panels that were moved to {weight.device} "
        f"or converted to {weight.dtype}: call prepare_weights() after that"
    )
    raise RuntimeError(msg)


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


@cache
def has_units_for(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies in `dtype`, not only in float32, and torch makes use of that."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
