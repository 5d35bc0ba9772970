# SPDX-License-Identifier: Apache-2.0
"""The cache ops under opcheck, torch.compile and torch.export: the same tensors change."""

from __future__ import annotations

import functools

import pytest
import torch
from cache_cases import ONE, int32, make_caches, make_tokens, same_bits
from torch.export import Dim

from paged_kv import ops


def write_arguments(layout, num_tokens=5):
    key, value = make_tokens(num_tokens + 1, 2, 32, torch.bfloat16)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    slots = torch.arange(num_tokens) * 7
    slots[1] = -1
    return key, value, *caches, slots, "auto", ONE, ONE


def quantised_write(layout, kv_cache_dtype, dtype):
    key, value, _, _, slots, *_ = write_arguments(layout)
    caches = make_caches(layout, block_size=16, num_kv_heads=2, head_size=32, dtype=dtype)
    scales = torch.tensor([0.5, 2.0]), torch.tensor([0.1])
    return key, value, *caches, slots, kv_cache_dtype, *scales


def gather_arguments(side):
    """Of a cache in panels: keys (0) or values (1)."""
    cache = make_caches(
        "panels", block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )[side]
    out = torch.zeros(18, 2, 32, dtype=torch.bfloat16)
    return cache, out, int32(3, 1, 2, 0).view(2, 2), int32(0, 17, 18)


def table_arguments():
    return torch.arange(12, dtype=torch.int32).view(3, 4), int32(2, -1), int32(1, 2, 3)


CASES = {
    "reshape_and_cache": lambda: write_arguments("vllm"),
    "reshape_and_cache_flash": lambda: write_arguments("nhd"),
    "reshape_and_cache_flash hnd": lambda: write_arguments("hnd"),
    "reshape_and_cache_flash fp8": lambda: quantised_write("nhd", "fp8", torch.uint8),
    "reshape_and_cache_flash int8": lambda: quantised_write("hnd", "int8", torch.int8),
    "reshape_and_cache_flash panels": lambda: write_arguments("panels"),
    "reshape_and_cache_flash panels int8": lambda: quantised_write("panels", "int8", torch.int8),
    "reshape_and_cache int8": lambda: quantised_write("vllm", "int8", torch.int8),
    "gather_cache int8": lambda: (
        torch.arange(-64, 64).char().repeat(16).view(4, 8, 2, 32),
        torch.zeros(11, 2, 32),
        int32(3, 1, 2, 0).view(2, 2),
        int32(0, 9, 10),
        None,
        "int8",
        torch.tensor([0.5, 2.0]),
    ),
    "gather_cache of keys in panels": lambda: gather_arguments(0),
    "gather_cache of values in panels": lambda: gather_arguments(1),
    "copy_blocks": lambda: (
        [torch.randn(4, 3), torch.randn(4, 2)],
        [torch.randn(4, 3), torch.randn(4, 2)],
        torch.tensor([[1, 0], [2, 3]]),
    ),
    "swap_blocks": lambda: (torch.randn(4, 3), torch.randn(2, 3), 12, torch.tensor([[3, 0]])),
    "gather_cache": lambda: (
        torch.randn(4, 8, 2, 32),
        torch.zeros(11, 2, 32),
        int32(3, 1, 2, 0).view(2, 2),
        int32(0, 9, 10),
        int32(1, 8),
    ),
    "gather_cache without starts": lambda: (
        torch.randn(4, 8, 2, 32),
        torch.zeros(11, 2, 32),
        int32(3, 1, 2, 0).view(2, 2),
        int32(0, 9, 10),
    ),
    "compute_slot_mapping": lambda: (
        int32(0, 2, 3),
        torch.tensor([3, 4, 20]),
        int32(3, 1, 2, 0).view(2, 2),
        torch.zeros(5, dtype=torch.int64),
        16,
    ),
    "compute_slot_mapping with rows": lambda: (
        int32(0, 2, 3),
        torch.tensor([3, 4, 20]),
        int32(3, 1, 2, 0).view(2, 2),
        torch.zeros(5, dtype=torch.int64),
        16,
        int32(1, -1),
    ),
    "apply_block_table_writes": lambda: (
        torch.zeros(3, 4, dtype=torch.int32),
        int32(2, 0),
        int32(1, 0),
        int32(2, 3),
        int32(7, 8, 9),
    ),
    "gather_block_tables": lambda: (*table_arguments(), torch.ones(3, 4, dtype=torch.int32)),
}


