# SPDX-License-Identifier: Apache-2.0
"""Caches in panels: where an element lies, what a write leaves alone, what is refused."""

from __future__ import annotations

import functools

import pytest
import torch
from cache_cases import (
    DTYPES,
    ONE,
    QUANTISED_FORMATS,
    int32,
    make_caches,
    make_tokens,
    permuted_slots,
    random_bits,
    same_bits,
)

from paged_kv import ops, reference
from paged_kv._cache_panels import as_nhd, from_panels, to_panels
from paged_kv.kv_cache_memory import allocate_kv_cache
from paged_kv.testing import poison_cache, to_layout

SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 48}
# dtype of the keys and kv_cache_dtype
ELEMENTS = [*((dtype, "auto") for dtype in DTYPES), (torch.bfloat16, "fp8"), (DTYPES[0], "int8")]
each_element = pytest.mark.parametrize(("dtype", "kv_cache_dtype"), ELEMENTS, ids=str)


def caches_of(dtype, kv_cache_dtype, layout="panels"):
    return make_caches(layout, **SIZES, dtype=QUANTISED_FORMATS.get(kv_cache_dtype, dtype))


@each_element
def test_elements_lie_where_the_layout_says(dtype, kv_cache_dtype):
    """By the formulas of docs/layouts.md; the same elements as in an nhd cache."""
    key, value = torch.randn(2, 40, 2, 48).to(dtype)
    nhd, panels = (caches_of(dtype, kv_cache_dtype, layout) for layout in ("nhd", "panels"))
    slots = permuted_slots(40, 5 * 32)
    for caches in (nhd, panels):
        ops.reshape_and_cache_flash(key, value, *caches, slots, kv_cache_dtype, ONE, ONE)
    x = 2 if dtype == torch.bfloat16 and kv_cache_dtype == "auto" else 1
    for slot in slots.tolist():
        block, t = divmod(slot, 32)
        for d in range(48):
            key_at = panels[0][block, :, t // 16, d // x, t % 16, d % x]
            value_at = panels[1][block, :, t // 16, d // 16, t % 16 // x, d % 16, t % x]
            assert same_bits(key_at, nhd[0][block, t, :, d])
            assert same_bits(value_at, nhd[1][block, t, :, d])


@each_element
def test_to_layout_and_back(dtype, kv_cache_dtype):
    """A cache that was written as nhd and then laid in panels is one that was written so."""
    key, value = torch.randn(2, 40, 2, 48).to(dtype)
    nhd = [torch.zeros_like(cache) for cache in caches_of(dtype, kv_cache_dtype, "nhd")]
    panels = allocate_kv_cache(5, 32, 2, 48, dtype=nhd[0].dtype, layout="panels")
    slots = permuted_slots(40, 5 * 32)
    for caches in (nhd, panels):
        ops.reshape_and_cache_flash(key, value, *caches, slots, kv_cache_dtype, ONE, ONE)
    for cache, cache_in_panels, is_key in zip(nhd, panels, (True, False), strict=True):
        assert to_layout(cache, "panels", is_key=is_key).is_contiguous()
        assert same_bits(to_layout(cache, "panels", is_key=is_key), cache_in_panels)
        assert same_bits(from_panels(to_panels(cache, is_key=is_key)), cache)
        assert same_bits(as_nhd(cache_in_panels), cache)
        assert as_nhd(cache) is cache


@each_element
@pytest.mark.parametrize("slots", [range(3, 43), range(42, 2, -1), range(0, 80, 2), [17]], ids=str)
def test_other_slots_keep_their_poison(dtype, kv_cache_dtype, slots):
    """Pairs of tokens share a word of bfloat16: the neighbour of a lone token is not touched."""
    slots = torch.tensor(slots)
    key, value = torch.randn(2, len(slots), 2, 48).to(dtype)
    caches = caches_of(dtype, kv_cache_dtype)
    for cache in caches:
        poison_cache(cache, torch.tensor([], dtype=torch.int64))
    poison = [cache.clone() for cache in caches]
    ops.reshape_and_cache_flash(key, value, *caches, slots, kv_cache_dtype, ONE, ONE)
    for cache, poisoned in zip(caches, poison, strict=True):
        nhd, poisoned_nhd = from_panels(cache).flatten(0, 1), from_panels(poisoned).flatten(0, 1)
        written = torch.zeros(5 * 32, dtype=torch.bool)
        written[slots] = True
        assert same_bits(nhd[~written], poisoned_nhd[~written])
        assert not nhd[written].float().isnan().any()
        poison_cache(cache, slots)  # keeps those
        assert same_bits(from_panels(cache).flatten(0, 1), nhd)


def test_strides_of_blocks_and_heads_are_free():
    """Keys and values side by side in a page, pages with gaps, heads outermost."""
    key, value = make_tokens(70, 2, 48, torch.bfloat16)
    dense = caches_of(torch.bfloat16, "auto")
    num_elements = dense[0][0].numel()
    pages = random_bits(5, 2 * num_elements + 64, dtype=torch.bfloat16)
    side_by_side = [
        pages[:, i * num_elements : (i + 1) * num_elements].view(cache.shape)
        for i, cache in enumerate(dense)
    ]
    heads_first = [cache.transpose(0, 1).contiguous().transpose(0, 1) for cache in dense]
    slots = permuted_slots(70, 5 * 32, padding=3)
    for caches in (side_by_side, heads_first):
        beside = pages[:, 2 * num_elements :].clone()
        expected = [cache.clone() for cache in caches]
        reference.reshape_and_cache_flash(key, value, *expected, slots)
        ops.reshape_and_cache_flash(key, value, *caches, slots, "auto", ONE, ONE)
        for cache, wanted in zip(caches, expected, strict=True):
            assert same_bits(cache, wanted)
            out = torch.empty(40, 2, 48, dtype=torch.bfloat16)
            ops.gather_cache(cache, out, int32(4, 0).view(1, 2), int32(0, 40), int32(9))
            wanted = from_panels(wanted)[[4, 0]].flatten(0, 1)
            assert same_bits(out, wanted[9:49])
        assert same_bits(pages[:, 2 * num_elements :], beside)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_gather_into_strided_rows(kv_cache_dtype):
    caches = caches_of(torch.float16, kv_cache_dtype)
    for cache in caches:
        wide = random_bits(40, 2, 96, dtype=torch.float16)
        beside = wide[..., 1::2].clone()
        expected = torch.empty(40, 2, 48, dtype=torch.float16)
        arguments = (int32(3, 1).view(1, 2), int32(0, 40), int32(5), kv_cache_dtype, ONE)
        reference.gather_cache(cache, expected, *arguments)
        ops.gather_cache(cache, wide[..., ::2], *arguments)
        assert torch.equal(wide[..., ::2].nan_to_num(), expected.nan_to_num())
        assert same_bits(wide[..., 1::2], beside)


def write_arguments(**changes):
    key, value = make_tokens(3, 2, 48, torch.bfloat16)
    key_cache, value_cache = caches_of(torch.bfloat16, "auto")
    return {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1, 2]),
        "kv_cache_dtype": "auto",
        "k_scale": ONE,
        "v_scale": ONE,
    } | changes


