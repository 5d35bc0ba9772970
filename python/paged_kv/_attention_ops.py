# SPDX-License-Identifier: Apache-2.0
"""Attention over the paged cache: wrappers of ``torch.ops.paged_kv``, exported by ``ops``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import paged_kv._library  # noqa: F401  (defines the ops)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge_attn_states"]


def merge_attn_states(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Tensor | None = None,
) -> None:
    """Joins attention over a prefix and over a suffix of the keys into attention over both.

    A side whose LSE is -inf (or +inf) has no keys and is not read. If neither has, the result is
    zeros with LSE -inf.

    Args:
        output: ``[num_tokens, num_heads, head_size]``, f32/f16/bf16, last dim dense.
        prefix_output: As ``output``.
        prefix_lse: ``[num_heads, num_tokens]`` float32, natural log.
        suffix_output: As ``output``.
        suffix_lse: As ``prefix_lse``.
        output_lse: As ``prefix_lse``; None if it is not needed.

    Mutates:
        ``output``, ``output_lse``. ``output`` may be ``prefix_output`` or ``suffix_output``.

    Raises:
        RuntimeError: Shape, dtype or stride mismatch.

    Notes:
        Cost: reads both outputs once. The argument order is vLLM's Python one;
        ``torch.ops.paged_kv.merge_attn_states`` has ``output_lse`` in second place.

    Source:
        Section 2.2 of arXiv 2501.01005; vLLM 0.32 merge_attn_states.

    Example:
        >>> import torch
        >>> from paged_kv import ops
        >>> output = torch.empty(1, 1, 2)
        >>> one, three = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 3.0)
        >>> ops.merge_attn_states(output, one, torch.zeros(1, 1), three, torch.zeros(1, 1))
        >>> output.tolist()
        [[[2.0, 2.0]]]
    """
    torch.ops.paged_kv.merge_attn_states.default(
        output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse
    )
