# SPDX-License-Identifier: Apache-2.0
"""paged_attention_varlen, where each query points at one key, which wins against all others.

Then the output is that key's value, bit for bit: a key or value that is taken from a wrong slot,
left out or added twice is seen whatever its size.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.attention_calls import dequantised, varlen

from paged_kv.testing import AttentionCase, AttentionInputs, make_case

SEQ_LEN = 1030
BLOCK_SIZE = 8
TILE, SPLIT = 64, 512
FORMATS = [
    (torch.float32, "auto"),
    (torch.float16, "auto"),
    (torch.bfloat16, "auto"),
    (torch.float32, "fp8"),
    (torch.bfloat16, "fp8"),
    (torch.float16, "fp8_e5m2"),
    (torch.float32, "int8"),
    (torch.bfloat16, "int8"),
]


def needle_positions() -> torch.Tensor:
    """The first two tiles of keys, the end, all around the splits, and a sample."""
    splits = [pos for edge in (SPLIT, 2 * SPLIT) for pos in range(edge - 6, edge + 6)]
    sample = torch.randperm(SEQ_LEN, generator=torch.Generator().manual_seed(1))[:60].tolist()
    chosen = {*range(2 * TILE + 2), *splits, *range(SEQ_LEN - 10, SEQ_LEN), *sample}
    return torch.tensor(sorted(chosen))


def rows_at(inputs: AttentionInputs, cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What an nhd or hnd cache holds for the only sequence: ``[n, num_kv_heads, head_size]``."""
    return cache[inputs.block_tables[0].long()[positions // BLOCK_SIZE], positions % BLOCK_SIZE]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(("dtype", "kv_cache_dtype"), FORMATS)
def test_each_query_finds_its_needle(dtype, kv_cache_dtype, query_len, layout):
    """One sequence a needle, all in the same blocks; its queries point at keys side by side."""
    one = AttentionCase(
        "needle",
        (1,),
        (SEQ_LEN,),
        block_size=BLOCK_SIZE,
        layout=layout,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        head_scales=True,
    )
    inputs = make_case(one)
    seen = dequantised(one, inputs)
    last = needle_positions()
    # Query i of a sequence sees the needle of the last one less what is between the two queries.
    needles = (last[:, None] + torch.arange(1 - query_len, 1)).clamp(min=0).flatten()
    keys = rows_at(inputs, seen.key_cache, needles).float()
    group_size = one.num_heads // one.num_kv_heads
    directions = torch.nn.functional.normalize(keys, dim=-1).repeat_interleave(group_size, dim=1)
    num_seqs = len(last)
    case = replace(one, query_lens=(query_len,) * num_seqs, seq_lens=(SEQ_LEN,) * num_seqs)
    out, _ = varlen(
        case,
        replace(
            inputs,
            query=(1000 * directions).to(dtype),
            query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
            seq_lens=inputs.seq_lens.expand(num_seqs),
            block_tables=inputs.block_tables.expand(num_seqs, -1),
            scale=1.0,
        ),
    )
    values = rows_at(inputs, seen.value_cache, needles).to(dtype)
    assert torch.equal(out, values.repeat_interleave(group_size, dim=1))
