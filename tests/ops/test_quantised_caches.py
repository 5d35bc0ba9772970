# SPDX-License-Identifier: Apache-2.0
"""fp8 and int8 caches: writers store what ``quantize_kv`` says and gather_cache reads it back."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    DTYPES,
    FLOAT8_FORMATS,
    NUM_BLOCKS,
    ONE,
    QUANTISED_FORMATS,
    has_layout,
    int32,
    make_caches,
    make_tokens,
    permuted_slots,
    random_bits,
    same_bits,
)
from ops.backends import Backend
from ops.cases import has_format, quantised_backends

from paged_kv import reference
from paged_kv.reference import dequantize_kv, quantize_kv
from paged_kv.testing import ABSURD_BLOCK_ID, poison_cache

LAYOUTS = ["vllm", "nhd", "hnd", "slices"]  # take any strides
each_format = pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"), quantised_backends(), indirect=["backend"]
)


def each_format_and_layout(*layouts):
    rows = [(*param.values, layout) for param in quantised_backends() for layout in layouts]
    names = ("backend", "kv_cache_dtype", "layout")
    return pytest.mark.parametrize(
        names, [row for row in rows if has_layout(row[0], row[2])], indirect=["backend"]
    )


SCALES = {
    "one": (ONE, torch.tensor([0.25])),
    "a head": (torch.tensor([0.5, 3.0]), torch.tensor([1e-3, 0.7])),
}


def same_values(actual, expected, kv_cache_dtype):
    """Equal bytes, but for the sign and payload of NaN: no two conversions agree on those."""
    if kv_cache_dtype == "auto":
        return same_bits(actual, expected)
    decoded = [dequantize_kv(cache, kv_cache_dtype, ONE) for cache in (actual, expected)]
    both_nan = decoded[0].isnan() & decoded[1].isnan()
    return (both_nan | (actual.view(torch.uint8) == expected.view(torch.uint8))).all()


def writers(backend, layout):
    name = "reshape_and_cache" if layout == "vllm" else "reshape_and_cache_flash"
    return getattr(backend, name), getattr(reference, name)


def tokens_of_all_sizes(num_tokens, num_kv_heads, head_size, dtype):
    """Values that round, saturate and vanish; infinities and NaN."""
    tokens = []
    for _ in range(2):
        exponents = torch.randint(-12, 12, (num_tokens, num_kv_heads, head_size))
        x = torch.randn(num_tokens, num_kv_heads, head_size) * 2.0**exponents
        x.view(-1)[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        tokens.append(x.to(dtype))
    return tokens


def check_writer(backend, layout, tokens, caches, slots, kv_cache_dtype, scales):
    op, expect = writers(backend, layout)
    expected = [cache.clone() for cache in caches]
    expect(*tokens, *expected, slots, kv_cache_dtype, *scales)
    op(*tokens, *caches, slots, kv_cache_dtype, *scales)
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_values(cache, wanted, kv_cache_dtype)


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_format_and_layout(*LAYOUTS, "panels")
def test_writers_equal_reference(backend, layout, kv_cache_dtype, dtype, scales):
    tokens = tokens_of_all_sizes(40, 2, 64, dtype)
    caches = make_caches(
        layout, block_size=16, num_kv_heads=2, head_size=64, dtype=QUANTISED_FORMATS[kv_cache_dtype]
    )
    for slots in (permuted_slots(40, NUM_BLOCKS * 16, padding=5), torch.arange(5, 45)):
        check_writer(backend, layout, tokens, caches, slots, kv_cache_dtype, scales)


@each_format
def test_every_half_is_rounded_once(backend, kv_cache_dtype):
    """All 2^16 bit patterns of a half, NaN payloads and denormals among them."""
    every_half = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    tokens = [every_half.view(32, 8, 256), every_half.flip(0).view(32, 8, 256)]
    for layout in ("nhd", "vllm", *(["panels"] if has_layout(backend.name, "panels") else [])):
        caches = make_caches(
            layout,
            block_size=16,
            num_kv_heads=8,
            head_size=256,
            dtype=QUANTISED_FORMATS[kv_cache_dtype],
        )
        slots = torch.arange(32)
        scales = (torch.tensor([0.3]), torch.tensor([7.0]))
        check_writer(backend, layout, tokens, caches, slots, kv_cache_dtype, scales)


@each_format
@pytest.mark.parametrize("head_size", [3, 9, 40, 80, 120])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_head_sizes_that_are_no_whole_vectors(backend, kv_cache_dtype, layout, head_size):
    tokens = tokens_of_all_sizes(10, 2, head_size, torch.bfloat16)
    caches = make_caches(
        layout,
        block_size=16,
        num_kv_heads=2,
        head_size=head_size,
        dtype=QUANTISED_FORMATS[kv_cache_dtype],
    )
    scales = SCALES["a head"]
    check_writer(backend, layout, tokens, caches, torch.arange(10), kv_cache_dtype, scales)


def test_packed_cache_needs_a_head_size_of_whole_chunks(backend):
    key, value = make_tokens(1, 2, 24, torch.float16)
    caches = [torch.zeros(2, 2, 1, 16, 16).byte(), torch.zeros(2, 2, 24, 16).byte()]
    with pytest.raises(RuntimeError, match="key_cache: expected head_size = 24"):
        backend.reshape_and_cache(key, value, *caches, torch.tensor([0]), "fp8", ONE, ONE)


@pytest.mark.parametrize("kv_cache_dtype", FLOAT8_FORMATS)
def test_float8_tensors_are_caches_too(backend, kv_cache_dtype):
    tokens = tokens_of_all_sizes(8, 2, 32, torch.float32)
    bytes_of = make_caches("nhd", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8)
    as_float8 = [cache.clone().view(FLOAT8_FORMATS[kv_cache_dtype]) for cache in bytes_of]
    slots = torch.arange(8)
    for caches in (bytes_of, as_float8):
        backend.reshape_and_cache_flash(*tokens, *caches, slots, kv_cache_dtype, ONE, ONE)
    for cache, other in zip(bytes_of, as_float8, strict=True):
        assert same_bits(cache, other.view(torch.uint8))


def test_strided_scales(backend):
    tokens = tokens_of_all_sizes(8, 2, 32, torch.float32)
    caches = make_caches("nhd", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8)
    scales = [torch.tensor([0.5, torch.nan, 2.0])[::2] for _ in range(2)]
    check_writer(backend, "nhd", tokens, caches, torch.arange(8), "fp8", scales)


def test_padding_writes_nothing(backend):
    tokens = [torch.full((3, 2, 32), torch.nan) for _ in range(2)]
    caches = make_caches("vllm", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8)
    before = [cache.clone() for cache in caches]
    past_the_end = -1 if backend.name == "cpu" else NUM_BLOCKS * 16  # there an error
    slots = torch.tensor([-1, past_the_end, -16])
    backend.reshape_and_cache(*tokens, *caches, slots, "fp8", ONE, ONE)
    for cache, wanted in zip(caches, before, strict=True):
        assert same_bits(cache, wanted)


@pytest.mark.parametrize("scale", [ONE, torch.tensor([0.3]), torch.tensor([0.3, 2.0])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_format_and_layout("nhd", "hnd", "slices", "panels")
def test_gather_equals_reference(backend, layout, kv_cache_dtype, dtype, scale):
    head_size = 48 if layout == "panels" else 40
    caches = make_caches(
        layout,
        block_size=16,
        num_kv_heads=2,
        head_size=head_size,
        dtype=QUANTISED_FORMATS[kv_cache_dtype],
    )
    tables = int32(4, 1, ABSURD_BLOCK_ID, 2, 0, 3).view(2, 3)
    lens, starts = int32(0, 20, 50), int32(3, 10)
    arguments = (tables, lens, starts, kv_cache_dtype, scale)
    for cache in caches:
        out = random_bits(51, 2, head_size, dtype=dtype)
        expected = out.clone()
        reference.gather_cache(cache, expected, *arguments)
        backend.gather_cache(cache, out, *arguments)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out[:50].nan_to_num(), expected[:50].nan_to_num())
        assert same_bits(out[50:], expected[50:])


@each_format_and_layout("hnd", "panels")
def test_gather_reads_back_what_the_writer_wrote(backend, kv_cache_dtype, layout):
    """Unused slots are NaN, or 127; what is read is the tokens, rounded to the cache's grid."""
    tokens = [torch.randn(20, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
    caches = make_caches(
        layout, block_size=16, num_kv_heads=2, head_size=64, dtype=QUANTISED_FORMATS[kv_cache_dtype]
    )
    slots = torch.tensor([48 + i if i < 16 else i for i in range(20)])
    scales = SCALES["a head"]
    backend.reshape_and_cache_flash(*tokens, *caches, slots, kv_cache_dtype, *scales)
    for cache, new_tokens, scale in zip(caches, tokens, scales, strict=True):
        poison_cache(cache, slots)
        out = torch.empty(20, 2, 64)
        backend.gather_cache(
            cache, out, int32(3, 1).view(1, 2), int32(0, 20), None, kv_cache_dtype, scale
        )
        rounded = dequantize_kv(
            quantize_kv(new_tokens, kv_cache_dtype, scale), kv_cache_dtype, scale
        )
        assert torch.equal(out, rounded)


def write_arguments(**changes):
    key, value = make_tokens(3, 2, 32, torch.float16)
    key_cache, value_cache = make_caches(
        "nhd", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.uint8
    )
    return {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1, 2]),
        "kv_cache_dtype": "fp8",
        "k_scale": ONE,
        "v_scale": ONE,
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_"),
        ({"kv_cache_dtype": "auto"}, "key_cache: expected dtype Half"),
        ({"key_cache": torch.zeros(5, 16, 2, 32).half()}, "key_cache: expected dtype Byte or"),
        ({"value_cache": torch.zeros(5, 16, 2, 32).to(torch.float8_e5m2)}, "value_cache: expected"),
        ({"k_scale": torch.ones(3)}, "k_scale: expected one element"),
        ({"v_scale": torch.ones(2, 1)}, "v_scale: expected one element"),
        ({"v_scale": torch.ones(1).half()}, "v_scale: expected dtype"),
    ],
)
def test_writer_refuses_bad_arguments(backend, changes, message):
    arguments = write_arguments(**changes)
    before = {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    with pytest.raises(RuntimeError, match=message):
        backend.reshape_and_cache_flash(**arguments)
    for name, wanted in before.items():
        assert same_bits(arguments[name], wanted)


def test_gather_refuses_bad_arguments(backend):
    cache, out = torch.zeros(4, 8, 2, 32, dtype=torch.uint8), torch.zeros(5, 2, 32)
    rest = (int32(0).view(1, 1), int32(0, 5), None)
    with pytest.raises(RuntimeError, match="scale: expected a tensor, as the cache is quantised"):
        backend.gather_cache(cache, out, *rest, "fp8")
    with pytest.raises(RuntimeError, match="cache: expected dtype"):
        backend.gather_cache(cache, out, *rest, "auto", ONE)
    with pytest.raises(RuntimeError, match="cache: expected dtype Byte"):
        backend.gather_cache(cache.float(), out, *rest, "fp8", ONE)
    with pytest.raises(RuntimeError, match="out: expected dtype"):
        backend.gather_cache(cache, out.byte(), *rest, "fp8", ONE)
    with pytest.raises(RuntimeError, match="got 'fp4'"):
        backend.gather_cache(cache, out, *rest, "fp4", ONE)
    assert not out.any()


def test_int8_caches_are_refused_on_the_device(device_backend):
    message = "kv_cache_dtype: expected one of: auto, fp8, fp8_e4m3, fp8_e5m2; got 'int8'"
    caches = {name: torch.zeros(5, 16, 2, 32).char() for name in ("key_cache", "value_cache")}
    arguments = write_arguments(kv_cache_dtype="int8", **caches)
    with pytest.raises(RuntimeError, match=message):
        device_backend.reshape_and_cache_flash(**arguments)
    packed = [torch.zeros(5, 2, 2, 16, 16).char(), torch.zeros(5, 2, 32, 16).char()]
    with pytest.raises(RuntimeError, match=message):
        device_backend.reshape_and_cache(
            arguments["key"], arguments["value"], *packed, torch.tensor([0]), "int8", ONE, ONE
        )
    out = torch.zeros(5, 2, 32)
    with pytest.raises(RuntimeError, match=message):
        device_backend.gather_cache(
            caches["key_cache"], out, int32(0).view(1, 1), int32(0, 5), None, "int8", ONE
        )


def test_int8_caches_have_no_other_dtype():
    cpu = Backend("cpu")
    message = "key_cache: expected dtype Char, got Byte"
    with pytest.raises(RuntimeError, match=message):
        cpu.reshape_and_cache_flash(**write_arguments(kv_cache_dtype="int8"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_strides_of_every_dimension(backend, layout, kv_cache_dtype):
    """No two elements are neighbours, neither of the tokens nor of the caches."""
    if not has_format(backend.name, kv_cache_dtype):
        kv_cache_dtype = "fp8_e5m2"
    tokens = [
        x.repeat_interleave(2, -1)[..., ::2] for x in tokens_of_all_sizes(40, 2, 64, DTYPES[1])
    ]
    dtype = QUANTISED_FORMATS.get(kv_cache_dtype, DTYPES[1])
    sizes = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": dtype}
    dense = make_caches(layout, **sizes)
    caches = [x.repeat_interleave(3, -1)[..., 1::3] for x in dense]
    check_writer(
        backend, layout, tokens, caches, torch.arange(5, 45), kv_cache_dtype, SCALES["a head"]
    )
    if layout == "vllm":
        return
    out = random_bits(40, 2, 128, dtype=DTYPES[1])[..., ::2]
    expected = out.clone()
    arguments = (
        int32(0, 1, 2).view(1, 3),
        int32(0, 40),
        int32(5),
        kv_cache_dtype,
        SCALES["one"][1],
    )
    reference.gather_cache(caches[0], expected, *arguments)
    backend.gather_cache(caches[0], out, *arguments)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
