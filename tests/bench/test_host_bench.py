# SPDX-License-Identifier: Apache-2.0
"""The host suite runs here without its peer: cases at a small size, and a stand-in process."""

from __future__ import annotations

import gc
import sys
from contextlib import closing
from itertools import islice

import pytest

import bench_host
import host_cases
from peer import Peer


@pytest.fixture(autouse=True)
def _collect_garbage_afterwards():
    yield
    gc.enable()


@pytest.mark.parametrize("name", host_cases.CASES)
def test_a_case_gives_times(name):
    samples = host_cases.start(name, bench_host.PagedKV(), host_cases.SMALL)
    times = list(islice(samples, 2))
    assert all(seconds > 0 for seconds in times)


def test_every_case_has_a_row():
    assert set(bench_host.ROWS) == set(host_cases.CASES)


def test_the_peer_answers_case_by_case(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nfor line in sys.stdin: print(len(line.strip()), flush=True)\n")
    with closing(Peer(sys.executable, worker)) as peer:
        assert peer.sample("four") == 4.0
        assert peer.sample("free now") == 8.0


def test_a_peer_that_ends_is_an_error(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(3)\n")
    with (
        closing(Peer(sys.executable, worker)) as peer,
        pytest.raises(RuntimeError, match="exit status 3"),
    ):
        peer.sample("free")
