# SPDX-License-Identifier: Apache-2.0
"""Collects each test of the GoogleTest binaries as a pytest item, and loads SmolLM2 once.

``make test`` builds the binaries of BINARIES, each in several build types. They are found in
build/, or named by ``$PAGED_KV_TEST_BINARIES`` (separated by ``:``).
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
BUILD_DIRS = {"release": "build/cpp-release", "asan": "build/cpp-asan", "tsan": "build/cpp-tsan"}
# Folder of the tests: name of its binary, and the build types that it is run in.
BINARIES = {
    "tests/cpp": ("paged_kv_test", ["release", "asan"]),
    "tests/cpu": ("paged_kv_cpu_test", ["release", "asan", "tsan"]),
    "tests/cuda": ("paged_kv_cuda_test", ["release", "asan", "tsan"]),
}
TIMEOUT_S = 300
# Files that take minutes. They run first, so that parallel workers end at about the same time.
SLOW_FILES = (
    "test_install.py",
    "test_smollm2.py",
    "test_gemma3.py",
    "test_soak.py",
    "test_emulated_asan.py",
    "test_kernel_coverage.py",
)


def _binaries(folder: str) -> dict[str, Path]:
    name, build_types = BINARIES[folder]
    if paths := os.environ.get("PAGED_KV_TEST_BINARIES"):
        named = (Path(path) for path in paths.split(":"))
        return {f"binary{i}": path for i, path in enumerate(named) if path.name == name}
    return {label: REPO_ROOT / BUILD_DIRS[label] / folder / name for label in build_types}


class CppTestItem(pytest.Item):
    """One TEST() of one binary."""

    def __init__(self, *, binary: Path, test: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.binary = binary
        self.test = test

    def runtest(self) -> None:
        command = [self.binary, f"--gtest_filter={self.test}", "--gtest_color=no"]
        with tempfile.TemporaryDirectory() as counts:
            result = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
                env={**os.environ, "GCOV_PREFIX": counts},
            )  # fmt: skip
        if result.returncode != 0:
            pytest.fail(result.stdout + result.stderr, pytrace=False)
        if "[  SKIPPED ]" in result.stdout:
            pytest.skip(f"{self.test} skipped itself")

    def reportinfo(self):
        return self.path, None, self.name


class CppTestFile(pytest.File):
    def collect(self):
        folder = str(self.path.parent.relative_to(REPO_ROOT))
        for label, binary in _binaries(folder).items():
            if not binary.is_file():
                msg = f"{binary} is missing: run `make test`, or deselect with --ignore={folder}"
                raise pytest.UsageError(msg)
            for test in _list_tests(binary):
                yield CppTestItem.from_parent(
                    self, name=f"{test}[{label}]", binary=binary, test=test
                )


def _list_tests(binary: Path) -> list[str]:
    listing = subprocess.run(
        [binary, "--gtest_list_tests"], capture_output=True, text=True, check=True
    ).stdout
    tests, suite = [], ""
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.endswith("."):
            suite = name
        elif name.startswith("  "):
            tests.append(suite + name.strip())
    return tests


def pytest_collect_file(parent, file_path):
    if file_path in [REPO_ROOT / folder / "CMakeLists.txt" for folder in BINARIES]:
        return CppTestFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


@pytest.fixture(scope="session", autouse=True)
def _line_counts_are_dropped(tmp_path_factory):
    """Kernels built for test_kernel_coverage.py leave gcov's counts when the process ends."""
    os.environ.setdefault("GCOV_PREFIX", str(tmp_path_factory.mktemp("gcov")))


# The imports are inside: tests of the core need neither torch nor transformers.
@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M through our loader."""
    from paged_kv.models import load_model

    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_hf_model():
    """SmolLM2-135M as transformers reads it; takes about ten seconds."""
    from model import _smollm2

    return _smollm2.hf_model()
