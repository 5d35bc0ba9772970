# SPDX-License-Identifier: Apache-2.0
"""Products with weights on a CPU: the wrapper exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IN_FEATURES_UNIT", "linear"]

IN_FEATURES_UNIT = 16
"""What `in_features` is a multiple of: the lanes of the widest instruction set."""


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """``out = x @ weight.T + bias``, summed in float32 and rounded once. CPU only.

    A row's result has the same bits whatever rows come with it and however many threads there are
    (which does not hold for ``torch.nn.functional.linear``). The weight is read where it lies, once
    a call; memory in huge pages (:func:`paged_kv.kv_cache_memory.zeros_in_huge_pages`) is read
    faster.

    Args:
        out: ``[num_rows, out_features]``, f32/f16/bf16, last dim dense.
        x: ``[num_rows, in_features]``, f32/f16/bf16, last dim dense.
        weight: ``[out_features, in_features]``, f32/f16/bf16, last dim dense; `in_features` is a
            multiple of `IN_FEATURES_UNIT`.
        bias: ``[out_features]``, f32/f16/bf16, dense; or None.

    Mutates:
        ``out``, which must not share memory with the others.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: for few rows, reading the weight; for many, the multiply-adds. Dtypes may differ:
        16-bit weights take half of the time of 32-bit ones at one row.

    Source:
        ``torch.nn.functional.linear``; the loops are those of attention logits (docs/kernels.md).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> x, weight, out = torch.ones(1, 16), torch.full((3, 16), 0.5), torch.empty(1, 3)
        >>> ops.linear(out, x, weight)
        >>> out
        tensor([[8., 8., 8.]])
    """
    torch.ops.paged_kv.linear(out, x, weight, bias)
