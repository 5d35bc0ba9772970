# SPDX-License-Identifier: Apache-2.0
"""Shape checks for the kernels that run on fake tensors (``torch.compile``, ``torch.export``).

They mirror cpp/ops/tensor_checks.h as far as shapes and dtypes go. Sizes may be symbolic: a check
on them becomes a guard or a runtime assertion of the traced graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FLOAT_DTYPES", "NamedSizes", "check_dtype"]

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_Size = int  # or torch.SymInt, which type checkers see as int


class NamedSizes:
    """Sizes by name: bound at first use, compared from then on."""

    def __init__(self) -> None:
        self._sizes: dict[str, _Size] = {}

    def check(self, tensor: Tensor, name: str, *dims: str) -> None:
        """Checks that ``tensor`` has one dimension for each name in ``dims``, of that size."""
        torch._check(
            tensor.dim() == len(dims),
            lambda: f"{name}: expected shape [{', '.join(dims)}], got {list(tensor.shape)}",
        )
        for dim, size in zip(dims, tensor.shape, strict=True):
            expected = self._sizes.setdefault(dim, size)
            torch._check(
                size == expected,
                lambda dim=dim, size=size, expected=expected: (
                    f"{name}: expected {dim} = {expected}, got {size}"
                ),
            )

    def __getitem__(self, dim: str) -> _Size:
        return self._sizes[dim]


def check_dtype(tensor: Tensor, name: str, *expected: torch.dtype) -> None:
    """Checks that the dtype of ``tensor`` is one of ``expected``."""
    torch._check(
        tensor.dtype in expected,
        lambda: f"{name}: expected dtype {' or '.join(map(str, expected))}, got {tensor.dtype}",
    )
