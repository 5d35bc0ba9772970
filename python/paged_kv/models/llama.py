# SPDX-License-Identifier: Apache-2.0
"""The Llama-architecture decoder (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from paged_kv.models.attention import Attention
from paged_kv.models.decoder import DecoderForCausalLM
from paged_kv.models.layers import GatedMLP, RMSNorm, silu_and_mul

if TYPE_CHECKING:
    import torch

    from paged_kv.kv_cache import KVCache
    from paged_kv.metadata import AttentionMetadata
    from paged_kv.models.config import ModelConfig

__all__ = ["LlamaForCausalLM"]


class LlamaDecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            activation=silu_and_mul,
            bias=config.mlp_bias,
        )

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
        hidden = attended.add_(hidden)
        transformed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return transformed.add_(hidden)


class LlamaForCausalLM(DecoderForCausalLM):
    """Rotary, grouped-query, SwiGLU decoder with RMSNorm before each part of a layer.

    Source:
        Touvron et al., "Llama 2", 2023; the order of roundings is that of transformers 5
        models/llama/modeling_llama.py.
    """

    def make_layer(self, index: int) -> nn.Module:
        """Make layer `index`; they are all alike."""
        return LlamaDecoderLayer(self.config, index)
