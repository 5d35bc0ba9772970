# SPDX-License-Identifier: Apache-2.0
"""Weights in panels, as :func:`paged_kv.ops.linear` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "IN_FEATURES_UNIT",
    "PANEL_FEATURES",
    "features_of_panels",
    "is_in_panels",
    "pack_weight",
    "unpack_weight",
]

PANEL_FEATURES = 16
"""Features of the output in a panel."""

IN_FEATURES_UNIT = 16
"""What `in_features` of a weight in panels is a multiple of.

These are the lanes of the widest instruction set: inputs of 16 bits are widened by whole vectors.
"""


def pack_weight(weight: Tensor) -> Tensor:
    """Lay a weight in panels of `PANEL_FEATURES` rows, each the other way round.

    A product then adds ``x[i] * panel[i]`` for one element of the input after the other: it needs
    no sum over lanes at its end, and reads memory in order. Of bfloat16 two elements of a feature
    lie side by side, so that a shift and a mask make two floats of them.

    Args:
        weight: ``[out_features, in_features]``, f32/f16/bf16; `in_features` is a positive multiple
            of `IN_FEATURES_UNIT`.

    Returns:
        A new contiguous tensor: ``[num_panels, in_features, 16]``, or of bfloat16 ``[num_panels,
        in_features / 2, 16, 2]``; `num_panels` is ``ceil(out_features / 16)``. What fills up the
        last panel is zero.

    Raises:
        ValueError: The weight is not as described.

    Notes:
        Cost: one copy; two if the last panel is filled up.

    Source:
        Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008.

    Example:
        >>> import torch
        >>> from paged_kv.weight_panels import pack_weight, unpack_weight
        >>> weight = torch.randn(40, 32)
        >>> panels = pack_weight(weight)
        >>> panels.shape
        torch.Size([3, 32, 16])
        >>> torch.equal(unpack_weight(panels, out_features=40), weight)
        True
    """
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        msg = f"weight: expected dtype float32, float16 or bfloat16, got {weight.dtype}"
        raise ValueError(msg)
    if weight.dim() != 2 or weight.shape[1] == 0 or weight.shape[1] % IN_FEATURES_UNIT != 0:
        msg = (
            "weight: expected shape [out_features, in_features], in_features a positive multiple "
            f"of {IN_FEATURES_UNIT}, got {list(weight.shape)}"
        )
        raise ValueError(msg)
    out_features, in_features = weight.shape
    if out_features % PANEL_FEATURES != 0:
        weight = functional.pad(weight, (0, 0, 0, -out_features % PANEL_FEATURES))
    pairs = [in_features // 2, 2] if weight.dtype == torch.bfloat16 else [in_features]
    rows = weight.reshape(-1, PANEL_FEATURES, *pairs)
    return rows.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def unpack_weight(panels: Tensor, *, out_features: int) -> Tensor:
    """Give back what `pack_weight` was given.

    Args:
        panels: From `pack_weight`, perhaps converted to another dtype since; or a weight that is in
            rows already.
        out_features: Rows of the weight.

    Returns:
        ``[out_features, in_features]`` in the dtype of `panels`: a new tensor, or the given one if
        that was in rows.

    Notes:
        Cost: one copy.

    Example:
        See `pack_weight`.
    """
    if panels.dim() == 2:
        return panels
    rows = panels.transpose(1, 2)  # [num_panels, 16, in_features], or in pairs
    weight = panels.new_empty(rows.shape).copy_(rows)
    return weight.flatten(2).flatten(0, 1)[:out_features]


def features_of_panels(panels: Tensor, features: Tensor) -> Tensor:
    """Look up rows of the weight, as embeddings are.

    Args:
        panels: From `pack_weight`.
        features: ``[n]`` int64, rows of the weight; others are not told from what fills up the last
            panel.

    Returns:
        A new tensor ``[n, in_features]`` in the dtype of `panels`.

    Raises:
        IndexError: A feature is beyond the last panel.

    Notes:
        Cost: one pass over the result; elements come from a line of memory each.

    Example:
        >>> import torch
        >>> from paged_kv.weight_panels import features_of_panels, pack_weight
        >>> weight = torch.randn(40, 32)
        >>> found = features_of_panels(pack_weight(weight), torch.tensor([39, 0]))
        >>> torch.equal(found, weight[[39, 0]])
        True
    """
    panel = features.div(PANEL_FEATURES, rounding_mode="floor")
    return panels[panel, :, features.remainder(PANEL_FEATURES)].flatten(1)


def is_in_panels(weight: Tensor) -> bool:
    """Whether it is as `pack_weight` gives it.

    Panels that were converted to another dtype are not: bfloat16 has a shape of its own.
    """
    return weight.dim() == (4 if weight.dtype == torch.bfloat16 else 3)
