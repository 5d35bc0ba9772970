# SPDX-License-Identifier: Apache-2.0
"""The torch ops of paged_kv, as documented functions.

Each function calls the op of the same name in ``torch.ops.paged_kv`` and nothing else; both forms
work in ``torch.compile(fullgraph=True)`` and ``torch.export``. Common rules:

* Tensors that are written come first and are named in "Mutates"; nothing is returned.
* Strides are honoured or refused with an error; no input is ever copied.
* A wrong argument raises RuntimeError that names it, and nothing has been written then.
* Inference only: with grad mode on, an input that requires grad is refused.
"""

from __future__ import annotations

import paged_kv._attention_fakes  # noqa: F401  (registers the kernels for fake tensors)
from paged_kv._attention_ops import merge_attn_states

__all__ = ["merge_attn_states"]
