# SPDX-License-Identifier: Apache-2.0
"""The cache writers put each token into its slot, bit for bit, and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from cache_cases import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_SIZES,
    NUM_BLOCKS,
    ONE,
    huge_tensor,
    make_caches,
    make_tokens,
    permuted_slots,
    same_bits,
)
from ops.backends import each_layout

from paged_kv import ops, reference

STRIDED_LAYOUTS = ["vllm", "nhd", "hnd", "slices"]  # take any strides
LAYOUTS = [*STRIDED_LAYOUTS, "panels"]


def writers(backend, layout):
    """The op for a layout and its reference."""
    if layout == "vllm":
        return backend.reshape_and_cache, reference.reshape_and_cache
    return backend.reshape_and_cache_flash, reference.reshape_and_cache_flash


def check_writer(backend, layout, key, value, caches, slots):
    op, expect = writers(backend, layout)
    expected = [cache.clone() for cache in caches]
    expect(key, value, *expected, slots)
    op(key, value, *caches, slots, "auto", ONE, ONE)
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_bits(cache, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@each_layout(LAYOUTS, block_size=BLOCK_SIZES)
def test_equals_reference(backend, layout, block_size, dtype):
    """Random slots, a run of them in order over block borders, padding in between."""
    key, value = make_tokens(40, 2, 64, dtype)
    caches = make_caches(layout, block_size=block_size, num_kv_heads=2, head_size=64, dtype=dtype)
    num_slots = NUM_BLOCKS * block_size
    check_writer(backend, layout, key, value, caches, permuted_slots(40, num_slots, padding=5))
    check_writer(backend, layout, key, value, caches, torch.arange(40) % (num_slots - 1))
    key, value = make_tokens(num_slots, 2, 64, dtype)
    check_writer(backend, layout, key, value, caches, torch.arange(num_slots - 1, -1, -1))


@pytest.mark.parametrize("num_kv_heads", [1, 3])
@each_layout(LAYOUTS, head_size=HEAD_SIZES)
def test_every_head_size(backend, layout, head_size, num_kv_heads):
    key, value = make_tokens(20, num_kv_heads, head_size, torch.bfloat16)
    caches = make_caches(
        layout,
        block_size=16,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=torch.bfloat16,
    )
    check_writer(
        backend, layout, key, value, caches, permuted_slots(20, NUM_BLOCKS * 16, padding=2)
    )


@each_layout(LAYOUTS)
def test_many_tokens_on_many_threads(backend, layout):
    key, value = make_tokens(1500, 4, 64, torch.float16)
    caches = make_caches(
        layout, block_size=16, num_kv_heads=4, head_size=64, dtype=torch.float16, num_blocks=100
    )
    check_writer(backend, layout, key, value, caches, permuted_slots(1500, 1600, padding=20))
    check_writer(backend, layout, key, value, caches, torch.arange(1500) + 100)


@each_layout(LAYOUTS)
def test_padding_rows_leave_the_whole_cache_alone(backend, layout):
    """-1 is no index: the last slot of the last block keeps its bits."""
    key, value = make_tokens(7, 2, 64, torch.float32)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    before = [cache.clone() for cache in caches]
    slots = torch.tensor([-1, -1, -16, -(2**63), -1, -80, -1])
    writers(backend, layout)[0](key, value, *caches, slots, "auto", ONE, ONE)
    for cache, wanted in zip(caches, before, strict=True):
        assert same_bits(cache, wanted)


@each_layout(LAYOUTS)
def test_token_count_is_that_of_slot_mapping(backend, layout):
    """Key and value may be padded, each on its own; too short a one is refused."""
    op, expect = writers(backend, layout)
    key, value = make_tokens(9, 2, 64, torch.float32)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    expected = [cache.clone() for cache in caches]
    slots = permuted_slots(6, NUM_BLOCKS * 16)
    op(key, value[:7], *caches, slots, "auto", ONE, ONE)
    expect(key[:6], value[:6], *expected, slots)
    for bad in ((key[:5], value), (key, value[:5])):
        with pytest.raises(RuntimeError, match="expected at least 6 tokens"):
            op(*bad, *caches, slots, "auto", ONE, ONE)
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_bits(cache, wanted)


@each_layout(LAYOUTS)
def test_strided_inputs(backend, layout):
    """Key and value as slices of a fused projection, dims transposed, slots as a column."""
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    qkv = make_tokens(12, 8, 64, torch.float32)[0].view(12, 8 * 64)
    key = qkv[:, 4 * 64 : 6 * 64].view(12, 2, 64)
    value = qkv[:, 6 * 64 :].view(12, 2, 64)
    slots = torch.stack([permuted_slots(12, NUM_BLOCKS * 16), torch.full((12,), 10**9)], dim=1)[
        :, 0
    ]
    check_writer(backend, layout, key, value, caches, slots)
    transposed = [t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in (key, value)]
    check_writer(backend, layout, *transposed, caches, slots)
    expanded = key[:1].expand(12, 2, 64)
    check_writer(backend, layout, expanded, expanded, caches, slots)


@each_layout(STRIDED_LAYOUTS)
def test_cache_with_strided_last_dim(backend, layout):
    key, value = make_tokens(12, 2, 64, torch.float32)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    wide = [torch.stack([cache, cache], dim=-1) for cache in caches]
    check_writer(backend, layout, key, value, [w[..., 0] for w in wide], permuted_slots(12, 80))
    for w, cache in zip(wide, caches, strict=True):
        assert same_bits(w[..., 1], cache)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slot_past_the_end_is_refused_on_the_cpu_before_anything_is_written(layout):
    key, value = make_tokens(3, 2, 64, torch.float32)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    before = [cache.clone() for cache in caches]
    for bad in (NUM_BLOCKS * 16, 2**40, 2**63 - 1):
        with pytest.raises(RuntimeError, match=rf"slot_mapping\[2\].*got {bad}"):
            writers(ops, layout)[0](
                key, value, *caches, torch.tensor([0, 1, bad]), "auto", ONE, ONE
            )
    for cache, wanted in zip(caches, before, strict=True):
        assert same_bits(cache, wanted)


@pytest.mark.parametrize("layout", STRIDED_LAYOUTS)
def test_slot_past_the_end_is_skipped_on_the_device(device_backend, layout):
    """The host cannot see it there; the tokens beside it are written."""
    key, value = make_tokens(9, 2, 64, torch.float32)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    expected = [cache.clone() for cache in caches]
    slots = torch.arange(16, 25)
    slots[[1, 4, 8]] = torch.tensor([NUM_BLOCKS * 16, 2**40, 2**63 - 1])
    op, expect = writers(device_backend, layout)
    op(key, value, *caches, slots, "auto", ONE, ONE)
    slots[[1, 4, 8]] = -1
    expect(key, value, *expected, slots)
    for cache, wanted in zip(caches, expected, strict=True):
        assert same_bits(cache, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["vllm", "nhd"])
def test_offsets_are_64_bit(host_backend, layout, dtype):
    """The last block of a cache with more than 2^31 elements; block 0 stays zero."""
    num_blocks = 2**31 // (16 * 2 * 64) + 3
    shape = (num_blocks, 16, 2, 64)
    x = 16 // dtype.itemsize
    caches = [huge_tensor(*shape, dtype=dtype) for _ in range(2)]
    if layout == "vllm":
        caches = [caches[0].view(-1, 2, 64 // x, 16, x), caches[1].view(-1, 2, 64, 16)]
    key, value = make_tokens(1, 2, 64, dtype)
    slots = torch.tensor([num_blocks * 16 - 3])
    writers(host_backend, layout)[0](key, value, *caches, slots, "auto", ONE, ONE)
    last = [cache[-1:].clone() for cache in caches]
    expected = [torch.zeros_like(cache) for cache in last]
    writers(host_backend, layout)[1](key, value, *expected, torch.tensor([13]))
    for cache, cache_end, wanted in zip(caches, last, expected, strict=True):
        assert same_bits(cache_end, wanted)
        assert not cache[:2].any()


SLOT_PATTERNS = {
    "aligned run": range(16, 48),
    "run from the middle of a block": range(5, 45),
    "run that ends early": range(16, 27),
    "descending": range(47, 15, -1),
    "every second": range(0, 60, 2),
    "two runs, each aligned": [*range(16, 29), *range(48, 64)],
    "two runs, neither aligned": [*range(3, 16), *range(37, 60)],
    "runs of one block in turns": [block * 16 + i for i in range(16) for block in (1, 3)],
    "padding inside a run": [-1 if i == 21 else i for i in range(8, 40)],
    "padding at the start of a tile": [-1, *range(16, 40)],
    "one token": [79],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", SLOT_PATTERNS)
@each_layout(["vllm", "hnd", "panels"])
def test_slot_patterns(backend, layout, pattern, dtype):
    slots = torch.tensor(SLOT_PATTERNS[pattern])
    key, value = make_tokens(len(slots), 3, 32, dtype)
    for block_size in (16, 80) if layout == "panels" else (16, 20, 5):  # 80 slots each
        caches = make_caches(
            layout,
            block_size=block_size,
            num_kv_heads=3,
            head_size=32,
            dtype=dtype,
            num_blocks=80 // block_size,
        )
        check_writer(backend, layout, key, value, caches, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_layout(LAYOUTS)
def test_misaligned_tensors(backend, layout, dtype):
    """Addresses and strides that allow no vectors, in one of the tensors at a time."""
    for misaligned in range(4):
        key, value = make_tokens(24, 2, 64, dtype)
        caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)
        tensors = [key, value, *caches]
        tensors[misaligned] = at_odd_address(tensors[misaligned])
        check_writer(backend, layout, *tensors[:2], tensors[2:], torch.arange(8, 32))


def at_odd_address(tensor):
    """The same values one element further in memory."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    dense = tensor.contiguous()
    return flat[1:].view(dense.shape).copy_(dense)


