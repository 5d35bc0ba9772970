# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ point to exists, inside the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).parents[2]
DOCUMENTS = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").rglob("*.md"))]

LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
# `cpp/src/block_pool.cpp` in running text: a path of this repository.
NAMED_PATH = re.compile(r"`((?:cpp|cuda|python|tests|docs|examples|bench)/[\w./-]+)`")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """GitHub's anchor of each heading: lower case, no punctuation, dashes for spaces."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def missing_targets(document: Path) -> list[str]:
    text = without_blocks(document.read_text(encoding="utf-8"))
    missing = []
    for target in LINK.findall(text):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        if (
            not path.exists()
            or not path.is_relative_to(REPO_ROOT)
            or (anchor and anchor not in anchors_of(path))
        ):
            missing.append(target)
    return missing + [p for p in NAMED_PATH.findall(text) if not (REPO_ROOT / p).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(REPO_ROOT)))
def test_links_and_named_files_exist(document):
    assert missing_targets(document) == []


def test_a_broken_link_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "REPO_ROOT", tmp_path)
    (tmp_path / "outside.md").write_text("")
    document = tmp_path / "docs.md"
    document.write_text(
        "# A heading: one\n[ok](#a-heading-one) [ok](outside.md) [no](#two) [no](none.md) "
        "[no](../../etc) `cpp/none.cpp`\n```\n[not](read.md)\n```\n"
    )
    assert missing_targets(document) == ["#two", "none.md", "../../etc", "cpp/none.cpp"]
