# SPDX-License-Identifier: Apache-2.0
"""Attention where a size or a number is at an edge of what its type or a kernel's loop holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ops.attention_calls import (
    decode,
    options_of,
    positional,
    reference_arguments,
    varlen,
)

from paged_kv import ops, reference
from paged_kv.testing import AttentionCase, assert_close_report, make_case

# One more than a signed 16-bit number holds.
LONG = AttentionCase("long", (1, 1), (32769, 7), num_heads=2, num_kv_heads=1, head_size=32)
# One more than an unsigned byte holds, and of no power of two.
MANY = AttentionCase("many", (1,) * 257, tuple(seq % 40 for seq in range(257)), head_size=32)


@pytest.mark.parametrize(
    "case", [LONG, replace(LONG, name="chunks", query_lens=(2, 2)), MANY], ids=str
)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
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
