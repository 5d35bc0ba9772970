# SPDX-License-Identifier: Apache-2.0
"""The attention of a decoder layer, over a paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)
from paged_kv.models.layers import RMSNorm, apply_rotary
from paged_kv.models.linear import Linear

if TYPE_CHECKING:
    from paged_kv.kv_cache import KVCache
    from paged_kv.metadata import AttentionMetadata
    from paged_kv.models.config import ModelConfig

__all__ = ["Attention"]


class Attention(nn.Module):
    """Grouped-query attention that writes to and reads from one layer's paged cache.

    The query, key and value projections are one matrix.

    Args:
        config: the model's shape.
        layer_index: the layer's number, which decides its sliding window.
        norm: kind of the norm over query and key heads, if the model has one.
    """

    def __init__(
        self, config: ModelConfig, layer_index: int, *, norm: type[RMSNorm] = RMSNorm
    ) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_size = config.head_size
        self.scale = config.attention_scale
        self.sliding_window = config.sliding_window_of(layer_index)
        num_qkv_heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv_proj = Linear(
            config.hidden_size, num_qkv_heads * config.head_size, bias=config.attention_bias
        )
        self.o_proj = Linear(
            config.num_heads * config.head_size,
            config.hidden_size,
            bias=config.attention_output_bias,
        )
        self.q_norm = norm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = norm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        last_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            hidden: ``[num_tokens, hidden_size]``.
            rotary: what `RotaryEmbedding` gives for the tokens' positions.
            kv_cache: takes the tokens' keys and values (mutated).
            metadata: where tokens and sequences lie in it.
            last_tokens: `AttentionMetadata.last_tokens`, to attend from these only. Keys and values
                of all tokens are written.

        Returns:
            ``[num_tokens, hidden_size]``, or ``[num_seqs, hidden_size]`` with `last_tokens`.
        """
        qkv = self.qkv_proj(hidden).view(hidden.shape[0], -1, self.head_size)
        num_rotated = self.num_heads + self.num_kv_heads
        query_key = qkv[:, :num_rotated]
        if self.q_norm is not None and self.k_norm is not None:
            query_key[:, : self.num_heads] = self.q_norm(query_key[:, : self.num_heads])
            query_key[:, self.num_heads :] = self.k_norm(query_key[:, self.num_heads :])
        query_key = apply_rotary(query_key, *rotary)  # within qkv, which nobody else holds
        query, key = torch.split(query_key, [self.num_heads, self.num_kv_heads], dim=1)

        torch.ops.paged_kv.reshape_and_cache_flash(
            key,
            qkv[:, num_rotated:],
            kv_cache.key,
            kv_cache.value,
            metadata.slot_mapping,
            kv_cache.kv_cache_dtype,
            kv_cache.k_scale,
            kv_cache.v_scale,
        )
        if last_tokens is not None:
            query, metadata = query[last_tokens], metadata.of_last_tokens()
        out = query.new_empty(query.shape)
        torch.ops.paged_kv.paged_attention_varlen(
            out,
            query,
            kv_cache.key,
            kv_cache.value,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_tables,
            self.scale,
            sliding_window=self.sliding_window or 0,
            kv_cache_dtype=kv_cache.kv_cache_dtype,
            k_scale=kv_cache.k_scale,
            v_scale=kv_cache.v_scale,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
        )
        attended: torch.Tensor = self.o_proj(out.view(len(out), -1))
        return attended
