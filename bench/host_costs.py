# SPDX-License-Identifier: Apache-2.0
"""Does what the host core costs grow with the pool? ``python bench/host_costs.py [--out FILE]``.

Three operations, in pools of 10^3 to 10^7 blocks (`host_costs.cpp`):

alloc
    ``BlockPool::append_new_blocks`` of one block.
free
    ``BlockPool::free_blocks`` of one block.
append
    One token of a request: ``Request::append_output_token_ids`` and
    ``KVCacheManager::try_allocate_slots``, with the hash and the prefix cache's entry of each
    block that fills, one in 16 tokens.

Counted are instructions, by callgrind: equal counts mean that nothing is searched or walked. Timed
is the CPU time of the thread, while blocks are free in the order of their ids and in a random one;
what that costs more are cache misses. Needs valgrind, a C++ compiler and 3 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from timing import machine

OPERATIONS = ("alloc", "free", "append")
ORDERS = ("in-order", "shuffled")
NUM_BLOCKS = tuple(10**i for i in range(3, 8))
COUNTED_OPERATIONS = 480
# Operations of a timed round: as many as the smallest pool has room for, or as fill more than a
# cache, where the pool has them.
TIMED_OPERATIONS = {"alloc": 500_000, "free": 500_000, "append": 4_800}
ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "callgrind.json"


def main() -> None:
    """Builds the driver, runs it at all sizes, prints a table and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="per time (default: 5)")
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON file")
    args = parser.parse_args()
    driver = build(ROOT / "build" / "bench")
    rows = []
    print("operation   blocks    instructions   ns in order   ns shuffled")
    for operation in OPERATIONS:
        for num_blocks in NUM_BLOCKS:
            row: dict[str, str | float] = {
                "operation": operation,
                "num_blocks": num_blocks,
                "instructions": count_instructions(driver, operation, num_blocks),
            }
            for order in ORDERS:
                row[f"ns_{order.replace('-', '_')}"] = time(
                    driver, operation, num_blocks, order, args.rounds
                )
            rows.append(row)
            print(
                f"{operation:9s} {num_blocks:10,}  {row['instructions']:10.1f}"
                f"  {row['ns_in_order']:12.1f}  {row['ns_shuffled']:12.1f}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "bench/host_costs.py", *sys.argv[1:]])
    result = {"command": command, "machine": machine(), "rows": rows}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def build(folder: Path) -> Path:
    """Builds `host_costs.cpp`; returns the program."""
    options = ["-DPAGED_KV_BUILD_BENCH=ON", "-DPAGED_KV_BUILD_PYTHON=OFF"]
    target = "paged_kv_host_costs"
    for command in (
        ["cmake", "-S", ROOT, "-B", folder, *options],
        ["cmake", "--build", folder, "--target", target],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "bench" / target


def count_instructions(driver: Path, operation: str, num_blocks: int) -> float:
    """Instructions per operation, the mean of `COUNTED_OPERATIONS`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={folder}/callgrind.out",
            "--toggle-collect=measured_round",
            *(driver, operation, str(num_blocks), "in-order", str(COUNTED_OPERATIONS), "1"),
        ]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    collected = re.search(r"Collected : (\d+)", output)
    if collected is None:
        msg = f"callgrind gave no count:\n{output}"
        raise RuntimeError(msg)
    return int(collected[1]) / COUNTED_OPERATIONS


def time(driver: Path, operation: str, num_blocks: int, order: str, num_rounds: int) -> float:
    """Nanoseconds per operation, the median of the rounds."""
    num_operations = TIMED_OPERATIONS[operation]
    if operation != "append":
        num_operations = min(num_operations, num_blocks - 1)
    command = [driver, operation, str(num_blocks), order, str(num_operations), str(num_rounds)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return statistics.median(float(line) for line in output.split())


if __name__ == "__main__":
    main()
