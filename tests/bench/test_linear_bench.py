# SPDX-License-Identifier: Apache-2.0
"""The suite linear at a small size: its candidates compute the same product."""

from __future__ import annotations

import torch
from torch.nn import functional

import bench_linear
import paged_kv.ops
from paged_kv.weight_panels import unpack_weight


def test_rows(monkeypatch):
    monkeypatch.setattr(bench_linear, "NUM_LAYERS", 1)
    monkeypatch.setattr(bench_linear, "HEAD_SHAPE", (640, 576))
    monkeypatch.setattr(bench_linear, "NUM_ROWS", (1, 3))
    products = []
    real = paged_kv.ops.linear

    def linear(out, x, panels):
        real(out, x, panels)
        products.append((out, x, unpack_weight(panels, out_features=out.shape[1])))

    monkeypatch.setattr(paged_kv.ops, "linear", linear)
    one, three = bench_linear.rows(2)
    for out, x, weight in products:
        torch.testing.assert_close(out, functional.linear(x, weight.float()), rtol=1e-4, atol=1e-4)
    assert {weight.dtype for *_, weight in products} == {torch.float32, torch.bfloat16}
    assert set(one.references) == {"torch", "oneDNN, packed", "ours, weights in bf16"}
    num_weights = 576 * (960 + 576 + 3072 + 1536 + 640)
    assert round(three.rate * three.ours.median_s * 1e9) == 2 * 3 * num_weights
    assert one.bound.timing.median_s > 0
