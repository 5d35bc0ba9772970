# SPDX-License-Identifier: Apache-2.0
"""Each example runs as a program of its own; it checks its numbers itself."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "paged_attention_in_30_lines.py"


def output_of(example: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", example], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_example_runs_and_gives_all_blocks_back():
    output = output_of(EXAMPLE)
    assert "a: 11 tokens in blocks" in output
    assert "b: 14 tokens in blocks" in output
    assert "free blocks: 15 of 15" in output


def test_beams_share_blocks_and_give_them_back():
    """It compares each step with caches that are not shared."""
    output = output_of(EXAMPLES / "beam_search.py")
    held, unshared = re.search(r"by 4 beams: (\d+), without sharing (\d+)", output).groups()
    assert int(held) < int(unshared)
    assert int(re.search(r"copied in 24 steps: (\d+)", output).group(1)) > 0
    assert "free blocks: 79 of 79" in output


def test_the_cache_in_a_model_of_ones_own():
    """It compares the logits of each step with dense attention."""
    output = output_of(EXAMPLES / "in_your_own_model.py")
    tables = [ids.split(", ") for ids in re.findall(r"\d+ tokens in blocks \[(.*)\]", output)]
    assert "25 steps, each with the logits of dense attention" in output
    assert tables[2][:2] == tables[0][:2], "a prefix of two blocks is shared"
    assert [len(ids) for ids in tables] == [4, 3, 4]
    assert "free blocks: 31 of 31" in output


def test_the_paged_step_of_a_model_of_ones_own_is_short():
    """What docs/quickstart.md says: thirty lines around the two ops."""
    tree = ast.parse((EXAMPLES / "in_your_own_model.py").read_text(encoding="utf-8"))
    (step,) = [node for node in tree.body if getattr(node, "name", None) == "step"]
    assert len([node for node in ast.walk(step) if isinstance(node, ast.stmt)]) <= 30


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


def test_another_eviction_policy_finds_more():
    output = output_of(EXAMPLES / "eviction_policy.py")
    lru, kept = map(
        float, re.search(r"LRU ([\d.]+)%, keep what was found ([\d.]+)%", output).groups()
    )
    assert kept > lru + 20
