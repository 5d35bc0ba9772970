# SPDX-License-Identifier: Apache-2.0
"""Writes text to stdout at once, also where stdout cannot carry every character."""

from __future__ import annotations

import sys

__all__ = ["can_carry_unicode", "write"]


def can_carry_unicode() -> bool:
    """Whether stdout takes every character."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def write(text: str) -> None:
    """Write and flush; characters that stdout has no code for become ``?``."""
    if not can_carry_unicode():
        encoding = sys.stdout.encoding or "ascii"
        text = text.encode(encoding, errors="replace").decode(encoding)
    sys.stdout.write(text)
    sys.stdout.flush()
