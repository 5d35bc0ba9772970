# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels of paged_attention_v1 and _v2 refuse, survive and reach."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import ONE, huge_tensor, int32
from ops.attention_calls import (
    FAR_STRIDE,
    decode,
    decode_arguments,
    far_apart,
    partition_buffers,
    v1,
    v2,
)
from ops.backends import Backend

from paged_kv.testing import AttentionCase, make_case

CASE = AttentionCase("two", (1, 1), (20, 600), layout="vllm", dtype=torch.float16)
each_version = pytest.mark.parametrize("version", ["v1", "v2"])


def shifted(tensor, num_elements=1):
    """The same elements at an address that many elements past an aligned one."""
    wide = tensor.new_zeros(tensor.numel() + num_elements)
    return wide[num_elements:].view(tensor.shape).copy_(tensor)


def padded(tensor, num_elements=1):
    """The same elements with that many of padding behind each row of the last dimension."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + num_elements)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda i: {"key_cache": shifted(i.key_cache)}, "key_cache: expected stride 1 .* 2 past"),
        (lambda i: {"key_cache": padded(i.key_cache)}, "key_cache: .* multiples of 16 bytes"),
        (lambda i: {"value_cache": shifted(i.value_cache, 4)}, "value_cache: .* 8 past such"),
        (lambda i: {"value_cache": padded(i.value_cache)}, "value_cache: .* multiples of 16"),
        (
            lambda i: {
                "key_cache": i.value_cache.transpose(2, 3).contiguous().transpose(1, 2),
                "value_cache": i.value_cache.transpose(2, 3).contiguous().transpose(1, 2),
            },
            r"key_cache: expected shape \[num_blocks, .* x\] on CUDA, got \[42, 16, 2, 64\]",
        ),
        (lambda i: {"seq_lens": i.seq_lens.long()}, "seq_lens: expected dtype Int"),
        (lambda _: {"scale": float("inf")}, "scale: expected a finite number"),
    ],
)
def test_tensors_that_it_cannot_read_are_refused(device_backend, changes, message):
    inputs = make_case(CASE)
    inputs = replace(inputs, **changes(inputs))
    for version in ("v1", "v2"):
        with pytest.raises(RuntimeError, match=message):
            decode(version, CASE, inputs, backend=device_backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 48}, r"query: expected a head_size of \[32, 64, 80, .*, 256\].* got 48"),
        ({"block_size": 12}, "block_size: expected a multiple of 8, .* got 12"),
        ({"block_size": 4}, "block_size: expected a multiple of 8, .* got 4"),
        ({"kv_cache_dtype": "fp8", "head_size": 120}, "multiple of x = 16, got 120"),
    ],
)
def test_sizes_without_a_kernel_are_refused(device_backend, changes, message):
    case = replace(CASE, **changes)
    if case.kv_cache_dtype == "auto":
        inputs = make_case(case)
    else:
        auto = make_case(replace(case, kv_cache_dtype="auto"))
        inputs = replace(
            auto,
            key_cache=torch.zeros(42, 2, 7, 16, 16, dtype=torch.uint8),
            value_cache=torch.zeros(42, 2, 120, 16, dtype=torch.uint8),
        )
    with pytest.raises(RuntimeError, match=message):
        v1(case, inputs, backend=device_backend)


def test_a_quantised_cache_needs_its_dtype(device_backend):
    inputs = make_case(CASE)
    for kv_cache_dtype, message in (
        ("fp8", "key_cache: expected dtype Byte or Float8_e4m3fn, got Half"),
        ("int8", "kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_e5m2; got 'int8'"),
    ):
        with pytest.raises(RuntimeError, match=message):
            v1(replace(CASE, kv_cache_dtype=kv_cache_dtype), inputs, backend=device_backend)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_torch_s_own_float8_dtypes(device_backend, kv_cache_dtype):
    case = replace(CASE, kv_cache_dtype=kv_cache_dtype)
    inputs = make_case(case)
    dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else torch.float8_e5m2
    typed = replace(
        inputs,
        key_cache=inputs.key_cache.view(dtype),
        value_cache=inputs.value_cache.view(dtype),
    )
    expected = v1(case, inputs, backend=device_backend)
    assert torch.equal(v1(case, typed, backend=device_backend), expected)


def test_v1_refuses_what_shared_memory_does_not_hold(device_backend):
    inputs = make_case(CASE)
    arguments = list(decode_arguments(CASE, inputs))
    arguments[5] = torch.zeros(2, 20000, dtype=torch.int32)
    arguments[8] = 300_000
    out = torch.full(inputs.query.shape, 7.0).half()
    with pytest.raises(RuntimeError, match=r"max_seq_len: paged_attention_v1 .*paged_attention_v2"):
        device_backend.paged_attention_v1(out, *arguments)
    arguments[8] = -1  # then it is what the tables hold
    with pytest.raises(RuntimeError, match="got 320000"):
        device_backend.paged_attention_v1(out, *arguments)
    assert (out == 7).all()


def test_v2_needs_partitions_for_max_seq_len(device_backend):
    inputs = make_case(CASE)
    with pytest.raises(RuntimeError, match=r"exp_sums: expected max_partitions >= 2 .*, got 1"):
        device_backend.paged_attention_v2(
            torch.zeros(inputs.query.shape).half(),
            *partition_buffers(CASE, num_partitions=1),
            *decode_arguments(CASE, inputs),
        )


def test_v2_compares_partitions_without_overflow(device_backend):
    """2^56 partitions are 2^65 tokens, and more than the 5 that are needed; of no sequence."""
    query = torch.zeros(0, 1, 32)
    arguments = (
        *(query, torch.zeros(1, 1, 8, 16, 4), torch.zeros(1, 1, 32, 16), 1, 1.0),
        *(torch.zeros(0, 1).int(), int32(), 16, 5, None, "auto", ONE, ONE),
    )
    buffers = [torch.zeros(0, 1, 2**56), torch.zeros(0, 1, 2**56), torch.zeros(0, 1, 2**56, 32)]
    device_backend.paged_attention_v2(query.clone(), *buffers, *arguments)


@each_version
def test_tables_of_any_width(version):
    """2^60 columns of 16 tokens: what they hold does not fit into 64 bits."""
    emulated = Backend("emulated")
    inputs = make_case(CASE)
    column = torch.zeros(2, 1, dtype=torch.int32)
    narrow = replace(inputs, block_tables=column.expand(2, 38))  # of 608 tokens
    wide = replace(inputs, block_tables=column.expand(2, 2**60))
    expected = decode(version, CASE, narrow, backend=emulated)
    assert torch.equal(decode(version, CASE, wide, backend=emulated), expected)


@each_version
def test_max_seq_len_from_the_shapes(device_backend, version):
    inputs = make_case(CASE)
    expected = decode(version, CASE, inputs, backend=device_backend)
    arguments = list(decode_arguments(CASE, inputs))
    arguments[8] = -1
    out = torch.full_like(expected, torch.nan)
    buffers = () if version == "v1" else partition_buffers(CASE)
    getattr(device_backend, f"paged_attention_{version}")(out, *buffers, *arguments)
    assert torch.equal(out, expected)


@each_version
def test_lengths_and_ids_that_are_wrong_are_cut_and_hidden(device_backend, version):
    """They cannot be checked without waiting for the device; other sequences do not notice."""
    case = AttentionCase("bad", (1,) * 4, (40, 40, 40, 40), layout="vllm", head_size=32)
    inputs = make_case(case)
    good = decode(version, case, inputs, backend=device_backend)
    lens, tables = inputs.seq_lens.clone(), inputs.block_tables.clone()
    lens[1:3] = int32(-7, 2**31 - 1)
    tables[3, :3] = int32(-1, 2**31 - 1, 2**31 - 1)
    bad = replace(inputs, seq_lens=lens, block_tables=tables)
    out = decode(version, case, bad, backend=device_backend)
    assert torch.equal(out[0], good[0])
    assert (out[1] == 0).all()
    assert torch.equal(out[2], good[2])  # cut at max_seq_len
    assert (out[3] == 0).all()


@each_version
def test_strides_are_honoured(device_backend, version):
    """Caches, tables, lengths and outputs that are slices of wider tensors."""
    case = replace(CASE, head_size=32)
    inputs = make_case(case)
    expected = decode(version, case, inputs, backend=device_backend)

    def spread(tensor, dim=-1):
        return torch.stack([tensor, tensor], dim).select(dim, 0)

    wide = replace(
        inputs,
        key_cache=spread(padded(inputs.key_cache.flatten(3), 8).unflatten(3, (-1, 8)), 2),
        value_cache=spread(padded(inputs.value_cache, 8), 1),
        seq_lens=spread(inputs.seq_lens),
        block_tables=spread(inputs.block_tables),
        alibi_slopes=None,
    )
    assert not wide.key_cache.is_contiguous()
    out = torch.zeros(2, 8, 64).half()[:, ::2, :32]
    buffers = ()
    if version == "v2":
        buffers = [spread(buffer) for buffer in partition_buffers(case)[:2]]
        buffers.append(spread(partition_buffers(case)[2], 2))
    getattr(device_backend, f"paged_attention_{version}")(
        out, *buffers, *decode_arguments(case, wide)
    )
    assert torch.equal(out, expected)


@each_version
def test_offsets_beyond_32_bits(version):
    """Blocks, queries and results more than 2^31 elements into their tensors (sparse memory)."""
    backend = Backend("emulated")  # a GPU would have to hold all of it
    case = AttentionCase(
        "far", (1, 1), (20, 530), 2, 1, head_size=32, layout="vllm", dtype=torch.float16
    )
    inputs = make_case(case)
    expected = decode(version, case, inputs, backend=backend)
    moved, out = far_apart(inputs)
    buffers, stride = (), FAR_STRIDE
    if version == "v2":
        sums = [
            huge_tensor(stride + 4, dtype=torch.float32).as_strided((2, 2, 2), (stride, 2, 1))
            for _ in range(2)
        ]
        tmp_out = huge_tensor(stride + 128, dtype=torch.float16)
        buffers = (*sums, tmp_out.as_strided((2, 2, 2, 32), (stride, 64, 32, 1)))
    getattr(backend, f"paged_attention_{version}")(out, *buffers, *decode_arguments(case, moved))
    assert torch.equal(out, expected)


def test_v2_of_one_partition_equals_v1(device_backend):
    case = replace(CASE, dtype=torch.float32, seq_lens=(20, 512))
    inputs = make_case(case)
    out, (exp_sums, _, tmp_out) = v2(case, inputs, backend=device_backend)
    assert torch.equal(tmp_out[:, :, 0], v1(case, inputs, backend=device_backend))
    torch.testing.assert_close(out, tmp_out[:, :, 0], atol=1e-6, rtol=1e-6)
    assert (exp_sums >= 1).all()
