# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernel of paged_attention_varlen refuses, survives and reaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import int32
from ops.attention_calls import far_apart, options_of, positional, varlen
from ops.backends import Backend

from paged_kv.testing import AttentionCase, make_case

CASE = AttentionCase("two", (3, 1), (20, 100), head_size=32, dtype=torch.float16)


def shifted(tensor, num_elements=1):
    """The same elements at an address that many elements past an aligned one."""
    wide = tensor.new_zeros(tensor.numel() + num_elements)
    return wide[num_elements:].view(tensor.shape).copy_(tensor)


def padded(tensor, num_elements):
    """The same elements with that many of padding behind each row of the last dimension."""
    wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + num_elements)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda i: {"key_cache": shifted(i.key_cache)}, "key_cache: expected stride 1 .* 2 past"),
        (lambda i: {"value_cache": shifted(i.value_cache, 4)}, "value_cache: .* 8 past such"),
        (lambda i: {"key_cache": padded(i.key_cache, 4)}, "key_cache: .* multiples of 16 bytes"),
        (
            lambda i: {"value_cache": i.value_cache.transpose(1, 3).contiguous().transpose(1, 3)},
            "value_cache: expected stride 1 in the last dimension",
        ),
        (lambda i: {"seq_lens": i.seq_lens.long()}, "seq_lens: expected dtype Int"),
        (lambda _: {"scale": float("inf")}, "scale: expected a finite number"),
    ],
)
def test_tensors_that_it_cannot_read_are_refused(device_backend, changes, message):
    inputs = make_case(CASE)
    with pytest.raises(RuntimeError, match=message):
        varlen(CASE, replace(inputs, **changes(inputs)), backend=device_backend)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 36}, "query: expected a head_size that is a multiple of 8 on CUDA, got 36"),
        ({"layout": "vllm"}, r"key_cache: expected shape \[num_blocks, block_size, .* on CUDA"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_e"),
    ],
)
def test_cases_without_a_kernel_are_refused(device_backend, changes, message):
    case = replace(CASE, dtype=torch.float32, **changes)
    with pytest.raises(RuntimeError, match=message):
        varlen(case, make_case(case), backend=device_backend)


@pytest.mark.parametrize("name", ["softcap", "sliding_window", "split_tokens", "max_seq_len"])
def test_numbers_out_of_range_are_refused(device_backend, name):
    inputs = make_case(CASE)
    with pytest.raises(RuntimeError, match=f"{name}: expected"):
        varlen(CASE, inputs, backend=device_backend, **{name: -2})


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_torch_s_own_float8_dtypes_and_no_scales(device_backend, kv_cache_dtype):
    case = replace(CASE, kv_cache_dtype=kv_cache_dtype)
    inputs = make_case(case)
    dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else torch.float8_e5m2
    caches = {name: getattr(inputs, name).view(dtype) for name in ("key_cache", "value_cache")}
    expected = varlen(case, inputs, backend=device_backend)[0]
    assert torch.equal(varlen(case, replace(inputs, **caches), backend=device_backend)[0], expected)
    ones = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    without = {"k_scale": None, "v_scale": None}
    assert torch.equal(
        varlen(case, replace(inputs, **ones), backend=device_backend)[0],
        varlen(case, replace(inputs, **without), backend=device_backend)[0],
    )


def bad_case():
    return AttentionCase("bad", (2,) * 4, (40,) * 4, head_size=32, sinks=True)


def test_lengths_that_are_wrong_are_cut(device_backend):
    """They cannot be checked without waiting for the device; other sequences do not notice."""
    case = bad_case()
    inputs = make_case(case)
    good, _ = varlen(case, inputs, backend=device_backend)
    lens = inputs.seq_lens.clone()
    lens[1:3] = int32(-7, 2**31 - 1)
    bad = replace(inputs, seq_lens=lens)
    out, lse = varlen(case, bad, backend=device_backend, max_seq_len=40)
    assert torch.equal(out[:2], good[:2])
    assert (out[2:4] == 0).all()
    assert (lse[:, 2:4] == -torch.inf).all()
    assert torch.equal(out[4:], good[4:])  # cut at max_seq_len
    out, _ = varlen(case, bad, backend=device_backend)  # cut at the table, past what was written
    assert torch.equal(out[:2], good[:2])
    assert torch.equal(out[6:], good[6:])


