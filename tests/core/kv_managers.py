# SPDX-License-Identifier: Apache-2.0
"""Specs and requests of small managers, as the tests of KVCacheManager use them."""

from __future__ import annotations

import numpy as np

from paged_kv import (
    FullAttentionSpec,
    Request,
    SlidingWindowSpec,
    get_request_block_hasher,
)

BLOCK = 16
SHAPE = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(block_size=BLOCK):
    return FullAttentionSpec(block_size=block_size, **SHAPE)


def window(size, block_size=BLOCK):
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **SHAPE)


def make_request(name, num_tokens, first_token=0, *, block_size=BLOCK, **arguments):
    tokens = np.arange(first_token, first_token + num_tokens)
    hasher = get_request_block_hasher(block_size)
    return Request(name, tokens, block_hasher=hasher, **arguments)
