# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of an LLM engine, as a library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from paged_kv._core import (
    AllocStatus,
    BlockDevice,
    BlockHashList,
    BlockHashToBlockMap,
    BlockPool,
    BlockSpaceManager,
    BlockTable,
    FreeKVCacheBlockQueue,
    InvariantError,
    KVCacheBlock,
    KVCacheBlocks,
    OutOfBlocksError,
    __version__,
    get_block_table_width,
)
from paged_kv.hashing import (
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    hash_blocks,
    init_none_hash,
    make_block_hash_with_group_id,
    sha256_cbor,
)

if TYPE_CHECKING:
    from paged_kv.engine import LLM, SamplingParams

__all__ = [
    "LLM",
    "AllocStatus",
    "BlockDevice",
    "BlockHashList",
    "BlockHashToBlockMap",
    "BlockPool",
    "BlockSpaceManager",
    "BlockTable",
    "FreeKVCacheBlockQueue",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "OutOfBlocksError",
    "SamplingParams",
    "__version__",
    "generate_block_hash_extra_keys",
    "get_block_hash",
    "get_block_table_width",
    "get_group_id",
    "get_request_block_hasher",
    "hash_block_tokens",
    "hash_blocks",
    "init_none_hash",
    "make_block_hash_with_group_id",
    "sha256_cbor",
]

# Names that need torch; the rest of the package works without importing it.
_FROM_ENGINE = ("LLM", "SamplingParams")


def __getattr__(name: str) -> object:
    if name in _FROM_ENGINE:
        return getattr(importlib.import_module("paged_kv.engine"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
