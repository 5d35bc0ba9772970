# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu.py measures: for each case the calls of our ops and of what they compare with.

The calls of one candidate take turns over ``rotations`` sets of buffers (gpu_timing.num_rotations).
Everything is built on the device that is given, so tests build small cases on the CPU and run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import GPU_DECODE, GPU_WRITES, AttentionCase, WriteCase
from paged_kv import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    Calls = dict[str, list[Callable[[], object]]]  # candidate -> its call on each set of buffers

PEER = "torch SDPA"
PARTITION_SIZE = 512  # tokens, of paged_attention_v2
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
NUM_LAYERS = 4
NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class Work:
    """One case.

    Attributes:
        case: What is run, in words and sizes.
        candidates: The names of ``build``'s result.
        num_bytes: What one call reads and writes of keys and values; 0: too little to be rated.
        build: ``(device, rotations)`` -> the calls.
    """

    case: str
    candidates: tuple[str, ...]
    num_bytes: int
    build: Callable[[torch.device, int], Calls]


def all_work() -> list[Work]:
    """In the order in which it is measured."""
    attention = [
        Work(
            str(case),
            ("paged_attention_v1", "paged_attention_v2", "paged_attention_varlen", PEER),
            case.kv_bytes,
            partial(attention_calls, case),
        )
        for case in GPU_DECODE
    ]
    writers = [
        Work(
            str(case),
            ("reshape_and_cache", "reshape_and_cache_flash"),
            case.num_bytes,
            partial(write_calls, case),
        )
        for case in GPU_WRITES
    ]
    block_case = GPU_WRITES[0]
    tables = ("compute_slot_mapping", "apply_block_table_writes", "gather_block_tables")
    return [
        *attention,
        *writers,
        Work(
            f"512 blocks in {NUM_LAYERS} layers",
            ("copy_blocks",),
            2 * 2 * NUM_LAYERS * 512 * _block_bytes(block_case),
            partial(copy_calls, block_case, 512),
        ),
        Work(
            "8 sequences of 1024 tokens",
            ("gather_cache",),
            2 * 8 * 1024 // block_case.block_size * _block_bytes(block_case),
            partial(gather_calls, block_case, 8, 1024),
        ),
        Work(f"{NUM_SEQS} sequences", tables, 0, block_table_calls),
    ]


def attention_calls(case: AttentionCase, device: torch.device, rotations: int) -> Calls:
    """v1, v2 over an x-packed cache, varlen over one in nhd, SDPA over contiguous keys and values.

    All have the same elements.

    A call returns its output, ``[num_seqs, num_heads, head_size]``.
    """
    torch.manual_seed(0)
    num_blocks = case.num_blocks * rotations
    x = 16 // case.cache_dtype.itemsize
    key_shape = (num_blocks, case.num_kv_heads, case.head_size // x, case.block_size, x)
    value_shape = (num_blocks, case.num_kv_heads, case.head_size, case.block_size)
    key_cache, value_cache = (_cache(case, shape, device) for shape in (key_shape, value_shape))
    tables = torch.randperm(num_blocks, device=device).int().view(rotations, case.num_seqs, -1)
    query = torch.randn(case.num_seqs, case.num_heads, case.head_size, device=device)
    query = query.to(case.dtype)
    one = torch.ones(1, device=device)
    seq_lens = torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32, device=device)
    scale = case.head_size**-0.5
    out = torch.empty_like(query)
    partitions = -(-case.seq_len // PARTITION_SIZE)
    sums = query.new_empty(2, case.num_seqs, case.num_heads, partitions, dtype=torch.float32)
    partial_out = query.new_empty(*sums.shape[1:], case.head_size)

    def arguments(table: Tensor) -> tuple[object, ...]:
        return (
            *(query, key_cache, value_cache, case.num_kv_heads, scale, table, seq_lens),
            *(case.block_size, case.seq_len, None, case.kv_cache_dtype, one, one),
        )

    def v1(table: Tensor) -> Tensor:
        ops.paged_attention_v1(out, *arguments(table))
        return out

    def v2(table: Tensor) -> Tensor:
        ops.paged_attention_v2(out, sums[0], sums[1], partial_out, *arguments(table))
        return out

    dense = tuple(
        cache.transpose(1, 2).contiguous()
        for cache in (key_cache.transpose(2, 3).flatten(3), value_cache.transpose(2, 3))
    )
    starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)

    def varlen(table: Tensor) -> Tensor:
        ops.paged_attention_varlen(
            *(out, query, *dense, starts, seq_lens, table, scale),
            kv_cache_dtype=case.kv_cache_dtype,
            k_scale=one,
            v_scale=one,
            max_query_len=1,
            max_seq_len=case.seq_len,
        )
        return out

    def sdpa(key: Tensor, value: Tensor) -> Tensor:
        grouped = case.num_heads != case.num_kv_heads
        result = F.scaled_dot_product_attention(
            query.unsqueeze(2), key, value, scale=scale, enable_gqa=grouped
        )
        return result.squeeze(2)

    def contiguous(table: Tensor) -> tuple[Tensor, Tensor]:
        key, value = key_cache[table.long()], value_cache[table.long()]
        key = key.permute(0, 2, 1, 4, 3, 5).reshape(case.num_seqs, case.num_kv_heads, -1, key_dim)
        value = value.permute(0, 2, 1, 4, 3).reshape(key.shape)
        return tuple(_values(case, tensor[:, :, : case.seq_len]) for tensor in (key, value))

    key_dim = case.head_size
    return {
        "paged_attention_v1": [partial(v1, table) for table in tables],
        "paged_attention_v2": [partial(v2, table) for table in tables],
        "paged_attention_varlen": [partial(varlen, table) for table in tables],
        PEER: [partial(sdpa, *contiguous(table)) for table in tables],
    }