def op_of(case):
    return getattr(ops, case.split()[0])


def overload_of(case):
    return getattr(torch.ops.paged_kv, case.split()[0]).default


def tensors_in(arguments):
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from argument


def clone(arguments):
    return [
        [t.clone() for t in a] if isinstance(a, list) else a.clone() if torch.is_tensor(a) else a
        for a in arguments
    ]


def assert_same_tensors(actual, expected):
    for a, e in zip(tensors_in(actual), tensors_in(expected), strict=True):
        assert same_bits(a, e)


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    torch.library.opcheck(overload_of(case), CASES[case]())


@pytest.mark.parametrize("case", CASES)
def test_compiled_op_changes_the_same_tensors(case):
    arguments = CASES[case]()
    expected, untouched = clone(arguments), clone(arguments)
    op_of(case)(*expected)
    compiled = torch.compile(op_of(case), fullgraph=True, backend="aot_eager")
    compiled(*arguments)
    assert_same_tensors(arguments, expected)
    with pytest.raises(AssertionError):  # the case does change something
        assert_same_tensors(arguments, untouched)


@pytest.mark.parametrize("layout", ["vllm", "nhd"])
def test_inductor_keeps_the_write_before_the_read(layout):
    """The write is functionalised and put back; a read after it sees the new tokens."""
    op = ops.reshape_and_cache if layout == "vllm" else ops.reshape_and_cache_flash

    def step(key, value, key_cache, value_cache, slots):
        before = key_cache.clone()
        op(key * 2, value, key_cache, value_cache, slots, "auto", ONE, ONE)
        return before, value_cache.clone()

    arguments = [tensor.nan_to_num() for tensor in write_arguments(layout)[:5]]
    expected = clone(arguments)
    results = step(*expected)
    compiled_results = torch.compile(step, fullgraph=True)(*arguments)
    assert_same_tensors(arguments, expected)
    assert_same_tensors(compiled_results, results)


def test_compiled_write_into_slices_of_one_tensor():
    """Keys and values are views of one tensor that the graph makes itself."""

    def step(key, value, kv_cache, slots):
        key_cache, value_cache = kv_cache.transpose(1, 2).split(32, dim=-1)
        ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, "auto", ONE, ONE)

    key, value = make_tokens(5, 2, 32, torch.bfloat16)
    slots = torch.tensor([3, 79, -1, 0, 17])
    eager = torch.zeros(5, 2, 16, 64, dtype=torch.bfloat16)
    compiled = eager.clone()
    step(key, value, eager, slots)
    torch.compile(step, fullgraph=True, backend="aot_eager")(key, value, compiled, slots)
    assert same_bits(compiled, eager)


