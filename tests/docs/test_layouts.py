# SPDX-License-Identifier: Apache-2.0
"""The code of docs/layouts.md runs from top to bottom, and its assertions hold."""

from __future__ import annotations

import re
from pathlib import Path

LAYOUTS = Path(__file__).resolve().parents[2] / "docs/layouts.md"


def snippets():
    """(first line, code) of each Python block."""
    text = LAYOUTS.read_text()
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start(1)), match[1]


def test_code_in_layouts_runs():
    namespace = {}
    found = list(snippets())
    for first_line, code in found:
        # Blank lines before the code keep the document's line numbers in tracebacks.
        exec(compile("\n" * first_line + code, LAYOUTS, "exec"), namespace)  # noqa: S102
    assert len(found) == 7


def test_every_layout_has_its_formula_checked():
    """Each `element(...)` formula of the text has a line of code that computes it."""
    text = LAYOUTS.read_text()
    formulas = text.count("element(block, offset, head, dim) =")
    computed = sum(code.count("element = ") for _, code in snippets())
    assert formulas == computed == 4