def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


KEY_SHAPE = r"key_cache: expected shape \[num_blocks, num_kv_heads, block_size/16, 24, 16, 2\], got"
VALUE_SHAPE = (
    r"value_cache: expected shape \[num_blocks, num_kv_heads, block_size/16, 3, 8, 16, 2\], got"
)
BAD_ARGUMENTS = [
    ({"key_cache": zeros(5, 2, 2, 48, 16, 1)}, KEY_SHAPE),
    ({"key_cache": zeros(5, 2, 2, 24, 8, 2)}, KEY_SHAPE),
    ({"value_cache": zeros(5, 2, 2, 3, 16, 16, 1)}, VALUE_SHAPE),
    ({"value_cache": zeros(5, 32, 2, 48)}, VALUE_SHAPE),
    ({"key_cache": zeros(5, 32, 2, 48)}, KEY_SHAPE),
    (
        {
            "key_cache": zeros(5, 2, 2, 3, 8, 16, 2),
            "value_cache": zeros(5, 2, 2, 24, 16, 2),
        },
        KEY_SHAPE,
    ),
    ({"key_cache": zeros(5, 3, 2, 24, 16, 2)}, "key_cache: expected num_kv_heads = 2"),
    ({"value_cache": zeros(4, 2, 2, 3, 8, 16, 2)}, "value_cache: expected num_blocks = 5"),
    ({"value_cache": zeros(5, 2, 1, 3, 8, 16, 2)}, "value_cache: expected block_size = 32"),
    ({"key_cache": zeros(5, 2, 2, 24, 16, 2, dtype=torch.float16)}, "key_cache: expected dtype"),
    ({"kv_cache_dtype": "int8"}, "key_cache: expected dtype"),
    (
        {name: torch.zeros(3, 2, 40).bfloat16() for name in ("key", "value")},
        "key_cache: this layout needs a head_size that is a multiple of 16, got 40",
    ),
]
BAD_STRIDES = [
    (
        {"key_cache": zeros(5, 2, 2, 24, 2, 16).transpose(4, 5)},
        "key_cache: expected dimensions 2 and on to be contiguous, got strides",
    ),
    (
        {"value_cache": zeros(5, 2, 3, 3, 8, 16, 2)[:, :, ::2]},
        "value_cache: expected dimensions 2 and on to be contiguous, got strides",
    ),
    (
        {"key_cache": zeros(1, 2, 2, 24, 16, 2).expand(5, 2, 2, 24, 16, 2)},
        "key_cache: is written, so its elements must not share memory",
    ),
    ({"slot_mapping": torch.tensor([0, 1, 160])}, r"slot_mapping\[2\].* = 160, got 160"),
]


