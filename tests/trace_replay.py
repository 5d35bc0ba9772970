# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded sequence of calls against `KVCacheManager`; format: tests/data/README.md."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paged_kv import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    LoRARequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    SlidingWindowSpec,
    get_request_block_hasher,
    sha256_cbor,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Record = dict[str, Any]

EVENT_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "session_id",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def load(path: Path) -> Record:
    with gzip.open(path, "rt", encoding="ascii") as file:
        return json.load(file)


def make_spec(group: Record):
    shape = {
        "block_size": group["block_size"],
        "num_kv_heads": group["num_kv_heads"],
        "head_size": group["head_size"],
        "dtype": group["dtype"],
    }
    if group["kind"] == "full":
        return FullAttentionSpec(**shape)
    if group["kind"] == "sliding_window":
        return SlidingWindowSpec(
            sliding_window=group["sliding_window"],
            extra_retained_tokens=group.get("extra_retained_tokens", 0),
            **shape,
        )
    return ChunkedLocalAttentionSpec(attention_chunk_size=group["attention_chunk_size"], **shape)


def make_manager(config: Record) -> KVCacheManager:
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], make_spec(group), group.get("is_eagle_group", False))
        for i, group in enumerate(config["groups"])
    ]
    return KVCacheManager(
        KVCacheConfig(config["num_blocks"], [], groups, config["retention_interval"]),
        max_model_len=config["max_model_len"],
        scheduler_block_size=config["scheduler_block_size"],
        hash_block_size=config["hash_block_size"],
        max_in_flight_tokens=config["max_in_flight_tokens"],
        enable_caching=config["enable_caching"],
        use_eagle=config["use_eagle"],
        num_prefill_lookahead=config.get("num_prefill_lookahead", 0),
        enable_kv_cache_events=config["enable_kv_cache_events"],
        watermark=config["watermark"],
        use_int_block_hashes=config.get("event_int_hashes", True),
    )


def make_request(record: Record, hash_block_size: int, hash_function=sha256_cbor) -> Request:
    lora = record.get("lora")
    features = [
        MultiModalFeatureSpec(None, "image", f["id"], PlaceholderRange(f["offset"], f["length"]))
        for f in record.get("mm") or ()
    ]
    sampling_params = SimpleNamespace(
        skip_reading_prefix_cache=record.get("skip_read"),
        extra_args={"kv_cache_report_mode": record.get("report_mode") or "incremental"},
    )
    return Request(
        record["id"],
        record["prompt"],
        sampling_params,
        mm_features=features,
        lora_request=lora and LoRARequest(lora["name"], lora["id"], lora["path"]),
        cache_salt=record.get("cache_salt"),
        session_id=record.get("session_id"),
        block_hasher=get_request_block_hasher(hash_block_size, hash_function),
    )


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def digest(value: object) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def to_json(value: Any) -> Any:
    """Tuples as lists, bytes as ``{"b": hex}``: as traces have them."""
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def event_record(event: object) -> Record:
    """The fields of an event that are not None."""
    kind = type(event).__name__
    fields = {name: to_json(getattr(event, name)) for name in EVENT_FIELDS[kind]}
    return {"type": kind, **{name: value for name, value in fields.items() if value is not None}}


def sort_runs_of_removals(events: list[Record]) -> list[Record]:
    """For calls whose removals come in no particular order."""
    result: list[Record] = []
    run: list[Record] = []
    for event in [*events, None]:
        if event is not None and event["type"] == "BlockRemoved":
            run.append(event)
            continue
        result += sorted(run, key=canonical)
        run = []
        if event is not None:
            result.append(event)
    return result


class RecordedState:
    """The state of a manager after each record of a trace: what it should be, and what it is.

    Args:
        trace: The trace.
        manager: What replays it.
    """

    def __init__(self, trace: Record, manager: KVCacheManager) -> None:
        self.trace = trace
        self.manager = manager
        self.expected: Record = {}

    def check(self, record: Record, request_ids: Iterable[str], where: str) -> None:
        """Compares; `request_ids` are the requests whose tables the record has."""
        state = self.found(request_ids)
        for section, value in record.get("st", {}).items():
            self.expected[section] = self.spell_out_keys(value) if section == "map" else value
        if self.trace["state_mode"] == "full" or "st" in record:
            for section, value in self.expected.items():
                assert state[section] == value, f"{where}: {section}"
        if "d" in record:
            assert digest(state) == record["d"], f"{where}: the state"

    def found(self, request_ids: Iterable[str]) -> Record:
        free, refs, index = self.manager.block_pool.dump()
        return {
            "tables": {rid: list(self.manager.get_block_ids(rid)) for rid in request_ids},
            "free": free,
            "refs": {str(block): count for block, count in refs.items()},
            "map": index,
        }

    def spell_out_keys(self, index: Record) -> Record:
        """Keys of the index, in traces a position in a list of hashes and a group."""
        result = {}
        for key, blocks in index.items():
            position, group = key.split(".")
            result[f"{self.trace['hashes'][int(position)]}{int(group):08x}"] = blocks
        return result


