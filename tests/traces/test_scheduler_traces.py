# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduling decisions, step by step: order, tokens, blocks, preemptions, ends, state."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from scheduler_replay import SchedulerReplay
from trace_replay import load

TRACES = sorted((Path(__file__).parents[1] / "data/scheduler_traces").glob("*.json.gz"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_step_does_what_vllm_did(path):
    SchedulerReplay(load(path)).run()


def test_every_kind_of_decision_is_in_the_recordings():
    seen: Counter[str] = Counter()
    for path in TRACES:
        trace = load(path)
        seen.update(trace["coverage"])
        seen[trace["config"]["policy"]] += 1
        seen[f"{len(trace['config']['groups'])} groups"] += 1
    expected = ["abort", "chunk", "preempt", "resumed", "hit", "fin_length", "fin_stop"]
    expected += ["draft", "accepted", "padded", "reset_True", "reset_False", "none_blocks", "idle"]
    expected += ["fcfs", "priority", "1 groups", "2 groups"]
    assert [name for name in expected if not seen[name]] == []


def a_trace():
    return load(next(path for path in TRACES if path.name.startswith("sched-fcfs-tight.")))


def test_a_wrong_decision_is_noticed():
    """The replay compares what it says it does."""
    trace = a_trace()
    position = next(i for i, step in enumerate(trace["steps"]) if step["out"]["preempted"])
    trace["steps"][position]["out"]["preempted"] = []
    with pytest.raises(AssertionError, match=f"step {position}: schedule"):
        SchedulerReplay(trace).run()


def test_a_wrong_state_is_noticed():
    trace = a_trace()
    trace["init"]["st"]["free"][0] += 1
    with pytest.raises(AssertionError, match="at the beginning: free"):
        SchedulerReplay(trace).run()


def test_a_wrong_end_is_noticed():
    trace = a_trace()
    position = next(i for i, step in enumerate(trace["steps"]) if step["upd"]["fin"])
    trace["steps"][position]["upd"]["fin"] = {}
    with pytest.raises(AssertionError, match=f"step {position}: update"):
        SchedulerReplay(trace).run()
