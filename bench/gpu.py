# SPDX-License-Identifier: Apache-2.0
"""Times our CUDA ops and what they are compared with; bench/gpu.sh builds, tests and calls this.

Prints one table last: median time, bytes a second, percent of what a plain copy reaches in the same
run, and the ratio to torch SDPA on contiguous keys and values. Correctness comes first: a candidate
of attention whose result differs from SDPA's is not timed. The exit status is 1 if anything failed
or was left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from gpu_timing import copy_bytes_per_second, num_rotations, time_calls
from gpu_work import PEER, Work, all_work
from timing import Timing, machine

RESULT = Path(__file__).parent / "results/gpu.json"
MAX_ERROR = 2e-2  # of 16-bit results, relative to the largest
NO_GPU = "no CUDA device: torch.cuda.is_available() is False. --dry-run shows what would be run"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; ``note`` says why there is no timing."""

    case: str
    candidate: str
    num_bytes: int
    timing: Timing | None = None
    note: str = ""


@dataclass(slots=True)
class Report:
    """All that was measured."""

    copy_bytes_per_second: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every row has a timing."""
        return all(row.timing for row in self.rows)

    def lines(self) -> list[str]:
        """The table."""
        peers = {row.case: row.timing for row in self.rows if row.candidate == PEER}
        head = f"{'case':58s} {'op':25s} {'median':>10s} {'p10..p90':>17s} {'GB/s':>7s}"
        lines = [f"{head} {'of copy':>7s} {'speedup':>8s}"]
        for row in self.rows:
            lines.append(f"{row.case:58s} {row.candidate:25s} {self._figures(row, peers)}")
        return [*lines, f"copy: {self.copy_bytes_per_second / 1e9:.0f} GB/s read and written"]

    def _figures(self, row: Row, peers: dict[str, Timing | None]) -> str:
        if row.timing is None:
            return row.note
        t = row.timing
        text = f"{t.median_s * 1e6:7.1f} us {t.p10_s * 1e6:8.1f}..{t.p90_s * 1e6:<7.1f}"
        if row.num_bytes:
            rate = row.num_bytes / t.median_s
            text += f" {rate / 1e9:7.0f} {rate / self.copy_bytes_per_second:7.0%}"
        if (peer := peers.get(row.case)) and row.candidate != PEER:
            text += f" {peer.median_s / t.median_s:7.2f}x"
        return text

    def as_dict(self) -> dict[str, object]:
        """The report as JSON can hold it."""
        return {
            "copy_bytes_per_second": self.copy_bytes_per_second,
            "rows": [asdict(row) for row in self.rows],
        }


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget-s", type=float, default=240, help="no case starts after this")
    parser.add_argument("--samples", type=int, default=15, help="per candidate (default: 15)")
    parser.add_argument(
        "--only", type=_pattern, default=re.compile(""), help="cases or ops that match this"
    )
    parser.add_argument("--out", type=Path, default=RESULT, help="JSON file")
    parser.add_argument("--dry-run", action="store_true", help="list the cases; needs no GPU")
    parsed = parser.parse_args(arguments)
    if parsed.samples < 2:
        parser.error("--samples: expected at least 2")
    return parsed


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def chosen(work: list[Work], pattern: re.Pattern[str]) -> list[Work]:
    """The cases whose text, or one of whose candidates, matches."""
    return [w for w in work if pattern.search(" ".join([w.case, *w.candidates]))]


def measure(work: Work, num_samples: int, l2_bytes: int) -> list[Row]:
    """The rows of one case; an error becomes the note of a row."""
    try:
        calls = work.build(torch.device("cuda"), num_rotations(work.num_bytes, l2_bytes))
    except (RuntimeError, ValueError) as error:
        return left_out(work, f"FAILED: {_first_line(error)}")
    rows = []
    for name in work.candidates:
        row = Row(work.case, name, work.num_bytes)
        try:
            if name != PEER and PEER in calls:
                check(calls[name][0](), calls[PEER][0]())
            rows.append(Row(*_key(row), timing=time_calls(calls[name], num_samples)))
        except (RuntimeError, ValueError, AssertionError) as error:
            rows.append(Row(*_key(row), note=f"FAILED: {_first_line(error)}"))
    return rows


def check(actual: object, expected: object) -> None:
    """Raises AssertionError if two results of attention differ by more than rounding."""
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        msg = "a call of attention returns its output"
        raise TypeError(msg)
    error = (actual.float() - expected.float()).abs().max() / expected.float().abs().max()
    if not error <= MAX_ERROR:  # not "error > ...": NaN is wrong, too
        msg = f"wrong result: largest error {error:.2g} of the largest value"
        raise AssertionError(msg)


def left_out(work: Work, note: str) -> list[Row]:
    """Rows of a case that was not measured."""
    return [Row(work.case, name, work.num_bytes, note=note) for name in work.candidates]


def plan_lines(work: list[Work], l2_bytes: int) -> list[str]:
    """What --dry-run prints."""
    return [
        f"{w.case:58s} {w.num_bytes / 1e6:9.2f} MB x {num_rotations(w.num_bytes, l2_bytes):<5d}"
        f" {', '.join(w.candidates)}"
        for w in work
    ]


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for and returns the exit status."""
    args = parse_arguments(arguments)
    work = chosen(all_work(), args.only)
    if args.dry_run:
        print("\n".join(plan_lines(work, 60 << 20)))
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 1
    deadline = time.monotonic() + args.budget_s
    properties = torch.cuda.get_device_properties(0)
    report = Report(copy_bytes_per_second(args.samples))
    try:
        for w in work:
            late = time.monotonic() > deadline
            report.rows += (
                left_out(w, "not run: out of time")
                if late
                else measure(w, args.samples, properties.L2_cache_size)
            )
            torch.cuda.empty_cache()
    finally:
        _write(args.out, arguments, report, properties)
        print("\n".join(report.lines()))
    return 0 if report.is_complete else 1


def _key(row: Row) -> tuple[str, str, int]:
    return row.case, row.candidate, row.num_bytes


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _write(path: Path, arguments: list[str], report: Report, properties: object) -> None:
    device = {
        "gpu": torch.cuda.get_device_name(),
        "properties": str(properties),
        "cuda": torch.version.cuda,
    }
    result = {
        "command": " ".join(["python", "bench/gpu.py", *arguments]),
        "machine": {**machine(), **device},
        **report.as_dict(),
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
