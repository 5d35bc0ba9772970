# SPDX-License-Identifier: Apache-2.0
"""Kernel of the op ``linear`` for fake tensors: it checks shapes and computes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)
from paged_kv._fake_checks import FLOAT_DTYPES, NamedSizes, check_dtype
from paged_kv._linear_ops import IN_FEATURES_UNIT

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []


@torch.library.register_fake("paged_kv::linear")
def _linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    sizes = NamedSizes()
    sizes.check(x, "x", "num_rows", "in_features")
    sizes.check(weight, "weight", "out_features", "in_features")
    sizes.check(out, "out", "num_rows", "out_features")
    named = {"x": x, "weight": weight, "out": out}
    if bias is not None:
        sizes.check(bias, "bias", "out_features")
        named["bias"] = bias
    for name, tensor in named.items():
        check_dtype(tensor, name, *FLOAT_DTYPES)
    torch._check(
        sizes["in_features"] % IN_FEATURES_UNIT == 0,
        lambda: (
            f"weight: expected in_features to be a multiple of {IN_FEATURES_UNIT}, got "
            f"{sizes['in_features']}"
        ),
    )
