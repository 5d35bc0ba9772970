# SPDX-License-Identifier: Apache-2.0
"""Runs benchmark suites: ``python bench/run.py [--suite NAME ...] [--samples N] [--out FILE]``.

A suite yields rows; a row names its case, our time and what it is compared with in the same run (a
peer or a measured bound). Results go to ``bench/results/<suite>.json`` with machine and command.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import bench_attention
import bench_cache
import bench_generate
import bench_pool
from timing import machine

if TYPE_CHECKING:
    from timing import Row

SUITES = {
    "pool": bench_pool.rows,
    "cache": bench_cache.rows,
    "attention": bench_attention.rows,
    "generate": bench_generate.rows,
}
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs the suites that the command line names; all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", action="append", choices=SUITES, help="default: all")
    parser.add_argument("--samples", type=int, default=21, help="per candidate (default: 21)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for suite in args.suite or SUITES:
        print(f"\n{suite}")
        rows = []
        for row in SUITES[suite](args.samples):
            print(f"  {row}")
            rows.append(row)
        _write(args.out / f"{suite}.json", rows)


def _write(path: Path, rows: list[Row]) -> None:
    command = " ".join(["python", "bench/run.py", *sys.argv[1:]])
    result = {"command": command, "machine": machine(), "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
