# SPDX-License-Identifier: Apache-2.0
"""Runs the emulated cases of tests/ops, or any Python, in a process with its own environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPO_ROOT = Path(__file__).resolve().parents[1]
# These repeat one shape for each token of a cache, for its values: no further line, no further
# place in memory, and most of the time of all cases.
REPETITIVE = "needle or huge_logits"
TIMEOUT_S = 900


def run_python(*arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    """``python <arguments>`` in the repository, with `env` set; pytest's own variables are not."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=False, capture_output=True, text=True, cwd=REPO_ROOT, timeout=TIMEOUT_S,
        env={**inherited, "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip


def run_emulated_cases(**env: str) -> subprocess.CompletedProcess[str]:
    """pytest over the emulated cases; fails unless all pass."""
    options = ("-q", "-p", "no:cacheprovider", "-k", f"emulated and not ({REPETITIVE})")
    result = run_python("-m", "pytest", *options, "tests/ops", **env)
    assert result.returncode == 0, result.stdout + result.stderr
    return result
