# SPDX-License-Identifier: Apache-2.0
"""What tests of the CUDA build share: the compiler, if there is one, and the library it made."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
NVCC = shutil.which(os.environ.get("CUDACXX", "nvcc")) or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no CUDA compiler")


def cuda_library() -> Path:
    """``_ops.so`` with its CUDA kernels, for sm_80 and sm_90; skips without a CUDA compiler."""
    if NVCC is None:
        pytest.skip("no CUDA compiler")
    path = REPO_ROOT / "build/cuda/cpp/ops/_ops.so"
    if not path.is_file():
        msg = f"{path} is missing: run `make test`"
        raise FileNotFoundError(msg)
    return path


def ops_with_cuda_kernel() -> set[str]:
    """The ops that a source of cuda/ops registers."""
    sources = (path.read_text(encoding="utf-8") for path in (REPO_ROOT / "cuda/ops").glob("*.cpp"))
    return {op for text in sources for op in re.findall(r'\bm\.impl\("(\w+)"', text)}
