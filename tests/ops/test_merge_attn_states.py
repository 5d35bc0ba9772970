# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from ops.attention_calls import poisoned, positional, varlen

from paged_kv import ops, reference
from paged_kv.testing import AttentionCase, assert_close_report, make_case

INF = float("inf")


def merge(prefix_output, prefix_lse, suffix_output, suffix_lse):
    output = poisoned(*prefix_output.shape, dtype=prefix_output.dtype)
    lse = poisoned(*prefix_lse.shape, dtype=torch.float32)
    ops.merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, lse)
    return output, lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_the_reference(dtype):
    """Including empty sides, marked by -inf or +inf, whose outputs are NaN and may not be read."""
    prefix, suffix = torch.randn(2, 9, 3, 20).to(dtype)
    prefix_lse, suffix_lse = 30 * torch.randn(2, 3, 9)
    prefix_lse[:, 0], suffix_lse[:, 1] = -INF, -INF
    prefix_lse[:, 2], suffix_lse[:, 2] = -INF, -INF
    prefix_lse[:, 3] = INF
    for token, (a, b) in enumerate(zip(prefix_lse[0], suffix_lse[0], strict=True)):
        if a.isinf():
            prefix[token] = torch.nan
        if b.isinf():
            suffix[token] = torch.nan
    output, lse = merge(prefix, prefix_lse, suffix, suffix_lse)
    expected = reference.merge_attn_states(prefix, prefix_lse, suffix, suffix_lse)
    assert_close_report(output, expected[0])
    assert_close_report(lse, expected[1], l2_error=1e-5)
    assert (output[2] == 0).all()
    assert (lse[:, 2] == -INF).all()


def test_joins_two_parts_of_the_keys():
    """Attention to a shared prefix, without a mask, and to the own tokens is attention to both."""
    case = AttentionCase("whole", (16,), (64,))
    inputs = make_case(case)
    whole, whole_lse = varlen(case, inputs)
    query, key_cache, value_cache, starts, _, tables, scale = positional(inputs)
    parts = []
    for causal, length, table in ((False, 48, tables), (True, 16, tables[:, 3:])):
        out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
        lens = torch.tensor([length], dtype=torch.int32)
        ops.paged_attention_varlen(
            out, query, key_cache, value_cache, starts, lens, table, scale, causal=causal, lse=lse
        )
        parts += [out, lse]
    output, lse = merge(*parts)
    assert_close_report(output, whole.double())
    assert_close_report(lse, whole_lse.double())


def test_strides_and_in_place():
    prefix, suffix = torch.randn(2, 4, 2, 8)
    lses = torch.randn(2, 4, 2)
    expected, expected_lse = merge(prefix, lses[0].T.contiguous(), suffix, lses[1].T.contiguous())
    ops.merge_attn_states(prefix, prefix, lses[0].T, suffix, lses[1].T, lses[0].T)
    assert torch.equal(prefix, expected)
    assert torch.equal(lses[0].T, expected_lse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suffix_lse": torch.zeros(2, 5)}, "suffix_lse: expected num_tokens = 4"),
        ({"prefix_output": torch.zeros(4, 2, 9)}, "prefix_output: expected head_size = 8"),
        ({"prefix_output": torch.zeros(4, 2, 8).half()}, "prefix_output: expected dtype Float"),
        ({"prefix_lse": torch.zeros(2, 4).double()}, "prefix_lse: expected dtype Float"),
        ({"output_lse": torch.zeros(1, 4).expand(2, 4)}, "output_lse: is written"),
    ],
)
def test_names_the_bad_argument(changes, message):
    good = {
        "output": torch.zeros(4, 2, 8),
        "prefix_output": torch.zeros(4, 2, 8),
        "prefix_lse": torch.zeros(2, 4),
        "suffix_output": torch.zeros(4, 2, 8),
        "suffix_lse": torch.zeros(2, 4),
    }
    with pytest.raises(RuntimeError, match=message):
        ops.merge_attn_states(**(good | changes))


@pytest.mark.usefixtures("_restored_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_number_of_threads(dtype):
    """300 rows of a token and head: 19 tasks of 16 at most."""
    prefix, suffix = torch.randn(2, 100, 3, 20).to(dtype)
    prefix_lse, suffix_lse = torch.randn(2, 3, 100)
    results = []
    for num_threads in (1, 2, 3, 7):
        torch.set_num_threads(num_threads)
        results.append(merge(prefix, prefix_lse, suffix, suffix_lse))
    for output, lse in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_empty():
    merge(torch.zeros(0, 2, 8), torch.zeros(2, 0), torch.zeros(0, 2, 8), torch.zeros(2, 0))


@pytest.mark.parametrize("other", [0.0, -INF, INF, torch.nan])
@pytest.mark.parametrize("nan_side", ["prefix", "suffix"])
def test_a_nan_lse_makes_the_row_nan(nan_side, other):
    """It comes from a model at fault; a row of zeros would hide that."""
    side = torch.ones(1, 1, 8)
    nan, lse = torch.full((1, 1), torch.nan), torch.full((1, 1), other)
    sides = (side, nan, side, lse) if nan_side == "prefix" else (side, lse, side, nan)
    output, merged_lse = merge(*sides)
    assert output.isnan().all()
    assert merged_lse.isnan().all()
