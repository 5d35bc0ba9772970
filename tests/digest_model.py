# SPDX-License-Identifier: Apache-2.0
"""A model whose next token is a checksum of all that attention may read: cheap, and it notices.

It keeps token ids in the cache as keys, and computes the next id from what it finds there. So a
block that holds another request's tokens, an old copy of them or none at all changes the output,
which `expected_output` computes from the token ids alone. Sums stay far below 2**24: exact.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from paged_kv import FullAttentionSpec, SlidingWindowSpec
from paged_kv.models import LoadedModel

VOCAB_SIZE = 23
MAX_LEN = 256
_WEIGHTS = torch.arange(MAX_LEN) * 7 % 31 + 1
_SHAPE = {"num_kv_heads": 1, "head_size": 8}


class DigestModel(torch.nn.Module):
    """What `ModelRunner` calls of a decoder, over a full layer and, with a window, a second one."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=VOCAB_SIZE, hidden_size=1, max_position_embeddings=MAX_LEN
        )
        self.windows = [None] if window is None else [None, window]
        self.weights = _WEIGHTS.float()

    def prepare_weights(self, *, batch_invariant=False):
        """There are none."""

    dtype = torch.float32
    batch_invariant = False  # what the engine asks for here; sums of integers are, in any case

    def kv_cache_specs(self, block_size, dtype, kv_cache_dtype="auto"):
        shape = {"block_size": block_size, "dtype": dtype, **_SHAPE}
        return {
            f"layer.{i}": FullAttentionSpec(**shape)
            if window is None
            else SlidingWindowSpec(sliding_window=window, **shape)
            for i, window in enumerate(self.windows)
        }

    def forward(
        self,
        input_ids,
        positions,
        kv_caches,
        metadata,
        *,
        check_token_ids=True,
        last_tokens_only=False,
    ):
        digests = torch.zeros(len(input_ids))
        for factor, window, cache, layer in zip(
            (1, 3), self.windows, kv_caches, metadata, strict=False
        ):
            slots = layer.slot_mapping
            block_size = cache.key.shape[1]
            cache.key[slots // block_size, slots % block_size, 0, 0] = input_ids.float()
            digests += factor * self._digests(positions, cache.key, window, layer)
        hidden = (digests % VOCAB_SIZE)[:, None]
        return hidden[metadata[0].last_tokens] if last_tokens_only else hidden

    def compute_logits(self, hidden):
        """All weight on one id: sampling at any temperature is greedy."""
        return torch.nn.functional.one_hot(hidden[:, 0].long(), VOCAB_SIZE).float() * 1e6

    def _digests(self, positions, keys, window, layer):
        """In ops alone, which can be recorded."""
        tokens = torch.arange(len(positions), dtype=torch.int32)
        sequences = torch.searchsorted(layer.query_start_loc, tokens, right=True) - 1
        ids = keys[:, :, 0, 0][layer.block_tables[sequences]].flatten(1)[:, :MAX_LEN]
        distances = positions[:, None] - torch.arange(ids.shape[1])
        is_seen = (distances >= 0) & (distances < (window or MAX_LEN))
        return torch.where(is_seen, ids * self.weights[: ids.shape[1]], 0.0).sum(1)


def load_digest_model(window: int | None) -> LoadedModel:
    """The model without a tokenizer."""
    model = DigestModel(window)
    return LoadedModel(model, model.config, None, frozenset(), "digest")


def expected_output(prompt, window, max_tokens, stop_token_ids=()) -> list[int]:
    """The new tokens of a prompt, the one that ends it included."""
    ids = list(prompt)
    weights = _WEIGHTS.tolist()
    while len(ids) < len(prompt) + max_tokens:
        digest = sum(token * weights[i] for i, token in enumerate(ids))
        if window is not None:
            first = max(0, len(ids) - window)
            digest += 3 * sum(ids[i] * weights[i] for i in range(first, len(ids)))
        ids.append(digest % VOCAB_SIZE)
        if ids[-1] in stop_token_ids:
            break
    return ids[len(prompt) :]