def test_ids_that_are_wrong_are_hidden(device_backend):
    case = bad_case()
    inputs = make_case(case)
    good, _ = varlen(case, inputs, backend=device_backend)
    tables = inputs.block_tables.clone()
    num_blocks = inputs.key_cache.shape[0]
    tables[2, :3] = int32(-1, 2**31 - 1, num_blocks)
    tables[3, 1] = -(2**31)
    out, lse = varlen(case, replace(inputs, block_tables=tables), backend=device_backend)
    assert torch.equal(out[:4], good[:4])
    assert (out[4:6] == 0).all()
    assert (lse[:, 4:6] == -torch.inf).all()
    assert out[6:].isfinite().all()
    assert not torch.equal(out[6:], good[6:])


@pytest.mark.parametrize(
    "starts",
    [
        (5, 2, 4, 6, 8),
        (0, 2, 4, 6, 2**31 - 1),
        (0, 2**31 - 1, 4, 6, 8),
        (-(2**31), 2, 4, 6, 8),
        (8, 6, 4, 2, 0),
        (-1, -1, -1, -1, -1),
        (0, 0, 0, 0, 0),
    ],
    ids=str,
)
def test_starts_that_are_wrong_leave_rows_alone_or_finite(device_backend, starts):
    case = bad_case()
    inputs = make_case(case)
    out, lse = varlen(case, replace(inputs, query_start_loc=int32(*starts)), backend=device_backend)
    untouched = out.isnan().all(-1).all(-1)
    assert out[~untouched].isfinite().all()
    assert lse[:, untouched].isnan().all()
    if len(set(starts)) == 1:
        assert untouched.all()


@pytest.mark.parametrize("num_seqs", [1, 31, 32, 33, 1025])
def test_each_token_finds_its_sequence(device_backend, num_seqs):
    """Also between sequences without queries."""
    lens = tuple(i % 3 for i in range(num_seqs))
    keys = tuple(1 + i % 5 for i in range(num_seqs))
    case = AttentionCase("many", lens, keys, 1, 1, head_size=8, block_size=8, causal=False)
    inputs = make_case(case)
    out, lse = varlen(case, inputs, backend=device_backend)
    expected, expected_lse = varlen(case, inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_strides_are_honoured(device_backend):
    """Caches, queries, scales and values a head that are slices of wider tensors."""
    case = replace(CASE, alibi=True, sinks=True)
    inputs = make_case(case)
    expected, _ = varlen(case, inputs, backend=device_backend)

    def spread(tensor, dim=-1):
        return torch.stack([tensor, tensor], dim).select(dim, 0)

    wide = replace(
        inputs,
        query=padded(inputs.query, 3)[::1],
        key_cache=spread(padded(inputs.key_cache, 8), 2),
        value_cache=spread(padded(inputs.value_cache, 24), 1),
        alibi_slopes=spread(inputs.alibi_slopes),
        sinks=spread(inputs.sinks),
    )
    assert torch.equal(varlen(case, wide, backend=device_backend)[0], expected)


def test_offsets_beyond_32_bits():
    """Blocks, queries and results more than 2^31 elements into their tensors (sparse memory)."""
    backend = Backend("emulated")  # a GPU would have to hold all of it
    case = AttentionCase("far", (1, 1), (20, 70), 2, 1, head_size=32, dtype=torch.float16)
    inputs = make_case(case)
    expected, _ = varlen(case, inputs, backend=backend)
    moved, out = far_apart(inputs)
    backend.paged_attention_varlen(out, *positional(moved), **options_of(case, moved))
    assert torch.equal(out, expected)


def test_tables_of_any_width():
    """2^60 columns of 16 tokens: what they hold does not fit into 64 bits."""
    emulated = Backend("emulated")
    inputs = make_case(CASE)
    column = inputs.block_tables[1:, :1].expand(2, 1)  # a block that is full
    narrow = replace(inputs, block_tables=column.expand(2, 7))
    wide = replace(inputs, block_tables=column.expand(2, 2**60))
    expected = varlen(CASE, narrow, backend=emulated)[0]
    assert torch.equal(varlen(CASE, wide, backend=emulated)[0], expected)


def test_a_plan_and_a_workspace_change_nothing(device_backend):
    inputs = make_case(CASE)
    expected = varlen(CASE, inputs, backend=device_backend)
    extras = {
        "plan": torch.zeros(64, dtype=torch.int32),
        "workspace": torch.empty(64, dtype=torch.uint8),
        "split_tokens": 512,
        "max_query_len": 3,
        "max_seq_len": 100,
    }
    actual = varlen(CASE, inputs, backend=device_backend, **extras)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
