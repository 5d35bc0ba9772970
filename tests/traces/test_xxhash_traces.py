# SPDX-License-Identifier: Apache-2.0
"""The recorded calls again with `xxhash_cbor`: all but the hashes is as with `sha256_cbor`."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_replay import Replay, load

from paged_kv import xxhash_cbor

# Some of each kind; what differs from test_traces.py is only how a block is named.
KINDS = ("full-", "swa-", "chunked-", "hyb-", "extras-", "ext-", "scripted-")
FOLDER = Path(__file__).parents[1] / "data/traces"
TRACES = [path for kind in KINDS for path in sorted(FOLDER.glob(f"{kind}*.json.gz"))[:3]]


def state(replay: Replay):
    free, refs, index = replay.manager.block_pool.dump()
    tables = {name: replay.manager.get_block_ids(name) for name in replay.requests}
    return tables, free, refs, sorted(index.values())


def result_of(replay: Replay, op):
    result = replay.call(op)
    # The last hash, which differs.
    return result[0] if op["op"] in ("add", "append") else result


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_decisions_do_not_depend_on_the_hash_function(path):
    trace = load(path)
    by_sha256, by_xxhash = Replay(trace), Replay(trace, xxhash_cbor)
    for i, op in enumerate(trace["ops"]):
        assert result_of(by_xxhash, op) == result_of(by_sha256, op), (i, op["op"])
        assert state(by_xxhash) == state(by_sha256), (i, op["op"])
        by_xxhash.manager.check_integrity()
        kinds = [
            [
                (type(event).__name__, getattr(event, "group_idx", None))
                for event in replay.manager.take_events()
            ]
            for replay in (by_sha256, by_xxhash)
        ]
        assert kinds[0] == kinds[1]
