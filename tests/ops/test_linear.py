# SPDX-License-Identifier: Apache-2.0
"""Products with weights: right, and of the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

from paged_kv import ops
from paged_kv.weight_panels import pack_weight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def product(x, weight, bias=None, dtype=None):
    """The op's result in `dtype`; poisoned before, so that nothing can be left unwritten."""
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=dtype or x.dtype)
    ops.linear(out, x, pack_weight(weight), bias)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 6, 70])
@pytest.mark.parametrize(("in_features", "out_features"), [(16, 1), (576, 130), (1536, 64)])
def test_is_the_product(in_features, out_features, rows, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
    x, weight, bias = x.to(dtype), weight.to(dtype), torch.randn(out_features).to(dtype)
    exact = x.double() @ weight.double().T
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6 * in_features}
    torch.testing.assert_close(product(x, weight).double(), exact, **tolerance)
    with_bias = product(x, weight, bias)
    torch.testing.assert_close(with_bias.double(), exact + bias.double(), **tolerance)


def test_dtypes_may_differ():
    x, weight, bias = torch.randn(3, 32), torch.randn(5, 32).bfloat16(), torch.randn(5).half()
    expected = x @ weight.float().T + bias.float()
    torch.testing.assert_close(product(x, weight, bias), expected)
    rounded = product(x, weight, bias, dtype=torch.float16)
    assert torch.equal(rounded, product(x, weight, bias).half())


def test_a_row_has_the_same_bits_with_any_others_and_any_threads():
    x, weight = torch.randn(100, 576), torch.randn(200, 576)
    whole, num_threads = product(x, weight), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for begin, end in ((0, 1), (7, 9), (30, 95), (0, 100)):
                assert torch.equal(product(x[begin:end], weight), whole[begin:end])
    finally:
        torch.set_num_threads(num_threads)


def test_slices_are_taken_and_their_surroundings_left():
    x = torch.full((4, 40), torch.nan)
    x[:, 8:] = torch.randn(4, 32)
    weight = torch.randn(5, 32)
    out = torch.full((4, 9), -1.0)
    ops.linear(out[:, 3:8], x[:, 8:], pack_weight(weight))
    assert torch.equal(out[:, 3:8], product(x[:, 8:].clone(), weight))
    assert (out[:, :3] == -1).all()
    assert (out[:, 8:] == -1).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 48)}, "panels: expected in_features = 48"),
        ({"x": torch.zeros(32)}, r"x: expected shape \[num_rows, in_features\]"),
        ({"x": torch.zeros(2, 32).double()}, "x: expected dtype Float or Half or BFloat16"),
        ({"x": torch.zeros(32, 2).T}, "x: expected stride 1"),
        ({"panels": torch.zeros(1, 32, 16).int()}, "panels: expected dtype"),
        (
            {"panels": torch.zeros(3, 32)},
            r"panels: expected shape \[num_panels, in_features, panel_features\], got",
        ),
        (
            {"panels": torch.zeros(2, 32, 16)},
            r"panels: expected num_panels = 1 \(from out\), got 2",
        ),
        (
            {"panels": torch.zeros(1, 32, 16).bfloat16()},
            r"panels: expected shape \[num_panels, in_features / 2, ",
        ),
        (
            {"panels": torch.zeros(1, 16, 16, 2)},
            r"panels: expected shape \[num_panels, in_features, ",
        ),
        ({"panels": torch.zeros(1, 32, 8)}, r"expected panel_features = 16 \(from the layout\)"),
        ({"panels": torch.zeros(1, 16, 32).mT}, "panels: expected a contiguous tensor"),
        ({"bias": torch.zeros(4)}, "bias: expected out_features = 3"),
        ({"bias": torch.zeros(1).expand(3)}, "bias: expected stride 1"),
        ({"out": torch.zeros(3, 3)}, "out: expected num_rows = 2"),
        ({"out": torch.zeros(2, 17)}, "panels: expected num_panels = 2"),
        ({"out": torch.zeros(1, 3).expand(2, 3)}, "out: is written"),
        (
            {"x": torch.zeros(2, 24), "panels": torch.zeros(1, 24, 16)},
            "x: expected in_features to be a positive multiple of 16, got 24",
        ),
        (
            {"x": torch.zeros(2, 0), "panels": torch.zeros(1, 0, 16)},
            "x: expected in_features to be a positive multiple of 16, got 0",
        ),
    ],
)
def test_names_the_bad_argument(changes, message):
    good = {"out": torch.zeros(2, 3), "x": torch.zeros(2, 32), "panels": torch.zeros(1, 32, 16)}
    with pytest.raises(RuntimeError, match=message):
        ops.linear(**(good | changes))


def arguments(dtype=torch.float32):
    torch.manual_seed(0)
    weight = pack_weight(torch.randn(7, 32).to(dtype))
    return torch.zeros(5, 7), torch.randn(5, 32), weight, torch.randn(7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype):
    torch.library.opcheck(torch.ops.paged_kv.linear.default, arguments(dtype))


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        (torch.zeros(2, 32, 16), "panels: expected num_panels = 1, got 2"),
        (
            torch.zeros(1, 32, 16).bfloat16(),
            r"panels: expected shape \[num_panels, in_features / 2, ",
        ),
        (torch.zeros(1, 32, 8), "panels: expected panel_features = 16, got 8"),
    ],
)
def test_fake_tensors_are_checked_too(panels, message):
    out, x = torch.zeros(2, 3, device="meta"), torch.zeros(2, 32, device="meta")
    with pytest.raises(RuntimeError, match=message):
        ops.linear(out, x, panels.to("meta"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiles_and_exports_without_graph_breaks(dtype):
    class Product(torch.nn.Module):
        def forward(self, x, panels, bias):
            out = x.new_empty(x.shape[0], bias.shape[0])
            ops.linear(out, x, panels, bias)
            return out

    _, *inputs = arguments(dtype)
    expected = Product()(*inputs)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(Product(), fullgraph=True)(*inputs), expected)
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(Product(), tuple(inputs), dynamic_shapes=({0: rows}, {}, {}))
    assert torch.equal(exported.module()(inputs[0][:3], *inputs[1:]), expected[:3])
