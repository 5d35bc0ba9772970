# SPDX-License-Identifier: Apache-2.0
"""bench/gpu.sh without a GPU: its cases, byte counts, table, and how loudly it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpu
from cases import GPU_DECODE, AttentionCase, WriteCase
from gpu_timing import num_rotations
from gpu_work import PEER, all_work, attention_calls, copy_calls, gather_calls, write_calls
from timing import Timing

REPO_ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
MB = 1 << 20
SMALL = AttentionCase(3, 4, 2, 64, 700, dtype=torch.bfloat16)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "python", "PYTHON": sys.executable}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=REPO_ROOT, env=environment
    )


def test_dry_run_lists_every_case():
    result = run("bench/gpu.sh", "--dry-run")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [work.case for work in all_work()]
    only = run("bench/gpu.sh", "--dry-run", "--only", "gather_cache")
    assert len(only.stdout.splitlines()) == 1


@pytest.mark.parametrize("command", [["bench/gpu.sh"], [sys.executable, "bench/gpu.py"]])
def test_without_a_gpu_it_fails_and_says_so(command):
    result = run(*command)
    assert result.returncode == 1
    assert "no GPU" in result.stderr or "no CUDA device" in result.stderr


def test_script_is_valid_bash():
    assert run("bash", "-n", "bench/gpu.sh").returncode == 0


@pytest.mark.parametrize(
    "case", [SMALL, replace(SMALL, block_size=8, dtype=torch.float32)], ids=str
)
def test_attention_candidates_agree(case):
    """So what is timed computes the same from the same keys and values, in each set of buffers."""
    calls = attention_calls(case, CPU, 2)
    ours = {"paged_attention_v1", "paged_attention_v2", "paged_attention_varlen"}
    assert set(calls) == {*ours, PEER}
    for i in range(2):
        expected = calls[PEER][i]()
        for name in ours:
            gpu.check(calls[name][i]().clone(), expected)
    with pytest.raises(AssertionError, match="wrong result"):
        gpu.check(calls["paged_attention_v1"][0](), calls[PEER][1]())
    with pytest.raises(AssertionError, match="wrong result"):
        gpu.check(torch.full((3,), float("nan")), torch.ones(3))


def test_candidates_of_fp8_caches_have_the_op_s_arguments():
    calls = attention_calls(replace(SMALL, kv_cache_dtype="fp8"), CPU, 1)
    expected = calls[PEER][0]()
    assert expected.isfinite().all()
    gpu.check(calls["paged_attention_v1"][0]().clone(), expected)
    gpu.check(calls["paged_attention_varlen"][0](), expected)


def test_cache_candidates_run():
    case = WriteCase(40, num_blocks=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    for one in (case, replace(case, scattered=True)):
        for calls in write_calls(one, CPU, 2).values():
            assert len(calls) == 2
            for call in calls:
                call()
    (copies,) = copy_calls(case, 4, CPU, 2).values()
    (gathers,) = gather_calls(case, 2, 32, CPU, 2).values()
    for call in [*copies, *gathers]:
        call()
    (table_work,) = [work for work in all_work() if work.num_bytes == 0]
    for calls in table_work.build(CPU, 1).values():
        calls[0]()


def test_byte_counts():
    assert SMALL.kv_bytes == 2 * 3 * 700 * 2 * 64 * 2
    assert replace(SMALL, kv_cache_dtype="fp8").kv_bytes == SMALL.kv_bytes // 2
    case = WriteCase(10, dtype=torch.bfloat16)
    assert case.num_bytes == 2 * 10 * 8 * 128 * (2 + 2)
    assert replace(case, kv_cache_dtype="fp8").num_bytes == 2 * 10 * 8 * 128 * (2 + 1)
    by_case = {work.candidates[0]: work.num_bytes for work in all_work()}
    block_bytes = 16 * 8 * 128 * 2
    assert by_case["copy_blocks"] == 512 * 4 * 2 * 2 * block_bytes  # layers, K and V, both ways
    assert by_case["gather_cache"] == 2 * 8 * 64 * block_bytes


def test_work_fits_a_gpu():
    for case in GPU_DECODE:
        assert case.seq_len * 4 <= 99 * 1024 - 4096, "v1 keeps a float a token in shared memory"
        assert case.kv_bytes <= 2 << 30


def test_buffers_exceed_the_l2_cache():
    assert num_rotations(0, 50 * MB) == 1
    assert num_rotations(100 * MB, 50 * MB) == 1
    for num_bytes in (1, 4096, 30 * MB, 99 * MB):
        rotations = num_rotations(num_bytes, 50 * MB)
        assert (rotations - 1) * num_bytes >= 100 * MB


def test_arguments():
    args = gpu.parse_arguments(["--budget-s", "60", "--only", "fp8_e5m2"])
    assert args.budget_s == 60
    (work,) = gpu.chosen(all_work(), args.only)
    assert work.case.endswith("fp8_e5m2")
    assert len(gpu.chosen(all_work(), gpu.parse_arguments([]).only)) == len(all_work())
    for wrong in (["--samples", "1"], ["--budget", "x"], ["--only", "("], ["case"]):
        with pytest.raises(SystemExit):
            gpu.parse_arguments(wrong)


def test_table_and_json():
    timing = Timing(100e-6, 90e-6, 120e-6, 5)
    report = gpu.Report(
        4e12,
        [
            gpu.Row("a case", "paged_attention_v1", 200_000_000, timing),
            gpu.Row("a case", "paged_attention_v2", 200_000_000, note="FAILED: no such op"),
            gpu.Row("a case", PEER, 200_000_000, replace(timing, median_s=150e-6)),
            gpu.Row("small", "compute_slot_mapping", 0, timing),
        ],
    )
    head, v1, v2, peer, small, copy = report.lines()
    assert v1.split()[-3:] == ["2000", "50%", "1.50x"]
    assert v2.endswith("FAILED: no such op")
    assert peer.split()[-2:] == ["1333", "33%"]
    assert "100.0 us" in small
    assert "%" not in small
    assert copy == "copy: 4000 GB/s read and written"
    assert head.index("median") < head.index("GB/s")
    assert not report.is_complete
    assert json.loads(json.dumps(report.as_dict()))["rows"][1]["note"] == "FAILED: no such op"


def test_what_cannot_be_built_becomes_a_note():
    (work, *_) = all_work()

    def fail(device, rotations):
        msg = "out of memory\nand a long story"
        raise RuntimeError(msg)

    rows = gpu.measure(replace(work, build=fail), 3, 50 * MB)
    assert [row.note for row in rows] == ["FAILED: out of memory"] * 4
