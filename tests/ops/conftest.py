# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch

import paged_kv.ops  # noqa: F401  (registers the ops)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
