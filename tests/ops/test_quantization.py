# SPDX-License-Identifier: Apache-2.0
"""quantize_kv and dequantize_kv: what a quantised cache holds, and what is read from it."""

from __future__ import annotations

import pytest
import torch

from paged_kv.reference import dequantize_kv, quantize_kv
from paged_kv.testing import poison_cache

FLOAT8_FORMATS = {"fp8": 448.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
ONE = torch.ones(1)


@pytest.mark.parametrize("kv_cache_dtype", FLOAT8_FORMATS)
def test_every_byte_survives_a_round_trip(kv_cache_dtype):
    every_byte = torch.arange(256, dtype=torch.uint8)
    values = dequantize_kv(every_byte, kv_cache_dtype, ONE)
    again = quantize_kv(values, kv_cache_dtype, ONE)
    finite = values.isfinite()
    assert torch.equal(again[finite], every_byte[finite])
    assert dequantize_kv(again[values.isnan()], kv_cache_dtype, ONE).isnan().all()
    assert values[finite].max() == FLOAT8_FORMATS[kv_cache_dtype]


@pytest.mark.parametrize("kv_cache_dtype", FLOAT8_FORMATS)
def test_saturates_and_keeps_nan(kv_cache_dtype):
    largest = FLOAT8_FORMATS[kv_cache_dtype]
    x = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30, torch.nan, largest * 2])
    stored = dequantize_kv(quantize_kv(x, kv_cache_dtype, ONE), kv_cache_dtype, ONE)
    expected = torch.tensor([largest, -largest, largest, -largest, torch.nan, largest])
    assert torch.equal(stored.nan_to_num(nan=1.0), expected.nan_to_num(nan=1.0))


def test_divides_by_the_scale_and_rounds_to_even():
    """e4m3 has 3 bits behind the point: 17 lies between 16 and 18, 19 between 18 and 20."""
    x = torch.tensor([8.5, 9.5, -8.5], dtype=torch.float16)
    half = torch.tensor([0.5])
    stored = quantize_kv(x, "fp8", half)
    assert dequantize_kv(stored, "fp8", ONE).tolist() == [16.0, 20.0, -16.0]
    assert dequantize_kv(stored, "fp8", half).tolist() == [8.0, 10.0, -8.0]


def test_int8_rounds_to_even_saturates_and_has_no_nan():
    x = torch.tensor([0.5, 1.5, -0.5, -1.5, 126.5, 127.6, -128.4, -129.0])
    assert quantize_kv(x, "int8", ONE).tolist() == [0, 2, 0, -2, 126, 127, -128, -128]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])
    stored = quantize_kv(special, "int8", ONE)
    assert stored.dtype == torch.int8
    assert stored.tolist() == [127, -128, 0, 127, -128]


def test_int8_divides_by_the_scale():
    every = torch.arange(-128, 128, dtype=torch.int8)
    scale = torch.tensor([0.37])
    values = dequantize_kv(every, "int8", scale)
    assert torch.equal(values, every.float() * scale)
    assert torch.equal(quantize_kv(values, "int8", scale), every)


def test_a_scale_a_head_applies_along_the_head_dimension():
    x = torch.ones(3, 2, 4)
    scale = torch.tensor([0.5, 2.0])
    stored = dequantize_kv(quantize_kv(x, "fp8", scale), "fp8", ONE)
    assert torch.equal(stored, torch.tensor([2.0, 0.5]).view(1, 2, 1).expand(3, 2, 4))
    heads_first = dequantize_kv(quantize_kv(x.transpose(0, 1), "fp8", scale, 0), "fp8", scale, 0)
    assert torch.equal(heads_first, torch.ones(2, 3, 4))


def test_float8_tensors_are_read_as_their_bytes_are():
    stored = quantize_kv(torch.randn(4, 2, 8), "fp8_e5m2", ONE)
    as_float8 = stored.view(torch.float8_e5m2)
    values = dequantize_kv(as_float8, "fp8_e5m2", ONE)
    assert torch.equal(values, dequantize_kv(stored, "fp8_e5m2", ONE))


@pytest.mark.parametrize("kv_cache_dtype", FLOAT8_FORMATS)
def test_poison_of_bytes_is_nan(kv_cache_dtype):
    cache = torch.zeros(2, 4, 1, 8, dtype=torch.uint8)
    poison_cache(cache, torch.tensor([0, 5]))
    poisoned = dequantize_kv(cache, kv_cache_dtype, ONE).isnan()
    assert poisoned.view(2, 4, 8).all(-1).int().tolist() == [[0, 1, 1, 1], [1, 0, 1, 1]]


def test_poison_of_int8_is_the_largest_value():
    cache = torch.zeros(1, 3, 1, 2, dtype=torch.int8)
    poison_cache(cache, torch.tensor([1]))
    assert cache.flatten().tolist() == [127, 127, 0, 0, 127, 127]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int4", ""])
def test_unknown_formats_are_refused(kv_cache_dtype):
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of"):
        quantize_kv(torch.zeros(1, 1), kv_cache_dtype, ONE)
    with pytest.raises(ValueError, match="kv_cache_dtype: expected one of"):
        dequantize_kv(torch.zeros(1, 1, dtype=torch.uint8), kv_cache_dtype, ONE)
