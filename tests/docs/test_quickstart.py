# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/quickstart.md work. (Its Python blocks: test_snippets.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from docs.bash_blocks import bash_commands

REPO_ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
COMMANDS = bash_commands((REPO_ROOT / "docs/quickstart.md").read_text(encoding="utf-8"))
CHATS = [command for command in COMMANDS if "paged-kv chat" in command]
# What may be said on stderr after four tokens.
CUT = "the answer has reached the largest number of tokens"


def run_with_short_answers(command: str, stdin: str) -> subprocess.CompletedProcess[str]:
    """Run a line in a shell; of an option that is given twice the last one counts."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} --max-tokens 4"],
        check=False,
        capture_output=True,
        text=True,
        input=stdin,
        env={**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"},
    )


@pytest.mark.parametrize("command", CHATS)
def test_a_chat_answers_each_message_of_a_pipe(command):
    is_fed = command.startswith("printf")
    result = run_with_short_answers(command, "" if is_fed else "Hello\nAnd then?\n")
    assert result.returncode == 0, result.stderr
    answers = [line for line in result.stdout.splitlines() if line.strip()]
    assert len(answers) >= 2, result.stdout
    assert set(result.stderr.splitlines()) <= {CUT}


def test_every_command_is_checked_somewhere():
    """Installing: tests/packaging does it in every way that docs/build.md lists."""
    installs = ("pip install", "python3 -m venv .venv")
    assert [c for c in COMMANDS if c not in CHATS and not c.startswith(installs)] == []
    assert len(CHATS) == 2
