# SPDX-License-Identifier: Apache-2.0
"""What a decode step must not depend on: the width of the block table, the size of the pool.

And what it depends on, the number of tokens, in proportion. Rows are compared with ours on the
shortest batch at the same rate, or on a table just wide enough over a pool just large enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import paged_kv.ops
from timing import Row, Timing, call_sampler, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 8, 128, 16
SHORTEST = 4096  # tokens; above what fits into a CPU's cache
TABLE_COLUMNS = 1 << 20
SETTLE_S = 0.01  # after which threads of the last call no longer spin


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of equal length, bf16, in blocks scattered over ``num_blocks``."""

    num_seqs: int
    seq_len: int
    num_columns: int
    num_blocks: int

    @classmethod
    def of(cls, num_seqs: int, seq_len: int) -> Batch:
        """With a table and a pool that are just large enough."""
        columns = -(-seq_len // BLOCK_SIZE)
        return cls(num_seqs, seq_len, columns, num_seqs * columns)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return 2 * 2 * self.num_seqs * self.seq_len * NUM_KV_HEADS * HEAD_SIZE

    def make_step(self) -> Callable[[], object]:
        """Random numbers, and the call."""
        torch.manual_seed(0)
        used = -(-self.seq_len // BLOCK_SIZE)
        ids = torch.randperm(self.num_blocks)[: self.num_seqs * used].int()
        shape = (self.num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        caches = paged_kv.allocate_kv_cache(*shape, dtype=torch.bfloat16)
        for cache in caches:
            cache[ids.long()] = torch.randn(len(ids), *shape[1:]).bfloat16()
        tables = torch.zeros(self.num_seqs, self.num_columns, dtype=torch.int32)
        tables[:, :used] = ids.view(self.num_seqs, used)
        query = torch.randn(self.num_seqs, NUM_HEADS, HEAD_SIZE).bfloat16()
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32)
        lens = torch.full((self.num_seqs,), self.seq_len, dtype=torch.int32)
        out = torch.empty_like(query)
        return lambda: paged_kv.ops.paged_attention_varlen(
            out, query, *caches, starts, lens, tables, HEAD_SIZE**-0.5
        )


def rows(num_samples: int) -> Iterator[Row]:
    """Decode steps, rated in bytes of KV a second."""
    longer = [(1, SHORTEST << i) for i in range(1, 5)] + [(16, SHORTEST)]
    batches = {f"{n} x {length} tokens": Batch.of(n, length) for n, length in longer}
    base = Batch.of(1, SHORTEST)
    for name, batch in batches.items():
        timings = _time({"ours": batch, "base": base}, num_samples)
        factor = batch.kv_bytes / base.kv_bytes
        yield _row(name, batch, timings["ours"], {"in proportion": _times(timings["base"], factor)})
    base = Batch.of(4, SHORTEST)
    wide = Batch(4, SHORTEST, TABLE_COLUMNS, base.num_blocks)
    large = Batch(4, SHORTEST, base.num_columns, 16 * base.num_blocks)
    for name, batch in {"table of 2^20 columns": wide, "pool of 16 x the blocks": large}.items():
        timings = _time({"ours": batch, "base": base}, num_samples)
        yield _row(name, batch, timings["ours"], {"just large enough": timings["base"]})


def _time(batches: dict[str, Batch], num_samples: int) -> dict[str, Timing]:
    samplers = {name: call_sampler(batch.make_step()) for name, batch in batches.items()}
    return take_turns(samplers, num_samples, settle_s=SETTLE_S)


def _times(timing: Timing, factor: float) -> Timing:
    return Timing(
        timing.median_s * factor, timing.p10_s * factor, timing.p90_s * factor, timing.num_samples
    )


def _row(name: str, batch: Batch, ours: Timing, references: dict[str, Timing]) -> Row:
    rate = batch.kv_bytes / ours.median_s / 1e9
    return Row(case=name, ours=ours, references=references, rate=rate, rate_unit="GB/s")
