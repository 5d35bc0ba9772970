# SPDX-License-Identifier: Apache-2.0
"""Attention where a size or a number is at an edge of what its type or a kernel's loop holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.attention_calls import (
    decode,
    options_of,
    positional,
    reference_arguments,
    varlen,
)

from paged_kv import ops, reference
from paged_kv.testing import AttentionCase, assert_close_report, make_case

INF = float("inf")

# One more than a signed 16-bit number holds.
LONG = AttentionCase("long", (1, 1), (32769, 7), num_heads=2, num_kv_heads=1, head_size=32)
# One more than an unsigned byte holds, and of no power of two.
MANY = AttentionCase("many", (1,) * 257, tuple(seq % 40 for seq in range(257)), head_size=32)


@pytest.mark.parametrize(
    "case", [LONG, replace(LONG, name="chunks", query_lens=(2, 2)), MANY], ids=str
)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm", "panels"])
def test_varlen(case, layout):
    case = replace(case, layout=layout)
    inputs = make_case(case)
    out, lse = varlen(case, inputs)
    expected, expected_lse = reference.paged_attention_varlen(
        *positional(inputs), **options_of(case, inputs)
    )
    assert_close_report(out, expected)
    assert_close_report(lse, expected_lse, l2_error=1e-5)


@pytest.mark.parametrize("case", [LONG, MANY], ids=str)
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_decode(case, version):
    case = replace(case, layout="vllm")
    inputs = make_case(case)
    expected = reference.paged_attention_v1(*reference_arguments(case, inputs))
    assert_close_report(decode(version, case, inputs, backend=ops), expected)


SINKS = AttentionCase("sinks", (1, 3, 1), (600, 40, 0), num_heads=4, head_size=32)


def with_sinks(*sinks):
    return replace(make_case(SINKS), sinks=torch.tensor(sinks))


def test_a_sink_of_minus_infinity_is_no_sink(backend):
    inputs = with_sinks(-INF, -INF, -INF, -INF)
    out, lse = varlen(SINKS, inputs, backend=backend)
    expected, expected_lse = varlen(SINKS, replace(inputs, sinks=None), backend=backend)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_a_sink_of_infinity_takes_all_weight(backend):
    """As the limit of ever larger sinks; queries without keys stay as they are without sinks."""
    inputs = with_sinks(INF, 0.5, INF, -INF)
    out, lse = varlen(SINKS, inputs, backend=backend)
    assert (out[:, [0, 2]] == 0).all()
    assert (lse[[0, 2], :4] == INF).all()
    assert (lse[:, 4] == -INF).all()
    expected, expected_lse = reference.paged_attention_varlen(
        *positional(inputs), **options_of(SINKS, inputs)
    )
    assert_close_report(out, expected)
    assert_close_report(lse, expected_lse, l2_error=1e-5)
