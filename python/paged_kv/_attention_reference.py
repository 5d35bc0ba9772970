# SPDX-License-Identifier: Apache-2.0
"""What the attention ops compute, in float64 and plain torch.

These functions are the oracle of the tests and the definition of the ops: short rather than fast.
They return their results instead of writing them, and take the caches in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_kv._cache_panels import as_nhd

__all__ = [
    "PARTITION_SIZE",
    "BlockSparsity",
    "gather_keys",
    "gather_values",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_varlen",
]

PARTITION_SIZE = 512
"""Tokens a partition of ``paged_attention_v2``."""


@dataclass(frozen=True, slots=True)
class BlockSparsity:
    """The block-sparse pattern of ``paged_attention_v1``/``v2``.

    A head sees the last ``local_blocks`` blocks and every ``vert_stride``-th one, counted from a
    start that slides from head to head by ``head_sliding_step`` (negative: from kv head to kv head,
    by its absolute value). ``tp_rank`` says which shard of all heads these are.
    """

    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int = 0
    tp_rank: int = 0

    def visible(self, seq_len: int, num_heads: int, num_kv_heads: int) -> Tensor:
        """Which keys each head sees: bool ``[num_heads, seq_len]``."""
        key_block = torch.arange(seq_len) // self.block_size
        last_block = (seq_len - 1) // self.block_size
        head = torch.arange(num_heads)
        if self.head_sliding_step >= 0:
            start = (self.tp_rank * num_heads + head) * self.head_sliding_step + 1
        else:
            kv_head = head // (num_heads // num_kv_heads)
            start = (self.tp_rank * num_kv_heads + kv_head) * -self.head_sliding_step + 1
        strided = (key_block[None, :] + start[:, None]) % self.vert_stride == 0
        local = key_block > last_block - self.local_blocks
        return strided | local


def gather_keys(key_cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    """Keys of one sequence at ``positions``: float64 ``[len(positions), num_kv_heads, head_size]``.

    Args:
        key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, x-packed
            ``[num_blocks, num_kv_heads, head_size / x, block_size, x]``, or panels.
        block_table: ``[max_blocks]``, the sequence's row.
        positions: ``[n]`` positions in the sequence.
    """
    if key_cache.dim() == 5:
        key_cache = key_cache.permute(0, 3, 1, 2, 4).flatten(3)
    return _gather(as_nhd(key_cache), block_table, positions)


def gather_values(
    value_cache: Tensor, block_table: Tensor, positions: Tensor, *, x_packed: bool
) -> Tensor:
    """Values of one sequence at ``positions``; see :func:`gather_keys`.

    Args:
        value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``,
            ``[num_blocks, num_kv_heads, head_size, block_size]`` if ``x_packed``, or panels.
        block_table: ``[max_blocks]``, the sequence's row.
        positions: ``[n]`` positions in the sequence.
        x_packed: Whether the key cache is x-packed.
    """
    if x_packed:
        value_cache = value_cache.permute(0, 3, 1, 2)
    return _gather(as_nhd(value_cache), block_table, positions)


def _gather(cache: Tensor, block_table: Tensor, positions: Tensor) -> Tensor:
    block_size = cache.shape[1]
    block_ids = block_table.long()[positions // block_size]
    return cache[block_ids, positions % block_size].double()


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one sequence: output ``[q, H, D]``, largest logit and sum of exp, ``[q, H]``.

    ``visible`` and ``bias`` are ``[q, H, k]``. Rows without a visible key: zeros, -inf and 0.
    """
    group_size = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group_size, dim=1)
    value = value.repeat_interleave(group_size, dim=1)

    logits = scale * torch.einsum("qhd,khd->qhk", query.double(), key)
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~visible, -torch.inf)

    has_keys = visible.any(-1)
    lowest = torch.full_like(logits[..., :1], -torch.inf)
    all_logits = torch.cat([logits, lowest], -1)
    if sinks is not None:
        all_logits[..., -1] = sinks.double()
    max_logit = all_logits.amax(-1)
    weights = torch.exp(logits - max_logit.masked_fill(~has_keys, 0.0)[..., None])
    exp_sum = weights.sum(-1)
    if sinks is not None:
        # The largest logit has weight 1, infinity too, whose difference would be NaN.
        below = (sinks.double() - max_logit).masked_fill(sinks.double() == max_logit, 0.0)
        exp_sum = exp_sum + torch.exp(below)
    output = torch.einsum("qhk,khd->qhd", weights / exp_sum[..., None], value)

    output = output.masked_fill(~has_keys[..., None], 0.0)
    max_logit = max_logit.masked_fill(~has_keys, -torch.inf)
    return output, max_logit, exp_sum.masked_fill(~has_keys, 0.0)


def _log_sum_exp(max_logit: Tensor, exp_sum: Tensor) -> Tensor:
    return torch.where(max_logit == -torch.inf, -torch.inf, max_logit + exp_sum.log())


