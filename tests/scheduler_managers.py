# SPDX-License-Identifier: Apache-2.0
"""A manager without tensors, for tests of scheduling."""

from __future__ import annotations

from paged_kv import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    SlidingWindowSpec,
)


def make_core_manager(num_blocks, block_size, window=None, *, max_model_len, **options):
    """One group of full attention; with a window another one."""
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if window is not None:
        spec = SlidingWindowSpec(sliding_window=window, **shape)
        groups.append(KVCacheGroupSpec(["window"], spec))
    config = KVCacheConfig(num_blocks, [], groups)
    return KVCacheManager(config, max_model_len, block_size, block_size, **options)
