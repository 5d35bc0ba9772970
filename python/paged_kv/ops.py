# SPDX-License-Identifier: Apache-2.0
"""The torch ops of paged_kv, as documented functions.

Each function calls the op of the same name in ``torch.ops.paged_kv`` and nothing else; both forms
work in ``torch.compile(fullgraph=True)`` and ``torch.export``. Common rules:

* Tensors that are written are named in "Mutates"; nothing is returned.
* Strides are honoured or refused with an error; no input is ever copied.
* A wrong argument raises RuntimeError that names it, and nothing has been written then.
* Inference only: with grad mode on, an input that requires grad is refused.
"""

from __future__ import annotations

import paged_kv._attention_fakes
import paged_kv._cache_fakes
import paged_kv._model_fakes  # noqa: F401  (all three register the kernels for fake tensors)
from paged_kv._attention_ops import (
    attention_plan_size,
    merge_attn_states,
    paged_attention_varlen,
    plan_attention,
)
from paged_kv._block_table_ops import (
    apply_block_table_writes,
    compute_slot_mapping,
    gather_block_tables,
)
from paged_kv._cache_ops import (
    copy_blocks,
    gather_cache,
    reshape_and_cache,
    reshape_and_cache_flash,
    swap_blocks,
)
from paged_kv._model_ops import (
    apply_rotary,
    gelu_tanh_and_mul,
    linear,
    rms_norm,
    silu_and_mul,
)
from paged_kv._paged_attention_ops import paged_attention_v1, paged_attention_v2

__all__ = [
    "apply_block_table_writes",
    "apply_rotary",
    "attention_plan_size",
    "compute_slot_mapping",
    "copy_blocks",
    "gather_block_tables",
    "gather_cache",
    "gelu_tanh_and_mul",
    "linear",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_varlen",
    "plan_attention",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "silu_and_mul",
    "swap_blocks",
]