def paged_attention_varlen(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    *,
    causal: bool = True,
    sliding_window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Defines :func:`paged_kv.ops.paged_attention_varlen`.

    Returns:
        Output ``[num_tokens, num_heads, head_size]`` and LSE ``[num_heads, num_tokens]``, float64.
        Rows past the last query are zeros and -inf here; the op leaves them alone.
    """
    num_tokens, num_heads, head_size = query.shape
    output = torch.zeros(num_tokens, num_heads, head_size, dtype=torch.float64)
    lse = torch.full((num_heads, num_tokens), -torch.inf, dtype=torch.float64)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[seq], starts[seq + 1])
        query_len = rows.stop - rows.start
        if query_len == 0 or seq_len == 0:
            continue
        query_pos = torch.arange(seq_len - query_len, seq_len)[:, None]
        first_key = max(0, seq_len - query_len - sliding_window + 1) if sliding_window else 0
        key_pos = torch.arange(min(first_key, seq_len), seq_len)
        key = gather_keys(key_cache, block_tables[seq], key_pos)
        value = gather_values(
            value_cache, block_tables[seq], key_pos, x_packed=key_cache.dim() == 5
        )
        visible = torch.ones(query_len, len(key_pos), dtype=torch.bool)
        if causal:
            visible &= key_pos <= query_pos
        if sliding_window > 0:
            visible &= key_pos > query_pos - sliding_window
        bias = None
        if alibi_slopes is not None:
            bias = alibi_slopes.double()[:, None] * (key_pos - query_pos)[:, None, :]
        out, max_logit, exp_sum = _attend(
            query[rows],
            key,
            value,
            visible[:, None, :].expand(-1, num_heads, -1),
            bias,
            scale,
            softcap,
            sinks,
        )
        output[rows] = out
        lse[:, rows] = _log_sum_exp(max_logit, exp_sum).T
    return output, lse


def paged_attention_v1(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    sparsity: BlockSparsity | None = None,
) -> Tensor:
    """Defines :func:`paged_kv.ops.paged_attention_v1`: one query a sequence, the last of it.

    Returns:
        Output ``[num_seqs, num_heads, head_size]``, float64.
    """
    output = torch.zeros(query.shape, dtype=torch.float64)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        if seq_len > 0:
            keys = torch.arange(seq_len)
            output[seq] = _decode(
                query[seq],
                key_cache,
                value_cache,
                scale,
                block_tables[seq],
                seq_len,
                keys,
                alibi_slopes,
                sparsity,
            )[0]
    return output


def paged_attention_v2(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    alibi_slopes: Tensor | None = None,
    sparsity: BlockSparsity | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The partitions of :func:`paged_kv.ops.paged_attention_v2`; its output is that of v1.

    Returns:
        ``exp_sums`` and ``max_logits`` ``[num_seqs, num_heads, max_partitions]``, ``tmp_out``
        ``[num_seqs, num_heads, max_partitions, head_size]``, float64. Partitions past a sequence's
        end are NaN here; the op leaves them alone.
    """
    num_seqs, num_heads, head_size = query.shape
    longest = max(seq_lens.tolist(), default=0)
    max_partitions = -(-longest // PARTITION_SIZE)
    shape = (num_seqs, num_heads, max_partitions)
    exp_sums = torch.full(shape, torch.nan, dtype=torch.float64)
    max_logits = torch.full(shape, torch.nan, dtype=torch.float64)
    tmp_out = torch.full((*shape, head_size), torch.nan, dtype=torch.float64)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for partition, begin in enumerate(range(0, seq_len, PARTITION_SIZE)):
            keys = torch.arange(begin, min(begin + PARTITION_SIZE, seq_len))
            out, max_logit, exp_sum = _decode(
                query[seq],
                key_cache,
                value_cache,
                scale,
                block_tables[seq],
                seq_len,
                keys,
                alibi_slopes,
                sparsity,
            )
            tmp_out[seq, :, partition] = out
            max_logits[seq, :, partition] = max_logit
            exp_sums[seq, :, partition] = exp_sum
    return exp_sums, max_logits, tmp_out


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    block_table: Tensor,
    seq_len: int,
    keys: Tensor,
    alibi_slopes: Tensor | None,
    sparsity: BlockSparsity | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of the last token of a sequence to ``keys``; results without the query axis."""
    num_heads = query.shape[0]
    key = gather_keys(key_cache, block_table, keys)
    value = gather_values(value_cache, block_table, keys, x_packed=key_cache.dim() == 5)
    visible = torch.ones(num_heads, len(keys), dtype=torch.bool)
    if sparsity is not None:
        visible = sparsity.visible(seq_len, num_heads, key.shape[1])[:, keys]
        # What no head sees is not read.
        value = value.masked_fill(~visible.any(0)[:, None, None], 0.0)
    bias = None
    if alibi_slopes is not None:
        bias = (alibi_slopes.double()[:, None] * (keys - (seq_len - 1)))[None]
    out, max_logit, exp_sum = _attend(
        query[None], key, value, visible[None], bias, scale, 0.0, None
    )
    return out[0], max_logit[0], exp_sum[0]


def merge_attn_states(
    prefix_output: Tensor, prefix_lse: Tensor, suffix_output: Tensor, suffix_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Defines :func:`paged_kv.ops.merge_attn_states`.

    Returns:
        Output ``[num_tokens, num_heads, head_size]`` and LSE ``[num_heads, num_tokens]``, float64.
    """
    lses = torch.stack([prefix_lse.double(), suffix_lse.double()])
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    lse = torch.logsumexp(lses, 0)
    empty = lses == -torch.inf
    weights = torch.exp(lses - lse.masked_fill(empty.all(0), 0.0)).transpose(1, 2)[..., None]
    outputs = torch.stack([prefix_output.double(), suffix_output.double()])
    outputs = outputs.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    return (weights * outputs).sum(0), lse
