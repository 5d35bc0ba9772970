# SPDX-License-Identifier: Apache-2.0
"""A bad argument is refused with a RuntimeError that names it, and nothing has been written."""

from __future__ import annotations

import pytest
import torch
from cache_cases import DTYPES, int32
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.attention_calls import (
    decode_arguments,
    dequantised,
    options_of,
    partition_buffers,
    positional,
    reference_arguments,
)

from paged_kv import ops, reference
from paged_kv.testing import TOLERANCES, AttentionCase, make_case

CASE = AttentionCase("two", (1, 3), (20, 35))
NAMES = (
    "out", "query", "key_cache", "value_cache", "query_start_loc", "seq_lens", "block_tables",
    "scale",
)  # fmt: skip


def table(inputs, row, column, value):
    tables = inputs.block_tables.clone()
    tables[row, column] = value
    return tables


BAD = {
    "query 2-D": ({"query": torch.zeros(4, 64)}, r"query: expected shape \[num_tokens"),
    "query dtype": ({"query": torch.zeros(4, 4, 64).double()}, "query: expected dtype Float or"),
    "query strided": ({"query": torch.zeros(4, 4, 128)[..., ::2]}, "query: expected stride 1"),
    "query heads": ({"query": torch.zeros(4, 3, 64)}, "out: expected num_heads = 3"),
    "head size": (
        {"query": torch.zeros(4, 4, 257), "out": torch.zeros(4, 4, 257)},
        r"head_size in \[1, 256\], got 257",
    ),
    "out dtype": ({"out": torch.zeros(4, 4, 64).half()}, "out: expected dtype Float, got Half"),
    "out expanded": ({"out": torch.zeros(1, 4, 64).expand(4, -1, -1)}, "out: is written"),
    "out overlaps itself": (
        {"out": torch.zeros(4 * 4 * 64).as_strided((4, 4, 64), (4 * 64, 32, 1))},
        r"out: is written, .* got strides \[256, 32, 1\] for shape \[4, 4, 64\]",
    ),
    "cache dtype": ({"key_cache": torch.zeros(7, 16, 2, 64).half()}, "key_cache: expected dtype"),
    "cache 3-D": ({"key_cache": torch.zeros(7, 16, 128)}, "key_cache: expected shape"),
    "cache head size": (
        {"key_cache": torch.zeros(7, 16, 2, 32)},
        r"key_cache: expected head_size = 64 \(from query\), got 32",
    ),
    "value blocks": ({"value_cache": torch.zeros(6, 16, 2, 64)}, "value_cache: expected num_bl"),
    "head ratio": (
        {"key_cache": torch.zeros(7, 16, 3, 64), "value_cache": torch.zeros(7, 16, 3, 64)},
        "num_heads to be a multiple of num_kv_heads = 3, got 4",
    ),
    "starts int64": ({"query_start_loc": torch.tensor([0, 1, 4])}, "query_start_loc: expected dt"),
    "starts short": ({"query_start_loc": int32(0, 4)}, "query_start_loc: expected num_seqs"),
    "starts at 1": ({"query_start_loc": int32(1, 2, 4)}, r"query_start_loc\[0\]: expected 0"),
    "starts decrease": (
        {"query_start_loc": int32(0, 3, 2)},
        r"query_start_loc\[2\]: expected >= 3",
    ),
    "starts too far": ({"query_start_loc": int32(0, 1, 5)}, r"query_start_loc\[2\]: expected <= "),
    "length negative": ({"seq_lens": int32(-1, 35)}, r"seq_lens\[0\]: expected >= 0, got -1"),
    "length too large": ({"seq_lens": int32(20, 65)}, r"seq_lens\[1\]: expected <= 64 .*got 65"),
    "lens int64": ({"seq_lens": torch.tensor([20, 35])}, "seq_lens: expected dtype Int, got Long"),
    "tables rows": ({"block_tables": torch.zeros(1, 4, dtype=torch.int32)}, "block_tables: expect"),
    "scale": ({"scale": float("nan")}, "scale: expected a finite number"),
    "scale past float32": ({"scale": 1e300}, "scale: expected a finite number"),
    "softcap below float32": ({"softcap": 1e-42}, "softcap: expected 0 or a positive normal"),
    "query on meta": (
        {"query": torch.zeros(4, 4, 64, device="meta")},
        "out: expected a tensor on meta, like query, got one on cpu",
    ),
    "window": ({"sliding_window": -1}, "sliding_window: expected >= 0, got -1"),
    "softcap": ({"softcap": -1.0}, "softcap: expected 0 or a positive normal float32, got -1"),
    "split": ({"split_tokens": -1}, "split_tokens: expected >= 0"),
    "slopes": ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes: expected num_heads = 4"),
    "sinks": ({"sinks": torch.zeros(4).double()}, "sinks: expected dtype Float, got Double"),
    "lse": ({"lse": torch.zeros(4, 5)}, "lse: expected num_tokens = 4"),
    "max_seq_len": ({"max_seq_len": 30}, r"seq_lens\[1\]: expected <= max_seq_len = 30, got 35"),
    "max_query_len": ({"max_query_len": 2}, "expected <= max_query_len = 2"),
    "k_scale": ({"k_scale": torch.ones(3)}, r"k_scale: expected one element or \[num_kv_heads\]"),
    "plan": ({"plan": torch.zeros(4)}, "plan: expected dtype Int, got Float"),
    "kv_cache_dtype": (
        {"kv_cache_dtype": "fp4"},
        "kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_e5m2, int8; got 'fp4'",
    ),
    "fp8": (
        {"kv_cache_dtype": "fp8"},
        "key_cache: expected dtype Byte or Float8_e4m3fn, got Float",
    ),
}


