# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder over a paged cache: blocks placed at random, everything unused poisoned."""

from __future__ import annotations

import torch

from paged_kv.metadata import AttentionMetadata
from paged_kv.testing import ABSURD_BLOCK_ID


class PagedRunner:
    """One model and one pool; `step` feeds new tokens of any of its sequences.

    Args:
        model: the decoder.
        num_seqs: how many sequences it will run.
        max_len: the longest, in tokens.
        block_size: tokens per block.
        seed: decides where blocks lie.
    """

    def __init__(self, model, *, num_seqs: int, max_len: int, block_size: int = 8, seed: int = 0):
        config = model.config
        self.model = model
        self.block_size = block_size
        self.lens = [0] * num_seqs
        blocks_per_seq = -(-max_len // block_size)
        num_blocks = 1 + 2 * num_seqs * blocks_per_seq
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
        dtype = model.embed_tokens.dtype
        self.kv_caches = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
            for _ in range(config.num_layers)
        ]
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.block_ids = order[: num_seqs * blocks_per_seq].view(num_seqs, -1).to(torch.int32)

    @torch.inference_mode()
    def step(self, new_tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Feed new tokens by sequence number; give the logits of each: ``[num_new, vocab]``."""
        rows, lens, starts, positions, slots, ids = [], [], [0], [], [], []
        for seq, tokens in new_tokens.items():
            place = torch.arange(self.lens[seq], self.lens[seq] + len(tokens))
            self.lens[seq] += len(tokens)
            row = self.block_ids[seq].clone()
            slots.append(
                row[place // self.block_size].long() * self.block_size + place % self.block_size
            )
            row[-(-self.lens[seq] // self.block_size) :] = ABSURD_BLOCK_ID
            rows.append(row)
            lens.append(self.lens[seq])
            starts.append(starts[-1] + len(tokens))
            positions.append(place)
            ids += tokens
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.stack(rows),
            slot_mapping=torch.cat(slots),
            max_query_len=max(len(tokens) for tokens in new_tokens.values()),
            max_seq_len=max(lens),
        )
        hidden = self.model(torch.tensor(ids), torch.cat(positions), self.kv_caches, metadata)
        logits = self.model.compute_logits(hidden)
        return {seq: logits[starts[i] : starts[i + 1]] for i, seq in enumerate(new_tokens)}

    def greedy(self, prompt: list[int], num_tokens: int, *, seq: int = 0) -> list[int]:
        """Extend `prompt` by the likeliest tokens."""
        new, out = list(prompt), []
        for _ in range(num_tokens):
            out.append(int(self.step({seq: new})[seq][-1].argmax()))
            new = out[-1:]
        return out
