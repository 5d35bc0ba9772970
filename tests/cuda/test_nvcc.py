# SPDX-License-Identifier: Apache-2.0
"""What the emulator runs is what nvcc compiles: the sample kernels, warnings being errors."""

from __future__ import annotations

import re
import subprocess

import pytest
from cuda_build import NVCC, REPO_ROOT, needs_nvcc

SOURCE = REPO_ROOT / "tests/cuda/sample_kernels.cu"

pytestmark = needs_nvcc


def _compile(*options: str) -> str:
    includes = [f"-I{REPO_ROOT / folder}" for folder in ("cuda/include", "cpp/include")]
    command = [NVCC, "-std=c++20", "-Werror", "all-warnings", *options, *includes, str(SOURCE)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_compiles_without_spills(arch, tmp_path):
    report = _compile(f"-arch={arch}", "-cubin", "-Xptxas=-v", "-o", str(tmp_path / "out.cubin"))
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == 7
    assert set(spills) == {("0", "0")}


def test_shared_storage_is_in_shared_memory(tmp_path):
    """static_shared() and dynamic_shared() cost nothing: no generic loads or stores are left."""
    ptx = tmp_path / "out.ptx"
    _compile("-arch=sm_80", "-ptx", "-o", str(ptx))
    accesses = set(re.findall(r"^\s+((?:ld|st)\.\w+)", ptx.read_text(), flags=re.MULTILINE))
    assert accesses == {"ld.param", "ld.global", "ld.shared", "st.global", "st.shared"}
