# SPDX-License-Identifier: Apache-2.0
"""Results that may not depend on something are the same bits, whatever it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_cases import DTYPES, same_bits
from ops.attention_calls import poisoned, positional, v1, v2, varlen
from ops.backends import BACKENDS

from paged_kv import ops
from paged_kv.testing import AttentionCase, make_case

MIXED = AttentionCase(
    "mixed", (1, 40, 1, 5), (80, 130, 600, 5), num_heads=6, head_size=32, sinks=True
)
DECODE = AttentionCase("decode", (1,) * 4, (3, 64, 600, 1100), num_heads=6, head_size=32)
NUMBERS_OF_THREADS = (1, 2, 3, 7)


def useful_threads(case: AttentionCase) -> int:
    """How many the kernel takes if it has them (max_useful_threads of attention_workers.h)."""
    num_logits = sum(q * k for q, k in zip(case.query_lens, case.seq_lens, strict=True))
    return 1 + num_logits * case.num_heads * case.head_size // 2**18


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *(("cpu", layout) for layout in ("vllm", "panels")),
        *((name, layout) for name in BACKENDS for layout in ("nhd", "hnd")),
    ],
    indirect=["backend"],
)
def test_placement_of_blocks(backend, layout):
    """The same keys in other physical blocks, 20 times."""
    block_size = 16 if layout == "panels" else 8
    sizes = {"head_size": 32, "block_size": block_size}
    case = AttentionCase("placed", (1, 20), (100, 70), **sizes, layout=layout)
    assert_placement_changes_no_bit(case, 20, backend)


@pytest.mark.parametrize("layout", ["vllm", "nhd", "hnd", "panels"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_placement_of_blocks_of_any_type(dtype, kv_cache_dtype, layout):
    """Other types and layouts are read by other code: as they are, converted or transposed.

    What 16-bit outputs round away, the float32 LSE of 80 (query, head) shows.
    """
    case = AttentionCase(
        "placed",
        (1, 20),
        (70, 1000),
        head_size=32,
        block_size=16 if layout == "panels" else 8,
        layout=layout,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
    )
    assert_placement_changes_no_bit(case, 5, ops)


def assert_placement_changes_no_bit(case, num_placements, backend):
    out, lse = varlen(case, make_case(case), backend=backend)
    for placement in range(1, num_placements + 1):
        other = make_case(case, placement=placement)
        other_out, other_lse = varlen(case, other, backend=backend)
        assert torch.equal(out, other_out)
        assert torch.equal(lse, other_lse)


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "fp8")],
)
@pytest.mark.parametrize("window", [0, 45], ids=["", "window"])
def test_layout(dtype, kv_cache_dtype, window):
    """In nhd the heads take turns within a tile of keys, elsewhere from tile to tile.

    Panels have an order of sums of their own.
    """
    case = AttentionCase(
        "laid out",
        (1, 20),
        (100, 70),
        dtype=dtype,
        sliding_window=window,
        kv_cache_dtype=kv_cache_dtype,
    )
    nhd, hnd, x_packed = (
        varlen(each, make_case(each))[0]
        for each in (replace(case, layout=layout) for layout in ("nhd", "hnd", "vllm"))
    )
    assert torch.equal(nhd, hnd)
    assert torch.equal(nhd, x_packed)


@pytest.mark.usefixtures("_restored_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "int8"])
def test_number_of_threads(dtype, kv_cache_dtype):
    """Long sequences among short ones: they are cut if there are threads, and joined again."""
    types = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "head_size": 64}
    mixed = replace(MIXED, **types)
    decode = replace(DECODE, seq_lens=(3, 64, 2100, 3000), **types)
    packed, panels = (replace(decode, layout=name) for name in ("vllm", "panels"))
    for case in (mixed, decode):
        assert useful_threads(case) >= max(NUMBERS_OF_THREADS)
    mixed_panels = replace(mixed, layout="panels")
    cases = (mixed, decode, packed, panels, mixed_panels)
    mixed_inputs, inputs, packed_inputs, panels_inputs, mixed_panels_inputs = map(make_case, cases)
    results = []
    for num_threads in NUMBERS_OF_THREADS:
        torch.set_num_threads(num_threads)
        out, buffers = v2(decode, inputs)
        packed_out, packed_buffers = v2(packed, packed_inputs)
        results.append(
            (
                *varlen(mixed, mixed_inputs),
                *varlen(decode, inputs),
                v1(decode, inputs),
                v1(packed, packed_inputs),
                v1(panels, panels_inputs),
                *varlen(mixed_panels, mixed_panels_inputs),
                *(out, *buffers),
                *(packed_out, *packed_buffers),
            )
        )
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert same_bits(a, b)


def test_batch_around_a_sequence(backend):
    """Each sequence alone, and the batch in reverse order, give what the batch gives."""
    inputs = make_case(MIXED)
    out, _ = varlen(MIXED, inputs, backend=backend)
    starts = inputs.query_start_loc.tolist()
    order = [3, 2, 1, 0]
    for chosen in ([0], [1], [2], [3], order):
        rows = [torch.arange(starts[seq], starts[seq + 1]) for seq in chosen]
        query = inputs.query[torch.cat(rows)]
        lens = [len(r) for r in rows]
        part = poisoned(*query.shape, dtype=query.dtype)
        backend.paged_attention_varlen(
            part,
            query,
            inputs.key_cache,
            inputs.value_cache,
            torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32),
            inputs.seq_lens[chosen],
            inputs.block_tables[chosen],
            inputs.scale,
            sinks=inputs.sinks,
        )
        assert torch.equal(part, out[torch.cat(rows)])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("window", [0, 30])
def test_chunks_of_a_prompt(backend, chunk, window):
    """A prompt in one step, in chunks, or token by token: what a prefix-cache hit relies on."""
    case = AttentionCase("prompt", (150,), (150,), head_size=32, sliding_window=window)
    inputs = make_case(case)
    whole, _ = varlen(case, inputs, backend=backend)
    for begin in range(0, 150, chunk):
        end = min(begin + chunk, 150)
        part = poisoned(end - begin, *whole.shape[1:], dtype=case.dtype)
        backend.paged_attention_varlen(
            part,
            inputs.query[begin:end],
            inputs.key_cache,
            inputs.value_cache,
            torch.tensor([0, end - begin], dtype=torch.int32),
            torch.tensor([end], dtype=torch.int32),
            inputs.block_tables,
            inputs.scale,
            sliding_window=window,
        )
        assert torch.equal(part, whole[begin:end])


def test_v1_equals_varlen():
    inputs = make_case(DECODE)
    assert torch.equal(v1(DECODE, inputs), varlen(DECODE, inputs)[0])


def test_plan_workspace_and_split_change_nothing():
    inputs = make_case(MIXED)
    size = ops.attention_plan_size(4, 47, 6, 2, 32, 16)
    plan = torch.zeros(size, dtype=torch.int32)
    ops.plan_attention(inputs.query_start_loc, inputs.seq_lens, 6, 2, 32, 16, plan)
    workspace = torch.empty(1024, dtype=torch.uint8)
    planned, _ = varlen(MIXED, inputs, plan=plan, workspace=workspace, split_tokens=512)
    assert torch.equal(planned, varlen(MIXED, inputs)[0])


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("query_len", [1, 5, 40])
def test_a_window_counts_the_query_itself(backend, window, query_len):
    """Equal logits and one-hot values show exactly which keys are seen."""
    seq_len = 40
    case = AttentionCase(
        "window", (query_len,), (seq_len,), 1, 1, head_size=64, sliding_window=window
    )
    inputs = make_case(case)
    inputs.query.zero_()
    pos = torch.arange(seq_len)
    ids = inputs.block_tables[0, pos // 16].long()
    inputs.value_cache[ids, pos % 16, 0] = torch.eye(seq_len, 64)
    out, _ = varlen(case, inputs, backend=backend)
    for i in range(query_len):
        query_pos = seq_len - query_len + i
        seen = set((out[i, 0] > 0).nonzero().flatten().tolist())
        assert seen == set(range(max(0, query_pos - window + 1), query_pos + 1))


def test_blocks_before_the_window_are_not_used(backend):
    """Their table entries may be anything: the host gives those blocks away."""
    case = AttentionCase("window", (3,), (100,), sliding_window=20)
    inputs = make_case(case)
    expected, _ = varlen(case, inputs, backend=backend)
    inputs.block_tables[0, : (97 - 19) // 16] = 2_147_480_000
    assert torch.equal(varlen(case, inputs, backend=backend)[0], expected)


def test_padding_rows_are_left_alone(backend):
    case = AttentionCase("padded", (2, 1), (20, 5))
    inputs = make_case(case)
    query = torch.cat([inputs.query, torch.full_like(inputs.query, torch.nan)])
    out = torch.full_like(query, 7.0)
    backend.paged_attention_varlen(out, query, *positional(inputs)[1:])
    assert torch.equal(out[:3], varlen(case, inputs, backend=backend)[0])
    assert (out[3:] == 7).all()


def test_strided_everything(backend):
    """Non-contiguous outputs, LSE, tables and lengths are honoured."""
    case = AttentionCase("strided", (3, 1), (50, 20))
    inputs = make_case(case)
    out, lse = varlen(case, inputs, backend=backend)

    def spread(tensor):
        wide = tensor.new_zeros(*tensor.shape, 2)
        wide[..., 0] = tensor
        return wide[..., 0]

    other_out = torch.zeros(4, 4, 128)[:, :, :64]
    other_lse = torch.zeros(4, 4).T
    backend.paged_attention_varlen(
        other_out,
        inputs.query,
        inputs.key_cache,
        inputs.value_cache,
        spread(inputs.query_start_loc),
        spread(inputs.seq_lens),
        spread(inputs.block_tables),
        inputs.scale,
        lse=other_lse,
    )
    assert torch.equal(other_out, out)
    assert torch.equal(other_lse, lse)
