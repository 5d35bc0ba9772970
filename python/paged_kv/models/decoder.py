# SPDX-License-Identifier: Apache-2.0
"""What all decoders over a paged KV cache have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paged_kv._core import FullAttentionSpec, SlidingWindowSpec
from paged_kv.kv_cache import kv_cache_dtype_str_to_dtype
from paged_kv.models.layers import HasBuffers, RMSNorm, RotaryEmbedding
from paged_kv.models.linear import Linear, has_units_for, is_in_usable_panels, linear
from paged_kv.models.weight_memory import (
    lay_in_panels,
    lay_in_rows,
    move_to_huge_pages,
    narrow_if_exact,
)
from paged_kv.weight_panels import features_of_panels, is_in_panels, unpack_weight

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paged_kv._core import AttentionSpec
    from paged_kv.kv_cache import KVCache
    from paged_kv.metadata import AttentionMetadata
    from paged_kv.models.config import ModelConfig

__all__ = ["DecoderForCausalLM"]


class DecoderForCausalLM(nn.Module, ABC):
    """A decoder whose keys and values live in a paged cache: embedding, layers, norm, head.

    A subclass says what a layer is. It may change the kind of the norms and scale embeddings.

    Parameters are uninitialised until `paged_kv.models.weights.build_model` fills them. They take
    no gradient. The query, key and value projections of a layer are one matrix, and so are gate
    and up; `weight_slots` says which part of it a checkpoint's tensor fills.

    Args:
        config: the model's shape.

    Example:
        >>> import torch
        >>> from paged_kv.models import load_model
        >>> model = load_model("smollm2-135m").model
        >>> specs = model.kv_cache_specs(block_size=16, dtype=torch.float32)
        >>> len(specs), specs["model.layers.0.self_attn"].page_size_bytes
        (30, 24576)
    """

    norm_class: type[RMSNorm] = RMSNorm

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        self.layers = nn.ModuleList(self.make_layer(index) for index in range(config.num_layers))
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(
            head_size=config.head_size, theta=config.rope_theta, scaling=config.rope_scaling
        )
        self.local_rotary_emb = (
            None
            if config.local_rope_theta is None
            else RotaryEmbedding(
                head_size=config.head_size, theta=config.local_rope_theta, scaling=None
            )
        )
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )
        self._batch_invariant = False

    @abstractmethod
    def make_layer(self, index: int) -> nn.Module:
        """Make layer `index`.

        Its forward takes hidden states, the rotary factors, the layer's cache and the metadata, and
        gives new hidden states; if given ``last_tokens``, those of these rows only.
        """

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Look up ``[num_tokens]`` ids: ``[num_tokens, hidden_size]``, a new tensor."""
        if is_in_usable_panels(self.embed_tokens):
            return features_of_panels(self.embed_tokens, input_ids).to(self.dtype)
        return self.embed_tokens.index_select(0, input_ids).to(self.dtype)

    def reset_buffers(self) -> None:
        """Compute what no checkpoint holds; call it once the weights are loaded."""
        for module in self.modules():
            if module is not self and isinstance(module, HasBuffers):
                module.reset_buffers()

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in. Its matrices may be kept in less: `prepare_weights`."""
        return self.norm.weight.dtype

    def prepare_weights(self, *, batch_invariant: bool = False) -> None:
        """Keep weights as their device reads them fastest.

        On a CPU, matrices go to panels (:mod:`paged_kv.weight_panels`) and those of 16-bit numbers
        are kept in 16 bits, whatever the model's dtype; all weights move to huge pages. A CPU with
        units for products in the model's dtype has these from torch, of matrices as they are. On
        other devices they are as they were loaded.

        Call it once the weights are loaded, and again after the model is moved or converted. Change
        weights before.

        Args:
            batch_invariant: whether the model is to run so. Then units for its dtype are left
                alone, now and later, since torch's products with them depend on the batch.

        Notes:
            Cost: two copies of the weights, and up to twice the largest matrix more in memory while
            it runs.
        """
        packs = batch_invariant or not has_units_for(self.dtype)
        for matrix, out_features in self._matrices():
            if matrix.device.type != "cpu":
                lay_in_rows(matrix, out_features=out_features)
                matrix.data = matrix.data.to(self.dtype)
            elif matrix is self.embed_tokens and self.lm_head is not None:
                narrow_if_exact(matrix)
            elif packs:
                lay_in_panels(matrix, out_features=out_features)
            elif not is_in_panels(matrix):
                lay_in_rows(matrix, out_features=out_features)
        move_to_huge_pages(self.parameters())

    @property
    def batch_invariant(self) -> bool:
        """What `set_batch_invariant` has chosen."""
        return self._batch_invariant

    def set_batch_invariant(self, enabled: bool) -> None:
        """Choose whether a token's result may depend on the tokens that are computed with it.

        If not, the same tokens give the same bits in any batch and in chunks of any size, for a
        given number of threads. See :func:`~paged_kv.models.linear.linear` for what that costs.
        """
        self._batch_invariant = enabled
        for module in self.modules():
            if isinstance(module, Linear):
                module.batch_invariant = enabled

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: Sequence[AttentionMetadata],
        *,
        check_token_ids: bool = True,
        last_tokens_only: bool = False,
    ) -> torch.Tensor:
        """Run one step over a ragged batch.

        Without the check of token ids it looks at no value of a tensor: it can be recorded.

        Args:
            input_ids: ``[num_tokens]`` int64, all sequences' new tokens back to back.
            positions: ``[num_tokens]`` int64, place of each token in its sequence.
            kv_caches: one a layer. Mutated.
            metadata: one a layer: where the batch's tokens lie in that layer's cache. Layers of one
                KV cache group share the object.
            check_token_ids: whether ids are looked at; those on other devices than a CPU never
                are, as that would stall the device. For ids that have been checked before.
            last_tokens_only: whether nothing but each sequence's last new token is wanted. Then the
                last layer computes keys and values of all tokens, and the rest of these alone.
                Every sequence needs a new token.

        Returns:
            ``[num_tokens, hidden_size]``, or ``[num_seqs, hidden_size]`` with `last_tokens_only`,
            after the final norm: input of `compute_logits`.

        Raises:
            ValueError: a token id outside ``0 .. vocab_size - 1``, or not one cache and one
                metadata a layer.
            RuntimeError: a tensor the ops refuse.
        """
        self._check_one_a_layer("kv_caches", kv_caches)
        self._check_one_a_layer("metadata", metadata)
        if check_token_ids:
            self._check_token_ids(input_ids)
        hidden = self.embed(input_ids)
        rotary = self.rotary_emb(positions, hidden.dtype)
        local_rotary = rotary
        if self.local_rotary_emb is not None:
            local_rotary = self.local_rotary_emb(positions, hidden.dtype)
        for index, layer in enumerate(self.layers):
            is_local = self.config.sliding_window_of(index) is not None
            options = {}
            if last_tokens_only and index == len(self.layers) - 1:
                options["last_tokens"] = metadata[index].last_tokens
            hidden = layer(
                hidden,
                local_rotary if is_local else rotary,
                kv_caches[index],
                metadata[index],
                **options,
            )
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
        if self.lm_head is not None:
            logits: torch.Tensor = self.lm_head(hidden)
        else:
            logits = linear(
                hidden,
                self.embed_tokens,
                out_features=self.config.vocab_size,
                batch_invariant=self._batch_invariant,
            )
        return logits.float()

    def kv_cache_specs(
        self, block_size: int, dtype: torch.dtype, kv_cache_dtype: str = "auto"
    ) -> dict[str, AttentionSpec]:
        """Describe what each layer keeps in its cache.

        Args:
            block_size: tokens per block.
            dtype: what the model computes in.
            kv_cache_dtype: as in :class:`~paged_kv.kv_cache.KVCache`.

        Returns:
            In the order of the layers, by ``model.layers.N.self_attn``: a `SlidingWindowSpec` for a
            layer with a window, else a `FullAttentionSpec`.

        Raises:
            ValueError: an unknown `kv_cache_dtype`, or a size out of range.
        """
        element_type = kv_cache_dtype_str_to_dtype(kv_cache_dtype, dtype)
        return {
            f"model.layers.{index}.self_attn": self._kv_cache_spec(index, block_size, element_type)
            for index in range(self.config.num_layers)
        }

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Map each tensor name of a Hugging Face checkpoint to the view it fills.

        Together the views cover every parameter exactly once. Matrices in panels
        (`prepare_weights`) are copied instead. Cost: one pass over the layers, and the copies.
        """
        embedding = self.embed_tokens.detach()
        slots = {
            "model.embed_tokens.weight": unpack_weight(
                embedding, out_features=self.config.vocab_size
            )
        }
        for index, layer in enumerate(self.layers):
            slots.update(_layer_slots(f"model.layers.{index}.", layer, self.config))
        slots["model.norm.weight"] = self.norm.weight.detach()
        if self.lm_head is not None:
            slots["lm_head.weight"] = self.lm_head.plain_weight()
        if self.rotary_emb.freq_factors is not None:
            slots["model.rotary_emb.freq_factors"] = self.rotary_emb.freq_factors.detach()
        return slots

    def _matrices(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The embedding and what the `Linear` modules hold, with their numbers of rows."""
        yield self.embed_tokens, self.config.vocab_size
        for module in self.modules():
            if isinstance(module, Linear):
                yield module.weight, module.out_features

    def _kv_cache_spec(self, index: int, block_size: int, dtype: torch.dtype) -> AttentionSpec:
        window = self.config.sliding_window_of(index)
        shape: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": self.config.num_kv_heads,
            "head_size": self.config.head_size,
            "dtype": dtype,
        }
        if window is None:
            return FullAttentionSpec(**shape)
        return SlidingWindowSpec(sliding_window=window, **shape)

    def _check_one_a_layer(self, name: str, items: Sequence[object]) -> None:
        if len(items) != len(self.layers):
            msg = f"{name}: expected {len(self.layers)}, one a layer, got {len(items)}"
            raise ValueError(msg)

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
        owner, tensor = layer.get_submodule(module), parameter.detach()
        if isinstance(owner, Linear) and kind == "weight":
            tensor = owner.plain_weight()
        if module not in parts:
            yield prefix + name, tensor
            continue
        parent = module.rpartition(".")[0]
        rows = parts[module]
        views = torch.split(tensor, list(rows.values()))
        for part, view in zip(rows, views, strict=True):
            yield f"{prefix}{parent}.{part}.{kind}", view
