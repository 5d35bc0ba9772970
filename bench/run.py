# SPDX-License-Identifier: Apache-2.0
"""Runs benchmark suites: ``python bench/run.py [--suite NAME ...] [--samples N] [--out FOLDER]``.

vLLM has an environment of its own (see ``peer.py``); ``--peer vllm --peer-python
vllm-env/bin/python`` adds it to the suites ``attention`` and ``engine``, and makes the suite
``host`` possible. ``--peer vllm,transformers`` adds both to ``engine``.

A suite yields rows; a row names its case, our time and what it is compared with in the same run
(peers, a measured bound). Results go to ``bench/results/<suite>.json`` with machine and command.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import bench_attention
import bench_cache
import bench_engine
import bench_generate
import bench_host
import bench_linear
import bench_pool
import bench_scaling
from timing import machine

if TYPE_CHECKING:
    from timing import Row

ATTENTION, ENGINE = "attention", "engine"
SUITES = {
    "pool": bench_pool.rows,
    "cache": bench_cache.rows,
    ATTENTION: bench_attention.rows,
    "scaling": bench_scaling.rows,
    "linear": bench_linear.rows,
    "generate": bench_generate.rows,
    ENGINE: bench_engine.rows,
}
HOST = "host"  # needs vLLM
VLLM, TRANSFORMERS = bench_engine.VLLM, bench_engine.TRANSFORMERS
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Runs the suites that the command line names; all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--suite", action="append", choices=[*SUITES, HOST], help="default: all")
    parser.add_argument("--samples", type=int, default=21, help="per candidate (default: 21)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=parse_peers,
        help="vllm (for attention, host and engine), transformers (for engine), or both: a,b",
    )
    parser.add_argument("--only", help="rows whose names match this (attention, engine)")
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=os.environ.get("PAGED_KV_BENCH_PEER_PYTHON"),
        help="the peer's Python (default: $PAGED_KV_BENCH_PEER_PYTHON)",
    )
    args = parser.parse_args()
    peers = list(dict.fromkeys(name for names in args.peer for name in names))
    suites = dict(SUITES)
    vllm_python = args.peer_python if VLLM in peers else None
    if VLLM in peers:
        if args.peer_python is None:
            parser.error("--peer vllm needs --peer-python")
        suites[HOST] = partial(bench_host.rows, peer_python=vllm_python)
    elif HOST in (args.suite or ()):
        parser.error("--suite host needs --peer vllm")
    suites[ENGINE] = partial(
        bench_engine.rows, peers=peers, peer_python=vllm_python, only=args.only
    )
    suites[ATTENTION] = partial(bench_attention.rows, peer_python=vllm_python, only=args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    num_threads = torch.get_num_threads()
    for suite in args.suite or suites:
        print(f"\n{suite}")
        rows = []
        for row in suites[suite](args.samples):
            print(f"  {row}", flush=True)
            rows.append(row)
        _write(args.out / f"{suite}.json", rows)
        torch.set_num_threads(num_threads)  # the suite host works on one


def parse_peers(text: str) -> list[str]:
    """Names of peers, separated by commas.

    Raises:
        argparse.ArgumentTypeError: One that is not known.
    """
    names = text.split(",")
    for name in names:
        if name not in bench_engine.WORKERS:
            msg = f"{name!r} is no peer: {' and '.join(bench_engine.WORKERS)} are"
            raise argparse.ArgumentTypeError(msg)
    return names


def _write(path: Path, rows: list[Row]) -> None:
    command = " ".join(["python", "bench/run.py", *sys.argv[1:]])
    result = {"command": command, "machine": machine(), "rows": [row.as_dict() for row in rows]}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
