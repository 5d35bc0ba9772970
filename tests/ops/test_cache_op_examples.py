# SPDX-License-Identifier: Apache-2.0
"""The examples in the docstrings of the cache ops run and print what they say."""

from __future__ import annotations

import doctest

import pytest

from paged_kv import _block_table_ops, _cache_ops


@pytest.mark.parametrize(
    "module", [_cache_ops, _block_table_ops], ids=lambda module: module.__name__
)
def test_examples(module):
    results = doctest.testmod(module)
    assert results.failed == 0
    assert results.attempted >= len(module.__all__)
