# SPDX-License-Identifier: Apache-2.0
"""paged_attention_v1, _v2 and _varlen against the float64 reference, over the shared cases.

Every case has NaN in all cache slots that no sequence holds and absurd ids in all table entries
that are not used, so these are tests of what is read as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.attention_calls import (
    decode,
    decode_arguments,
    dequantised,
    options_of,
    partition_buffers,
    poisoned,
    positional,
    reference_arguments,
    v1,
    v2,
    varlen,
)
from ops.cases import decode_cases_by_backend, varlen_cases_by_backend

from paged_kv import reference
from paged_kv.testing import AttentionCase, assert_close_report, make_case

SPARSITIES = [
    # local_blocks, vert_stride, block_size, head_sliding_step, tp_rank
    (1, 4, 64, 0, 0),
    (2, 8, 64, 1, 0),
    (16, 8, 32, 0, 0),
    (1, 3, 16, 2, 3),
    (0, 3, 32, -1, 0),
    (1, 5, 16, -2, 1),
]


on_each_backend = pytest.mark.parametrize(
    ("backend", "case"), decode_cases_by_backend(), indirect=["backend"]
)
each_version = pytest.mark.parametrize("version", ["v1", "v2"])


def expected_v1(case, inputs, sparsity=None):
    return reference.paged_attention_v1(
        *reference_arguments(case, inputs), alibi_slopes=inputs.alibi_slopes, sparsity=sparsity
    )


@pytest.mark.parametrize(("backend", "case"), varlen_cases_by_backend(), indirect=["backend"])
def test_varlen_matches_the_reference(backend, case):
    inputs = make_case(case)
    out, lse = varlen(case, inputs, backend=backend)
    expected_out, expected_lse = reference.paged_attention_varlen(
        *positional(dequantised(case, inputs)), **options_of(case, inputs)
    )
    assert_close_report(out, expected_out, name="out")
    assert_close_report(lse, expected_lse, name="lse", l2_error=1e-5)


@on_each_backend
def test_v1_matches_the_reference(backend, case):
    inputs = make_case(case)
    assert_close_report(v1(case, inputs, backend=backend), expected_v1(case, inputs))


@on_each_backend
def test_v2_matches_the_reference_and_fills_its_partitions(backend, case):
    inputs = make_case(case)
    out, (exp_sums, max_logits, tmp_out) = v2(case, inputs, backend=backend)
    # bf16 is rounded twice: in tmp_out and in out.
    bound = 1.2e-2 if case.dtype == torch.bfloat16 else None
    assert_close_report(out, expected_v1(case, inputs), max_error=bound)

    expected = reference.paged_attention_v2(
        *reference_arguments(case, inputs), alibi_slopes=inputs.alibi_slopes
    )
    # NaN on both sides: partitions past the end are left alone.
    assert_close_report(exp_sums, expected[0], name="exp_sums", l2_error=1e-5)
    assert_close_report(max_logits, expected[1], name="max_logits", l2_error=1e-5)
    assert_close_report(tmp_out, expected[2], name="tmp_out")


@pytest.mark.parametrize("sparsity", SPARSITIES, ids=str)
@each_version
def test_block_sparse_patterns(backend, sparsity, version):
    local_blocks, vert_stride, block_size, step, tp_rank = sparsity
    case = AttentionCase(
        "sparse", (1,) * 5, (0, 1, 100, 515, 1100), num_heads=6, layout="vllm", head_size=32
    )
    inputs = make_case(case)
    pattern = reference.BlockSparsity(local_blocks, vert_stride, block_size, step, tp_rank)
    arguments = (tp_rank, local_blocks, vert_stride, block_size, step)
    actual = decode(version, case, inputs, *arguments, backend=backend)
    assert_close_report(actual, expected_v1(case, inputs, pattern))
    # The pattern does hide something; otherwise this test would show nothing.
    assert not torch.allclose(actual, v1(case, inputs))


def test_a_hidden_block_is_not_read(backend):
    """NaN in blocks that the pattern hides from all heads does not reach the output."""
    case = AttentionCase("sparse", (1,), (256,), 2, 1, block_size=16, layout="vllm")
    inputs = make_case(case)
    pattern = reference.BlockSparsity(local_blocks=1, vert_stride=4, block_size=64)
    visible = pattern.visible(256, 2, 1).any(0)
    assert not visible.all()
    for block in range(16):
        if not visible[block * 16]:
            inputs.value_cache[inputs.block_tables[0, block]] = torch.nan
            inputs.key_cache[inputs.block_tables[0, block]] = torch.nan
    assert v1(case, inputs, 0, 1, 4, 64, 0, backend=backend).isfinite().all()


def test_v2_accepts_more_partitions_than_needed(backend):
    case = AttentionCase("decode", (1, 1), (600, 30), layout="vllm")
    inputs = make_case(case)
    buffers = partition_buffers(case, num_partitions=5)
    out = poisoned(*inputs.query.shape, dtype=case.dtype)
    backend.paged_attention_v2(out, *buffers, *decode_arguments(case, inputs))
    assert torch.equal(out, v2(case, inputs, backend=backend)[0])
    assert buffers[0][:, :, 2:].isnan().all()


@pytest.mark.parametrize("seq_len", [3, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_query_of_nan_gives_nan(backend, dtype, seq_len):
    """All its logits are NaN: it must not pass for a query without keys, which gives zeros."""
    case = AttentionCase("nan", (1, 1), (seq_len, seq_len), layout="vllm", dtype=dtype)
    inputs = make_case(case)
    inputs.query[0] = torch.nan
    results = [decode(version, case, inputs, backend=backend) for version in ("v1", "v2")]
    dense = replace(case, layout="hnd")
    dense_inputs = make_case(dense)
    dense_inputs.query[0] = torch.nan
    out, lse = varlen(dense, dense_inputs, backend=backend)
    assert lse[:, 0].isnan().all()
    assert lse[:, 1].isfinite().all()
    for result in [*results, out]:
        assert result[0].isnan().all()
        assert result[1].isfinite().all()


def test_the_largest_window_is_no_window(backend):
    """Also for queries before the first key, whose position minus the window is below 2**63."""
    case = AttentionCase("wide", (5, 1), (2, 20), causal=False)
    inputs = make_case(case)
    expected = varlen(case, inputs, backend=backend)[0]
    wide = varlen(case, inputs, backend=backend, sliding_window=2**63 - 1)[0]
    assert torch.equal(wide, expected)
