# SPDX-License-Identifier: Apache-2.0
"""PagedAttention: shapes, the choice between v1 and v2, and attention over what was written."""

from __future__ import annotations

import pytest
import torch
from cache_cases import ONE, int32, same_bits

from paged_kv import attention
from paged_kv.attention import PagedAttention, num_partitions, use_v1
from paged_kv.testing import ABSURD_BLOCK_ID, assert_close_report, poison_cache

BLOCK_SIZE, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 16, 2, 4, 32
SCALE = 0.2


def make_cache(num_blocks, dtype=torch.float32):
    shape = PagedAttention.get_kv_cache_shape(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    kv_cache = torch.zeros(shape, dtype=dtype)
    return kv_cache, *PagedAttention.split_kv_cache(kv_cache, NUM_KV_HEADS, HEAD_SIZE)


def dense_attention(query, key, value, scale=SCALE, window=0):
    """float64 causal attention of the last ``len(query)`` tokens to all of ``key``."""
    group = NUM_HEADS // NUM_KV_HEADS
    q, k, v = query.double(), key.double(), value.double()
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    positions = torch.arange(len(k) - len(q), len(k))[:, None]
    keys = torch.arange(len(k))[None]
    hidden = keys > positions
    if window:
        hidden |= keys <= positions - window
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Batch:
    """Sequences written into a fresh cache on permuted blocks; all other slots hold NaN."""

    def __init__(self, seq_lens, dtype=torch.float32):
        num_blocks = [-(-n // BLOCK_SIZE) for n in seq_lens]
        self.kv_cache, self.key_cache, self.value_cache = make_cache(sum(num_blocks) + 2, dtype)
        ids = (torch.randperm(sum(num_blocks)) + 1).int()
        self.tables = torch.full((len(seq_lens), max(num_blocks) + 1), ABSURD_BLOCK_ID).int()
        self.keys = [torch.randn(n, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype) for n in seq_lens]
        self.values = [torch.randn(n, NUM_KV_HEADS, HEAD_SIZE, dtype=dtype) for n in seq_lens]
        self.seq_lens = int32(*seq_lens)
        slots = []
        for seq, row in enumerate(ids.split(num_blocks)):
            self.tables[seq, : len(row)] = row
            positions = torch.arange(seq_lens[seq])
            slots.append(row[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE)
        slots = torch.cat(slots)
        PagedAttention.write_to_paged_cache(
            torch.cat(self.keys),
            torch.cat(self.values),
            self.key_cache,
            self.value_cache,
            slots,
            "auto",
            ONE,
            ONE,
        )
        poison_cache(self.key_cache, slots, 0, 3)
        poison_cache(self.value_cache, slots, 0, 3)


def test_shapes_are_views_of_one_tensor():
    kv_cache, key_cache, value_cache = make_cache(3, torch.bfloat16)
    assert kv_cache.shape == (2, 3, 16 * 2 * 32)
    assert key_cache.shape == (3, 2, 4, 16, 8)
    assert value_cache.shape == (3, 2, 32, 16)
    assert key_cache.data_ptr() == kv_cache[0].data_ptr()
    assert value_cache.data_ptr() == kv_cache[1].data_ptr()


def test_split_refuses_other_shapes():
    with pytest.raises(ValueError, match="head_size: expected a multiple of 8"):
        PagedAttention.split_kv_cache(torch.zeros(2, 3, 64, dtype=torch.float16), 1, 4)
    for shape in ((3, 3, 64), (2, 3, 65), (2, 192)):
        with pytest.raises(ValueError, match="kv_cache: expected shape"):
            PagedAttention.split_kv_cache(torch.zeros(shape), 2, 32)


@pytest.mark.parametrize(
    ("max_seq_len", "num_seqs", "num_heads", "expected"),
    [
        (0, 1, 1, True),
        (1, 1, 1, True),
        (512, 1, 1, True),  # one partition
        (513, 1, 1, False),  # two, and little to do
        (513, 16, 32, False),  # 512 pairs are not enough
        (513, 19, 27, True),  # 513 are
        (8192, 64, 32, True),
        (8193, 64, 32, False),  # too long for one go
    ],
)
def test_choice_of_v1(max_seq_len, num_seqs, num_heads, expected):
    assert use_v1(max_seq_len, num_seqs, num_heads) is expected


def test_num_partitions():
    assert [num_partitions(n) for n in (0, 1, 512, 513, 1024, 1025)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("seq_lens", "op"),
    [([1, 16, 17, 300], "paged_attention_v1"), ([600, 5, 1100], "paged_attention_v2")],
    ids=["v1", "v2"],
)
def test_decode_attends_to_the_whole_sequence(seq_lens, op, dtype, monkeypatch):
    called = []
    real = getattr(attention.ops, op)
    monkeypatch.setattr(attention.ops, op, lambda *args: called.append(op) or real(*args))
    batch = Batch(seq_lens, dtype)
    query = torch.randn(len(seq_lens), NUM_HEADS, HEAD_SIZE, dtype=dtype)
    out = PagedAttention.forward_decode(
        query,
        batch.key_cache,
        batch.value_cache,
        batch.tables,
        batch.seq_lens,
        max(seq_lens),
        "auto",
        NUM_KV_HEADS,
        SCALE,
        None,
        ONE,
        ONE,
    )
    assert called == [op]
    assert out.dtype == dtype
    for seq in range(len(seq_lens)):
        expected = dense_attention(query[seq : seq + 1], batch.keys[seq], batch.values[seq])
        # v2 rounds the partitions' results to the dtype before it joins them.
        bounds = {"max_error": 1.2e-2, "l2_error": 1e-2} if dtype != torch.float32 else {}
        assert_close_report(out[seq : seq + 1], expected, name=f"sequence {seq}", **bounds)


@pytest.mark.parametrize("seq_lens", [[40, 7], [40, 700]], ids=["v1", "v2"])
def test_compiled_decode_equals_eager(seq_lens):
    batch = Batch(seq_lens)
    arguments = (
        torch.randn(2, NUM_HEADS, HEAD_SIZE),
        batch.key_cache,
        batch.value_cache,
        batch.tables,
        batch.seq_lens,
        max(seq_lens),
        "auto",
        NUM_KV_HEADS,
        SCALE,
        None,
        ONE,
        ONE,
    )
    decode = torch.compile(PagedAttention.forward_decode, fullgraph=True, backend="aot_eager")
    assert same_bits(decode(*arguments), PagedAttention.forward_decode(*arguments))


def test_decode_passes_the_block_sparse_pattern_on():
    """vert_stride 2 with one local block: head 0 sees the odd pattern blocks and the last."""
    batch = Batch([5 * 16])
    query = torch.randn(1, NUM_HEADS, HEAD_SIZE)
    out = PagedAttention.forward_decode(
        query,
        batch.key_cache,
        batch.value_cache,
        batch.tables,
        batch.seq_lens,
        80,
        "auto",
        NUM_KV_HEADS,
        SCALE,
        None,
        ONE,
        ONE,
        blocksparse_local_blocks=1,
        blocksparse_vert_stride=2,
        blocksparse_block_size=16,
    )
    seen = torch.tensor([i for i in range(80) if i // 16 in (1, 3, 4)])
    expected = dense_attention(query, batch.keys[0][seen], batch.values[0][seen])
    assert_close_report(out, expected)


@pytest.mark.parametrize("window", [None, 0, 7])
def test_prefix_attends_causally_to_context_and_prompt(window):
    """Chunks of 4, 1 and 20 tokens over contexts of 15, 40 and 0."""
    seq_lens, query_lens = [19, 41, 20], [4, 1, 20]
    batch = Batch(seq_lens)
    queries = [torch.randn(n, NUM_HEADS, HEAD_SIZE) for n in query_lens]
    tail = [slice(n - q, n) for n, q in zip(seq_lens, query_lens, strict=True)]
    out = PagedAttention.forward_prefix(
        torch.cat(queries),
        torch.cat([key[part] for key, part in zip(batch.keys, tail, strict=True)]),
        torch.cat([value[part] for value, part in zip(batch.values, tail, strict=True)]),
        "auto",
        batch.key_cache,
        batch.value_cache,
        batch.tables,
        int32(0, 4, 5, 25),
        batch.seq_lens,
        20,
        None,
        window,
        ONE,
        ONE,
    )
    for seq, result in enumerate(out.split(query_lens)):
        expected = dense_attention(
            queries[seq], batch.keys[seq], batch.values[seq], HEAD_SIZE**-0.5, window or 0
        )
        assert_close_report(result, expected, name=f"sequence {seq}")


def test_prefix_takes_a_scale():
    batch = Batch([10])
    query = torch.randn(10, NUM_HEADS, HEAD_SIZE)
    out = PagedAttention.forward_prefix(
        query,
        batch.keys[0],
        batch.values[0],
        "auto",
        batch.key_cache,
        batch.value_cache,
        batch.tables,
        int32(0, 10),
        batch.seq_lens,
        10,
        None,
        None,
        ONE,
        ONE,
        scale=SCALE,
    )
    assert_close_report(out, dense_attention(query, batch.keys[0], batch.values[0]))


def test_swap_and_copy_move_keys_and_values():
    kv_cache, host = torch.randn(2, 5, 64), torch.zeros(2, 3, 64)
    before = kv_cache.clone()
    PagedAttention.swap_blocks(kv_cache, host, torch.tensor([[4, 1]]))
    assert same_bits(host[:, 1], before[:, 4])
    assert not host[:, [0, 2]].any()
    PagedAttention.copy_blocks([kv_cache, host], torch.tensor([[1, 2]]))
    assert same_bits(kv_cache[:, 2], before[:, 1])
    assert same_bits(host[:, 2], host[:, 1])
    assert same_bits(kv_cache[:, [0, 1, 3, 4]], before[:, [0, 1, 3, 4]])


def test_every_supported_head_size_fits_the_layout():
    for head_size in PagedAttention.get_supported_head_sizes():
        for dtype in (torch.float32, torch.bfloat16):
            shape = PagedAttention.get_kv_cache_shape(2, 16, 1, head_size)
            PagedAttention.split_kv_cache(torch.zeros(shape, dtype=dtype), 1, head_size)
