# SPDX-License-Identifier: Apache-2.0
"""What a decoder computes besides attention, on a CPU: wrappers exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IN_FEATURES_UNIT", "linear", "rms_norm"]

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


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """``out = weight * input / sqrt(mean(input ** 2) + epsilon)`` of each row, on a CPU.

    Computed in float32. The quotient is rounded to the dtype of ``weight`` before the product: a
    weight in the dtype of ``input`` gives the roundings of Llama, a float32 weight those of Gemma.

    Args:
        out: ``[num_rows, size]``, dtype of ``input``, last dim dense; may be ``input``.
        input: ``[num_rows, size]``, f32/f16/bf16, last dim dense.
        weight: ``[size]``, dtype of ``input`` or float32, dense.
        epsilon: At least 0.

    Mutates:
        ``out``.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: two passes over each row. torch's own takes eight operations.

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; vLLM's ``rms_norm``
        (schema).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> row, out = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.empty(1, 4)
        >>> ops.rms_norm(out, row, torch.ones(4), 0.0)
        >>> out
        tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    torch.ops.paged_kv.rms_norm(out, input, weight, epsilon)
