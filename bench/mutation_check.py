# SPDX-License-Identifier: Apache-2.0
"""Mutation check of the host core: do the tests notice a fault?

Each fault changes one place of the core, in a copy of the repository. The copy's `_core` is built
and the host's Python tests run until one fails; a fault that they miss is tried on the C++ tests.
A fault that nothing notices is a test that is missing. Takes about half a minute a fault::

    python bench/mutation_check.py [--copy DIR] [--only WORD ...] [--jobs N] [--python-only]

DIR is kept for the next run; without it the copy is a temporary folder. docs/testing.md has the
outcome.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mutation_faults import FAULTS, Fault

REPO_ROOT = Path(__file__).resolve().parents[1]
COPIED = ("CMakeLists.txt", "pyproject.toml", "cmake", "cpp", "cuda", "python", "tests")
SUFFIXES = {".txt", ".toml", ".cmake", ".cpp", ".h", ".cu", ".cuh", ".py", ".pyi", ".gz", ".json"}
# The quickest to notice a fault come first.
PYTHON_TESTS = ("tests/core", "tests/traces", "tests/property")
IGNORED = ("tests/core/test_stub.py",)
BUILD_DIR = "build/quick"
TIMEOUT_S = 900


def copy_tree(copy: Path) -> None:
    """Makes `copy` like the repository; files that are alike keep their time, for the build."""
    for name in COPIED:
        source = REPO_ROOT / name
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        for file in files:
            if not file.is_file() or file.suffix not in SUFFIXES:
                continue
            target = copy / file.relative_to(REPO_ROOT)
            if not target.is_file() or target.read_bytes() != file.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())


def configure(copy: Path) -> None:
    """A build without optimisation: quick to compile, and the tests are short."""
    pybind11 = subprocess.check_output(
        [sys.executable, "-m", "pybind11", "--cmakedir"], text=True
    ).strip()
    subprocess.run(
        ["cmake", "-S", copy, "-B", copy / BUILD_DIR, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
         "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DPAGED_KV_INPLACE=ON", "-DPAGED_KV_BUILD_TESTS=ON",
         f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11}"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def build(copy: Path, target: str, jobs: int) -> bool:
    """False if the compiler refuses the fault."""
    command = ["cmake", "--build", copy / BUILD_DIR, "-j", str(jobs), "--target", target]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def python_tests_fail(copy: Path) -> str:
    """The first Python test that fails; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += [f"--ignore={file}" for file in IGNORED] + list(PYTHON_TESTS)
    env = {**os.environ, "PYTHONPATH": f"{copy / 'python'}:{copy / 'tests'}"}
    try:
        result = subprocess.run(
            command, cwd=copy, env=env, capture_output=True, text=True, check=False,
            timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "pytest does not end"
    if result.returncode == 0:
        return ""
    failed = [line for line in result.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].partition(" - ")[0] if failed else f"pytest ended with {result.returncode}"


def cpp_tests_fail(copy: Path, jobs: int) -> str:
    """The first C++ test that fails; empty if none does."""
    if not build(copy, "paged_kv_test", jobs):
        return "the C++ tests do not compile"
    try:
        result = subprocess.run(
            [copy / BUILD_DIR / "tests/cpp/paged_kv_test", "--gtest_fail_fast"],
            capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "the C++ tests do not end"
    if result.returncode == 0:
        return ""
    failed = [line for line in result.stdout.splitlines() if line.startswith("[  FAILED  ]")]
    return failed[0] if failed else f"the C++ tests ended with {result.returncode}"


def noticed_by(copy: Path, jobs: int, *, python_only: bool) -> str:
    """What fails with the copy as it is; empty if nothing does.

    Raises:
        ValueError: It does not compile.
    """
    if not build(copy, "_core", jobs):
        msg = "does not compile"
        raise ValueError(msg)
    return python_tests_fail(copy) or ("" if python_only else cpp_tests_fail(copy, jobs))


def check(fault: Fault, copy: Path, jobs: int, *, python_only: bool) -> str:
    """What noticed the fault; empty if nothing did.

    Raises:
        ValueError: The fault is none: its text is not found once, or it does not compile.
    """
    path = copy / "cpp" / fault.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(fault.plant(sound), encoding="utf-8")
    try:
        return noticed_by(copy, jobs, python_only=python_only)
    finally:
        path.write_text(sound, encoding="utf-8")


def suite_of(failure: str) -> str:
    """``FAILED tests/core/test_request.py::...`` is of tests/core."""
    found = re.search(r"tests/\w+|pytest", failure)
    return found[0] if found else "tests/cpp"


def main() -> int:
    """Prints a line a fault; 1 if a fault was not noticed, 2 if the tests fail without one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--copy", type=Path, help="where to build; kept")
    parser.add_argument("--only", nargs="*", default=[], help="faults with one of these words")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--python-only", action="store_true", help="without the C++ tests")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.only or any(word in f.name for word in args.only)]
    with tempfile.TemporaryDirectory() as temporary:
        copy = args.copy or Path(temporary)
        copy_tree(copy)
        configure(copy)
        build(copy, "_ops", args.jobs)  # no fault lies in it, but what imports the engine loads it
        if without_fault := noticed_by(copy, args.jobs, python_only=args.python_only):
            print(f"the tests fail without any fault: {without_fault}")
            return 2
        suites = Counter()
        for fault in faults:
            start = time.monotonic()
            try:
                noticed = check(fault, copy, args.jobs, python_only=args.python_only)
            except ValueError as error:
                noticed = ""
                print(f"{fault.name}: {error}")
            suites.update([suite_of(noticed)] if noticed else [])
            took = time.monotonic() - start
            print(f"{fault.name:60}{noticed or 'NOT NOTICED'}  ({took:.0f} s)", flush=True)
    by_suite = ", ".join(f"{count} by {suite}" for suite, count in suites.most_common())
    print(f"noticed {suites.total()} of {len(faults)}: {by_suite}")
    return 0 if suites.total() == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
