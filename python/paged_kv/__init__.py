# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of an LLM engine, as a library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paged_kv._core import (
    AllBlocksCleared,
    AllocStatus,
    AttentionSpec,
    BlockDevice,
    BlockHashList,
    BlockHashToBlockMap,
    BlockPool,
    BlockRemoved,
    BlockSpaceManager,
    BlockStored,
    BlockTable,
    CachedBlocksView,
    ChunkedLocalAttentionSpec,
    FreeKVCacheBlockQueue,
    FreePlace,
    FreeQueueView,
    FullAttentionSpec,
    InvariantError,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvictionEvent,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheMetricsCollector,
    KVCacheSpec,
    KVCacheTensor,
    NoHitReason,
    NoHitReport,
    OutOfBlocksError,
    PrefixCacheStats,
    RequestBatch,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    __version__,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_block_table_width,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    unify_kv_cache_spec_page_size,
)
from paged_kv.hashing import (
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_hash_fn_by_name,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256_cbor,
    xxhash_cbor,
)
from paged_kv.request import (
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
)

if TYPE_CHECKING:
    from paged_kv.engine import LLM, AsyncLLM, SamplingParams
    from paged_kv.kv_cache_memory import allocate_kv_cache

__all__ = [
    "LLM",
    "AllBlocksCleared",
    "AllocStatus",
    "AsyncLLM",
    "AttentionSpec",
    "BlockDevice",
    "BlockHashList",
    "BlockHashToBlockMap",
    "BlockPool",
    "BlockRemoved",
    "BlockSpaceManager",
    "BlockStored",
    "BlockTable",
    "CachedBlocksView",
    "ChunkedLocalAttentionSpec",
    "FreeKVCacheBlockQueue",
    "FreePlace",
    "FreeQueueView",
    "FullAttentionSpec",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheEvictionEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "KVCacheSpec",
    "KVCacheTensor",
    "LoRARequest",
    "MultiModalFeatureSpec",
    "NoHitReason",
    "NoHitReport",
    "OutOfBlocksError",
    "PlaceholderRange",
    "PrefixCacheStats",
    "Request",
    "RequestBatch",
    "RequestStatus",
    "SamplingParams",
    "SlidingWindowSpec",
    "UniformTypeKVCacheSpecs",
    "__version__",
    "allocate_kv_cache",
    "estimate_max_model_len",
    "generate_block_hash_extra_keys",
    "generate_scheduler_kv_cache_config",
    "get_block_hash",
    "get_block_table_width",
    "get_group_id",
    "get_hash_fn_by_name",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "get_request_block_hasher",
    "hash_block_tokens",
    "hash_blocks",
    "init_none_hash",
    "make_block_hash_with_group_id",
    "sha256_cbor",
    "unify_kv_cache_spec_page_size",
    "xxhash_cbor",
]

# Names that need torch; the rest of the package works without importing it.
_MODULE_OF = {
    "LLM": "paged_kv.engine",
    "AsyncLLM": "paged_kv.engine",
    "SamplingParams": "paged_kv.engine",
    "allocate_kv_cache": "paged_kv.kv_cache_memory",
}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
