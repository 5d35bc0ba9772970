# SPDX-License-Identifier: Apache-2.0
"""Integer helpers that both halves of the facade use."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            msg = f"{name}: expected at least 1, got {size}"
            raise ValueError(msg)
