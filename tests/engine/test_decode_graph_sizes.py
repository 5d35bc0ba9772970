# SPDX-License-Identifier: Apache-2.0
"""Graphs of decode steps without an engine: padding, batch sizes, and what captures on a GPU."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from paged_kv.engine import EngineConfig, config, decode_graphs
from paged_kv.engine.decode_graphs import DecodeGraphs, default_graph_sizes
from paged_kv.engine.step_inputs import StepArrays


def step_of(*lengths, num_tokens=1):
    """A step of requests in rows 10, 11 and so on, with these lengths."""
    num_seqs = len(lengths)
    positions = np.concatenate([np.arange(n - num_tokens, n) for n in lengths]).astype(np.int64)
    return StepArrays(
        input_ids=positions + 100,
        positions=positions,
        query_start_loc=np.arange(num_seqs + 1, dtype=np.int32) * num_tokens,
        rows=np.arange(10, 10 + num_seqs, dtype=np.int32),
        seq_lens=np.array(lengths, np.int32),
    )


class CallAgain:
    """Instead of a graph: runs the function when captured, and again."""

    def capture(self, run):
        run()
        return run


def test_a_step_is_padded_to_the_next_size_with_requests_without_tokens():
    seen = []

    def forward(inputs):
        seen.append({name: getattr(inputs, name).clone() for name in inputs._fields})
        seen[-1]["addresses"] = [tensor.data_ptr() for tensor in inputs]
        return inputs.input_ids[:, None].float()

    graphs = DecodeGraphs(forward, [1, 2, 5], torch.zeros(5, 1), CallAgain())
    captured, seen[:] = list(seen), []
    assert [len(inputs["rows"]) for inputs in captured] == [5, 2, 1]
    assert graphs.run(step_of(7, 8, 9, 3, 4)).flatten().tolist() == [106, 107, 108, 102, 103]
    assert graphs.run(step_of(20, 31, 40)).flatten().tolist() == [119, 130, 139]
    assert graphs.run(step_of(2, 5)).flatten().tolist() == [101, 104]
    assert [len(inputs["rows"]) for inputs in seen] == [5, 5, 2]
    for inputs, like in zip(seen, (captured[0], captured[0], captured[1]), strict=True):
        assert inputs["addresses"] == like["addresses"]
        assert all(inputs[name].dtype == like[name].dtype for name in StepArrays._fields)
    assert {name: seen[1][name].tolist() for name in StepArrays._fields} == {
        "input_ids": [119, 130, 139, 0, 0],
        "positions": [19, 30, 39, 0, 0],
        "query_start_loc": [0, 1, 2, 3, 3, 3],
        "rows": [10, 11, 12, -1, -1],
        "seq_lens": [20, 31, 40, 0, 0],
    }
    assert captured[0]["rows"].tolist() == [-1] * 5, "captured without requests"


def test_steps_of_one_token_a_request_have_a_graph_if_they_are_not_too_many():
    graphs = DecodeGraphs(
        lambda step: step.rows[:, None].float(), [2], torch.zeros(2, 1), CallAgain()
    )
    assert graphs.fits(step_of(5))
    assert graphs.fits(step_of(5, 9))
    assert not graphs.fits(step_of(5, 9, 1))
    assert not graphs.fits(step_of(5, num_tokens=2))


def test_default_sizes_reach_the_largest_batch():
    assert default_graph_sizes(1) == (1,)
    assert default_graph_sizes(3) == (1, 2, 3)
    assert default_graph_sizes(8) == (1, 2, 4, 8)
    assert default_graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_graph_sizes(300) == (1, 2, 4, *range(8, 256, 8), 256, 272, 288, 300)
    assert default_graph_sizes(10000) == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"cuda_graph_sizes": [1]}, ValueError, "cuda_graph_sizes needs cuda_graphs"),
        ({"cuda_graphs": True, "cuda_graph_sizes": []}, ValueError, "at least one size"),
        (
            {"cuda_graphs": True, "cuda_graph_sizes": [0]},
            ValueError,
            r"cuda_graph_sizes must be in \[1, max_num_seqs = 4\], got 0",
        ),
        ({"cuda_graphs": True, "cuda_graph_sizes": [1, 5]}, ValueError, "= 4.*, got 5"),
        ({"cuda_graphs": True, "cuda_graph_sizes": [1.0]}, TypeError, "must be an integer"),
    ],
)
def test_sizes_are_checked(arguments, error, message, monkeypatch):
    monkeypatch.setattr(config, "check_cuda_graphs", lambda _device: None)
    with pytest.raises(error, match=message):
        EngineConfig(max_num_seqs=4, **arguments)


def test_a_cpu_has_no_graphs():
    with pytest.raises(ValueError, match="cuda_graphs needs device cuda, got 'cpu'"):
        EngineConfig(cuda_graphs=True)


def test_a_gpu_has_graphs(monkeypatch):
    monkeypatch.setattr(config, "check_device", lambda _device: None)
    for device in ("cuda", "cuda:1"):
        given = EngineConfig(device=device, cuda_graphs=True, max_num_seqs=4)
        assert given.decode_graph_sizes == (1, 2, 4)


def test_cuda_graphs_are_captured_on_one_stream_in_one_pool_after_a_warm_up(monkeypatch):
    """The calls of torch.cuda, recorded: there is no GPU here."""
    calls = []

    class Stream:
        def __init__(self, name):
            self.name = str(name)

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    class Graph:
        def replay(self):
            calls.append("replay")

    @contextmanager
    def during(what):
        calls.append(f"begin {what}")
        yield
        calls.append(f"end {what}")

    def capture(graph, pool, stream, *, capture_error_mode):
        assert isinstance(graph, Graph)
        return during(f"graph in {pool} on {stream.name}, {capture_error_mode}")

    fakes = {
        "CUDAGraph": Graph,
        "Stream": lambda device: Stream(f"side of {device}"),
        "current_stream": lambda: Stream("main"),
        "device": lambda device: during(str(device)),
        "graph": capture,
        "graph_pool_handle": lambda: f"pool {len(calls)}",
        "stream": lambda stream: during(stream.name),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    recorder = decode_graphs.CudaGraphRecorder(torch.device("cuda:1"))
    replays = [recorder.capture(lambda: calls.append("run")) for _ in range(2)]
    once = [
        "begin cuda:1",
        "side of cuda:1 waits for main",
        "begin side of cuda:1",
        "run",
        "end side of cuda:1",
        "begin graph in pool 0 on side of cuda:1, thread_local",
        "run",
        "end graph in pool 0 on side of cuda:1, thread_local",
        "main waits for side of cuda:1",
        "end cuda:1",
    ]
    assert calls == once * 2
    replays[0]()
    assert calls[-1] == "replay"


def test_torch_has_the_arguments_that_a_capture_is_given():
    parameters = inspect.signature(torch.cuda.graph).parameters
    assert list(parameters)[:3] == ["cuda_graph", "pool", "stream"]
    assert "capture_error_mode" in parameters