def call_with(inputs, changes):
    out = torch.full((4, 4, 64), 7.0)
    arguments = dict(zip(NAMES, (out, *positional(inputs)), strict=True)) | changes
    ops.paged_attention_varlen(**arguments)
    return arguments["out"]


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=list(BAD))
def test_varlen_names_the_bad_argument(changes, message):
    inputs = make_case(CASE)
    with pytest.raises(RuntimeError, match=message) as error:
        call_with(inputs, changes)
    assert "\n" not in str(error.value)
    assert ".cpp" not in str(error.value)
    assert ".h" not in str(error.value)


@pytest.mark.parametrize("block_id", [-1, 7, 2**31 - 1])
def test_a_used_block_id_out_of_range_is_refused_before_anything_is_written(block_id):
    inputs = make_case(CASE)
    assert inputs.key_cache.shape[0] == 7
    out = torch.full((4, 4, 64), 7.0)
    with pytest.raises(
        RuntimeError, match=r"block_tables\[1, 2\]: expected a block id in \[0, 7\)"
    ):
        call_with(inputs, {"out": out, "block_tables": table(inputs, 1, 2, block_id)})
    assert (out == 7).all()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_decode_ops_name_the_bad_argument(version):
    case = AttentionCase("decode", (1, 1), (20, 600), layout="vllm")
    inputs = make_case(case)
    out = torch.full(inputs.query.shape, 7.0)
    good = decode_arguments(case, inputs)

    def call(index, value):
        arguments = [*good]
        arguments[index] = value
        if version == "v1":
            ops.paged_attention_v1(out, *arguments)
        else:
            ops.paged_attention_v2(out, *partition_buffers(case), *arguments)

    for index, value, message in (
        (1, inputs.key_cache[..., :2], "key_cache: expected x = 4"),
        (3, 3, "key_cache: expected num_kv_heads = 3"),
        (5, table(inputs, 0, 1, -5), r"block_tables\[0, 1\]"),
        (6, int32(20, 5000), r"seq_lens\[1\]: expected <= "),
        (6, int32(20), "block_tables|seq_lens: expected num_seqs = 2"),
        (7, 8, "key_cache: expected block_size = 8"),
        (8, 100, r"seq_lens\[1\]: expected <= max_seq_len = 100, got 600"),
        (10, "int8", "key_cache: expected dtype Char, got Float"),
        (11, torch.ones(1, dtype=torch.float64), "k_scale: expected dtype Float"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(index, value)
    for sparsity, message in (
        ((0, 1, 4, 24, 0), "blocksparse_block_size: expected a multiple"),
        ((2**63 - 1, 1, 4, 32, 1), "tp_rank: expected in"),
        ((0, 1, 4, 32, -(2**63)), "blocksparse_head_sliding_step: expected in"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.paged_attention_v1(out, *good, *sparsity)
    assert (out == 7).all()


def test_v2_refuses_too_few_partitions():
    case = AttentionCase("decode", (1,), (513,))
    inputs = make_case(case)
    out = torch.zeros(inputs.query.shape)
    with pytest.raises(RuntimeError, match="exp_sums: expected max_partitions >= 2"):
        ops.paged_attention_v2(
            out, *partition_buffers(case, num_partitions=1), *decode_arguments(case, inputs)
        )


def test_the_x_packed_layout_refuses_other_head_sizes():
    """x = 8 for 16-bit elements; 12 dimensions are a chunk and a half."""
    inputs = make_case(AttentionCase("odd", (1,), (5,), head_size=12, dtype=torch.float16))
    key_cache, value_cache = torch.zeros(3, 2, 1, 16, 8).half(), torch.zeros(3, 2, 12, 16).half()
    with pytest.raises(RuntimeError, match="multiple of x = 8, got 12"):
        ops.paged_attention_varlen(
            torch.empty(1, 4, 12).half(), inputs.query, key_cache, value_cache,
            *positional(inputs)[3:],
        )  # fmt: skip


@pytest.mark.parametrize("name", ["query", "key_cache", "out"])
def test_an_input_that_requires_grad_is_refused(name):
    inputs = make_case(CASE)
    arguments = dict(zip(NAMES, (torch.zeros(4, 4, 64), *positional(inputs)), strict=True))
    arguments[name] = arguments[name].detach().clone().requires_grad_()
    with pytest.raises(RuntimeError, match="an input requires grad"):
        torch.ops.paged_kv.paged_attention_varlen(*arguments.values())
    with torch.no_grad():
        torch.ops.paged_kv.paged_attention_varlen(*arguments.values())


@st.composite
def any_case(draw, version):
    """A case that the version takes, of small sizes."""
    num_seqs = draw(st.integers(0, 4))
    is_varlen = version == "varlen"
    query_len = st.integers(0, 9) if is_varlen else st.just(1)
    seq_len = st.integers(0, 80) | st.integers(500, 1100)
    kv_cache_dtype = draw(st.sampled_from(["auto", "fp8", "fp8_e5m2", "int8"]))
    dtype = draw(st.sampled_from(DTYPES))
    layout = draw(st.sampled_from(["nhd", "hnd", "vllm", "panels"]))
    head_size, block_size = draw(st.integers(1, 40)), draw(st.integers(1, 20))
    if layout == "vllm":  # whole chunks of 16 bytes
        chunk = 16 if kv_cache_dtype != "auto" else 16 // dtype.itemsize
        head_size = -(-head_size // chunk) * chunk
    elif layout == "panels":
        head_size, block_size = (-(-size // 16) * 16 for size in (head_size, block_size))
    num_kv_heads = draw(st.integers(1, 3))
    options = {}
    if is_varlen:
        options = {
            "causal": draw(st.booleans()),
            "sliding_window": draw(st.integers(0, 30)),
            "softcap": draw(st.just(0.0) | st.floats(0.5, 50.0)),
            "sinks": draw(st.booleans()),
        }
    return AttentionCase(
        "random",
        tuple(draw(st.lists(query_len, min_size=num_seqs, max_size=num_seqs))),
        tuple(draw(st.lists(seq_len, min_size=num_seqs, max_size=num_seqs))),
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        layout=layout,
        dtype=dtype,
        alibi=draw(st.booleans()),
        kv_cache_dtype=kv_cache_dtype,
        head_scales=draw(st.booleans()),
        **options,
    )


def call_version(version, case, inputs, out, buffers):
    if version == "v1":
        ops.paged_attention_v1(out, *decode_arguments(case, inputs))
    elif version == "v2":
        ops.paged_attention_v2(out, *buffers, *decode_arguments(case, inputs))
    else:
        ops.paged_attention_varlen(
            out,
            *positional(inputs),
            **options_of(case, inputs),
            kv_cache_dtype=case.kv_cache_dtype,
            k_scale=inputs.k_scale,
            v_scale=inputs.v_scale,
        )


def expected_of(version, case, inputs):
    if version == "varlen":
        return reference.paged_attention_varlen(
            *positional(dequantised(case, inputs)), **options_of(case, inputs)
        )[0]
    return reference.paged_attention_v1(
        *reference_arguments(case, inputs), alibi_slopes=inputs.alibi_slopes
    )


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("version", ["v1", "v2", "varlen"])
@given(data=st.data())
def test_any_shape_gives_the_right_answer_or_a_clear_error(version, data):
    """Random sizes, then metadata with one random number in a random place."""
    draw = data.draw
    case = draw(any_case(version))
    inputs = make_case(case)
    metadata = ["seq_lens", "block_tables", *(["query_start_loc"] * (version == "varlen"))]
    victim = draw(st.sampled_from(["none", "none", *metadata]))
    if victim != "none" and getattr(inputs, victim).numel() > 0:
        flat = getattr(inputs, victim).view(-1)
        index = draw(st.integers(0, flat.numel() - 1))
        flat[index] = draw(st.integers(-3, 90) | st.sampled_from([2**31 - 1, -(2**31)]))
    out = torch.full(inputs.query.shape, 7.0, dtype=case.dtype)
    buffers = partition_buffers(case)
    refusal = None
    try:
        call_version(version, case, inputs, out, buffers)
    except RuntimeError as error:
        refusal = str(error)
    if refusal is not None:
        assert victim != "none", refusal
        assert refusal.startswith(tuple(metadata)), refusal
        assert (out == 7).all()
        assert all(buffer.isnan().all() for buffer in buffers)
    elif victim == "none":
        # Relative to the values, which are up to about 4: in a small case they may cancel out.
        bound = 4 * TOLERANCES[case.dtype][0]
        error = (out.double() - expected_of(version, case, inputs)).abs()
        assert error.numel() == 0 or error.max() <= bound, error.max()
