# SPDX-License-Identifier: Apache-2.0
"""Kernels of the attention ops for fake tensors: they check shapes and compute nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)
from paged_kv._fake_checks import FLOAT_DTYPES, NamedSizes, check_dtype

if TYPE_CHECKING:
    from torch import Tensor

__all__: list[str] = []


@torch.library.register_fake("paged_kv::merge_attn_states")
def _merge_attn_states(
    output: Tensor,
    output_lse: Tensor | None,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
) -> None:
    sizes = NamedSizes()
    check_dtype(output, "output", *FLOAT_DTYPES)
    for tensor, name in (
        (output, "output"),
        (prefix_output, "prefix_output"),
        (suffix_output, "suffix_output"),
    ):
        sizes.check(tensor, name, "num_tokens", "num_heads", "head_size")
        check_dtype(tensor, name, output.dtype)
    lses = [(prefix_lse, "prefix_lse"), (suffix_lse, "suffix_lse")]
    if output_lse is not None:
        lses.append((output_lse, "output_lse"))
    for lse, name in lses:
        sizes.check(lse, name, "num_heads", "num_tokens")
        check_dtype(lse, name, torch.float32)
