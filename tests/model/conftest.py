# SPDX-License-Identifier: Apache-2.0
"""Slow things that several tests look at."""

from __future__ import annotations

import pytest
from model import _smollm2

from paged_kv.models import load_model


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M through our loader."""
    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_hf_model():
    return _smollm2.hf_model()


@pytest.fixture(scope="session")
def smollm2_hf_tokenizer():
    return _smollm2.hf_tokenizer()
