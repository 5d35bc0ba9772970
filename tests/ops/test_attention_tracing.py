# SPDX-License-Identifier: Apache-2.0
"""The attention ops under opcheck, torch.compile, torch.export and the profiler."""

from __future__ import annotations

import pytest
import torch
from ops.attention_calls import decode_arguments, partition_buffers, positional

from paged_kv import ops
from paged_kv.testing import AttentionCase, make_case

VARLEN = AttentionCase("mixed", (1, 5), (20, 35))
DECODE = AttentionCase("decode", (1, 1, 1), (20, 600, 0), layout="vllm")


def varlen_arguments():
    inputs = make_case(VARLEN)
    return (torch.zeros(inputs.query.shape), *positional(inputs))


def v1_arguments():
    inputs = make_case(DECODE)
    return (torch.zeros(inputs.query.shape), *decode_arguments(DECODE, inputs))


def v2_arguments():
    out, *rest = v1_arguments()
    buffers = [buffer.nan_to_num() for buffer in partition_buffers(DECODE)]
    return (out, *buffers, *rest)


def plan_arguments():
    starts = torch.tensor([0, 1, 41], dtype=torch.int32)
    lens = torch.tensor([5000, 60], dtype=torch.int32)
    size = ops.attention_plan_size(2, 41, 4, 2, 64, 8)
    return starts, lens, 4, 2, 64, 8, torch.zeros(size, dtype=torch.int32)


def merge_arguments():
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(5, 3, 8, generator=generator) for _ in range(2)]
    lses = [torch.randn(3, 5, generator=generator) for _ in range(2)]
    return (
        torch.zeros(5, 3, 8), torch.zeros(3, 5), outputs[0], lses[0], outputs[1], lses[1],
    )  # fmt: skip


CALLS = {
    "paged_attention_varlen": varlen_arguments,
    "paged_attention_v1": v1_arguments,
    "paged_attention_v2": v2_arguments,
    "plan_attention": plan_arguments,
    "merge_attn_states": merge_arguments,
}


def op_of(name):
    return getattr(torch.ops.paged_kv, name).default


def clone(arguments):
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    arguments = CALLS[name]()
    # NaN poison makes opcheck's comparison of inputs before and after fail.
    arguments = tuple(
        a.nan_to_num() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    )
    torch.library.opcheck(op_of(name), arguments)


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "aot_eager") for name in CALLS]
    + [("paged_attention_varlen", "inductor"), ("merge_attn_states", "inductor")],
)
def test_compiles_without_graph_breaks(name, backend):
    op = op_of(name)

    def step(*arguments):
        op(*arguments)
        return next(a + 1 for a in arguments if isinstance(a, torch.Tensor))

    eager, compiled = clone(CALLS[name]()), clone(CALLS[name]())
    torch._dynamo.reset()
    result = torch.compile(step, fullgraph=True, backend=backend)(*compiled)
    torch.testing.assert_close(result, step(*eager), rtol=0, atol=0, equal_nan=True)
    assert_same(eager, compiled)


class Decode(torch.nn.Module):
    def forward(self, query, key_cache, value_cache, starts, seq_lens, block_tables):
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        ops.paged_attention_varlen(
            out, query, key_cache, value_cache, starts, seq_lens, block_tables, 0.125, lse=lse
        )
        merged = torch.empty_like(out)
        ops.merge_attn_states(merged, out, lse, out, lse)
        one = torch.ones(1)
        again = torch.empty_like(query)
        ops.paged_attention_v1(
            again, query, key_cache, value_cache, key_cache.shape[2], 0.125, block_tables,
            seq_lens, key_cache.shape[1], -1, None, "auto", one, one,
        )  # fmt: skip
        exp_sums = query.new_empty(*query.shape[:2], 2)
        max_logits, tmp_out = torch.empty_like(exp_sums), query.new_empty(*exp_sums.shape, 64)
        ops.paged_attention_v2(
            again, exp_sums, max_logits, tmp_out, query, key_cache, value_cache,
            key_cache.shape[2], 0.125, block_tables, seq_lens, key_cache.shape[1], -1, None,
            "auto", one, one,
        )  # fmt: skip
        plan = query.new_zeros(1000, dtype=torch.int32)
        ops.plan_attention(starts, seq_lens, 4, 2, 64, 8, plan)
        return out, merged, again, plan


def decode_inputs(num_seqs):
    inputs = make_case(AttentionCase("decode", (1,) * num_seqs, (40,) * num_seqs))
    return positional(inputs)[:-1]


def test_exports_with_a_dynamic_batch():
    """opcheck does not notice a size that was specialised; export does."""
    num_seqs, num_blocks = torch.export.Dim("num_seqs", min=2), torch.export.Dim("num_blocks")
    shapes = (
        {0: num_seqs},
        {0: num_blocks},
        {0: num_blocks},
        {0: num_seqs + 1},
        {0: num_seqs},
        {0: num_seqs},
    )
    program = torch.export.export(Decode(), decode_inputs(3), dynamic_shapes=shapes)
    for name in CALLS:
        assert f"paged_kv.{name}" in str(program.graph)
    inputs = decode_inputs(5)
    assert_same(program.module()(*inputs), Decode()(*inputs))


@pytest.mark.parametrize(
    "name", ["paged_attention_varlen", "paged_attention_v1", "paged_attention_v2"]
)
def test_runs_no_other_op(name):
    """No index, gather or copy of a cache inside: the profile of a call is the call."""
    arguments = CALLS[name]()
    op_of(name)(*arguments)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profile:
        op_of(name)(*arguments)
    names = {event.key for event in profile.key_averages() if "::" in event.key}
    assert names == {f"paged_kv::{name}"}


def test_fakes_refuse_what_the_kernel_refuses():
    out, query, *rest = varlen_arguments()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        for bad, message in (
            ((out, query[:, :3], *rest), "expected num_heads"),
            ((out, query.double(), *rest), "query: expected dtype"),
            ((out, query, rest[0][..., :32], *rest[1:]), "key_cache: expected head_size = 64"),
        ):
            with pytest.raises(RuntimeError, match=message):
                op_of("paged_attention_varlen")(*bad)
