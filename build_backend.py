# SPDX-License-Identifier: Apache-2.0
"""Build backend: scikit-build-core, plus the two questions that torch raises.

1. Where are torch's headers? In the environment that the package is installed into, if torch is
   there already. pip builds in an isolated environment, so that one is found through sysconfig, and
   torch is located without being imported. Otherwise torch becomes a build requirement
   (``$PAGED_KV_BUILD_TORCH``, default ``torch>=2.10``).
2. With CUDA or without? ``$PAGED_KV_CUDA`` = ``auto`` (default), ``1`` or ``0``; see decide_cuda().
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit_build
from scikit_build_core.build import (  # noqa: F401  (hooks of PEP 517 that need no change)
    build_sdist,
    get_requires_for_build_sdist,
)

_STABLE_ABI_HEADER = "include/torch/csrc/stable/library.h"

ConfigSettings = dict[str, Any] | None


def decide_cuda(setting: str, nvcc: str | None, torch_cuda: str | None) -> bool:
    """Decides whether the CUDA kernels are built.

    Args:
        setting: ``auto``, ``1`` or ``0`` (``$PAGED_KV_CUDA``).
        nvcc: Path of the CUDA compiler, None if there is none.
        torch_cuda: CUDA version of the target's torch, None if it is a CPU build.

    Returns:
        True to build them. ``auto`` builds them if there is a compiler and torch can use them.

    Raises:
        ValueError: ``setting`` is not one of the three, or ``1`` and there is no compiler.
    """
    match setting:
        case "0":
            return False
        case "1" if nvcc is None:
            msg = (
                "PAGED_KV_CUDA=1, but nvcc was not found: put it on PATH, set CUDACXX or "
                "CUDA_HOME, or build with PAGED_KV_CUDA=0"
            )
            raise ValueError(msg)
        case "1":
            return True
        case "auto":
            return nvcc is not None and torch_cuda is not None
    msg = f"PAGED_KV_CUDA: expected auto, 1 or 0, got {setting!r}"
    raise ValueError(msg)


def torch_cuda_version(torch_root: Path) -> str | None:
    """Returns the CUDA version that ``torch/version.py`` names, None for a CPU build."""
    version_py = torch_root / "version.py"
    if not version_py.is_file():
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", version_py.read_text(), re.MULTILINE)
    return match[1] if match else None


def find_nvcc() -> str | None:
    """Returns the CUDA compiler: $CUDACXX, else nvcc of $CUDA_HOME, of PATH or of /usr/local."""
    candidates = [os.environ.get("CUDACXX"), "nvcc", "/usr/local/cuda/bin/nvcc"]
    if cuda_home := os.environ.get("CUDA_HOME"):
        candidates.insert(1, f"{cuda_home}/bin/nvcc")
    return next((path for c in candidates if c and (path := shutil.which(c))), None)


def find_torch_root() -> Path | None:
    """Returns the folder of a torch with stable-ABI headers, without importing it."""
    if explicit := os.environ.get("PAGED_KV_TORCH_ROOT"):
        return Path(explicit)
    site_packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    roots = (Path(entry or ".") / "torch" for entry in [*sys.path, *site_packages])
    return next((root for root in roots if (root / _STABLE_ABI_HEADER).is_file()), None)


def _with_torch(requires: list[str]) -> list[str]:
    if find_torch_root():
        return requires
    return [*requires, os.environ.get("PAGED_KV_BUILD_TORCH", "torch>=2.10")]


def _settings(config_settings: ConfigSettings) -> dict[str, Any]:
    settings = dict(config_settings or {})
    torch_root = find_torch_root()
    if torch_root is None:
        msg = "torch >= 2.10 was not found: install it first, or set PAGED_KV_TORCH_ROOT"
        raise RuntimeError(msg)
    nvcc = find_nvcc()
    cuda = decide_cuda(
        os.environ.get("PAGED_KV_CUDA", "auto"), nvcc, torch_cuda_version(torch_root)
    )
    settings.setdefault("cmake.define.PAGED_KV_TORCH_ROOT", str(torch_root))
    settings.setdefault("cmake.define.PAGED_KV_CUDA", "ON" if cuda else "OFF")
    if cuda and nvcc:
        settings.setdefault("cmake.define.CMAKE_CUDA_COMPILER", nvcc)
    return settings


def get_requires_for_build_wheel(config_settings: ConfigSettings = None) -> list[str]:
    """PEP 517 hook."""
    return _with_torch(_scikit_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: ConfigSettings = None) -> list[str]:
    """PEP 660 hook."""
    return _with_torch(_scikit_build.get_requires_for_build_editable(config_settings))


def build_wheel(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517 hook."""
    return _scikit_build.build_wheel(
        wheel_directory, _settings(config_settings), metadata_directory
    )


def build_editable(
    wheel_directory: str,
    config_settings: ConfigSettings = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660 hook."""
    return _scikit_build.build_editable(
        wheel_directory, _settings(config_settings), metadata_directory
    )
