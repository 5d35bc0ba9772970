# SPDX-License-Identifier: Apache-2.0
"""A slow thing that several tests look at."""

from __future__ import annotations

import pytest
from model import _smollm2


@pytest.fixture(scope="session")
def smollm2_hf_tokenizer():
    return _smollm2.hf_tokenizer()
