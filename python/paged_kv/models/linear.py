# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights, which are nearly all of a decoder's work on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TILE_ROWS", "Linear", "PackedLinear", "in_fixed_tiles"]

TILE_ROWS = 16
"""Rows of each product in batch-invariant mode. Weights are packed for as many, which suits all."""


class PackedLinear:
    """``y = x @ weight.T + bias`` with the weight in the order that oneDNN's kernel reads.

    The product is computed in float32. Weights of 16 bits are widened: CPUs without units for them
    would do that in each step.

    Args:
        weight: ``[out_features, in_features]`` on the CPU. Copied.
        bias: ``[out_features]``, or None. Copied.

    Notes:
        Cost: one pass over the weight; 4 bytes an element for as long as this object lives.
        A call on float32 took 0.6 times as long as ``F.linear`` at 8 to 64 rows (576 features wide,
        one AVX2 core), 0.95 times at 256 rows, and 1.15 times at one row, which the memory bounds.
        With 16-bit weights it took a third as long at 16 rows and twice as long at one.

    Source:
        torch._inductor.fx_passes.mkldnn_fusion (the ops, which have no other documentation).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().float(), TILE_ROWS)
        self._bias = None if bias is None else bias.detach().float()
        self._out_features = weight.shape[0]

    @staticmethod
    def is_supported(weight: torch.Tensor) -> bool:
        """Whether packing such a weight is possible here and pays."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.enabled:
            return False
        # Builds of torch without oneDNN don't have these ops.
        if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            return False
        return weight.dtype == torch.float32 or not _has_units_for(weight.dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, in_features]`` to ``[rows, out_features]`` in the dtype of `x`."""
        if x.shape[0] == 0:
            return x.new_empty(0, self._out_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x.float(), self._weight, self._bias, "none", [], ""
        )
        return out.to(x.dtype)


class Linear(nn.Module):
    """``y = x @ weight.T + bias``, without the random initialisation of ``torch.nn.Linear``.

    Args:
        in_features: last dimension of the input.
        out_features: last dimension of the output.
        bias: add a bias.

    Attributes:
        batch_invariant: compute in tiles of `TILE_ROWS` rows, see `in_fixed_tiles`.
    """

    weight: torch.Tensor | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self.batch_invariant = False
        self._packed: PackedLinear | None = None

    def pack(self) -> None:
        """Pack the weight where that pays, and let go of `weight`, which is None then.

        Do it last: a packed module can't be converted, moved or saved.
        """
        if self.weight is not None and PackedLinear.is_supported(self.weight):
            self._packed = PackedLinear(self.weight, self.bias)
            self.weight = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, in_features]`` to ``[rows, out_features]``."""
        product = self._product if self._packed is None else self._packed
        return in_fixed_tiles(product, x) if self.batch_invariant else product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            msg = "a packed module was copied without its packed weight"
            raise RuntimeError(msg)
        return functional.linear(x, self.weight, self.bias)


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


def _has_units_for(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
