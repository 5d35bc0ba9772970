# SPDX-License-Identifier: Apache-2.0
"""The emulated conversions of kernels round as torch's, bit for bit."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

REPO_ROOT = Path(__file__).resolve().parents[2]
LIBRARY = REPO_ROOT / "build/cpp-release/tests/cuda/libpaged_kv_cuda_conversions.so"

FORMATS = {
    "half": (torch.float16, np.uint16, None),
    "bfloat16": (torch.bfloat16, np.uint16, None),
    "e4m3": (torch.float8_e4m3fn, np.uint8, 448.0),
    "e5m2": (torch.float8_e5m2, np.uint8, 57344.0),
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    assert LIBRARY.is_file(), f"{LIBRARY} is missing: run `make test`"
    return ctypes.CDLL(str(LIBRARY))


def _call(function, source: np.ndarray, out: np.ndarray) -> np.ndarray:
    function(
        ctypes.c_void_p(source.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(source.size),
    )
    return out


def _floats() -> np.ndarray:
    """Every bfloat16 with its neighbours among floats, half values with theirs, and random bits."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    half_bits = halves.float().numpy().view(np.uint32)
    steps = np.array([-1, 0, 1, 1 << 12, (1 << 12) + 1, 1 << 15, (1 << 15) - 1], dtype=np.int64)
    near = (np.concatenate([upper, half_bits]).astype(np.int64)[:, None] + steps).ravel()
    random = np.random.default_rng(0).integers(0, 1 << 32, size=1_000_000)
    return np.concatenate([near, random]).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_from_float(library, name):
    dtype, bits, largest = FORMATS[name]
    values = _floats()
    nan = np.isnan(values)
    actual = _call(getattr(library, f"{name}_from_float"), values, np.empty(values.shape, bits))
    source = torch.from_numpy(values)
    if largest is not None:  # torch overflows to NaN or infinity, kernels saturate
        source = source.clamp(-largest, largest)
    expected = source.to(dtype).view(torch.uint8 if bits is np.uint8 else torch.int16)
    expected = expected.numpy().view(bits)
    np.testing.assert_array_equal(actual[~nan], expected[~nan])
    back = _call(getattr(library, f"float_from_{name}"), actual, np.empty(values.shape, np.float32))
    assert np.isnan(back[nan]).all()
    assert not np.isnan(back[~nan]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_to_float(library, name):
    dtype, bits, _ = FORMATS[name]
    every = np.arange(np.iinfo(bits).max + 1, dtype=np.int64).astype(bits)
    actual = _call(getattr(library, f"float_from_{name}"), every, np.empty(every.shape, np.float32))
    expected = torch.from_numpy(every).view(dtype).float().numpy()
    np.testing.assert_array_equal(actual, expected)  # NaN where NaN is
    zero = expected == 0
    np.testing.assert_array_equal(np.signbit(actual[zero]), np.signbit(expected[zero]))
