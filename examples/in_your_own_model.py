# SPDX-License-Identifier: Apache-2.0
"""The paged cache inside a model of one's own: what changes is two ops in its attention.

The model is plain torch, with random weights. Two requests generate together and a third one joins
them: its prompt is computed in the same batch as their next tokens. It begins like the first, so
its first blocks are found in the cache and not computed. The logits of each step are checked
against the same model with dense attention over the whole text. Run it with ``python``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paged_kv import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    Request,
    allocate_kv_cache,
    get_request_block_hasher,
    ops,
)

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, VOCAB_SIZE, MAX_LENGTH = 3, 4, 32, 100, 256
NUM_BLOCKS, BLOCK_SIZE, NUM_NEW_TOKENS = 32, 16, 24
WIDTH, SCALE, ONE = NUM_HEADS * HEAD_SIZE, HEAD_SIZE**-0.5, torch.ones(1)


class Batch(NamedTuple):
    """Where the tokens of a step are: those of each request follow one another."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor


class Attention(nn.Module):
    """Causal attention, paged if there is a batch, else dense over one whole text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache = allocate_kv_cache(
            NUM_BLOCKS, BLOCK_SIZE, NUM_HEADS, HEAD_SIZE, dtype=torch.float32
        )

    def forward(self, x: Tensor, batch: Batch | None) -> Tensor:
        """Shapes: [num_tokens, width], in and out."""
        query, key, value = self.qkv(x).view(-1, 3, NUM_HEADS, HEAD_SIZE).unbind(1)
        if batch is None:
            heads_first = (t.transpose(0, 1) for t in (query, key, value))
            out = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(0, 1)
        else:
            slots, out = batch.slot_mapping, torch.empty(query.shape)
            ops.reshape_and_cache_flash(key, value, *self.cache, slots, "auto", ONE, ONE)
            ops.paged_attention_varlen(out, query, *self.cache, *batch[:3], SCALE)
        return self.out(out.flatten(1))


class Model(nn.Module):
    """Embeddings, attention layers with residuals, and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, ids: Tensor, positions: Tensor, batch: Batch | None = None) -> Tensor:
        """Logits, [num_tokens, vocabulary]."""
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = x + layer(x, batch)
        return self.head(x)


spec = FullAttentionSpec(
    block_size=BLOCK_SIZE, num_kv_heads=NUM_HEADS, head_size=HEAD_SIZE, dtype="float32"
)
manager = KVCacheManager(
    KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layers"], spec)]),
    max_model_len=MAX_LENGTH,
    scheduler_block_size=BLOCK_SIZE,
    hash_block_size=BLOCK_SIZE,
)


def step(model: Model, requests: list[Request]) -> None:
    """Computes what is new of each request and appends the most likely next token."""
    counts = []
    for request in requests:
        hit, num_hits = manager.empty_kv_cache_blocks, 0
        if request.num_computed_tokens == 0:
            hit, num_hits, _ = manager.get_computed_blocks(request)
        counts.append(request.num_tokens - request.num_computed_tokens - num_hits)
        if manager.allocate_slots(request, counts[-1], num_hits, hit) is None:
            msg = "out of blocks: a scheduler would let the request wait"
            raise RuntimeError(msg)
        request.num_computed_tokens += num_hits

    tables = [torch.tensor(manager.get_block_ids(r.request_id)[0]) for r in requests]
    block_tables = nn.utils.rnn.pad_sequence(tables, batch_first=True).int()
    query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
    seq_lens = torch.tensor([r.num_tokens for r in requests], dtype=torch.int32)
    news = [(r, range(r.num_computed_tokens, r.num_tokens)) for r in requests]
    ids = torch.tensor([r.all_token_ids[i] for r, new in news for i in new])
    positions = torch.tensor([i for _, new in news for i in new])
    slot_mapping = torch.empty(len(ids), dtype=torch.int64)
    ops.compute_slot_mapping(query_start_loc, positions, block_tables, slot_mapping, BLOCK_SIZE)

    batch = Batch(query_start_loc, seq_lens, block_tables, slot_mapping)
    last_logits = model(ids, positions, batch)[query_start_loc[1:] - 1]
    for request, logits in zip(requests, last_logits, strict=True):
        text = torch.tensor(request.all_token_ids)
        torch.testing.assert_close(logits, model(text, torch.arange(len(text)))[-1])
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(int(logits.argmax()))


torch.manual_seed(0)
model = Model().eval().requires_grad_(False)
first, second = (torch.randint(VOCAB_SIZE, (n,)).tolist() for n in (40, 19))
hasher = get_request_block_hasher(BLOCK_SIZE)
requests = [
    Request(name, prompt, block_hasher=hasher)
    for name, prompt in (("a", first), ("b", second), ("c", [*first[:36], 1, 2]))
]
for num_running in (2, *[3] * NUM_NEW_TOKENS):  # "c" joins after a step
    step(model, requests[:num_running])

print(f"{1 + NUM_NEW_TOKENS} steps, each with the logits of dense attention")
for request in requests:
    block_ids = manager.get_block_ids(request.request_id)[0]
    print(f"{request.request_id}: {request.num_tokens} tokens in blocks {block_ids}")
for request in requests:
    manager.free(request)
print(f"free blocks: {manager.block_pool.get_num_free_blocks()} of {NUM_BLOCKS - 1}")
