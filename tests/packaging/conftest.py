# SPDX-License-Identifier: Apache-2.0
"""Fresh virtual environments for the installation tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

# An editable install leaves files whose names only contain the package's.
LEFT_OUT = ("paged_kv", "__pycache__", "pip", "setuptools")


class FreshVenv:
    """A new environment with pip and, on request, the running one's packages except paged_kv.

    The packages are linked, not installed again: torch alone would take a minute each time.
    """

    def __init__(self, path: Path, *, with_packages: bool) -> None:
        self.path = path
        venv.create(path, with_pip=True)
        if with_packages:
            self._link_packages()

    @property
    def site_packages(self) -> Path:
        return next(self.path.glob("lib/python*/site-packages"))

    def run(self, *command: str | Path, cwd: Path | None = None, **env: str) -> str:
        """Runs bin/<command> with `env` set; returns what it printed, fails with all of it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PAGED_KV_", "PYTHON"))}
        path = f"{self.path}/bin:{Path(sys.executable).parent}:{clean['PATH']}"
        result = subprocess.run(
            [self.path / "bin" / command[0], *command[1:]],
            check=False,
            capture_output=True,
            text=True,
            cwd=cwd or self.path,
            env={**clean, "PATH": path, "PAGED_KV_CUDA": "0", **env},
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    def _link_packages(self) -> None:
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            target = self.site_packages / entry.name
            if not target.exists() and not any(name in entry.name for name in LEFT_OUT):
                target.symlink_to(entry)


@pytest.fixture(scope="session")
def fresh_venv():
    return FreshVenv
