# SPDX-License-Identifier: Apache-2.0
"""What a decoder computes besides attention, on a CPU: wrappers exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "apply_rotary",
    "gelu_tanh_and_mul",
    "linear",
    "rms_norm",
    "silu_and_mul",
]


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    """Rotate heads in place: ``x = x * cos + x.roll(head_size // 2, -1) * signed_sin``. CPU only.

    Element ``i`` of a head is paired with ``i + head_size / 2``. Both products and the sum are
    rounded to the dtype of ``x``: the bits are those that torch gives for this formula.

    Args:
        x: ``[num_tokens, num_heads, head_size]``, f32/f16/bf16, `head_size` even, last dim dense;
            e.g. the queries and keys within a product that has the values, too.
        cos: ``[num_tokens, 1, head_size]``, dtype of ``x``, last dim dense.
        signed_sin: The same; the sine of the angle, its first half negated.

    Mutates:
        ``x``, which must not share memory with the others.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: one pass over ``x``. torch takes four operations and two tensors like ``x``.

    Source:
        Su et al., "RoFormer", 2021; vLLM's ``rotary_embedding`` (in place, NeoX pairing).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        >>> cos, signed_sin = torch.zeros(1, 1, 4), torch.tensor([[[-1.0, -1.0, 1.0, 1.0]]])
        >>> ops.apply_rotary(x, cos, signed_sin)  # a quarter turn
        >>> x
        tensor([[[-3., -4.,  1.,  2.]]])
    """
    torch.ops.paged_kv.apply_rotary(x, cos, signed_sin)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    """``out = gelu(gate) * up`` of each row ``[gate, up]``, gelu by its tanh formula. CPU only.

    As :func:`silu_and_mul`, with another activation: the values are those of
    ``torch.nn.functional.gelu(gate, approximate="tanh")``, but where they are nearly 0 they are
    more precise, since ``1 + tanh`` does not cancel.

    Args:
        out: ``[num_rows, size]``, dtype of ``input``, last dim dense; may be either half of it.
        input: ``[num_rows, 2 * size]``, f32/f16/bf16, last dim dense.

    Mutates:
        ``out``, which may be a half of ``input`` and must not share memory with it otherwise.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: one pass over ``input``, with an exponential for each element of ``out``.

    Source:
        Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; vLLM's ``gelu_tanh_and_mul``
        (schema).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> row, out = torch.tensor([[0.0, 10.0, 5.0, 0.5]]), torch.empty(1, 2)
        >>> ops.gelu_tanh_and_mul(out, row)
        >>> out
        tensor([[0., 5.]])
    """
    torch.ops.paged_kv.gelu_tanh_and_mul(out, input)


def linear(out: Tensor, x: Tensor, panels: Tensor, bias: Tensor | None = None) -> None:
    """``out = x @ weight.T + bias``, summed in float32 and rounded once. CPU only.

    A row's result has the same bits whatever rows come with it and however many threads there are
    (which does not hold for ``torch.nn.functional.linear``). The weight is read once for 72 rows or
    more; memory in huge pages (:func:`paged_kv.kv_cache_memory.zeros_in_huge_pages`) is read
    faster.

    Args:
        out: ``[num_rows, out_features]``, f32/f16/bf16, last dim dense.
        x: ``[num_rows, in_features]``, f32/f16/bf16, last dim dense; `in_features` is a positive
            multiple of 16.
        panels: The weight from :func:`paged_kv.weight_panels.pack_weight`, contiguous:
            ``[num_panels, in_features, 16]`` f32/f16, or ``[num_panels, in_features / 2, 16, 2]``
            bf16.
        bias: ``[out_features]``, f32/f16/bf16, dense; or None.

    Mutates:
        ``out``, which must not share memory with the others.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: for few rows, reading the weight; for many, the multiply-adds. Dtypes may differ:
        16-bit weights take half of the time of 32-bit ones at one row.

    Source:
        ``torch.nn.functional.linear``; Goto and van de Geijn, "Anatomy of High-Performance Matrix
        Multiplication", 2008 (docs/kernels.md).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> from paged_kv.weight_panels import pack_weight
        >>> x, weight, out = torch.ones(1, 16), torch.full((3, 16), 0.5), torch.empty(1, 3)
        >>> ops.linear(out, x, pack_weight(weight))
        >>> out
        tensor([[8., 8., 8.]])
    """
    torch.ops.paged_kv.linear(out, x, panels, bias)


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


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    """``out = silu(gate) * up`` of each row ``[gate, up]``: SwiGLU's activation. CPU only.

    Computed in float32. ``silu(gate)`` is rounded to the dtype before the product, as where torch
    computes them one by one; below -87 it is -0.

    Args:
        out: ``[num_rows, size]``, dtype of ``input``, last dim dense; may be either half of it.
        input: ``[num_rows, 2 * size]``, f32/f16/bf16, last dim dense.

    Mutates:
        ``out``, which may be a half of ``input`` and must not share memory with it otherwise.

    Raises:
        RuntimeError: A tensor is not as described.

    Notes:
        Cost: one pass over ``input``, with an exponential for each element of ``out``.

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020; vLLM's ``silu_and_mul`` (schema).

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> row, out = torch.tensor([[0.0, 20.0, 5.0, 0.5]]), torch.empty(1, 2)
        >>> ops.silu_and_mul(out, row)
        >>> out
        tensor([[ 0., 10.]])
    """
    torch.ops.paged_kv.silu_and_mul(out, input)
