# SPDX-License-Identifier: Apache-2.0
"""The committed stub of _core is the one that pybind11-stubgen makes of the built module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paged_kv
from paged_kv import _core

REPO_ROOT = Path(__file__).resolve().parent.parent.parent


def test_committed_stub_matches_the_module(tmp_path):
    """On a difference: pybind11-stubgen paged_kv._core -o python, and commit the result."""
    python_path = str(Path(paged_kv.__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": python_path}
    command = [sys.executable, "-m", "pybind11_stubgen", "paged_kv._core", "-o", str(tmp_path)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    made = (tmp_path / "paged_kv" / "_core.pyi").read_text()
    assert (REPO_ROOT / "python" / "paged_kv" / "_core.pyi").read_text() == made


def public_members(owner):
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("_")]


def test_every_public_name_of_the_core_is_documented():
    for name, value in public_members(_core):
        if isinstance(value, type) and issubclass(value, BaseException):
            continue  # register_exception() takes no text
        assert value.__doc__, name
        for member, method in public_members(value) if isinstance(value, type) else []:
            if hasattr(value, "__members__") and member in {"name", "value"}:
                continue  # pybind11 gives every enumeration these two
            # The first line of a method is its signature.
            doc = method.__doc__ or ""
            text = doc if isinstance(method, property) else doc.partition("\n")[2]
            assert text.strip(), f"{name}.{member}"
