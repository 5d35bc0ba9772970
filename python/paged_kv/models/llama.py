# SPDX-License-Identifier: Apache-2.0
"""The Llama-architecture decoder over a paged KV cache (Llama, Mistral, Qwen2, Qwen3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)
from paged_kv.models.layers import Linear, RMSNorm, RotaryEmbedding, apply_rotary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paged_kv.metadata import AttentionMetadata
    from paged_kv.models.config import ModelConfig

__all__ = ["LlamaForCausalLM"]


class LlamaAttention(nn.Module):
    """Grouped-query attention that writes to and reads from one layer's paged cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.head_size**-0.5
        self.sliding_window = config.sliding_window or 0
        num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = Linear(
            config.hidden_size, num_qkv_heads * config.head_size, bias=config.attention_bias
        )
        self.o_proj = Linear(
            config.num_heads * config.head_size,
            config.hidden_size,
            bias=config.attention_output_bias,
        )
        self.q_norm = RMSNorm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        kv_scale: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend; `kv_cache` takes this step's keys and values (mutated)."""
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_size)
        num_rotated = self.num_heads + self.num_kv_heads
        query_key = qkv[:, :num_rotated]
        if self.q_norm is not None and self.k_norm is not None:
            query_key[:, : self.num_heads] = self.q_norm(query_key[:, : self.num_heads])
            query_key[:, self.num_heads :] = self.k_norm(query_key[:, self.num_heads :])
        query_key = apply_rotary(query_key, *rotary)
        query, key = query_key[:, : self.num_heads], query_key[:, self.num_heads :]
        value = qkv[:, num_rotated:]

        key_cache, value_cache = kv_cache
        torch.ops.paged_kv.reshape_and_cache_flash(
            key, value, key_cache, value_cache, metadata.slot_mapping, "auto", kv_scale, kv_scale
        )
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        torch.ops.paged_kv.paged_attention_varlen(
            out,
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.scale,
            sliding_window=self.sliding_window,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )
        attended: torch.Tensor = self.o_proj(out.view(hidden.shape[0], -1))
        return attended


class LlamaMLP(nn.Module):
    """SwiGLU feed-forward: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * intermediate, bias=config.mlp_bias)
        self.down_proj = Linear(intermediate, hidden, bias=config.mlp_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape."""
        gate, up = self.gate_up_proj(hidden).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate).mul_(up))
        return out


class LlamaDecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LlamaAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        kv_scale: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Map ``[num_tokens, hidden_size]`` to the same shape; mutates `kv_cache`."""
        normed = self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(normed, rotary, kv_cache, kv_scale, metadata)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class LlamaForCausalLM(nn.Module):
    """A Llama-architecture decoder whose keys and values live in a paged cache.

    Its parameters are uninitialised until `paged_kv.models.weights.load_weights` fills them. They
    take no gradient. The query, key and value projections of a layer are one matrix, and so are
    gate and up; `weight_slots` says which part of it a checkpoint's tensor fills.

    Args:
        config: the model's shape.

    Example:
        >>> import torch
        >>> from paged_kv.models import load_model
        >>> loaded = load_model("smollm2-135m")
        >>> loaded.model.config.num_layers
        30
    """

    kv_scale: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            head_size=config.head_size, theta=config.rope_theta, scaling=config.rope_scaling
        )
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )
        self.register_buffer("kv_scale", torch.empty(1), persistent=False)

    def reset_buffers(self) -> None:
        """Compute what no checkpoint holds; call it once the weights are loaded."""
        self.rotary_emb.reset_inv_freq()
        # float32 whatever the model's dtype: the cache ops take no other scale.
        self.kv_scale = torch.ones(1, dtype=torch.float32, device=self.kv_scale.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Run one step over a ragged batch.

        Args:
            input_ids: ``[num_tokens]`` int64, all sequences' new tokens back to back.
            positions: ``[num_tokens]`` int64, place of each token in its sequence.
            kv_caches: one ``(key_cache, value_cache)`` a layer, each ``[num_blocks, block_size,
                num_kv_heads, head_size]`` in the model's dtype. Mutated.
            metadata: where the batch's tokens lie in those caches.

        Returns:
            ``[num_tokens, hidden_size]``, after the final norm: input of `compute_logits`.

        Raises:
            ValueError: a token id outside ``0 .. vocab_size - 1`` (checked on CPU tensors; a
                check of device tensors would stall the device, so check ids before the upload),
                or not one cache a layer.
            RuntimeError: a tensor the ops refuse.
        """
        if len(kv_caches) != len(self.layers):
            msg = f"kv_caches: expected {len(self.layers)}, one a layer, got {len(kv_caches)}"
            raise ValueError(msg)
        self._check_token_ids(input_ids)
        hidden = functional.embedding(input_ids, self.embed_tokens)
        rotary = self.rotary_emb(positions, hidden.dtype)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, rotary, kv_cache, self.kv_scale, metadata)
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score every token of the vocabulary.

        Args:
            hidden: ``[n, hidden_size]``, the rows of `forward`'s result to score; usually the last
                token of each sequence.

        Returns:
            ``[n, vocab_size]`` float32.
        """
        weight = self.embed_tokens if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden, weight).float()

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Map each tensor name of a Hugging Face checkpoint to the view it fills.

        Together the views cover every parameter exactly once. Cost: one pass over the layers.
        """
        slots = {"model.embed_tokens.weight": self.embed_tokens.detach()}
        for index, layer in enumerate(self.layers):
            slots.update(_layer_slots(f"model.layers.{index}.", layer, self.config))
        slots["model.norm.weight"] = self.norm.weight.detach()
        if self.lm_head is not None:
            slots["lm_head.weight"] = self.lm_head.weight.detach()
        if self.rotary_emb.freq_factors is not None:
            slots["model.rotary_emb.freq_factors"] = self.rotary_emb.freq_factors.detach()
        return slots

    def _check_token_ids(self, input_ids: torch.Tensor) -> None:
        if input_ids.device.type != "cpu" or input_ids.numel() == 0:
            return
        smallest, largest = torch.aminmax(input_ids)
        if smallest < 0 or largest >= self.config.vocab_size:
            bad = int(smallest) if smallest < 0 else int(largest)
            msg = f"token id {bad} is outside the vocabulary: 0 to {self.config.vocab_size - 1}"
            raise ValueError(msg)


def _layer_slots(
    prefix: str, layer: nn.Module, config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and view of every weight and bias of one decoder layer."""
    q_rows = config.num_heads * config.head_size
    kv_rows = config.num_kv_heads * config.head_size
    # A fused module's checkpoint parts, in the order of its rows.
    parts: dict[str, dict[str, int]] = {
        "self_attn.qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "mlp.gate_up_proj": {
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        },
    }
    for name, parameter in layer.named_parameters():
        module, _, kind = name.rpartition(".")
        if module not in parts:
            yield prefix + name, parameter.detach()
            continue
        parent = module.rpartition(".")[0]
        rows = parts[module]
        views = torch.split(parameter.detach(), list(rows.values()))
        for part, view in zip(rows, views, strict=True):
            yield f"{prefix}{parent}.{part}.{kind}", view
