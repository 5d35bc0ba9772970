# SPDX-License-Identifier: Apache-2.0
"""Each formula of docs/layouts.md has code that checks it; test_snippets.py runs the code."""

from __future__ import annotations

import re
from pathlib import Path

LAYOUTS = Path(__file__).resolve().parents[2] / "docs/layouts.md"


def test_every_layout_has_its_formula_checked():
    """Each `element(...)` formula of the text has a line of code that computes it."""
    text = LAYOUTS.read_text()
    formulas = text.count("element(block, offset, head, dim) =")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    computed = sum(block.count("element = ") for block in blocks)
    assert formulas == computed == 6
