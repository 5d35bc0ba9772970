# SPDX-License-Identifier: Apache-2.0
"""The ops are registered with the schemas of the snapshot, on the CPU and for fake tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paged_kv._library import op_names

SNAPSHOT = Path(__file__).with_name("schemas.txt")


def registered_schemas() -> list[str]:
    return [str(getattr(torch.ops.paged_kv, name).default._schema) for name in op_names()]


def test_schemas_equal_the_snapshot():
    """A changed schema breaks callers: change the snapshot only together with the version."""
    assert registered_schemas() == SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("key", ["CPU", "Autograd"])
def test_every_op_has_a_kernel(key):
    missing = [
        name
        for name in op_names()
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"paged_kv::{name}", key)
    ]
    assert not missing


def test_every_op_has_a_kernel_for_fake_tensors():
    registry = torch._library.simple_registry.singleton
    missing = [
        name for name in op_names() if registry.find(f"paged_kv::{name}").fake_impl.kernel is None
    ]
    assert not missing