def test_compiled_for_one_batch_size_serves_another():
    write = torch.compile(
        ops.reshape_and_cache_flash, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for num_tokens in (3, 8, 5):
        arguments = write_arguments("nhd", num_tokens)
        expected = clone(arguments)
        ops.reshape_and_cache_flash(*expected)
        write(*arguments)
        assert_same_tensors(arguments, expected)


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def exported(function, arguments, dynamic_shapes):
    """Exports ``function`` and returns the graph as a module."""
    program = torch.export.export(
        _Module(function), tuple(arguments), dynamic_shapes=(tuple(dynamic_shapes),)
    )
    return program.module()


@pytest.mark.parametrize("layout", ["vllm", "nhd"])
def test_exported_write_takes_any_number_of_tokens(layout):
    op = ops.reshape_and_cache if layout == "vllm" else ops.reshape_and_cache_flash

    def write(key, value, key_cache, value_cache, slots):
        op(key, value, key_cache, value_cache, slots, "auto", torch.ones(1), torch.ones(1))
        return key_cache.clone(), value_cache.clone()

    def arguments(num_tokens):
        key, value, *rest = write_arguments(layout, num_tokens)[:5]
        return key[:num_tokens], value[:num_tokens], *rest

    num_tokens = Dim("num_tokens", min=2, max=64)
    shapes = [{0: num_tokens}, {0: num_tokens}, None, None, {0: num_tokens}]
    program = exported(write, arguments(5), shapes)
    for n in (2, 5, 11):
        given = arguments(n)
        expected = clone(given)
        results = write(*expected)
        assert_same_tensors(program(*given), results)
        assert_same_tensors(given, expected)


def test_exported_slot_mapping_and_gather_take_any_batch():
    def step(query_start_loc, positions, tables, cache):
        slots = torch.empty_like(positions)
        ops.compute_slot_mapping(query_start_loc, positions, tables, slots, 8)
        out = cache.new_empty(positions.shape[0], 2, 32)
        ops.gather_cache(cache, out, tables, query_start_loc)
        return slots, out

    def arguments(num_seqs):
        starts = torch.arange(num_seqs + 1, dtype=torch.int32) * 9
        tables = torch.randint(0, 6, (num_seqs, 2), dtype=torch.int32)
        return starts, torch.arange(9).repeat(num_seqs), tables, torch.randn(6, 8, 2, 32)

    num_seqs = Dim("num_seqs", min=2, max=64)
    num_tokens = Dim("num_tokens", min=2, max=4096)
    shapes = [{0: num_seqs + 1}, {0: num_tokens}, {0: num_seqs}, None]
    program = exported(step, arguments(3), shapes)
    for n in (2, 3, 7):
        given = arguments(n)
        assert_same_tensors(program(*given), step(*given))


def test_exported_block_copies_and_table_ops_take_any_batch():
    def step(key_cache, value_cache, host, pairs, table, rows, contents, num_blocks):
        ops.copy_blocks([key_cache], [value_cache], pairs)
        ops.swap_blocks(key_cache, host, 3 * 4, pairs)
        ones = torch.ones_like(rows)
        ops.apply_block_table_writes(table, rows, ones, ones.cumsum(0).int(), contents)
        out = table.new_full((rows.shape[0] + 1, table.shape[1]), 7)
        ops.gather_block_tables(table, rows, num_blocks, out)
        return key_cache.clone(), value_cache.clone(), host.clone(), table.clone(), out

    def arguments(n):
        caches = [torch.randn(9, 3) for _ in range(3)]
        pairs = torch.stack([torch.zeros(n, dtype=torch.int64), torch.arange(1, n + 1)], dim=1)
        rows = torch.randperm(8)[:n].int()
        table = torch.zeros(8, 4, dtype=torch.int32)
        return *caches, pairs, table, rows, 100 + rows, torch.full((8,), 2, dtype=torch.int32)

    n = Dim("n", min=2, max=8)
    shapes = [None, None, None, {0: n}, None, {0: n}, {0: n}, None]
    program = exported(step, arguments(3), shapes)
    for num in (2, 3, 7):
        given = arguments(num)
        expected = clone(given)
        assert_same_tensors(program(*given), step(*expected))
        assert_same_tensors(given, expected)


def test_fake_kernels_refuse_what_the_ops_refuse():
    """A shape fault shows while tracing and not at the first run."""
    with torch._subclasses.FakeTensorMode() as mode:
        fake = functools.partial(mode.from_tensor, static_shapes=True)
        key, value, key_cache, value_cache, slots, *rest = (
            fake(a) if torch.is_tensor(a) else a for a in write_arguments("nhd")
        )
        with pytest.raises(RuntimeError, match="key: expected at least 5"):
            ops.reshape_and_cache_flash(key[:4], value, key_cache, value_cache, slots, *rest)
        with pytest.raises(RuntimeError, match="value_cache: expected head_size"):
            ops.reshape_and_cache_flash(key, value, key_cache, value_cache[..., :16], slots, *rest)
        with pytest.raises(RuntimeError, match="key_cache: expected shape"):
            ops.reshape_and_cache(key, value, key_cache, value_cache, slots, *rest)
        for kv_cache_dtype, message in (
            ("fp4", "kv_cache_dtype: expected one of"),
            ("fp8", "key_cache: expected dtype"),
            ("int8", "key_cache: expected dtype torch.int8"),
        ):
            with pytest.raises(RuntimeError, match=message):
                ops.reshape_and_cache_flash(
                    key, value, key_cache, value_cache, slots, kv_cache_dtype, *rest[1:]
                )
