# SPDX-License-Identifier: Apache-2.0
"""Beam search on a paged cache: beams share blocks, and copy one before they write to it.

The model is one attention layer with random weights. In each step beams fork and die; the
`BlockSpaceManager` says which blocks to copy, and `copy_blocks` does it. After each step every
beam's output must equal, bit for bit, that of a cache in which each beam has blocks of its own.
Run it with ``python``; it prints what sharing saved and raises if a number is off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kv import BlockSpaceManager, ops
from paged_kv.block_table import BlockTable

NUM_BEAMS, NUM_STEPS, VOCAB_SIZE = 4, 24, 50
NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, MAX_BLOCKS = 80, 4, 2, 16, 16
PROMPT = [7, 3, 9, 1, 4, 8]
NO_SCALE = torch.ones(1)
torch.manual_seed(0)

key_of, value_of, query_of = torch.randn(3, VOCAB_SIZE, NUM_HEADS, HEAD_SIZE)
output_weight = torch.randn(NUM_HEADS * HEAD_SIZE, VOCAB_SIZE)


def make_caches() -> tuple[Tensor, Tensor]:
    """Keys and values. A slot that is read before it was written shows as NaN."""
    key, value = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE), torch.nan)
    return key, value


def forward(
    caches: tuple[Tensor, Tensor], rows: list[list[int]], texts: list[list[int]], num_new: int
) -> Tensor:
    """Writes the last tokens of each text; returns log-probabilities of the next one."""
    table = BlockTable(BLOCK_SIZE, len(rows), MAX_BLOCKS, len(rows) * num_new)
    for i, row in enumerate(rows):
        table.add_row(row, i)
    table.commit_block_table(len(rows))
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    length = len(texts[0])
    table.compute_slot_mapping(
        len(rows), starts * num_new, torch.arange(length - num_new, length).repeat(len(rows))
    )
    tokens = torch.tensor([token for text in texts for token in text[-num_new:]])
    ops.reshape_and_cache_flash(
        key_of[tokens], value_of[tokens], *caches, table.slot_mapping, "auto", NO_SCALE, NO_SCALE
    )
    query = query_of[torch.tensor([text[-1] for text in texts])]
    out = torch.empty_like(query)
    lengths = torch.full((len(rows),), length, dtype=torch.int32)
    block_tables = table.get_device_tensor(len(rows))
    ops.paged_attention_varlen(out, query, *caches, starts, lengths, block_tables, HEAD_SIZE**-0.5)
    return torch.log_softmax(out.flatten(1) @ output_weight, dim=-1)


def forward_unshared(texts: list[list[int]]) -> Tensor:
    """The same from a cache that is written anew, with blocks of its own for each text."""
    rows = [list(range(1 + i * MAX_BLOCKS, 1 + (i + 1) * MAX_BLOCKS)) for i in range(len(texts))]
    return forward(make_caches(), rows, texts, num_new=len(texts[0]))


manager = BlockSpaceManager(BLOCK_SIZE, NUM_BLOCKS)
caches = make_caches()
beams, texts, scores = [0], [PROMPT], torch.zeros(1)
manager.allocate(beams, len(PROMPT))
log_probs = forward(caches, [manager.get_block_table(0).tolist()], texts, num_new=len(PROMPT))
num_beams_made, num_copies = 1, 0

for _ in range(NUM_STEPS):
    best = (scores[:, None] + log_probs).flatten().topk(NUM_BEAMS)
    scores, parents = best.values, (best.indices // VOCAB_SIZE).tolist()
    tokens = (best.indices % VOCAB_SIZE).tolist()
    texts = [[*texts[parent], token] for parent, token in zip(parents, tokens, strict=True)]

    children = list(range(num_beams_made, num_beams_made + NUM_BEAMS))
    num_beams_made += NUM_BEAMS
    for parent, child in zip(parents, children, strict=True):
        manager.fork(beams[parent], child)
    for beam in beams:
        manager.free(beam)
    beams = children

    copies = torch.from_numpy(manager.append_slots(beams))  # room for one token more of each
    ops.copy_blocks([caches[0]], [caches[1]], copies)
    num_copies += len(copies)
    rows = [manager.get_block_table(beam).tolist() for beam in beams]
    log_probs = forward(caches, rows, texts, num_new=1)
    if not torch.equal(log_probs, forward_unshared(texts)):
        msg = "a beam read what another wrote"
        raise RuntimeError(msg)

num_held = NUM_BLOCKS - 1 - manager.get_num_free_gpu_blocks()
print(f"best beam: {texts[0]}, log-probability {scores[0]:.2f}")
print(f"blocks held by {NUM_BEAMS} beams: {num_held}, without sharing {sum(map(len, rows))}")
print(f"blocks copied in {NUM_STEPS} steps: {num_copies}")
manager.reset()
print(f"free blocks: {manager.get_num_free_gpu_blocks()} of {NUM_BLOCKS - 1}")
