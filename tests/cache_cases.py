# SPDX-License-Identifier: Apache-2.0
"""Caches and tokens for tests of the cache ops. Elements are random bits, so that NaN payloads,
infinities and denormals are among them; compare with ``same_bits``."""

from __future__ import annotations

import mmap

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK_SIZES = [8, 16, 32, 64, 128]
HEAD_SIZES = [32, 64, 80, 96, 112, 120, 128, 192, 256]
ONE = torch.ones(1)
NUM_BLOCKS = 5

FLOAT8_FORMATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# kv_cache_dtype: dtype of the cache.
QUANTISED_FORMATS = {**dict.fromkeys(FLOAT8_FORMATS, torch.uint8), "int8": torch.int8}
_BITS = {
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def bits(tensor):
    return tensor.contiguous().view(_BITS.get(tensor.dtype, tensor.dtype))


def same_bits(actual, expected):
    return torch.equal(bits(actual), bits(expected))


def random_bits(*shape, dtype):
    integer = _BITS[dtype]
    info = torch.iinfo(integer)
    return torch.randint(info.min, info.max, shape, dtype=integer).view(dtype)


def make_tokens(num_tokens, num_kv_heads, head_size, dtype):
    return [random_bits(num_tokens, num_kv_heads, head_size, dtype=dtype) for _ in range(2)]


def make_caches(layout, *, block_size, num_kv_heads, head_size, dtype, num_blocks=NUM_BLOCKS):
    """Key and value cache of a layout. ``slices`` are hnd views into one tensor that has both."""
    b, s, h, d = num_blocks, block_size, num_kv_heads, head_size
    if layout == "vllm":
        x = 16 // dtype.itemsize
        return [
            random_bits(b, h, d // x, s, x, dtype=dtype),
            random_bits(b, h, d, s, dtype=dtype),
        ]
    if layout == "nhd":
        return [random_bits(b, s, h, d, dtype=dtype) for _ in range(2)]
    if layout == "hnd":
        return [random_bits(b, h, s, d, dtype=dtype).transpose(1, 2) for _ in range(2)]
    if layout == "panels":
        x = 2 if dtype == torch.bfloat16 else 1
        return [
            random_bits(b, h, s // 16, d // x, 16, x, dtype=dtype),
            random_bits(b, h, s // 16, d // 16, 16 // x, 16, x, dtype=dtype),
        ]
    assert layout == "slices"
    return list(random_bits(b, h, s, 2 * d, dtype=dtype).transpose(1, 2).split(d, dim=-1))


def has_layout(backend, layout, *sizes):
    """Panels are for CPUs, and for sizes (of blocks and heads) that are multiples of 16."""
    return layout != "panels" or (backend == "cpu" and all(size % 16 == 0 for size in sizes))


def permuted_slots(num_tokens, num_slots, padding=0):
    """Distinct slots in random order, ``padding`` of them replaced by -1."""
    slots = torch.randperm(num_slots)[:num_tokens]
    slots[torch.randperm(num_tokens)[:padding]] = -1
    return slots


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def huge_tensor(*shape, dtype):
    """A zeroed tensor of any size that costs only the pages it touches."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    map_noreserve = 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype).view(shape)
