# SPDX-License-Identifier: Apache-2.0
"""Collects each test of the GoogleTest binaries as a pytest item, and loads SmolLM2 once.

``make test`` builds two binaries from tests/cpp: an optimised one and one under ASan and UBSan. They
are found in build/, or named by ``$PAGED_KV_TEST_BINARIES`` (separated by ``:``).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
BINARY_DIRS = {"release": "build/cpp-release", "asan": "build/cpp-asan"}
TIMEOUT_S = 300
# Files that take minutes. They run first, so that parallel workers end at about the same time.
SLOW_FILES = ("test_install.py", "test_smollm2.py")


def _binaries() -> dict[str, Path]:
    if paths := os.environ.get("PAGED_KV_TEST_BINARIES"):
        return {f"binary{i}": Path(path) for i, path in enumerate(paths.split(":"))}
    return {
        name: REPO_ROOT / folder / "tests/cpp/paged_kv_test" for name, folder in BINARY_DIRS.items()
    }


class CppTestItem(pytest.Item):
    """One TEST() of one binary."""

    def __init__(self, *, binary: Path, test: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.binary = binary
        self.test = test

    def runtest(self) -> None:
        command = [self.binary, f"--gtest_filter={self.test}", "--gtest_color=no"]
        result = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if result.returncode != 0:
            pytest.fail(result.stdout + result.stderr, pytrace=False)
        if "[  SKIPPED ]" in result.stdout:
            pytest.skip(f"{self.test} skipped itself")

    def reportinfo(self):
        return self.path, None, self.name


class CppTestFile(pytest.File):
    def collect(self):
        for label, binary in _binaries().items():
            if not binary.is_file():
                msg = f"{binary} is missing: run `make test`, or deselect with --ignore=tests/cpp"
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
    if file_path == REPO_ROOT / "tests/cpp/CMakeLists.txt":
        return CppTestFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)


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
