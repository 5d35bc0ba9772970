# SPDX-License-Identifier: Apache-2.0
"""The README is short, and its commands work. (Its Python blocks: test_snippets.py.)"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from docs.bash_blocks import bash_commands

REPO_ROOT = Path(__file__).parents[2]
README = (REPO_ROOT / "README.md").read_text()
COMMANDS = bash_commands(README)
MAX_LINES = 150
BIN = Path(sys.executable).parent


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPO_ROOT)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def recipe(target: str) -> str:
    """What make would run for a target whose set-up is done."""
    setup_done = ["install", "demo-model", "test-tools"]
    setup_done += ["cpp-release", "cpp-asan", "cpp-tsan", "cuda", "torch-2.10-headers"]
    old = [flag for name in setup_done for flag in ("-o", f"{BIN.parent}/done/{name}")]
    return run("make", "-n", *old, f"VENV={BIN.parent}", target).stdout.replace("\\\n", " ")


def test_readme_is_short():
    assert len(README.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("paged-kv ")])
def test_command_line(command):
    name, *arguments = shlex.split(command)
    assert run(BIN / name, *arguments).stdout.strip()


def test_make_demo_shows_text_and_shared_blocks():
    (line,) = [line for line in recipe("demo").splitlines() if "/paged-kv generate" in line]
    result = run(*shlex.split(line))
    assert result.stdout.strip(), "the generated text"
    assert "shared by 2 requests" in result.stderr, "the block map"


def test_make_test_runs_pytest():
    assert "-m pytest" in recipe("test")


def test_every_command_is_checked_somewhere():
    """`pip install`: tests/packaging installs in every way that docs/build.md lists."""
    checked = ("paged-kv ", "make demo", "make test", "pip install .", "pip install '.[model]'")
    assert [c for c in COMMANDS if not c.startswith(checked)] == []
