# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder over a paged cache: blocks placed at random, everything unused poisoned."""

from __future__ import annotations

import torch

from paged_kv.kv_cache import KVCache, kv_cache_dtype_str_to_dtype
from paged_kv.metadata import AttentionMetadata
from paged_kv.testing import ABSURD_BLOCK_ID

# NaN in both float8 formats, the largest value in int8.
_POISON_BYTE = 0x7F


class PagedRunner:
    """One model and one pool; `step` feeds new tokens of any of its sequences.

    Layers with a sliding window have block tables of their own, in which all blocks that have left
    the window are forgotten.

    Args:
        model: the decoder.
        num_seqs: how many sequences it will run.
        max_len: the longest, in tokens.
        block_size: tokens per block.
        seed: decides where blocks lie.
        kv_cache_dtype: of all layers.
        scales: ``(k_scale, v_scale)`` of all layers, if the cache is quantised.
    """

    def __init__(
        self,
        model,
        *,
        num_seqs: int,
        max_len: int,
        block_size: int = 8,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
        scales: tuple[torch.Tensor, ...] = (),
    ):
        config = model.config
        self.model = model
        self.block_size = block_size
        self.lens = [0] * num_seqs
        blocks_per_seq = -(-max_len // block_size)
        num_blocks = 1 + 2 * num_seqs * blocks_per_seq
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_size)
        dtype = kv_cache_dtype_str_to_dtype(kv_cache_dtype, model.dtype)

        def poisoned() -> torch.Tensor:
            poison = torch.nan if dtype.is_floating_point else _POISON_BYTE
            return torch.full(shape, poison, dtype=dtype).transpose(1, 2)

        self.kv_caches = [
            KVCache(poisoned(), poisoned(), kv_cache_dtype, *scales)
            for _ in range(config.num_layers)
        ]
        self.windows = [config.sliding_window_of(layer) for layer in range(config.num_layers)]
        generator = torch.Generator().manual_seed(seed)
        self.block_ids = {}
        for window in dict.fromkeys(self.windows):
            order = torch.randperm(num_blocks - 1, generator=generator) + 1
            ids = order[: num_seqs * blocks_per_seq].view(num_seqs, -1)
            self.block_ids[window] = ids.to(torch.int32)

    @torch.inference_mode()
    def step(
        self,
        new_tokens: dict[int, list[int]],
        *,
        logits_to_keep: int | None = None,
        last_tokens_only: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Feed new tokens by sequence number; give the logits of each: ``[num_new, vocab]``.

        With `logits_to_keep` only those of the last tokens of each; with `last_tokens_only` the
        model computes no others than the very last.
        """
        counts = {seq: len(tokens) for seq, tokens in new_tokens.items()}
        starts = [0, *torch.tensor(list(counts.values())).cumsum(0).tolist()]
        metadata = {window: self._metadata(counts, starts, window) for window in self.block_ids}
        positions = [torch.arange(self.lens[seq], self.lens[seq] + n) for seq, n in counts.items()]
        for seq, count in counts.items():
            self.lens[seq] += count
        ids = [token for tokens in new_tokens.values() for token in tokens]
        hidden = self.model(
            torch.tensor(ids),
            torch.cat(positions),
            self.kv_caches,
            [metadata[window] for window in self.windows],
            last_tokens_only=last_tokens_only,
        )
        if last_tokens_only:
            starts = list(range(len(new_tokens) + 1))
        rows = {seq: hidden[starts[i] : starts[i + 1]] for i, seq in enumerate(new_tokens)}
        if logits_to_keep is not None:
            rows = {seq: of_seq[-logits_to_keep:] for seq, of_seq in rows.items()}
        logits = self.model.compute_logits(torch.cat(list(rows.values())))
        parts = logits.split([len(of_seq) for of_seq in rows.values()])
        return dict(zip(rows, parts, strict=True))

    def greedy(self, prompt: list[int], num_tokens: int, *, seq: int = 0) -> list[int]:
        """Extend `prompt` by the likeliest tokens."""
        new, out = list(prompt), []
        for _ in range(num_tokens):
            out.append(int(self.step({seq: new}, logits_to_keep=1)[seq][-1].argmax()))
            new = out[-1:]
        return out

    def _metadata(self, counts: dict[int, int], starts: list[int], window: int | None):
        rows, slots = [], []
        for seq, count in counts.items():
            place = torch.arange(self.lens[seq], self.lens[seq] + count)
            row = self.block_ids[window][seq].clone()
            slots.append(
                row[place // self.block_size].long() * self.block_size + place % self.block_size
            )
            row[-(-(self.lens[seq] + count) // self.block_size) :] = ABSURD_BLOCK_ID
            if window is not None:
                first_seen = max(0, self.lens[seq] - window + 1)
                row[: first_seen // self.block_size] = ABSURD_BLOCK_ID
            rows.append(row)
        seq_lens = [self.lens[seq] + count for seq, count in counts.items()]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.stack(rows),
            slot_mapping=torch.cat(slots),
            max_query_len=max(counts.values()),
            max_seq_len=max(seq_lens),
        )
