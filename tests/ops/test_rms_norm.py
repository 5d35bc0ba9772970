# SPDX-License-Identifier: Apache-2.0
"""RMS normalisation on the CPU: the roundings of Llama and of Gemma, row by row."""

from __future__ import annotations

import pytest
import torch

from paged_kv import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = 1e-5


def normed(x, weight, epsilon=EPSILON):
    out = torch.full_like(x, torch.nan)
    ops.rms_norm(out, x, weight, epsilon)
    return out


def expected_of(x, weight):
    wide = x.double()
    quotient = wide / (wide.square().mean(-1, keepdim=True) + EPSILON).sqrt()
    return (quotient.to(weight.dtype) * weight).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 200])
@pytest.mark.parametrize("size", [1, 15, 16, 64, 577])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_is_the_quotient_rounded_to_the_weight_then_the_product(size, rows, dtype, wide_weight):
    torch.manual_seed(0)
    x = (3 * torch.randn(rows, size)).to(dtype)
    weight = torch.randn(size, dtype=torch.float32 if wide_weight else dtype)
    # A quotient at the middle of two numbers may be rounded either way: a unit in the last place.
    rtol = max(2 * torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(normed(x, weight), expected_of(x, weight), rtol=rtol, atol=0)


def test_rounds_twice_only_with_a_narrow_weight():
    """1 / rms of (1, 1, 1, 3) is no bfloat16."""
    x = torch.tensor([[1.0, 1.0, 1.0, 3.0]]).bfloat16()
    weight = torch.full((4,), 1.0078125)
    twice, once = normed(x, weight.bfloat16(), 0.0), normed(x, weight, 0.0)
    quotient = x.float() / 3**0.5
    assert torch.equal(twice, quotient.bfloat16() * weight.bfloat16())
    assert torch.equal(once, (quotient * weight).bfloat16())
    assert not torch.equal(twice, once)


def test_in_place_of_slices():
    x = torch.full((6, 40), torch.nan)
    x[::2, 4:36] = torch.randn(3, 32)
    rows, weight = x[::2, 4:36], torch.randn(32)
    expected = normed(rows.clone(), weight)
    ops.rms_norm(rows, rows, weight, EPSILON)
    assert torch.equal(rows, expected)
    assert x[1::2].isnan().all()
    assert x[::2, :4].isnan().all()
    assert x[::2, 36:].isnan().all()


def test_a_row_has_the_same_bits_with_any_others():
    x, weight = torch.randn(3000, 576), torch.randn(576)
    whole = normed(x, weight)
    assert torch.equal(normed(x[7:9], weight), whole[7:9])
    assert torch.equal(normed(x[1000:], weight), whole[1000:])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": torch.zeros(8)}, r"input: expected shape \[num_rows, size\]"),
        ({"input": torch.zeros(2, 8).double()}, "input: expected dtype Float"),
        ({"input": torch.zeros(8, 2).T}, "input: expected stride 1"),
        ({"weight": torch.zeros(7)}, "weight: expected size = 8"),
        ({"weight": torch.zeros(8).half()}, "weight: expected dtype Float"),
        ({"out": torch.zeros(3, 8)}, "out: expected num_rows = 2"),
        ({"out": torch.zeros(2, 8).half()}, "out: expected dtype Float, got Half"),
        ({"out": torch.zeros(1, 8).expand(2, 8)}, "out: is written"),
        ({"epsilon": -1.0}, "epsilon: expected a finite number >= 0, got -1"),
        ({"epsilon": float("nan")}, "epsilon: expected a finite number"),
    ],
)
def test_names_the_bad_argument(changes, message):
    good = {
        "out": torch.zeros(2, 8),
        "input": torch.zeros(2, 8),
        "weight": torch.zeros(8),
        "epsilon": EPSILON,
    }
    with pytest.raises(RuntimeError, match=message):
        ops.rms_norm(**(good | changes))


def test_opcheck_and_compile():
    arguments = torch.zeros(3, 8), torch.randn(3, 8), torch.randn(8), EPSILON
    torch.library.opcheck(torch.ops.paged_kv.rms_norm.default, arguments)

    def step(x, weight):
        out = torch.empty_like(x)
        ops.rms_norm(out, x, weight, EPSILON)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True)
    assert torch.equal(compiled(*arguments[1:3]), step(*arguments[1:3]))
