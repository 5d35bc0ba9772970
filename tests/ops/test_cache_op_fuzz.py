# SPDX-License-Identifier: Apache-2.0
"""Any shapes, strides and indices: the right answer or a clear error, and never a crash.

Each case is drawn valid and then spoiled in at most one argument. What the op accepts must equal
the reference; what it refuses must be spoiled, be named in the error and leave every tensor as it
was.
"""

from __future__ import annotations

import pytest
import torch
from cache_cases import DTYPES, ONE, make_caches, random_bits, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paged_kv import ops, reference

FUZZ = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
NASTY_INTS = st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 7, 2**31 - 1])


def strided(draw, tensor):
    """The same values with other strides: permuted in memory, or every second element of more."""
    order = draw(st.permutations(range(tensor.dim())))
    inverse = sorted(range(tensor.dim()), key=order.__getitem__)
    result = tensor.permute(order).contiguous().permute(inverse)
    if draw(st.booleans()):
        result = torch.stack([result, result], dim=-1)[..., 0]
    return result


def spoil(draw, tensor):
    """Another tensor in place of this one: wrong in shape, dtype or values, or still right."""
    kind = draw(st.sampled_from(["longer", "shorter", "flat", "deeper", "dtype", "values"]))
    if kind in ("longer", "shorter") and tensor.dim() > 0:
        dim = draw(st.integers(0, tensor.dim() - 1))
        if kind == "shorter":
            return tensor.narrow(dim, 0, max(0, tensor.shape[dim] - 1)).clone()
        return torch.cat([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim)
    if kind == "flat":
        return tensor.reshape(-1).clone()
    if kind == "deeper":
        return tensor.unsqueeze(0).clone()
    if kind == "dtype":
        return tensor.to(draw(st.sampled_from([torch.float64, torch.int16, torch.bool])))
    if tensor.is_floating_point() or tensor.numel() == 0:
        return tensor
    spoiled = tensor.contiguous().clone()
    spoiled.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(NASTY_INTS)
    return spoiled


def copy_of(arguments):
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def run_case(draw, op, expect, arguments, tensor_names):
    spoiled = draw(st.sampled_from([None, *tensor_names]))
    if spoiled is not None:
        arguments[spoiled] = spoil(draw, arguments[spoiled])
    wanted = copy_of(arguments)
    refusal = None
    try:
        op(**arguments)
    except RuntimeError as error:
        refusal = str(error)
    if refusal is None:
        expect(**wanted)
    else:
        assert spoiled is not None, refusal
        assert refusal.startswith(tuple(tensor_names)), refusal
    for name in tensor_names:
        assert same_bits(arguments[name], wanted[name])


def strided_blocks(draw, cache):
    """A cache in panels with other strides of its blocks and heads; all others are fixed."""
    if draw(st.booleans()):
        cache = cache.transpose(0, 1).contiguous().transpose(0, 1)
    gaps = draw(st.sampled_from([(), (0,), (1,)]))
    return torch.stack([cache, cache], dim=gaps[0] + 1).select(gaps[0] + 1, 0) if gaps else cache


def write_case(draw, layout):
    dtype = draw(st.sampled_from(DTYPES))
    b, h = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    s = 16 * draw(st.integers(1, 2)) if layout == "panels" else draw(st.integers(1, 9))
    unit = {"vllm": 16 // dtype.itemsize, "panels": 16}.get(layout)
    d = unit * draw(st.integers(1, 3)) if unit else draw(st.integers(1, 9))
    num_tokens = draw(st.integers(0, b * s))
    slots = torch.tensor(draw(st.permutations(range(b * s)))[:num_tokens], dtype=torch.int64)
    for i in range(num_tokens):
        if draw(st.integers(0, 5)) == 0:
            slots[i] = -draw(st.integers(1, 2**62))
    caches = make_caches(
        layout, block_size=s, num_kv_heads=h, head_size=d, dtype=dtype, num_blocks=b
    )
    restride = strided_blocks if layout == "panels" else strided
    tokens = [
        random_bits(num_tokens + draw(st.integers(0, 2)), h, d, dtype=dtype) for _ in range(2)
    ]
    names = ["key", "value", "key_cache", "value_cache", "slot_mapping"]
    tensors = [
        *(strided(draw, tensor) for tensor in tokens),
        *(restride(draw, cache) for cache in caches),
        strided(draw, slots),
    ]
    return dict(zip(names, tensors, strict=True))


@pytest.mark.parametrize("layout", ["vllm", "nhd", "panels"])
def test_writers(layout):
    name = "reshape_and_cache" if layout == "vllm" else "reshape_and_cache_flash"
    op, expect = getattr(ops, name), getattr(reference, name)

    @FUZZ
    @given(st.data())
    def check(data):
        draw = data.draw
        arguments = write_case(draw, layout)
        run_case(
            draw,
            lambda **a: op(**a, kv_cache_dtype="auto", k_scale=ONE, v_scale=ONE),
            expect,
            arguments,
            list(arguments),
        )

    check()


def gather_case(draw, layout):
    dtype = draw(st.sampled_from(DTYPES))
    b, s, h, d = (draw(st.integers(1, 5)) for _ in range(4))
    restride = strided
    if layout == "panels":
        s, d, restride = 16 * s, 16 * d, strided_blocks
    num_seqs, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    starts = [draw(st.integers(0, s * width)) for _ in range(num_seqs)]
    lens = [draw(st.integers(0, s * width - start)) for start in starts]
    tables = torch.randint(0, b, (num_seqs, width), dtype=torch.int32)
    out = random_bits(sum(lens) + draw(st.integers(0, 2)), h, d, dtype=dtype)
    caches = make_caches(
        layout, block_size=s, num_kv_heads=h, head_size=d, dtype=dtype, num_blocks=b
    )
    cache = restride(draw, draw(st.sampled_from(caches)))
    tensors = {
        "out": out,
        "block_tables": tables,
        "cu_seq_lens": torch.tensor([0, *lens]).cumsum(0).int(),
        "seq_starts": torch.tensor(starts, dtype=torch.int32),
    }
    return {"cache": cache} | {name: strided(draw, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", ["nhd", "panels"])
def test_gather_cache(layout):
    @FUZZ
    @given(st.data())
    def check(data):
        draw = data.draw
        arguments = gather_case(draw, layout)
        run_case(draw, ops.gather_cache, reference.gather_cache, arguments, list(arguments))

    check()


def copy_case(draw):
    dtype = draw(st.sampled_from(DTYPES))
    num_blocks = draw(st.integers(1, 6))
    shape = [num_blocks, *draw(st.lists(st.integers(0, 4), max_size=3))]
    ids = draw(st.permutations(range(num_blocks)))
    destinations = ids[: draw(st.integers(0, num_blocks - 1))]
    sources = ids[len(destinations) :]
    pairs = [(draw(st.sampled_from(sources)), dst) for dst in destinations]
    tensors = {
        "key_caches": random_bits(*shape, dtype=dtype),
        "value_caches": random_bits(*shape, dtype=dtype),
        "block_mapping": torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
    }
    return {name: strided(draw, tensor) for name, tensor in tensors.items()}


@FUZZ
@given(st.data())
def test_copy_blocks(data):
    draw = data.draw
    arguments = copy_case(draw)

    def listed(function):
        return lambda key_caches, value_caches, block_mapping: function(
            [key_caches], [value_caches], block_mapping
        )

    run_case(
        draw, listed(ops.copy_blocks), listed(reference.copy_blocks), arguments, list(arguments)
    )


def slot_case(draw):
    block_size, num_rows, width = (draw(st.integers(1, 5)) for _ in range(3))
    num_seqs = draw(st.integers(0, 4))
    lens = [draw(st.integers(0, 4)) for _ in range(num_seqs)]
    num_tokens = sum(lens)
    tensors = {
        "query_start_loc": torch.tensor([0, *lens]).cumsum(0).int(),
        "positions": torch.randint(0, block_size * width, (num_tokens + 1,)),
        "block_tables": torch.randint(0, 2**31 - 1, (num_rows, width)).int(),
        "idx_mapping": torch.randint(-1, num_rows, (num_seqs,)).int(),
        "slot_mapping": torch.randint(0, 9, (num_tokens + draw(st.integers(0, 3)),)),
    }
    tensors = {name: strided(draw, tensor) for name, tensor in tensors.items()}
    return tensors, block_size


@FUZZ
@given(st.data())
def test_compute_slot_mapping(data):
    draw = data.draw
    arguments, block_size = slot_case(draw)
    run_case(
        draw,
        lambda **a: ops.compute_slot_mapping(**a, block_size=block_size),
        lambda **a: reference.compute_slot_mapping(**a, block_size=block_size),
        arguments,
        list(arguments),
    )


def staged_case(draw):
    num_rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    num_writes = draw(st.integers(0, 5))
    starts = [draw(st.integers(0, width)) for _ in range(num_writes)]
    lens = [draw(st.integers(0, width - start)) for start in starts]
    tensors = {
        "table": torch.randint(0, 99, (num_rows, width)).int(),
        "rows": torch.randint(0, num_rows, (num_writes,)).int(),
        "starts": torch.tensor(starts, dtype=torch.int32),
        "cu_lens": torch.tensor(lens, dtype=torch.int32).cumsum(0).int(),
        "contents": torch.randint(100, 199, (sum(lens) + 1,)).int(),
    }
    return {name: strided(draw, tensor) for name, tensor in tensors.items()}


@FUZZ
@given(st.data())
def test_apply_block_table_writes(data):
    draw = data.draw
    arguments = staged_case(draw)
    run_case(
        draw,
        ops.apply_block_table_writes,
        reference.apply_block_table_writes,
        arguments,
        list(arguments),
    )


def rows_case(draw):
    num_rows, width, num_reqs = (draw(st.integers(1, 5)) for _ in range(3))
    tensors = {
        "table": torch.randint(0, 99, (num_rows, width)).int(),
        "idx_mapping": torch.randint(-1, num_rows, (num_reqs,)).int(),
        "num_blocks": torch.randint(0, width + 1, (num_rows,)).int(),
        "out": torch.randint(0, 99, (num_reqs + 1, width + draw(st.integers(0, 2)))).int(),
    }
    return {name: strided(draw, tensor) for name, tensor in tensors.items()}


@FUZZ
@given(st.data())
def test_gather_block_tables(data):
    draw = data.draw
    arguments = rows_case(draw)
    run_case(
        draw, ops.gather_block_tables, reference.gather_block_tables, arguments, list(arguments)
    )