def flash_arguments(**changes):
    key, value = make_tokens(3, 2, 64, torch.float32)
    key_cache, value_cache = make_caches(
        "nhd", block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32
    )
    arguments = {
        "key": key,
        "value": value,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": torch.tensor([0, 1, 2]),
        "kv_cache_dtype": "auto",
        "k_scale": ONE,
        "v_scale": ONE,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(3, 128)}, "key: expected shape"),
        ({"key": torch.zeros(3, 2, 64, dtype=torch.float64)}, "key: expected dtype"),
        ({"value": torch.zeros(3, 2, 64, dtype=torch.float16)}, "value: expected dtype"),
        ({"value": torch.zeros(3, 2, 32)}, "value: expected head_size = 64"),
        ({"key_cache": torch.zeros(5, 16, 3, 64)}, "key_cache: expected num_kv_heads = 2"),
        ({"key_cache": torch.zeros(5, 16, 2, 64).half()}, "key_cache: expected dtype"),
        ({"value_cache": torch.zeros(5, 8, 2, 64)}, "value_cache: expected block_size = 16"),
        ({"value_cache": torch.zeros(4, 16, 2, 64)}, "value_cache: expected num_blocks = 5"),
        ({"value_cache": torch.zeros(5, 16, 2, 1).expand(5, 16, 2, 64)}, "value_cache: is written"),
        ({"slot_mapping": torch.tensor([0, 1, 2], dtype=torch.int32)}, "slot_mapping: expected dt"),
        ({"slot_mapping": torch.tensor([[0, 1, 2]])}, "slot_mapping: expected shape"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype: expected one of: auto"),
        ({"k_scale": torch.ones(3)}, "k_scale: expected one element"),
        ({"v_scale": torch.ones(1, dtype=torch.float64)}, "v_scale: expected dtype"),
    ],
)
def test_flash_refuses_bad_arguments(backend, changes, message):
    arguments = flash_arguments(**changes)
    before = {name: arguments[name].clone() for name in ("key_cache", "value_cache")}
    with pytest.raises(RuntimeError, match=message):
        backend.reshape_and_cache_flash(**arguments)
    for name, wanted in before.items():
        assert same_bits(arguments[name], wanted)


@pytest.mark.parametrize(
    ("key_cache", "message"),
    [
        (torch.zeros(5, 2, 8, 16, 8), "key_cache: expected x = 4"),
        (torch.zeros(5, 2, 15, 16, 4), "key_cache: expected head_size = 64"),
        (torch.zeros(5, 16, 2, 64), "key_cache: expected shape"),
        (torch.zeros(5, 2, 16, 1, 4).expand(5, 2, 16, 16, 4), "key_cache: is written"),
    ],
)
def test_packed_layout_refuses_other_shapes(backend, key_cache, message):
    arguments = flash_arguments(key_cache=key_cache, value_cache=torch.zeros(5, 2, 64, 16))
    with pytest.raises(RuntimeError, match=message):
        backend.reshape_and_cache(**arguments)


@pytest.mark.parametrize("name", ["key", "value", "key_cache"])
def test_input_that_requires_grad_is_refused(name):
    arguments = flash_arguments()
    arguments[name] = arguments[name].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        ops.reshape_and_cache_flash(**arguments)
    with torch.no_grad():
        ops.reshape_and_cache_flash(**arguments)
