# SPDX-License-Identifier: Apache-2.0
"""Tensors of a case of the suite attention, and SDPA over them: for ours and for the peer alike.

Free of both libraries: imported by `bench_attention`, and by `peer_vllm_attention` in a process of
its own, so both get the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cases import AttentionCase

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
# Up to here data may stay in a CPU's cache from one call to the next.
MAX_CACHED_BYTES = 64 << 20
# Powers of two, so that every value read from a quantised cache is a bf16 number.
KV_SCALE = {"auto": 1.0, "fp8": 1.0, "int8": 1 / 32}


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbours in the batch with the same lengths: one call of SDPA.

    ``key``, ``value``: contiguous ``[num_seqs, num_kv_heads, seq_len, head_size]`` as they are in
    the cache, so quantised if it is. ``query_begin``, ``query_end``: rows of the query.
    """

    num_seqs: int
    query_len: int
    seq_len: int
    query_begin: int
    query_end: int
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What attention is called with. Blocks are scattered; every block is in use.

    ``query``: ``[num_tokens, num_heads, head_size]``. ``query_start_loc``, ``seq_lens`` and
    ``block_tables`` are int32.
    """

    case: AttentionCase
    query: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    groups: list[Group]
    scale: float

    def fill(self, caches: tuple[Tensor, Tensor]) -> None:
        """Writes all keys and values, of a cache seen as ``[num_blocks, heads, block, dim]``."""
        row = 0
        for group in self.groups:
            num_blocks = -(-group.seq_len // self.case.block_size)
            rows = slice(row, row + group.num_seqs)
            ids = self.block_tables[rows, :num_blocks].flatten().long()
            for cache, tokens in zip(caches, (group.key, group.value), strict=True):
                missing = num_blocks * self.case.block_size - group.seq_len
                padded = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
                blocks = padded.unflatten(2, (num_blocks, -1)).transpose(1, 2).flatten(0, 1)
                cache[ids] = blocks
            row += group.num_seqs

    def new_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values as a model makes them, ``[num_tokens, num_kv_heads, head_size]``."""
        pairs = [(group.key, group.value) for group in self.groups]
        key, value = (
            torch.cat([_dequantise(each, self.case).transpose(1, 2).flatten(0, 1) for each in kind])
            for kind in zip(*pairs, strict=True)
        )
        return key, value

    def slot_mapping(self) -> Tensor:
        """The slot of every token, sequence after sequence, int64."""
        size = self.case.block_size
        rows = zip(self.block_tables.long(), self.seq_lens.tolist(), strict=True)
        slots = [
            (table[:, None] * size + torch.arange(size)).flatten()[:seq_len]
            for table, seq_len in rows
        ]
        return torch.cat(slots)


def may_stay_cached(case: AttentionCase) -> bool:
    """Whether all candidates are to be timed with a warm-up call before each sample."""
    return case.kv_bytes <= MAX_CACHED_BYTES


def make_inputs(case: AttentionCase) -> Inputs:
    """Random numbers, the same for the same case. A quantised cache gets its own roundings."""
    torch.manual_seed(0)
    query_lens, seq_lens = (list(lens) for lens in zip(*case.lengths, strict=True))
    query_start_loc = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(int(query_start_loc[-1]), case.num_heads, case.head_size).to(case.dtype)
    ids = torch.randperm(case.num_blocks).int()
    blocks_of = [-(-seq_len // case.block_size) for seq_len in seq_lens]
    block_tables = torch.zeros(case.num_seqs, max(blocks_of), dtype=torch.int32)
    for table, its_ids in zip(block_tables, ids.split(blocks_of), strict=True):
        table[: len(its_ids)] = its_ids
    groups, begin = [], 0
    for (query_len, seq_len), same in groupby(case.lengths):
        num_seqs = len(list(same))
        end = begin + num_seqs * query_len
        shape = (num_seqs, case.num_kv_heads, seq_len, case.head_size)
        key, value = (_quantise(torch.randn(shape), case) for _ in range(2))
        groups.append(Group(num_seqs, query_len, seq_len, begin, end, key, value))
        begin = end
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    scale = case.head_size**-0.5
    return Inputs(case, query, query_start_loc, lens, block_tables, groups, scale)


def make_sdpa(inputs: Inputs) -> Callable[[], Tensor]:
    """SDPA of torch over contiguous keys and values in the query's dtype, a call a group."""
    case = inputs.case
    out = torch.empty_like(inputs.query)
    calls = []
    for group in inputs.groups:
        rows = inputs.query[group.query_begin : group.query_end]
        query = rows.unflatten(0, (group.num_seqs, group.query_len)).transpose(1, 2).contiguous()
        is_whole = group.query_len == group.seq_len
        mask = None
        if group.query_len > 1 and not is_whole:
            mask = torch.ones(group.query_len, group.seq_len, dtype=torch.bool)
            mask = mask.tril(group.seq_len - group.query_len)
        key, value = (_dequantise(tensor, case) for tensor in (group.key, group.value))
        calls.append((group, query, key, value, mask, is_whole and group.query_len > 1))

    def sdpa() -> Tensor:
        for group, query, key, value, mask, is_causal in calls:
            result = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=is_causal,
                scale=inputs.scale,
                enable_gqa=case.num_heads != case.num_kv_heads,
            )
            out[group.query_begin : group.query_end] = result.transpose(1, 2).flatten(0, 1)
        return out

    return sdpa


def check(result: Tensor, expected: Tensor) -> None:
    """Raises AssertionError if they are further apart than their dtype explains."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)


def _quantise(values: Tensor, case: AttentionCase) -> Tensor:
    if case.kv_cache_dtype == "fp8":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    if case.kv_cache_dtype == "int8":
        return (values / KV_SCALE["int8"]).round().clamp(-128, 127).to(torch.int8)
    return values.to(case.dtype)


def _dequantise(stored: Tensor, case: AttentionCase) -> Tensor:
    if case.kv_cache_dtype == "fp8":
        stored = stored.view(torch.float8_e4m3fn)
    if case.kv_cache_dtype == "auto":
        return stored
    return (stored.float() * KV_SCALE[case.kv_cache_dtype]).to(case.dtype)
