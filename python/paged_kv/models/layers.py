# SPDX-License-Identifier: Apache-2.0
"""The parts decoders are made of. All are for inference: no parameter takes a gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)
from paged_kv.models.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from paged_kv.models.config import RopeScaling

__all__ = [
    "GatedMLP",
    "HasBuffers",
    "RMSNorm",
    "RotaryEmbedding",
    "apply_rotary",
    "gelu_tanh_and_mul",
    "rms_norm",
    "silu_and_mul",
]


def _empty_parameter(*shape: int) -> nn.Parameter:
    # Never initialised: weights come from a file, and every element is checked to have come.
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


@runtime_checkable
class HasBuffers(Protocol):
    """A part that computes values from its weights, once these are loaded."""

    def reset_buffers(self) -> None:
        """Compute them."""


class RMSNorm(nn.Module):
    """``weight * x / rms(x)`` over the last dimension, computed in float32.

    Args:
        size: last dimension of the input.
        eps: added to the mean square.

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; the order of roundings is
        that of transformers 5 models/llama/modeling_llama.py::LlamaRMSNorm.
    """

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = _empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of ``[..., size]``; the result has the dtype of `x`."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * x / rms(x)`` over the last dimension, computed in float32.

    Args:
        x: ``[..., size]``.
        weight: ``[size]``. What it is multiplied with is rounded to its dtype before, as the models
            were trained: that of `x`, or float32.
        eps: added to the mean square.

    Returns:
        A new tensor like `x`.
    """
    if x.is_cpu:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = rows.new_empty(rows.shape)
        torch.ops.paged_kv.rms_norm(out, rows, weight, eps)
        return out if out.shape == x.shape else out.view(x.shape)
    wide = x.float()
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square.add_(eps))
    return normed.to(weight.dtype).mul_(weight).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, silu rounded before the product.

    Args:
        gate_up: ``[num_tokens, 2 * size]``: gate, then up.

    Returns:
        A new tensor ``[num_tokens, size]``.
    """
    if gate_up.is_cpu:
        out = _half_as_wide(gate_up)
        torch.ops.paged_kv.silu_and_mul(out, gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul`, with gelu in its tanh form."""
    if gate_up.is_cpu:
        out = _half_as_wide(gate_up)
        torch.ops.paged_kv.gelu_tanh_and_mul(out, gate_up)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh").mul_(up)


def _half_as_wide(gate_up: torch.Tensor) -> torch.Tensor:
    num_tokens, width = gate_up.shape
    return gate_up.new_empty(num_tokens, width // 2)


class GatedMLP(nn.Module):
    """Gated feed-forward: ``down(activation(gate(x)) * up(x))``. Gate and up are one matrix.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between the projections.
        activation: of the gate, times up: `silu_and_mul` (SwiGLU) or `gelu_tanh_and_mul`.
        bias: add a bias in all projections.

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[torch.Tensor], torch.Tensor],
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        out: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return out


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embedding (RoPE).

    They are computed once a forward pass for the positions at hand and shared by all layers: a few
    microseconds, against a table of tens of megabytes for a 128k context.

    Args:
        head_size: width of one head.
        theta: base of the frequencies.
        scaling: stretching of the frequencies, or None.

    Source:
        Su et al., "RoFormer", 2021; scaling: transformers 5 modeling_rope_utils.py.
    """

    inv_freq: torch.Tensor

    def __init__(self, *, head_size: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__()
        self.head_size = head_size
        self.theta = theta
        self.scaling = scaling
        self.register_buffer("inv_freq", torch.empty(head_size // 2), persistent=False)
        # Filled from the file when the frequencies are scaled one by one.
        self.freq_factors = (
            _empty_parameter(head_size // 2)
            if scaling is not None and scaling.rope_type == "freq_factors"
            else None
        )

    def reset_buffers(self) -> None:
        """Compute `inv_freq` in float32."""
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        inv_freq = 1.0 / (self.theta**exponents)
        if self.freq_factors is not None:
            inv_freq = inv_freq / self.freq_factors.cpu().float()
        elif self.scaling is not None:
            inv_freq = _scale_inv_freq(inv_freq, self.scaling)
        self.inv_freq = inv_freq.to(self.inv_freq.device)

    def forward(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Give what `apply_rotary` multiplies with.

        Args:
            positions: ``[num_tokens]`` int64, place of each token in its sequence.
            dtype: dtype of the result; angles are computed in float32 whatever it is.

        Returns:
            ``cos`` and ``signed_sin``, both ``[num_tokens, 1, head_size]``; the first half of
            ``signed_sin`` carries the minus of the rotation.
        """
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        cos = torch.cat((cos, cos), dim=-1).to(dtype)
        signed_sin = torch.cat((-sin, sin), dim=-1).to(dtype)
        return cos[:, None], signed_sin[:, None]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head of `x`, pairing element ``i`` with ``i + head_size / 2``.

    Args:
        x: ``[num_tokens, num_heads, head_size]``; overwritten on a CPU.
        cos: ``[num_tokens, 1, head_size]`` from `RotaryEmbedding`.
        signed_sin: the same shape.

    Returns:
        `x` itself on a CPU, elsewhere a new contiguous tensor. Both have the same bits.
    """
    if x.is_cpu:
        torch.ops.paged_kv.apply_rotary(x, cos, signed_sin)
        return x
    # Rolling by half a head is rotate_half without its sign, which signed_sin has: the products and
    # their roundings are the same, the negation and one concatenation are saved.
    rotated = x.roll(x.shape[-1] // 2, dims=-1).mul_(signed_sin)
    return (x * cos).add_(rotated)


def _scale_inv_freq(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.rope_type == "linear":
        return inv_freq / scaling.factor
    low_freq_wavelen = scaling.original_max_position_embeddings / scaling.low_freq_factor
    high_freq_wavelen = scaling.original_max_position_embeddings / scaling.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    smooth = (scaling.original_max_position_embeddings / wavelen - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    scaled = inv_freq / scaling.factor
    blended = (1 - smooth) * scaled + smooth * inv_freq
    result = torch.where(wavelen > low_freq_wavelen, scaled, blended)
    return torch.where(wavelen < high_freq_wavelen, inv_freq, result)
