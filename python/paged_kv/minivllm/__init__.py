# SPDX-License-Identifier: Apache-2.0
"""Paging in thirty lines: which request holds which blocks, and the tensors behind the blocks.

:class:`BlockManager` decides *where* a token's key and value live, :class:`PagedKVCache` holds
them.
Neither knows the other: a block table (list of block ids) and a slot mapping (block id * block size
+ offset, one per token) are all that passes between them, as in a full engine. No prefix cache, no
scheduler, one sequence per call; ``paged_kv.BlockPool`` and ``paged_kv.ops`` give those who need
more the parts to build it from.

``examples/paged_attention_in_30_lines.py`` puts both to work.

Source:
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, sections 4.1 to 4.3; block ids and the null block as in vLLM 0.32
    v1/core/block_pool.py.
"""

from __future__ import annotations

from paged_kv.minivllm.block_manager import BlockManager
from paged_kv.minivllm.cache import CacheLayout, PagedKVCache, bytes_per_block, bytes_per_token

__all__ = ["BlockManager", "CacheLayout", "PagedKVCache", "bytes_per_block", "bytes_per_token"]
