# SPDX-License-Identifier: Apache-2.0
"""Kernels of a decoder's other ops for fake tensors: they check shapes and compute nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)
from paged_kv._fake_checks import FLOAT_DTYPES, NamedSizes, check_dtype
from paged_kv.weight_panels import IN_FEATURES_UNIT, PANEL_FEATURES

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []


@torch.library.register_fake("paged_kv::apply_rotary")
def _apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> None:
    sizes = NamedSizes()
    sizes.check(x, "x", "num_tokens", "num_heads", "head_size")
    check_dtype(x, "x", *FLOAT_DTYPES)
    for name, factors in {"cos": cos, "signed_sin": signed_sin}.items():
        sizes.check(factors, name, "num_tokens", "1", "head_size")
        check_dtype(factors, name, x.dtype)
    torch._check(sizes["1"] == 1, lambda: "cos: expected shape [num_tokens, 1, head_size]")
    torch._check(
        sizes["head_size"] % 2 == 0,
        lambda: f"x: expected an even head_size, got {sizes['head_size']}",
    )


@torch.library.register_fake("paged_kv::gelu_tanh_and_mul")
@torch.library.register_fake("paged_kv::silu_and_mul")
def _gated_activation(out: Tensor, input: Tensor) -> None:
    sizes = NamedSizes()
    sizes.check(input, "input", "num_rows", "2 * size")
    check_dtype(input, "input", *FLOAT_DTYPES)
    sizes.check(out, "out", "num_rows", "size")
    check_dtype(out, "out", input.dtype)
    torch._check(
        sizes["2 * size"] == 2 * sizes["size"],
        lambda: (
            f"out: expected half the width of input, {sizes['2 * size']} / 2, got {sizes['size']}"
        ),
    )


@torch.library.register_fake("paged_kv::linear")
def _linear(out: Tensor, x: Tensor, panels: Tensor, bias: Tensor | None = None) -> None:
    sizes = NamedSizes()
    sizes.check(x, "x", "num_rows", "in_features")
    sizes.check(out, "out", "num_rows", "out_features")
    named = {"x": x, "panels": panels, "out": out}
    if bias is not None:
        sizes.check(bias, "bias", "out_features")
        named["bias"] = bias
    for name, tensor in named.items():
        check_dtype(tensor, name, *FLOAT_DTYPES)
    in_features, out_features = sizes["in_features"], sizes["out_features"]
    torch._check(
        in_features > 0 and in_features % IN_FEATURES_UNIT == 0,
        lambda: (
            f"x: expected in_features to be a positive multiple of {IN_FEATURES_UNIT}, "
            f"got {in_features}"
        ),
    )
    sizes.bind("num_panels", -(-out_features // PANEL_FEATURES))
    sizes.bind("panel_features", PANEL_FEATURES)
    if panels.dtype == torch.bfloat16:
        sizes.bind("in_features / 2", in_features // 2)
        sizes.bind("pair", 2)
        dims = ["num_panels", "in_features / 2", "panel_features", "pair"]
    else:
        dims = ["num_panels", "in_features", "panel_features"]
    sizes.check(panels, "panels", *dims)
    torch._check(panels.is_contiguous(), lambda: "panels: expected a contiguous tensor")


@torch.library.register_fake("paged_kv::rms_norm")
def _rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    sizes = NamedSizes()
    sizes.check(input, "input", "num_rows", "size")
    check_dtype(input, "input", *FLOAT_DTYPES)
    sizes.check(weight, "weight", "size")
    check_dtype(weight, "weight", input.dtype, torch.float32)
    sizes.check(out, "out", "num_rows", "size")
    check_dtype(out, "out", input.dtype)
    torch._check(epsilon >= 0, lambda: f"epsilon: expected a finite number >= 0, got {epsilon}")
