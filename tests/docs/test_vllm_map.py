# SPDX-License-Identifier: Apache-2.0
"""Whatever docs/vllm_map.md names exists: Python names and ops."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

import paged_kv.ops  # noqa: F401  (registers torch.ops.paged_kv)

REPO_ROOT = Path(__file__).parents[2]
TEXT = (REPO_ROOT / "docs/vllm_map.md").read_text(encoding="utf-8")

OP_PREFIX = "torch.ops.paged_kv."
NAMES = sorted(set(re.findall(r"`(paged_kv(?:\.\w+)+)", TEXT)))
OPS = sorted(set(re.findall(rf"`{re.escape(OP_PREFIX)}(\w+)", TEXT)))


def resolve(name: str) -> object:
    """The object behind a dotted name: modules are imported, the rest is looked up."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(".".join(parts[:i]))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_python_name_exists(name):
    assert resolve(name) is not None


@pytest.mark.parametrize("op", OPS)
def test_op_is_registered(op):
    assert hasattr(torch.ops.paged_kv, op)


def test_every_op_and_every_native_class_has_a_row():
    """The map is complete: a unit that is added to the library is added to the map."""
    registered = re.findall(
        r'm\.def\(\s*"(\w+)', (REPO_ROOT / "cpp/ops/schemas.cpp").read_text(encoding="utf-8")
    )
    core = importlib.import_module("paged_kv._core")
    classes = {name for name, item in vars(core).items() if isinstance(item, type)}
    assert set(registered) <= set(OPS)
    assert classes <= {name.split(".")[1] for name in NAMES}


def test_a_wrong_name_would_be_noticed():
    assert NAMES
    assert OPS
    with pytest.raises(ModuleNotFoundError):
        resolve("paged_kv.BlockPool.no_such_method")
