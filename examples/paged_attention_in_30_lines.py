# SPDX-License-Identifier: Apache-2.0
"""Paged attention in thirty lines: allocate, prefill, decode, and compare with dense attention.

Two sequences share a pool of blocks. Their keys and values are random, as this is about where they
are kept and not about what a model would make of them. Run it with ``python``; it prints where each
sequence ended up and raises if a number is off.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.minivllm import BlockManager, PagedKVCache

NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 4, 2, 8, 2, 64
torch.manual_seed(0)

manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
cache = PagedKVCache(NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
# What a cache without blocks holds: keys and values, copied to a longer tensor in each step.
dense = dict.fromkeys("ab", torch.empty(NUM_LAYERS, 2, 0, NUM_KV_HEADS, HEAD_SIZE))


def step(request_id: str, start: int, end: int) -> None:
    """Runs the tokens ``start`` to ``end - 1`` through every layer and checks the result."""
    new_kv = torch.randn(NUM_LAYERS, 2, end - start, NUM_KV_HEADS, HEAD_SIZE)
    dense[request_id] = torch.cat([dense[request_id], new_kv], dim=2)
    slots, table = manager.slot_mapping(request_id, start, end), manager.block_table(request_id)
    for layer in range(NUM_LAYERS):
        cache.write(layer, *new_kv[layer], slots)
        query = torch.randn(end - start, NUM_HEADS, HEAD_SIZE)
        paged = cache.attend(layer, query, table, seq_len=end)
        key, value = dense[request_id][layer].transpose(1, 2)
        visible = torch.ones(end, end, dtype=torch.bool).tril()[start:]  # causal
        expected = scaled_dot_product_attention(
            query.transpose(0, 1), key, value, attn_mask=visible, enable_gqa=True
        )
        torch.testing.assert_close(paged, expected.transpose(0, 1))


for request_id, prompt_len in (("a", 6), ("b", 9)):
    manager.prefill_allocate(request_id, prompt_len)
    step(request_id, 0, prompt_len)
for _ in range(5):  # decode: one token per sequence, a new block only when the last one is full
    for request_id in ("a", "b"):
        manager.decode_append(request_id)
        step(request_id, manager.num_tokens(request_id) - 1, manager.num_tokens(request_id))

print(f"empty slots in blocks that are held: {manager.fragmentation_ratio():.0%}")
for request_id in ("a", "b"):
    num_tokens, table = manager.num_tokens(request_id), manager.block_table(request_id)
    print(f"{request_id}: {num_tokens} tokens in blocks {table}")
    manager.free_request(request_id)
print(f"free blocks: {manager.num_free_blocks} of {NUM_BLOCKS - 1}")
