# SPDX-License-Identifier: Apache-2.0
"""The example runs as a program of its own; it checks its numbers itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples/paged_attention_in_30_lines.py"


def test_example_runs_and_gives_all_blocks_back():
    result = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "a: 11 tokens in blocks" in result.stdout
    assert "b: 14 tokens in blocks" in result.stdout
    assert "free blocks: 15 of 15" in result.stdout


def test_example_keeps_the_promise_of_its_name():
    """Without imports and docstrings, 30 statements at most."""
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert len(statements) <= 30
