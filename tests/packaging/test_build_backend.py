# SPDX-License-Identifier: Apache-2.0
"""The decisions of build_backend.py: with CUDA or without, and where torch is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
NVCC = "/opt/cuda/bin/nvcc"


@pytest.fixture(scope="module")
def backend():
    spec = importlib.util.spec_from_file_location("build_backend", REPO_ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("setting", "nvcc", "torch_cuda", "expected"),
    [
        ("auto", NVCC, "13.0", True),
        ("auto", NVCC, None, False),
        ("auto", None, "13.0", False),
        ("auto", None, None, False),
        ("1", NVCC, None, True),
        ("1", NVCC, "13.0", True),
        ("0", NVCC, "13.0", False),
        ("0", None, None, False),
    ],
)
def test_decide_cuda(backend, setting, nvcc, torch_cuda, expected):
    assert backend.decide_cuda(setting, nvcc, torch_cuda) is expected


def test_cuda_without_compiler_is_an_error_never_a_cpu_build(backend):
    with pytest.raises(ValueError, match="PAGED_KV_CUDA=1, but nvcc was not found"):
        backend.decide_cuda("1", None, "13.0")


@pytest.mark.parametrize("setting", ["", "yes", "ON", "2"])
def test_unknown_setting_is_refused(backend, setting):
    with pytest.raises(ValueError, match="expected auto, 1 or 0"):
        backend.decide_cuda(setting, NVCC, "13.0")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ('cuda = "12.8"', "12.8"),
        ("cuda: Optional[str] = None", None),
        ("rocm: Optional[str] = '7.0'", None),
    ],
)
def test_torch_cuda_version_is_read_without_importing_torch(backend, tmp_path, line, expected):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\ngit_version = 'x'\n")
    assert backend.torch_cuda_version(tmp_path) == expected


def test_torch_cuda_version_of_a_missing_file(backend, tmp_path):
    assert backend.torch_cuda_version(tmp_path) is None


def test_find_torch_root_needs_the_stable_abi_headers(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(backend.sysconfig, "get_path", lambda _: str(tmp_path))
    (tmp_path / "torch").mkdir()
    assert backend.find_torch_root() is None
    header = tmp_path / "torch/include/torch/csrc/stable/library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert backend.find_torch_root() == tmp_path / "torch"


def test_torch_becomes_a_build_requirement_only_if_it_is_missing(backend, monkeypatch):
    monkeypatch.setattr(backend, "find_torch_root", lambda: Path("/site/torch"))
    assert not [r for r in backend.get_requires_for_build_wheel() if r.startswith("torch")]
    monkeypatch.setattr(backend, "find_torch_root", lambda: None)
    assert "torch>=2.10" in backend.get_requires_for_build_wheel()
    monkeypatch.setenv("PAGED_KV_BUILD_TORCH", "torch==2.13.0")
    assert "torch==2.13.0" in backend.get_requires_for_build_editable()


def test_torch_is_not_imported():
    """Importing torch takes seconds, and fails in an isolated build environment."""
    code = "import sys, build_backend as b; b.find_torch_root(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, check=True)


def test_cmake_refuses_cuda_without_a_compiler(tmp_path):
    """The same rule for who calls CMake directly."""
    cmake = Path(sys.executable).parent / "cmake"
    result = subprocess.run(
        [
            cmake,
            "-S",
            REPO_ROOT,
            "-B",
            tmp_path,
            "-DPAGED_KV_CUDA=ON",
            "-DPAGED_KV_BUILD_PYTHON=OFF",
        ],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CUDACXX": str(tmp_path / "missing-nvcc")},
    )
    assert result.returncode != 0
    assert "no CUDA compiler was found" in " ".join(result.stderr.split())