@pytest.mark.parametrize(("changes", "message"), [*BAD_ARGUMENTS, *BAD_STRIDES])
def test_writer_refuses_bad_arguments(changes, message):
    arguments = write_arguments(**changes)
    before = {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    with pytest.raises(RuntimeError, match=message):
        ops.reshape_and_cache_flash(**arguments)
    for name, wanted in before.items():
        assert same_bits(arguments[name], wanted)


@pytest.mark.parametrize(("changes", "message"), [*BAD_ARGUMENTS, *BAD_STRIDES[:2]])
def test_fake_writer_refuses_the_same(changes, message):
    with torch._subclasses.FakeTensorMode() as mode:
        fake = functools.partial(mode.from_tensor, static_shapes=True)
        arguments = {
            name: fake(value) if torch.is_tensor(value) else value
            for name, value in write_arguments(**changes).items()
        }
        with pytest.raises(RuntimeError, match=message):
            ops.reshape_and_cache_flash(**arguments)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (zeros(5, 2, 2, 48, 16, 1), r"cache: expected shape \[.*, 24, 16, 2\], got"),
        (zeros(5, 2, 2, 3, 16, 16, 1), r"cache: expected shape \[.*, 3, 8, 16, 2\], got"),
        (zeros(5, 3, 2, 24, 16, 2), "cache: expected num_kv_heads = 2"),
        (zeros(5, 2, 0, 24, 16, 2), "cache: expected block_size of at least 1"),
        (zeros(5, 2, 2, 24, 2, 16).transpose(4, 5), "cache: expected dimensions 2 and on"),
        (zeros(5, 2, 2, 24, 16, 2, dtype=torch.float16), "out: expected dtype Half"),
    ],
)
def test_gather_refuses_bad_caches(cache, message):
    out = torch.full((33, 2, 48), 7.0, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=message):
        ops.gather_cache(cache, out, int32(3, 1).view(1, 2), int32(0, 33))
    assert (out == 7).all()


def test_other_devices_refuse_panels(device_backend):
    arguments = write_arguments()
    message = "key_cache: the layout panels is for CPUs, got shape"
    with pytest.raises(RuntimeError, match=message):
        device_backend.reshape_and_cache_flash(**arguments)
    out = torch.zeros(33, 2, 48, dtype=torch.bfloat16)
    for name in ("key_cache", "value_cache"):
        with pytest.raises(RuntimeError, match="cache: the layout panels is for CPUs"):
            device_backend.gather_cache(arguments[name], out, int32(3, 1).view(1, 2), int32(0, 33))
    assert not out.any()


def on_meta(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def attention_arguments(key, value, *, block_size=32, device="cpu"):
    """Of paged_attention_v1."""
    query = torch.zeros(2, 4, 48, device=device)
    tables, lens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    if device == "meta":
        key, value, tables, lens = map(on_meta, (key, value, tables, lens))
    one = ONE.to(device)
    return (
        *(torch.full_like(query, 7.0), query, key, value, 2, 1.0),
        *(tables, lens, block_size, 40, None, "auto", one, one),
    )


floats = functools.partial(zeros, dtype=torch.float32)
GOOD_KEY, GOOD_VALUE = floats(5, 2, 2, 48, 16, 1), floats(5, 2, 2, 3, 16, 16, 1)
ATTENTION_KEY_SHAPE = r"key_cache: expected shape \[num_blocks, .*block_size/16, 48, 16, 1\], got"
ATTENTION_VALUE_SHAPE = (
    r"value_cache: expected shape \[num_blocks, .*block_size/16, 3, 16, 16, 1\], got"
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("key", "value", "block_size", "message"),
    [
        (GOOD_KEY, GOOD_VALUE, 32, None),
        (GOOD_KEY, GOOD_VALUE, 8, "key_cache: expected block_size = 8.*, got 32"),
        (GOOD_KEY, GOOD_VALUE, 16, "key_cache: expected block_size = 16.*, got 32"),
        (floats(5, 2, 2, 40, 16, 1), GOOD_VALUE, 32, ATTENTION_KEY_SHAPE),
        (GOOD_KEY, floats(5, 2, 32, 48), 32, ATTENTION_VALUE_SHAPE),
        (floats(5, 2, 12, 32, 4), GOOD_VALUE, 32, ATTENTION_KEY_SHAPE),
        (GOOD_VALUE, GOOD_KEY, 32, ATTENTION_KEY_SHAPE),
        (GOOD_KEY, floats(5, 3, 2, 3, 16, 16, 1), 32, "value_cache: expected num_kv_heads = 2"),
        (floats(5, 2, 2, 16, 48, 1).transpose(3, 4), GOOD_VALUE, 32, "2 and on to be contiguous"),
        (GOOD_KEY, floats(5, 2, 4, 3, 16, 16, 1)[:, :, ::2], 32, "2 and on to be contiguous"),
        (
            *(floats(5, 2, 0, 48, 16, 1), floats(5, 2, 0, 3, 16, 16, 1), 0),
            "expected a block_size >= 1, got 0",
        ),
    ],
)
def test_attention_checks_panels(key, value, block_size, message, device):
    arguments = attention_arguments(key, value, block_size=block_size, device=device)
    if message is None:
        ops.paged_attention_v1(*arguments)
        return
    with pytest.raises(RuntimeError, match=message):
        ops.paged_attention_v1(*arguments)
    assert device == "meta" or (arguments[0] == 7).all()