def write_calls(case: WriteCase, device: torch.device, rotations: int) -> Calls:
    """The writers of both layouts; each set of buffers has tokens and slots of its own."""
    torch.manual_seed(0)
    blocks, block, heads = case.num_blocks, case.block_size, case.num_kv_heads
    x = 16 // case.cache_dtype.itemsize
    empty = partial(torch.zeros, dtype=case.cache_dtype, device=device)
    packed = (
        empty(blocks, heads, case.head_size // x, block, x),
        empty(blocks, heads, case.head_size, block),
    )
    nhd = empty(2, blocks, block, heads, case.head_size)
    one = torch.ones(1, device=device)
    calls: Calls = {"reshape_and_cache": [], "reshape_and_cache_flash": []}
    for i in range(rotations):
        tokens = torch.randn(2, case.num_tokens, heads, case.head_size, device=device)
        tokens = tokens.to(case.dtype)
        slots = (case.slot_mapping(device) + i * case.num_tokens) % (blocks * block)
        tail = slots, case.kv_cache_dtype, one, one
        calls["reshape_and_cache"].append(partial(ops.reshape_and_cache, *tokens, *packed, *tail))
        calls["reshape_and_cache_flash"].append(
            partial(ops.reshape_and_cache_flash, *tokens, *nhd, *tail)
        )
    return calls


def copy_calls(case: WriteCase, num_pairs: int, device: torch.device, rotations: int) -> Calls:
    """Random blocks to the other half of the cache, in all layers."""
    torch.manual_seed(0)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    half = case.num_blocks // 2
    calls = []
    for _ in range(rotations):
        caches = torch.zeros(2, NUM_LAYERS, *shape, dtype=case.dtype, device=device)
        sources, targets = (torch.randperm(half, device=device)[:num_pairs] for _ in range(2))
        mapping = torch.stack([sources, targets + half], dim=1)
        calls.append(partial(ops.copy_blocks, list(caches[0]), list(caches[1]), mapping))
    return {"copy_blocks": calls}


def gather_calls(
    case: WriteCase, num_seqs: int, seq_len: int, device: torch.device, rotations: int
) -> Calls:
    """The tokens of sequences, on random blocks, one after the other."""
    torch.manual_seed(0)
    shape = (case.num_blocks, case.block_size, case.num_kv_heads, case.head_size)
    blocks_per_seq = seq_len // case.block_size
    cu_seq_lens = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * seq_len
    calls = []
    for _ in range(rotations):
        cache = torch.zeros(shape, dtype=case.dtype, device=device)
        ids = torch.randperm(case.num_blocks, device=device)[: num_seqs * blocks_per_seq]
        out = cache.new_empty(num_seqs * seq_len, *shape[2:])
        tables = ids.view(num_seqs, blocks_per_seq).int()
        calls.append(partial(ops.gather_cache, cache, out, tables, cu_seq_lens))
    return {"gather_cache": calls}


def block_table_calls(device: torch.device, rotations: int) -> Calls:
    """What a decode step of NUM_SEQS sequences does to its tables: a matter of latency."""
    max_blocks = 512
    int32 = partial(torch.arange, dtype=torch.int32, device=device)
    calls: Calls = {}
    for _ in range(rotations):
        table = torch.zeros(NUM_SEQS, max_blocks, dtype=torch.int32, device=device)
        positions = torch.arange(NUM_SEQS, device=device)
        rows, starts = int32(NUM_SEQS), int32(NUM_SEQS) % max_blocks
        slots = torch.empty(NUM_SEQS, dtype=torch.int64, device=device)
        num_blocks = torch.full((NUM_SEQS,), max_blocks, dtype=torch.int32, device=device)
        one = {
            "compute_slot_mapping": partial(
                ops.compute_slot_mapping, int32(NUM_SEQS + 1), positions, table, slots, 16
            ),
            "apply_block_table_writes": partial(
                ops.apply_block_table_writes, table, rows, starts, rows + 1, rows
            ),
            "gather_block_tables": partial(
                ops.gather_block_tables, table, rows, num_blocks, torch.empty_like(table)
            ),
        }
        for name, call in one.items():
            calls.setdefault(name, []).append(call)
    return calls


def _cache(case: AttentionCase, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if case.kv_cache_dtype == "auto":
        return torch.randn(shape, dtype=case.dtype, device=device)
    stored = torch.randn(shape, dtype=torch.float16, device=device)
    return stored.to(FP8[case.kv_cache_dtype]).view(torch.uint8)


def _values(case: AttentionCase, stored: Tensor) -> Tensor:
    """What stored elements mean, as elements of the query's type."""
    if case.kv_cache_dtype != "auto":
        stored = stored.contiguous().view(FP8[case.kv_cache_dtype])
    return stored.to(case.dtype).contiguous()


def _block_bytes(case: WriteCase) -> int:
    """Of one cache tensor: keys or values."""
    return case.block_size * case.num_kv_heads * case.head_size * case.cache_dtype.itemsize
