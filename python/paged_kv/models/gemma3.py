# SPDX-License-Identifier: Apache-2.0
"""The Gemma 3 text decoder: layers with a sliding window, and every so often one without."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from paged_kv.models.attention import Attention
from paged_kv.models.decoder import DecoderForCausalLM
from paged_kv.models.layers import GatedMLP, RMSNorm, gelu_tanh_and_mul, rms_norm

if TYPE_CHECKING:
    from paged_kv.kv_cache import KVCache
    from paged_kv.metadata import AttentionMetadata
    from paged_kv.models.config import ModelConfig

__all__ = ["Gemma3ForCausalLM", "Gemma3RMSNorm"]


class Gemma3RMSNorm(RMSNorm):
    """``(1 + weight) * x / rms(x)``, rounded to the dtype of `x` once, at the end.

    Args:
        size: last dimension of the input.
        eps: added to the mean square.

    Source:
        transformers 5 models/gemma3/modeling_gemma3.py::Gemma3RMSNorm.
    """

    scale: torch.Tensor

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__(size, eps=eps)
        self.register_buffer("scale", torch.empty(size), persistent=False)

    def reset_buffers(self) -> None:
        """Compute ``1 + weight`` in float32."""
        self.scale = 1.0 + self.weight.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise each row of ``[..., size]``; the result has the dtype of `x`."""
        return rms_norm(x, self.scale, self.eps)


class Gemma3DecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.self_attn = Attention(config, index, norm=Gemma3RMSNorm)
        self.post_attention_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(size, eps=eps)
        self.mlp = GatedMLP(
            size,
            config.intermediate_size,
            activation=gelu_tanh_and_mul,
        )
        self.post_feedforward_layernorm = Gemma3RMSNorm(size, eps=eps)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        last_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape; mutates `kv_cache`.

        With `last_tokens`, to the rows of these only.
        """
        normed = self.input_layernorm(hidden)
        attended = self.self_attn(normed, rotary, kv_cache, metadata, last_tokens)
        if last_tokens is not None:
            hidden = hidden[last_tokens]
        hidden = self.post_attention_layernorm(attended).add_(hidden)
        transformed = self.mlp(self.pre_feedforward_layernorm(hidden))
        added: torch.Tensor = self.post_feedforward_layernorm(transformed)
        return added.add_(hidden)


class Gemma3ForCausalLM(DecoderForCausalLM):
    """The text part of Gemma 3.

    Layers with a sliding window rotate with frequencies of their own, and forget what has left the
    window: this is the model whose layers need caches of two kinds.

    Source:
        Gemma Team, "Gemma 3 Technical Report", 2025; the order of roundings is that of
        transformers 5 models/gemma3/modeling_gemma3.py.
    """

    norm_class = Gemma3RMSNorm

    def make_layer(self, index: int) -> nn.Module:
        """Make layer `index`; layers differ by their window."""
        return Gemma3DecoderLayer(self.config, index)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up ``[num_tokens]`` ids and scale them by ``sqrt(hidden_size)``."""
        embedded = super().embed(input_ids)
        return embedded.mul_(_rounded(self.config.hidden_size**0.5, embedded.dtype))


@cache
def _rounded(value: float, dtype: torch.dtype) -> float:
    """`value` rounded to the model's dtype, as it was in training.

    Kept, since a tensor that is made in the forward pass keeps it from being captured.
    """
    return float(torch.tensor(value).to(dtype))
