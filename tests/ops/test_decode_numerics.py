# SPDX-License-Identifier: Apache-2.0
"""paged_attention_v1 and _v2 where the right answer is known exactly, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import DTYPES, same_bits
from ops.attention_calls import decode, v1, v2
from ops.backends import BACKENDS
from ops.cases import has_format

from paged_kv.testing import AttentionCase, make_case

VERSIONS = ["v1", "v2"]
each_version = pytest.mark.parametrize("version", VERSIONS)


def key_slots(case, inputs, seq=0):
    """A view of all keys of a sequence in layout vllm: block ids and offsets, by position."""
    positions = torch.arange(case.seq_lens[seq])
    return inputs.block_tables[seq, positions // case.block_size].long(), (
        positions % case.block_size
    )


def set_keys(case, inputs, keys, seq=0):
    """Writes ``[seq_len, head_size]`` as the keys of every head."""
    blocks, offsets = key_slots(case, inputs, seq)
    x = inputs.key_cache.shape[-1]
    chunks = keys.to(case.dtype).view(len(keys), 1, -1, x)
    inputs.key_cache[blocks, :, :, offsets] = chunks.expand(-1, case.num_kv_heads, -1, -1)


def values_of(case, inputs, seq=0):
    """``[seq_len, num_kv_heads, head_size]``."""
    blocks, offsets = key_slots(case, inputs, seq)
    return inputs.value_cache[blocks, :, :, offsets]


@each_version
@pytest.mark.parametrize("block_size", [8, 16, 32, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_each_key_is_a_needle_once(backend, version, block_size, dtype):
    """Query i points at key i, which wins against all others: out is value i, bit for bit.

    All sequences share one row of blocks, so every lane, tile, block and partition has its turn.
    """
    seq_len, head_size = 1030 if version == "v2" else 150, 32
    one = AttentionCase(
        "needle", (1,), (seq_len,), 1, 1, head_size, block_size, layout="vllm", dtype=dtype
    )
    inputs = make_case(one)
    keys = torch.nn.functional.normalize(torch.randn(seq_len, head_size), dim=1)
    set_keys(one, inputs, keys)
    case = replace(one, query_lens=(1,) * seq_len, seq_lens=(seq_len,) * seq_len)
    needles = replace(
        inputs,
        query=(30000 * keys)[:, None].to(dtype),
        seq_lens=inputs.seq_lens.expand(seq_len),
        block_tables=inputs.block_tables.expand(seq_len, -1),
        scale=1.0,
    )
    out = decode(version, case, needles, backend=backend)
    assert torch.equal(out, values_of(one, inputs))


@each_version
def test_huge_logits(backend, version):
    """Logits of +-10^4: exp of the difference is 1 or 0."""
    case = AttentionCase("huge", (1,), (700,), 2, 1, 32, layout="vllm")
    inputs = replace(make_case(case), scale=1.0)
    signs = torch.where(torch.rand(700) < 0.1, 1.0, -1.0)
    inputs.query.zero_()[..., 0] = 100
    set_keys(case, inputs, torch.eye(1, 32) * 100 * signs[:, None])
    expected = values_of(case, inputs)[signs > 0].double().mean(0)
    out = decode(version, case, inputs, backend=backend)
    torch.testing.assert_close(out[0].double(), expected.expand(2, -1), atol=1e-6, rtol=1e-5)


@each_version
@pytest.mark.parametrize("logit", [0.0, -1e30, 1e30])
def test_equal_logits_give_the_mean(backend, version, logit):
    case = AttentionCase("equal", (1,), (700,), 2, 1, 32, layout="vllm")
    inputs = replace(make_case(case), scale=logit)
    inputs.query.zero_()[..., 0] = 1
    set_keys(case, inputs, torch.eye(1, 32).expand(700, -1))
    expected = values_of(case, inputs).double().mean(0)
    out = decode(version, case, inputs, backend=backend)
    torch.testing.assert_close(out[0].double(), expected.expand(2, -1), atol=1e-6, rtol=1e-5)


@each_version
@pytest.mark.parametrize("step", [0.125, -0.125])
def test_monotonic_logits(backend, version, step):
    """The largest logit comes last, or first."""
    case = AttentionCase("ramp", (1,), (1100,), 2, 1, 32, layout="vllm")
    inputs = replace(make_case(case), scale=1.0)
    ramp = step * torch.arange(1100)
    inputs.query.zero_()[..., 0] = 1
    set_keys(case, inputs, torch.eye(1, 32) * ramp[:, None])
    weights = torch.softmax(ramp.double(), 0)
    expected = torch.einsum("k,khd->hd", weights, values_of(case, inputs).double())
    out = decode(version, case, inputs, backend=backend)
    torch.testing.assert_close(out[0].double(), expected.expand(2, -1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [
        (name, kv_cache_dtype)
        for name in BACKENDS
        for kv_cache_dtype in ("auto", "fp8", "int8")
        if has_format(name, kv_cache_dtype)
    ],
    indirect=["backend"],
)
def test_placement_of_blocks_changes_no_bit(backend, kv_cache_dtype, dtype):
    """Of the results, and of v2's buffers, which no rounding to 16 bits has passed over."""
    case = AttentionCase(
        "placed",
        (1, 1),
        (100, 530),
        block_size=8,
        layout="vllm",
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    results = []
    for placement in range(6):
        inputs = make_case(case, placement=placement)
        out, buffers = v2(case, inputs, backend=backend)
        results.append((v1(case, inputs, backend=backend), out, *buffers))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)


@each_version
def test_the_batch_around_a_sequence_changes_no_bit(backend, version):
    case = AttentionCase("batch", (1,) * 4, (3, 64, 600, 1100), 6, head_size=32, layout="vllm")
    inputs = make_case(case)
    out = decode(version, case, inputs, backend=backend)
    for chosen in ([0], [1], [2], [3], [3, 2, 1, 0]):
        part = replace(
            inputs,
            query=inputs.query[chosen],
            seq_lens=inputs.seq_lens[chosen],
            block_tables=inputs.block_tables[chosen],
        )
        lens = tuple(case.seq_lens[seq] for seq in chosen)
        part_case = replace(case, query_lens=(1,) * len(chosen), seq_lens=lens)
        assert torch.equal(decode(version, part_case, part, backend=backend), out[chosen])
