# SPDX-License-Identifier: Apache-2.0
"""Recorded functions: the same bits, no allocation, one memory, and what cannot be recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.graph_stand_in import fill_with_garbage
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from paged_kv.engine.op_recorder import OpRecorder

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def recorder():
    return OpRecorder(CPU)


def allocations(run):
    """Ops, also those within others, that allocate more than a number (as for a Python factor)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return [event.name for event in profiled.events() if event.self_cpu_memory_usage > 8]


def assert_repeats(recorder, function, *shape, dtype=torch.float32):
    """That a replay computes what a call does, for other values."""
    x = torch.randn(shape).to(dtype)
    result = torch.empty_like(function(x))
    replay = recorder.capture(lambda: result.copy_(function(x)))
    assert torch.equal(result, function(x)), "recording computes"
    for _ in range(2):
        x.copy_(torch.randn(shape))
        fill_with_garbage(recorder.arena)
        replay()
        assert torch.equal(result, function(x))
    return replay


FUNCTIONS = {
    "elementwise": lambda x: (x * 2.0 + 1.0).cos() - x.sin() / 3.0,
    "in place": lambda x: (x + 1.0).mul_(x).add_(x, alpha=0.5),
    "views": lambda x: (x * 1.0).t()[1:, None].transpose(0, 2).squeeze(1).reshape(-1),
    "reshape that copies": lambda x: (x * 1.0).t().reshape(-1),
    "cat": lambda x: torch.cat([x, -x, x.exp()], dim=-1),
    "to and back": lambda x: x.to(torch.bfloat16).float(),
    "clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous() + 1.0,
    "linear": lambda x: functional.linear(x, torch.arange(48.0).view(8, 6).to(x)),
    "linear with bias": lambda x: functional.linear(
        x, torch.ones(2, 6, dtype=x.dtype), torch.full((2,), 3.0, dtype=x.dtype)
    ),
    "pad": lambda x: functional.pad(x, (0, 0, 0, 3)),
    "several results": lambda x: x.topk(2).values + x.max(dim=-1, keepdim=True).values,
    "sums of another type": lambda x: x.sum(-1, dtype=torch.float64),
    "where and masks": lambda x: torch.where(x > 0.0, x, torch.zeros_like(x)),
    "factories": lambda x: x + torch.arange(6) + torch.full((6,), 2.0) + x.new_zeros(6),
    "indices": lambda x: x[x.argsort()[:, 0] % 4] + x.index_select(0, torch.arange(4)),
    "written before read": lambda x: torch.empty_like(x).copy_(x).add_(1.0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_computes_what_a_call_does(recorder, name, dtype):
    assert_repeats(recorder, FUNCTIONS[name], 4, 6, dtype=dtype)


# torch has some other ops for given results, too, but these compute new ones and copy them.
@pytest.mark.parametrize("name", list(FUNCTIONS)[: list(FUNCTIONS).index("pad")])
def test_a_replay_allocates_nothing(recorder, name):
    replay = assert_repeats(recorder, FUNCTIONS[name], 4, 6)
    assert allocations(lambda: FUNCTIONS[name](torch.ones(4, 6))) != []
    assert allocations(replay) == []


def test_an_op_that_only_gives_new_tensors_is_repeated_and_copied(recorder):
    x, result = torch.randn(2, 6), torch.empty(2, 3)
    with_list = torch.ops.aten.split_copy.Tensor  # its variant for given results takes a list

    replay = recorder.capture(lambda: result.copy_(with_list(x, 3, dim=1)[1] + 1.0))
    x.copy_(torch.randn(2, 6))
    replay()
    assert torch.equal(result, x[:, 3:] + 1.0)


def test_numbers_and_shapes_are_those_of_the_recording(recorder):
    x, result, factor = torch.ones(3), torch.zeros(3), [2.0]
    replay = recorder.capture(lambda: result.copy_(x * factor[0]))
    factor[0] = 5.0
    replay()
    assert result.tolist() == [2.0] * 3


def chain(num_layers, num_rows):
    """Layers whose tensors live until the next layer has read them."""
    x, result = torch.ones(num_rows, 100), torch.empty(num_rows, 100)

    def run():
        hidden = x
        for _ in range(num_layers):
            wide = torch.cat([hidden, hidden], dim=-1)
            hidden = wide[:, :100] * 0.5 + wide[:, 100:] * 0.5
        result.copy_(hidden)

    return run


def test_memory_does_not_grow_with_the_number_of_layers(recorder):
    recorder.capture(chain(2, 3))
    num_bytes = recorder.arena.num_bytes
    assert num_bytes < 3 * 100 * 4 * 6
    recorder.capture(chain(40, 3))
    assert recorder.arena.num_bytes == num_bytes


def test_recordings_share_one_memory_and_stay_right_when_it_grows(recorder):
    small, large = torch.randn(2, 6), torch.randn(2000, 6)
    small_result, large_result = torch.empty(2, 12), torch.empty(2000, 12)

    def twice(x):
        return torch.cat([x * 3.0, x + 1.0], dim=-1) * 2.0

    replay_small = recorder.capture(lambda: small_result.copy_(twice(small)))
    before = recorder.arena.num_bytes
    replay_large = recorder.capture(lambda: large_result.copy_(twice(large)))
    needed = recorder.arena.num_bytes
    assert needed > 100 * before
    recorder.capture(lambda: large_result.copy_(twice(large)))
    assert recorder.arena.num_bytes == needed
    for x in (small, large):
        x.normal_()
    for replay in (replay_small, replay_large, replay_small):
        small_result.zero_(), large_result.zero_()
        fill_with_garbage(recorder.arena)
        replay()
        assert torch.equal(small_result, twice(small)) == (replay is replay_small)
        assert torch.equal(large_result, twice(large)) == (replay is replay_large)


def test_the_memory_of_a_parameter_is_kept_whatever_the_parameter_is_given():
    module, x, result = nn.Linear(16, 16, bias=False), torch.randn(1, 16), torch.empty(1, 16)
    module.requires_grad_(requires_grad=False)
    replay = OpRecorder(CPU).capture(lambda: result.copy_(x.mm(module.weight)))
    expected = x.mm(module.weight)
    storage = StorageWeakRef(module.weight.untyped_storage())
    module.weight.data = torch.zeros(16, 16)
    assert not storage.expired()
    replay()
    assert torch.equal(result, expected)
    del replay
    assert storage.expired()


def test_what_is_written_to_a_tensor_in_place_is_seen(recorder):
    weight, result = torch.ones(3), torch.empty(3)
    replay = recorder.capture(lambda: result.copy_(weight * 2.0))
    weight.fill_(4.0)
    replay()
    assert result.tolist() == [8.0] * 3


LOOKS = {
    "item": lambda x: x[0, 0].item(),
    "int": lambda x: int(x[0, 0]),
    "bool": lambda x: bool(x[0, 0] > 0.0),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0.0],
    "masked_select": lambda x: x.masked_select(x > 0.0),
    "unique": lambda x: x.unique(),
    "values of Python's": lambda x: x + torch.tensor(1.0),
    "values of numpy's": lambda x: x + torch.from_numpy(np.ones(6, np.float32)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_looks_at_values_are_refused_and_leave_the_recorder_usable(recorder, name):
    x = torch.ones(4, 6)
    assert_repeats(recorder, torch.exp, 4, 6)
    size = recorder.arena.num_bytes
    with pytest.raises(RuntimeError, match=r"aten\..*: a recording cannot hold what looks at"):
        recorder.capture(lambda: LOOKS[name](x.exp()))
    assert recorder.arena.num_bytes == size
    LOOKS[name](x)  # no mode is left on
    assert_repeats(recorder, torch.cos, 4, 6)


def test_tensors_elsewhere_are_refused(recorder):
    elsewhere = torch.ones(3, device="meta")
    with pytest.raises(RuntimeError, match="a recording on cpu cannot hold a tensor on meta"):
        recorder.capture(lambda: elsewhere.add_(1.0))


def test_an_op_that_writes_and_makes_tensors_is_refused(recorder):
    library = torch.library.Library("test_op_recorder", "DEF")
    library.define("increment_and_copy(Tensor(a!) x) -> Tensor")
    library.impl("increment_and_copy", lambda x: x.add_(1).clone(), "CPU")
    op = torch.ops.test_op_recorder.increment_and_copy
    with pytest.raises(RuntimeError, match="writes to arguments and makes tensors"):
        recorder.capture(lambda: op(torch.ones(3)))


def test_errors_of_the_function_come_through(recorder):
    def run():
        torch.ones(3).exp()
        msg = "no luck"
        raise ValueError(msg)

    with pytest.raises(ValueError, match="no luck"):
        recorder.capture(run)
    assert_repeats(recorder, torch.cos, 4, 6)
