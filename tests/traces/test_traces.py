# SPDX-License-Identifier: Apache-2.0
"""vLLM's decisions, call by call: results, tables, free queue, holders, index and events."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from trace_replay import Replay, load

TRACES = sorted((Path(__file__).parents[1] / "data/traces").glob("*.json.gz"))
CATEGORIES = {
    "extra-keys",
    "flow-async",
    "flow-deferred-free",
    "flow-external",
    "flow-mtp",
    "flow-raw-event-hashes",
    "flow-report-full",
    "hybrid",
    "scripted",
    "unitary-chunked",
    "unitary-full",
    "unitary-swa",
}


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_call_does_what_vllm_did(path):
    Replay(load(path)).run()


def test_every_kind_of_recording_is_there():
    counts = Counter(load(path)["category"] for path in TRACES)
    assert set(counts) == CATEGORIES
    assert min(counts.values()) >= 2


def test_a_wrong_result_is_noticed():
    """The replay compares what it says it does."""
    trace = load(next(path for path in TRACES if path.name.startswith("full-")))
    position = next(i for i, op in enumerate(trace["ops"]) if op["op"] == "alloc" and op["ret"])
    trace["ops"][position]["ret"][0][0] += 1
    with pytest.raises(AssertionError, match=f"call {position}: alloc"):
        Replay(trace).run()


def test_a_wrong_state_is_noticed():
    trace = load(next(path for path in TRACES if path.name.startswith("full-")))
    trace["init"]["st"]["free"][0] += 1
    with pytest.raises(AssertionError, match="at the beginning: free"):
        Replay(trace).run()
