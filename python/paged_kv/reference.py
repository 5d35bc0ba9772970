# SPDX-License-Identifier: Apache-2.0
"""What each op computes, in plain torch: the definition that the tests compare kernels with.

Slow, and made to be read. Each function has the name of its op in ``paged_kv.ops``.
"""

from __future__ import annotations

from paged_kv._attention_reference import (
    PARTITION_SIZE,
    BlockSparsity,
    gather_keys,
    gather_values,
    merge_attn_states,
    paged_attention_v1,
    paged_attention_v2,
    paged_attention_varlen,
)
from paged_kv._cache_reference import (
    apply_block_table_writes,
    compute_slot_mapping,
    copy_blocks,
    gather_block_tables,
    gather_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from paged_kv._quantization import dequantize_kv, quantize_kv

__all__ = [
    "PARTITION_SIZE",
    "BlockSparsity",
    "apply_block_table_writes",
    "compute_slot_mapping",
    "copy_blocks",
    "dequantize_kv",
    "gather_block_tables",
    "gather_cache",
    "gather_keys",
    "gather_values",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_varlen",
    "quantize_kv",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "swap_blocks",
]
