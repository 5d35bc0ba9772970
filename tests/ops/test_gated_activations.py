# SPDX-License-Identifier: Apache-2.0
"""silu_and_mul and gelu_tanh_and_mul: the values, their roundings, row by row."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from paged_kv import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GATES = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_tanh_and_mul}
BY_TORCH = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}

every_gate = pytest.mark.parametrize("name", GATES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def gated(name, x):
    """The op's result; poisoned before, so that nothing can be left unwritten."""
    out = torch.full((x.shape[0], x.shape[1] // 2), torch.nan, dtype=x.dtype)
    GATES[name](out, x)
    return out


def activated(name, gate):
    """activation(gate), as the op computes it: times one."""
    return gated(name, torch.cat((gate, torch.ones_like(gate)))[None])[0]


def exponent_of(name, x):
    """z in activation(x) = x / (1 + exp(-z)), in float64."""
    x = x.double()
    return x if name == "silu" else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def exactly(name, x):
    return x.double() / (1 + (-exponent_of(name, x)).exp())


def unit_of(x):
    """The distance of float32 numbers at x."""
    return torch.ldexp(torch.ones_like(x), x.frexp().exponent - 24)


@every_gate
def test_is_within_some_units_of_the_last_place(name):
    x = torch.cat((torch.linspace(-86, 30, 500_001), torch.linspace(-1e-2, 1e-2, 10_001)))
    z = exponent_of(name, x)
    x, z = x[z > -86.5], z[z > -86.5]
    exact = exactly(name, x)
    # The error of gelu's exponent becomes a relative one of its power.
    num_units = 4 if name == "silu" else 4 + 4 * z.abs()
    error = (activated(name, x).double() - exact).abs()
    assert (error <= num_units * unit_of(exact)).all()


@every_gate
def test_is_as_close_to_torch_as_torch_is_to_the_exact_value(name):
    x = torch.linspace(-20, 20, 200_001)
    tolerance = {"rtol": 6 * 2**-24, "atol": 5e-7 if name == "gelu_tanh" else 0}
    torch.testing.assert_close(activated(name, x), BY_TORCH[name](x), **tolerance)


@every_gate
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_16_bit_number_is_rounded_once(name, dtype):
    """Only values that lie all but in the middle of two numbers may go either way."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (exponent_of(name, x) > -86)]
    result, exact = activated(name, x), exactly(name, x)
    differs = result != exact.to(dtype)
    assert differs.sum() <= 30
    off = (result.double() - exact)[differs].abs()
    half_unit = (exact.to(dtype).double() - exact)[differs].abs()
    assert (off <= half_unit + 2e-5 * exact[differs].abs()).all()


@every_gate
@every_dtype
def test_edges(name, dtype):
    """Infinities and NaN are as in torch; far below zero the result is -0 and never NaN."""
    edges = [torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 100.0, 6e4, -6e4, -100.0]
    x = torch.tensor(edges, dtype=dtype)
    expected = BY_TORCH[name](x)
    result = activated(name, x)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-36, equal_nan=True)
    assert torch.equal(result.signbit()[3:], torch.tensor([0, 1, 0, 0, 1, 1]).bool())
    below = activated(name, torch.linspace(-90, -86, 1001, dtype=dtype))
    assert ((below <= 0) & (below.double() > -4e-36)).all()


@every_gate
@every_dtype
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 17, 64, 577])
def test_is_the_activation_rounded_then_the_product(size, rows, dtype, name):
    x = (3 * torch.randn(rows, 2 * size)).to(dtype)
    gate, up = x[:, :size], x[:, size:]
    result = gated(name, x)
    assert torch.equal(result, activated(name, gate.flatten()).view(rows, size) * up)


@every_gate
def test_slices_are_taken_and_their_surroundings_left(name):
    x = torch.full((6, 40), torch.nan)
    x[::2, 4:38] = torch.randn(3, 34)
    out = torch.full((3, 30), -1.0)
    GATES[name](out[:, 8:25], x[::2, 4:38])
    assert torch.equal(out[:, 8:25], gated(name, x[::2, 4:38].clone()))
    assert (out[:, :8] == -1).all()
    assert (out[:, 25:] == -1).all()


@every_gate
@every_dtype
@pytest.mark.parametrize("half", [slice(0, 19), slice(19, 38)], ids=["gate", "up"])
def test_out_may_be_either_half_of_the_input(half, dtype, name):
    x = torch.randn(5, 38).to(dtype)
    whole, expected = x.clone(), x.clone()
    expected[:, half] = gated(name, x)
    GATES[name](whole[:, half], whole)
    assert torch.equal(whole, expected)


@every_gate
def test_a_row_has_the_same_bits_with_any_others_and_any_threads(name):
    x = torch.randn(300, 2 * 577)
    whole, num_threads = gated(name, x), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for part in (slice(0, 1), slice(7, 9), slice(100, 300), slice(0, 300)):
                assert torch.equal(gated(name, x[part]), whole[part])
    finally:
        torch.set_num_threads(num_threads)


@every_gate
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.ones(8)}, r"input: expected shape \[num_rows, 2 \* size\], got \[8\]"),
        ({"input": torch.ones(2, 8).int()}, "input: expected dtype Float or Half or BFloat16, got"),
        ({"input": torch.ones(8, 2).T}, "input: expected stride 1 in dimension 1, got 2"),
        ({"input": torch.ones(2, 9)}, "out: expected half the width of input, 9 / 2, got 4"),
        ({"out": torch.ones(2, 8)}, "out: expected half the width of input, 8 / 2, got 8"),
        ({"out": torch.ones(3, 4)}, r"out: expected num_rows = 2 \(from input\), got 3"),
        ({"out": torch.ones(2, 4).half()}, "out: expected dtype Float, got Half"),
        ({"out": torch.ones(1, 4).expand(2, 4)}, "out: is written"),
    ],
)
def test_names_the_bad_argument_and_changes_nothing(changes, message, name):
    given = {"out": torch.ones(2, 4), "input": torch.ones(2, 8)} | changes
    with pytest.raises(RuntimeError, match=message):
        GATES[name](**given)
    assert (given["out"] == 1).all()


@every_gate
def test_opcheck_and_compile(name):
    x = torch.randn(3, 16)
    op = getattr(torch.ops.paged_kv, f"{name}_and_mul").default
    torch.library.opcheck(op, (torch.zeros(3, 8), x))

    def gate(x):
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        GATES[name](out, x)
        return out

    torch._dynamo.reset()
    assert torch.equal(torch.compile(gate, fullgraph=True)(x), gate(x))
