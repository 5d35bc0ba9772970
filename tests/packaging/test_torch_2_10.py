# SPDX-License-Identifier: Apache-2.0
"""The ops compile against the headers of torch 2.10, the oldest torch that they may meet."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from cuda_build import REPO_ROOT

TORCH_INCLUDE = REPO_ROOT / "build/torch-2.10/torch/include"
SOURCES = sorted([*REPO_ROOT.glob("cpp/ops/*.cpp"), *REPO_ROOT.glob("cuda/ops/*.cpp")])
# The emulator's cuda_runtime.h stands for CUDA's, so that this needs no toolkit.
INCLUDES = ["cpp/include", "cpp", ".", "cuda/include", "cuda/simt/include"]
COMPILE = [
    *(os.environ.get("CXX", "g++"), "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-Werror", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(TORCH_INCLUDE)),
    *(f"-I{REPO_ROOT / folder}" for folder in INCLUDES),
]


def _compile(*options: object) -> str:
    command = [*COMPILE, *map(str, options)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    return result.stderr if result.returncode != 0 else ""


@pytest.fixture(scope="module")
def common_header(tmp_path_factory):
    """torch's headers, precompiled: nearly all that these files have to read."""
    version = TORCH_INCLUDE / "torch/headeronly/version.h"
    assert version.is_file(), f"{version} is missing: run `make test`"
    assert "#define TORCH_VERSION_MINOR 10\n" in version.read_text()
    header = tmp_path_factory.mktemp("precompiled") / "torch_headers.h"
    header.write_text(
        "#include <torch/csrc/stable/library.h>\n#include <torch/csrc/stable/tensor.h>\n"
    )
    assert not _compile("-x", "c++-header", header, "-o", f"{header}.gch")
    return header


def test_every_op_compiles(common_header):
    assert {path.parent.parent.name for path in SOURCES} == {"cpp", "cuda"}
    with ThreadPoolExecutor(max_workers=2) as pool:
        options = (("-fsyntax-only", "-include", common_header, path) for path in SOURCES)
        errors = list(pool.map(lambda option: _compile(*option), options))
    assert not any(errors), "\n".join(errors)


def test_a_function_that_2_10_lacks_is_noticed(common_header, tmp_path):
    source = tmp_path / "too_new.cpp"
    source.write_text("auto too_new = &torch::stable::function_of_a_later_torch;\n")
    errors = _compile("-fsyntax-only", "-include", common_header, source)
    assert "function_of_a_later_torch" in errors
