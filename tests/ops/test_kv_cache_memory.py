# SPDX-License-Identifier: Apache-2.0
"""Caches: their form, and where their memory comes from and goes to."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest
import torch

import paged_kv
from paged_kv import ops
from paged_kv.kv_cache_memory import (
    HUGE_PAGE_BYTES,
    allocate_kv_cache,
    preferred_layout,
    zeros_in_huge_pages,
)

HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def mappings_of(tensor):
    """For each mapping that holds some of the tensor: its flags in /proc/self/smaps."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    found, overlaps = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if "-" in key and not key.endswith(":"):
            first, last = (int(part, 16) for part in key.split("-"))
            overlaps = first < end and begin < last
        elif key == "VmFlags:" and overlaps:
            found.append(rest)
    return found


def memory_pages():
    """Pages of this process: all that it may use, and those that it has."""
    total, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(total), int(resident)


@pytest.mark.parametrize(
    ("layout", "dtype", "key_shape", "value_shape"),
    [
        ("nhd", torch.float32, (5, 4, 2, 24), (5, 4, 2, 24)),
        ("hnd", torch.bfloat16, (5, 4, 2, 24), (5, 4, 2, 24)),
        ("vllm", torch.float32, (5, 2, 6, 4, 4), (5, 2, 24, 4)),
        ("vllm", torch.float16, (5, 2, 3, 4, 8), (5, 2, 24, 4)),
        ("panels", torch.float32, (5, 2, 2, 48, 16, 1), (5, 2, 2, 3, 16, 16, 1)),
        ("panels", torch.float16, (5, 2, 2, 48, 16, 1), (5, 2, 2, 3, 16, 16, 1)),
        ("panels", torch.bfloat16, (5, 2, 2, 24, 16, 2), (5, 2, 2, 3, 8, 16, 2)),
        ("panels", torch.int8, (5, 2, 2, 48, 16, 1), (5, 2, 2, 3, 16, 16, 1)),
    ],
)
def test_shapes_of_a_cache(layout, dtype, key_shape, value_shape):
    block_size, head_size = (32, 48) if layout == "panels" else (4, 24)
    sizes = (5, block_size, 2, head_size)
    key_cache, value_cache = allocate_kv_cache(*sizes, dtype=dtype, layout=layout)
    assert key_cache.shape == key_shape
    assert value_cache.shape == value_shape
    for cache in (key_cache, value_cache):
        assert cache.dtype == dtype
        assert cache.count_nonzero() == 0
        contiguous = cache.transpose(1, 2) if layout == "hnd" else cache
        assert contiguous.is_contiguous()


@pytest.mark.parametrize("layout", ["nhd", "hnd", "panels"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_ops_take_a_cache(layout, kv_cache_dtype):
    """Large enough for huge pages; written and read back in its last block."""
    dtype = {"auto": torch.float32, "fp8": torch.float8_e4m3fn, "int8": torch.int8}[kv_cache_dtype]
    caches = allocate_kv_cache(4096, 16, 2, 64, dtype=dtype, layout=layout)
    key, value = torch.ones(16, 2, 64), torch.full((16, 2, 64), 2.0)
    slots, one = torch.arange(4095 * 16, 4096 * 16), torch.ones(1)
    ops.reshape_and_cache_flash(key, value, *caches, slots, kv_cache_dtype, one, one)
    assert (caches[0][4095].float() == 1).all()
    assert (caches[1][4095].float() == 2).all()
    assert caches[1][:4095].view(torch.uint8).count_nonzero() == 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.uint8]
)
def test_large_tensor_is_in_huge_pages(dtype):
    """Its first page is a huge one, and the system was asked for such pages to its end."""
    tensor = zeros_in_huge_pages((3, HUGE_PAGE_BYTES + 2), dtype=dtype)
    assert tensor.shape == (3, HUGE_PAGE_BYTES + 2)
    assert tensor.dtype == dtype
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert all(("hg" in flags) == HAS_HUGE_PAGES for flags in mappings_of(tensor))
    bits = tensor.view(torch.uint8)
    bits[0, 0] = bits[-1, -1] = 1
    assert bits.count_nonzero() == 2


def test_small_tensor_is_of_torch(monkeypatch):
    """Flags would not tell: NumPy asks for huge pages in the heap that torch shares with it."""
    monkeypatch.setattr(mmap, "mmap", None)
    tensor = zeros_in_huge_pages((HUGE_PAGE_BYTES - 1,), dtype=torch.uint8)
    assert tensor.count_nonzero() == 0
    with pytest.raises(TypeError, match="not callable"):
        zeros_in_huge_pages((HUGE_PAGE_BYTES,), dtype=torch.uint8)


def test_memory_is_taken_when_written_and_given_back():
    """A view keeps it as long as it lives."""
    num_pages = (1 << 30) // resource.getpagesize()
    total, resident = memory_pages()
    tensor = zeros_in_huge_pages((1 << 10, 1 << 20), dtype=torch.uint8)
    assert memory_pages()[0] - total >= num_pages
    assert memory_pages()[1] - resident < num_pages // 10
    view = tensor[-1]
    del tensor
    view.fill_(1)
    assert memory_pages()[0] - total >= num_pages
    del view
    assert memory_pages()[0] - total < num_pages // 10


def test_works_where_huge_pages_are_refused(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    tensor = zeros_in_huge_pages((4, HUGE_PAGE_BYTES), dtype=torch.uint8)
    assert not any("hg" in flags for flags in mappings_of(tensor))
    assert tensor.fill_(1).sum() == 4 * HUGE_PAGE_BYTES


def test_other_devices_get_zeros_of_torch():
    key_cache, _ = allocate_kv_cache(4096, 16, 2, 64, dtype=torch.float32, device="meta")
    assert key_cache.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks: expected at least 1, got 0"),
        ({"block_size": -1}, "block_size: expected at least 1, got -1"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected at least 1, got 0"),
        ({"head_size": 0}, "head_size: expected at least 1, got 0"),
        ({"layout": "hdn"}, "layout: expected one of nhd, hnd, vllm, panels; got 'hdn'"),
        (
            {"layout": "vllm", "head_size": 20},
            "head_size: expected a multiple of 8 for layout vllm and torch.float16, got 20",
        ),
        (
            {"layout": "panels", "head_size": 72},
            "head_size: expected a multiple of 16 for layout panels, got 72",
        ),
        (
            {"layout": "panels", "block_size": 8},
            "block_size: expected a multiple of 16 for layout panels, got 8",
        ),
    ],
)
def test_bad_arguments(changes, message):
    sizes = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 64}
    with pytest.raises(ValueError, match=message):
        allocate_kv_cache(**(sizes | {"dtype": torch.float16} | changes))


@pytest.mark.parametrize(
    ("device", "block_size", "head_size", "layout"),
    [
        ("cpu", 16, 64, "panels"),
        (torch.device("cpu"), 48, 80, "panels"),
        ("cpu", 8, 64, "nhd"),
        ("cpu", 16, 72, "nhd"),
        ("cuda", 16, 64, "nhd"),
        ("cuda:1", 16, 64, "nhd"),
    ],
)
def test_preferred_layout(device, block_size, head_size, layout):
    assert preferred_layout(device, block_size=block_size, head_size=head_size) == layout


def test_more_memory_than_there_is():
    with pytest.raises(MemoryError, match="cannot map 1152921504606846976 bytes for a cache"):
        allocate_kv_cache(1 << 40, 1 << 10, 1 << 5, 1 << 5, dtype=torch.uint8)


def test_is_a_name_of_the_package():
    assert paged_kv.allocate_kv_cache is allocate_kv_cache
