# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of README.md and docs/ run, top to bottom, one namespace per file.

A block that cannot run is marked ```` ```python no-run: <reason> ````; without a reason it fails.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

REPO_ROOT = Path(__file__).parents[2]
DOCUMENTS = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").rglob("*.md"))]
MIN_REASON_WORDS = 3

FENCE = re.compile(r"^(?P<fence>```+)(?P<info>.*)$")


class Snippet(NamedTuple):
    """A fenced block: its info string, its text and the line of the document it starts on."""

    info: str
    code: str
    line: int


def snippets_of(text: str) -> list[Snippet]:
    snippets, fence, info, first, body = [], "", "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        match = FENCE.match(line)
        if not fence and match:
            fence, info, first, body = match["fence"], match["info"].strip(), number, []
        elif fence and line.strip() == fence:
            snippets.append(Snippet(info, "\n".join(body), first))
            fence = ""
        elif fence:
            body.append(line)
    if fence:
        msg = f"line {first}: block is not closed"
        raise ValueError(msg)
    return snippets


def reason_not_to_run(info: str) -> str | None:
    """The reason after ``no-run:``; None if the block is to run."""
    language, _, attributes = info.partition(" ")
    if language != "python":
        msg = f"{info!r}: write python, so that the block is run"
        raise ValueError(msg)
    if not attributes:
        return None
    match = re.fullmatch(r"no-run:\s*(.*)", attributes.strip())
    if match is None or len(match[1].split()) < MIN_REASON_WORDS:
        msg = f"{info!r}: expected python, or python no-run: <why it cannot run>"
        raise ValueError(msg)
    return match[1]


def is_python(info: str) -> bool:
    return re.match(r"(python|py|python3|pycon)\b", info, re.IGNORECASE) is not None


def run_snippets(text: str, filename: str) -> int:
    """Runs the Python blocks of a document; returns how many ran."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    num_run = 0
    for snippet in snippets_of(text):
        if not is_python(snippet.info) or reason_not_to_run(snippet.info):
            continue
        # Blank lines in front make the line numbers of a traceback those of the document.
        code = compile("\n" * snippet.line + snippet.code, filename, "exec")
        exec(code, namespace)  # noqa: S102  (running them is the point)
        num_run += 1
    return num_run


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(REPO_ROOT)))
def test_snippets_of_document_run(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_snippets(path.read_text(encoding="utf-8"), str(path))


def test_quickstart_has_snippets():
    text = (REPO_ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
    assert len([s for s in snippets_of(text) if is_python(s.info)]) >= 2


def test_blocks_share_a_namespace_and_fail_with_their_line():
    text = "# t\n```python\nx = 2\n```\n\n```python no-run: needs a second machine\n1 / 0\n```\n"
    assert run_snippets(text, "t.md") == 1
    assert run_snippets(text + "```python\ny = x + 1\n```\n", "t.md") == 2
    with pytest.raises(ZeroDivisionError) as error:
        run_snippets(text + "```python\nx / 0\n```\n", "t.md")
    assert error.traceback[-1].lineno + 1 == 10


@pytest.mark.parametrize(
    "info", ["python no-run", "python no-run: later", "python skip", "py", "Python3", "pycon"]
)
def test_block_that_would_be_skipped_without_a_reason_is_refused(info):
    with pytest.raises(ValueError, match=r"expected python|write python"):
        run_snippets(f"```{info}\nx = 1\n```\n", "t.md")


def test_unclosed_block_is_refused():
    with pytest.raises(ValueError, match="line 2: block is not closed"):
        run_snippets("text\n```python\nx = 1\n", "t.md")