class Replay:
    """One trace, call by call."""

    def __init__(self, trace: Record, hash_function=sha256_cbor) -> None:
        self.trace = trace
        self.hash_function = hash_function
        self.manager = make_manager(trace["config"])
        self.requests: dict[str, Request] = {}
        self.hits: dict[str, Any] = {}
        self.popped: deque[list] = deque()
        self.state = RecordedState(trace, self.manager)

    def run(self) -> None:
        self.state.check(self.trace["init"], self.requests, "at the beginning")
        for i, op in enumerate(self.trace["ops"]):
            where = f"{self.trace['name']}, call {i}: {op['op']} {op.get('r', '')}"
            assert self.call(op) == op.get("ret"), where
            self.manager.check_integrity()
            self.check_events(op, where)
            self.state.check(op, self.requests, where)

    def call(self, op: Record):
        for name, value in op.get("set", {}).items():
            value = getattr(RequestStatus, value) if name == "status" else value
            setattr(self.requests[op["r"]], name, value)
        try:
            return getattr(self, f"op_{op['op']}")(op)
        except ValueError as error:
            return {"exc": type(error).__name__}

    # One method for each kind of call; each returns what the trace has as its result.

    def op_add(self, op: Record):
        hash_block_size = self.trace["config"]["hash_block_size"]
        request = make_request(op["req"], hash_block_size, self.hash_function)
        self.requests[op["req"]["id"]] = request
        return self.hashes(request)

    def op_append(self, op: Record):
        request = self.requests[op["r"]]
        request.append_output_token_ids(op["toks"])
        return self.hashes(request)

    def op_get(self, op: Record):
        blocks, num_tokens, boundary = self.manager.get_computed_blocks(self.requests[op["r"]])
        self.hits[op["r"]] = blocks
        return [num_tokens, list(blocks.get_block_ids()), boundary]

    def op_alloc(self, op: Record):
        blocks = self.manager.allocate_slots(
            self.requests[op["r"]],
            op["n"],
            num_new_computed_tokens=op.get("nc", 0),
            new_computed_blocks=self.hits[op["r"]] if op.get("use") else None,
            num_lookahead_tokens=op.get("look", 0),
            num_external_computed_tokens=op.get("ext", 0),
            delay_cache_blocks=bool(op.get("delay", 0)),
            full_sequence_must_fit=bool(op.get("fit", 0)),
            reserved_blocks=op.get("resv", 0),
            has_scheduled_reqs=bool(op.get("sched", 1)),
        )
        return None if blocks is None else list(blocks.get_block_ids())

    def op_cache(self, op: Record):
        self.manager.cache_blocks(self.requests[op["r"]], op["n"])

    def op_free(self, op: Record):
        self.manager.free(self.requests[op["r"]])
        self.forget_if_dropped(op)

    def op_pop(self, op: Record):
        blocks = self.manager.pop_blocks_for_free(self.requests[op["r"]])
        self.popped.append(blocks)
        self.forget_if_dropped(op)
        return [block.block_id for block in blocks]

    def op_release(self, _op: Record):
        self.manager.block_pool.free_blocks(reversed(self.popped.popleft()))

    def op_evict(self, op: Record):
        self.manager.evict_blocks(op["ids"])

    def op_reset(self, _op: Record):
        return self.manager.reset_prefix_cache()

    def op_skip(self, op: Record):
        self.manager.remove_skipped_blocks(op["r"], op["n"])

    def op_est(self, op: Record):
        return self.manager.estimate_cached_tokens(self.requests[op["r"]])

    def op_bids(self, op: Record):
        return list(self.manager.get_block_ids_for_computed_tokens(op["r"], op["n"]))

    def op_usage(self, _op: Record):
        return round(self.manager.usage, 9)

    def forget_if_dropped(self, op: Record) -> None:
        if op.get("drop"):
            del self.requests[op["r"]]
            self.hits.pop(op["r"], None)

    @staticmethod
    def hashes(request: Request):
        hashes = request.block_hashes
        return [len(hashes), hashes[-1].hex() if len(hashes) else None]

    def check_events(self, record: Record, where: str) -> None:
        events = [event_record(event) for event in self.manager.take_events()]
        if record.get("sort_removed"):
            events = sort_runs_of_removals(events)
        if "ed" in record:
            assert digest(events) == record["ed"], f"{where}: events"
        else:
            assert events == record.get("ev", []), f"{where}: events"
