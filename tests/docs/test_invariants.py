# SPDX-License-Identifier: Apache-2.0
"""Each test that docs/invariants.md names exists, and each invariant of a header has a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).parents[2]
TEXT = (REPO_ROOT / "docs/invariants.md").read_text(encoding="utf-8")
PYTHON_TESTS = "\n".join(
    path.read_text(encoding="utf-8") for path in (REPO_ROOT / "tests").rglob("test_*.py")
)
CPP_TESTS = "\n".join(
    path.read_text(encoding="utf-8") for path in (REPO_ROOT / "tests").rglob("*.cpp")
)
NAMES = sorted(set(re.findall(r"`(test_\w+)`", TEXT)))
SUITES = sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", TEXT)))
FILES = sorted(set(re.findall(r"`(tests/[\w/]+\.\w+)", TEXT)))


@pytest.mark.parametrize("name", NAMES)
def test_python_test_exists(name):
    assert f"def {name}(" in PYTHON_TESTS


@pytest.mark.parametrize(("suite", "name"), SUITES)
def test_cpp_test_exists(suite, name):
    assert re.search(rf"TEST(_F|_P)?\({suite},\s*{name}\)", CPP_TESTS)


@pytest.mark.parametrize("file", FILES)
def test_file_exists(file):
    assert (REPO_ROOT / file).is_file()


def expand(cell: str) -> set[str]:
    """``I1..I3, K1`` as its five names."""
    names = set()
    for item in cell.split(","):
        first, _, last = item.strip().partition("..")
        letters = first.rstrip("0123456789")
        begin = int(first[len(letters) :])
        end = int(last[len(letters) :]) if last else begin
        names |= {f"{letters}{i}" for i in range(begin, end + 1)}
    return names


def test_every_invariant_that_a_header_states_has_a_row():
    stated = set()
    for header in (REPO_ROOT / "cpp/include/paged_kv").rglob("*.h"):
        stated |= set(re.findall(r"^//   ([A-Z]+\d+)  ", header.read_text("utf-8"), re.MULTILINE))
    rows = re.findall(r"^\| ([A-Z]+\d[^|]*) \| `", TEXT, re.MULTILINE)
    assert stated
    assert stated <= set().union(*(expand(cell) for cell in rows))
