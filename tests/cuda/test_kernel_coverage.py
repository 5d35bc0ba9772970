# SPDX-License-Identifier: Apache-2.0
"""Every CUDA kernel runs in the tests, and at least 95 % of the lines of their sources.

A process of its own runs the emulated cases of tests/ops and leaves gcov's counts in a folder that
is only its own. A line counts as run if it ran in one instantiation of its template.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from emulated_cases import REPO_ROOT, run_emulated_cases

MIN_COVERAGE = 0.95
GCOV = os.environ.get("GCOV", "gcov")

Lines = dict[str, dict[int, int]]  # file -> line -> how often it ran
Functions = dict[str, int]  # demangled name -> how often it ran


def _read_counts(counts: Path) -> list[dict]:
    """gcov's report of each object file. gcov wants the notes of the compiler beside the counts."""
    reports = []
    for count_file in sorted(counts.rglob("*.gcda")):
        original = Path("/", count_file.relative_to(counts))
        shutil.copy(original.with_suffix(".gcno"), count_file.with_suffix(".gcno"))
        command = [GCOV, "--json-format", "--stdout", str(count_file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        reports += [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return reports


def merge(reports: list[dict]) -> tuple[Lines, Functions]:
    """Counts of kernel sources, summed over object files and instantiations."""
    lines: Lines = defaultdict(lambda: defaultdict(int))
    functions: Functions = defaultdict(int)
    for entry in (entry for report in reports for entry in report["files"]):
        source = re.search(r"\bcuda/(?:src/.*|include/.*\.cuh)$", entry["file"])
        if source is None:
            continue
        for line in entry["lines"]:
            lines[source[0]][line["line_number"]] += line["count"]
        for function in entry["functions"]:
            functions[function["demangled_name"]] += function["execution_count"]
    return lines, functions


def kernels_of(source: str) -> list[str]:
    """The names of the ``__global__`` functions that a source defines."""
    names = re.findall(r"__global__[^;{]*?\b(\w+_kernel)\s*\(", source)
    assert len(names) == source.count("__global__"), "the name of a kernel ends in _kernel"
    return names


def never_run(kernels: list[str], functions: Functions) -> list[str]:
    return [
        kernel
        for kernel in kernels
        if not any(n > 0 and re.search(rf"\b{kernel}[<(]", name) for name, n in functions.items())
    ]


def summary(lines: Lines) -> tuple[float, str]:
    """Part of all lines that ran, and a table of files with the lines that did not."""
    rows, num_lines, num_run = [], 0, 0
    for file, counts in sorted(lines.items()):
        missed = sorted(line for line, count in counts.items() if count == 0)
        num_lines, num_run = num_lines + len(counts), num_run + len(counts) - len(missed)
        rows.append(f"{1 - len(missed) / len(counts):6.1%} of {len(counts):4d}  {file}  {missed}")
    return num_run / num_lines, "\n".join(rows)


@pytest.fixture(scope="module")
def coverage(tmp_path_factory):
    counts = tmp_path_factory.mktemp("coverage")
    result = run_emulated_cases(GCOV_PREFIX=str(counts))
    assert "libgcov profiling error" not in result.stderr
    return merge(_read_counts(counts))


def _sources() -> list[Path]:
    folders = (REPO_ROOT / "cuda" / folder for folder in ("src", "include"))
    return sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in {".cu", ".cuh"})


def test_every_kernel_runs(coverage):
    kernels = [k for path in _sources() for k in kernels_of(path.read_text(encoding="utf-8"))]
    assert kernels
    assert never_run(kernels, coverage[1]) == []


def test_lines_of_kernels_run(coverage):
    part, report = summary(coverage[0])
    print(f"\n{report}\n{part:6.1%} of all")
    assert part >= MIN_COVERAGE, report
    sources = {str(path.relative_to(REPO_ROOT)) for path in _sources() if "src" in path.parts}
    with_code = {s for s in sources if kernels_of((REPO_ROOT / s).read_text(encoding="utf-8"))}
    assert with_code <= coverage[0].keys(), "a source is not in the emulated library"


def test_what_did_not_run_is_noticed():
    """Counts as gcov gives them: one instantiation ran, one did not, and a kernel never did."""
    file = {
        "file": "../cuda/src/cache/copy.cu",
        "lines": [
            {"line_number": 7, "count": 3},
            {"line_number": 8, "count": 0},
            {"line_number": 7, "count": 0},
            {"line_number": 8, "count": 0},
        ],
        "functions": [
            {"demangled_name": "void copy_kernel<float>(Params)", "execution_count": 3},
            {"demangled_name": "void copy_kernel<int>(Params)", "execution_count": 0},
            {"demangled_name": "idle_kernel(Params)", "execution_count": 0},
        ],
    }
    other = {"file": "/usr/include/c++/12/span", "lines": [], "functions": []}
    lines, functions = merge([{"files": [file]}, {"files": [other]}])
    assert lines == {"cuda/src/cache/copy.cu": {7: 3, 8: 0}}
    part, report = summary(lines)
    assert part == 0.5
    assert report.endswith("[8]")
    source = """
        __global__ void __launch_bounds__(8)
            copy_kernel(P p) {}
        __global__ void idle_kernel() {}
    """
    assert kernels_of(source) == ["copy_kernel", "idle_kernel"]
    assert never_run([*kernels_of(source), "absent_kernel"], functions) == [
        "idle_kernel",
        "absent_kernel",
    ]
