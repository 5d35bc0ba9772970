# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache: both layouts, views without copies, poison, attention like dense attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from paged_kv.minivllm import BlockManager, PagedKVCache, bytes_per_block, bytes_per_token

LAYOUTS = ("separate", "stacked")
SIZES = {"num_blocks": 9, "num_layers": 3, "block_size": 8, "num_kv_heads": 2, "head_size": 32}
PAGE = (3, 8, 2, 32)


def poisoned_cache(layout: str, dtype: torch.dtype = torch.float32) -> PagedKVCache:
    """A cache of NaNs: whoever reads a slot that was not written gets one."""
    cache = PagedKVCache(**SIZES, dtype=dtype, layout=layout)
    for tensor in cache.tensors:
        tensor.fill_(math.nan)
    return cache


def random_kv(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_tokens, 2, 32, generator=generator).to(dtype)


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last ``len(query)`` tokens, in float64."""
    num_queries, seq_len = len(query), len(key)
    visible = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()[seq_len - num_queries :]
    q, k, v = (x.transpose(0, 1).double() for x in (query, key, value))
    out = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1)


def test_shapes_are_the_documented_ones():
    separate = PagedKVCache(**SIZES, layout="separate").tensors
    assert [t.shape for t in separate] == [(9, *PAGE), (9, *PAGE)]
    (stacked,) = PagedKVCache(**SIZES, layout="stacked").tensors
    assert stacked.shape == (9, 2, *PAGE)
    assert all(t.is_contiguous() for t in (*separate, stacked))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_is_a_view_of_its_own_part(layout):
    cache = PagedKVCache(**SIZES, layout=layout)
    for layer in range(3):
        for i, view in enumerate(cache.layer(layer)):
            assert view.shape == (9, 8, 2, 32)
            view.fill_(10 * layer + i + 1)
    if layout == "stacked":
        key, value = cache.tensors[0][:, 0], cache.tensors[0][:, 1]
    else:
        key, value = cache.tensors
    for layer in range(3):
        assert (key[:, layer] == 10 * layer + 1).all()
        assert (value[:, layer] == 10 * layer + 2).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_touches_the_named_slots_of_one_layer_only(layout):
    cache = PagedKVCache(**SIZES, layout=layout)
    key, value = random_kv(3)
    cache.write(1, key, value, torch.tensor([17, -1, 71]))
    for layer in range(3):
        for cached, new in zip(cache.layer(layer), (key, value), strict=True):
            expected = torch.zeros(72, 2, 32)
            if layer == 1:
                expected[17], expected[71] = new[0], new[2]
            assert torch.equal(cached.reshape(72, 2, 32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gather_returns_what_was_written(layout, dtype):
    cache = poisoned_cache(layout, dtype)
    manager = BlockManager(9, 8)
    manager.prefill_allocate("other", 10)
    table = manager.prefill_allocate("a", 19)
    key, value = random_kv(19, dtype=dtype)
    cache.write(2, key, value, manager.slot_mapping("a", 0, 19))
    for seq_len in (0, 1, 8, 19):
        gathered_key, gathered_value = cache.gather_kv_for_attention(2, table, seq_len)
        assert torch.equal(gathered_key, key[:seq_len])
        assert torch.equal(gathered_value, value[:seq_len])
        assert gathered_key.is_contiguous()
        assert gathered_value.is_contiguous()


def generate(layout: str, num_tokens: int, num_decodes: int) -> tuple[list[torch.Tensor], ...]:
    """Prefill and decode of one layer, beside a freed and an unrelated sequence."""
    manager, cache = BlockManager(9, 8), poisoned_cache(layout)
    manager.prefill_allocate("freed", 20)
    manager.prefill_allocate("other", 9)
    manager.free_request("freed")

    kv = random_kv(num_tokens + num_decodes)
    query = torch.randn(num_tokens + num_decodes, 6, 32, generator=torch.Generator().manual_seed(1))
    manager.prefill_allocate("a", num_tokens)
    steps = [(0, num_tokens)]
    steps += [(n, n + 1) for n in range(num_tokens, num_tokens + num_decodes)]
    paged, dense = [], []
    for start, end in steps:
        if start > 0:
            manager.decode_append("a")
        cache.write(1, *kv[:, start:end], manager.slot_mapping("a", start, end))
        table = manager.block_table("a")
        paged.append(cache.attend(1, query[start:end], table, seq_len=end))
        dense.append(dense_attention(query[start:end], *kv[:, :end]))
    return paged, dense


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 21])
def test_attention_over_blocks_equals_dense_attention(num_tokens):
    """In both layouts, with NaN in every slot that may not be read."""
    outputs = {layout: generate(layout, num_tokens, num_decodes=10) for layout in LAYOUTS}
    for paged, dense in outputs.values():
        for got, expected in zip(paged, dense, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(outputs["separate"][0], outputs["stacked"][0], strict=True):
        assert torch.equal(a, b)


def test_attend_scales_the_dot_products():
    manager, cache = BlockManager(9, 8), poisoned_cache("separate")
    table = manager.prefill_allocate("a", 5)
    key, value = random_kv(5)
    cache.write(0, key, value, manager.slot_mapping("a", 0, 5))
    query = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(1))
    uniform = cache.attend(0, query, table, 5, scale=0.0)
    torch.testing.assert_close(uniform, value.mean(0, keepdim=True))
    default = cache.attend(0, query, table, 5)
    assert torch.equal(default, cache.attend(0, query, table, 5, scale=32**-0.5))
    assert not torch.allclose(default, uniform)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layer_that_does_not_exist_is_refused(layer):
    cache = PagedKVCache(**SIZES)
    key, value = random_kv(1)
    message = f"layer: expected 0 to 2, got {layer}"
    with pytest.raises(IndexError, match=message):
        cache.layer(layer)
    with pytest.raises(IndexError, match=message):
        cache.write(layer, key, value, torch.tensor([8]))
    with pytest.raises(IndexError, match=message):
        cache.gather_kv_for_attention(layer, [1], 1)
    with pytest.raises(IndexError, match=message):
        cache.attend(layer, torch.zeros(1, 2, 32), [1], 1)


@pytest.mark.parametrize(
    ("block_table", "seq_len", "message"),
    [
        ([1, 9], 9, "block_table: expected block ids 0 to 8, got 9"),
        ([-1], 1, "block_table: expected block ids 0 to 8, got -1"),
        ([1, 2], 17, r"seq_len: expected 0 to 16 \(2 blocks of 8 tokens\), got 17"),
        ([1, 2], -1, "seq_len: expected 0 to 16"),
    ],
)
def test_reads_past_the_cache_or_the_table_are_refused(block_table, seq_len, message):
    cache = PagedKVCache(**SIZES)
    with pytest.raises(IndexError, match=message):
        cache.gather_kv_for_attention(0, block_table, seq_len)
    with pytest.raises(IndexError, match=message):
        cache.attend(0, torch.zeros(1, 2, 32), block_table, seq_len)


def test_table_entries_past_the_sequence_are_not_used():
    cache = PagedKVCache(**SIZES)
    key, value = random_kv(8)
    cache.write(0, key, value, torch.arange(8, 16))
    assert torch.equal(cache.gather_kv_for_attention(0, [1, 10**6], 8)[0], key)
    assert cache.attend(0, torch.zeros(1, 2, 32), [1, 10**6], 8).isfinite().all()


def test_write_past_the_cache_is_refused_and_writes_nothing():
    cache = PagedKVCache(**SIZES)
    key, value = random_kv(2)
    with pytest.raises((RuntimeError, IndexError), match="slot"):
        cache.write(0, key, value, torch.tensor([8, 72]))
    assert not any(t.any() for t in cache.tensors)


@pytest.mark.parametrize("name", list(SIZES))
def test_size_below_one_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        PagedKVCache(**SIZES | {name: 0})


def test_unknown_layout_and_dtype_are_refused():
    with pytest.raises(ValueError, match=r"layout: expected one of .*'stacked'.*got 'nhd'"):
        PagedKVCache(**SIZES, layout="nhd")
    with pytest.raises(ValueError, match=r"dtype: expected one of .*got torch.int8"):
        PagedKVCache(**SIZES, dtype=torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_byte_counts_are_those_of_the_tensors(layout, dtype):
    cache = PagedKVCache(**SIZES, dtype=dtype, layout=layout)
    num_bytes = sum(t.numel() * t.element_size() for t in cache.tensors)
    per_block = bytes_per_block(8, num_layers=3, num_kv_heads=2, head_size=32, dtype=dtype)
    assert num_bytes == 9 * per_block
    assert per_block == 8 * bytes_per_token(3, 2, 32, dtype)
