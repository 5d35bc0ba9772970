# SPDX-License-Identifier: Apache-2.0
"""Replays a recorded run of vLLM's scheduler against ours; format: tests/data/README.md."""

from __future__ import annotations

from typing import Any

import numpy as np
from trace_replay import RecordedState, make_spec

from paged_kv import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    get_request_block_hasher,
)
from paged_kv.engine import Request, RequestStatus, SamplingParams, Scheduler, SchedulerConfig
from paged_kv.engine.input_batch import InputBatch
from paged_kv.engine.request import finish_reason
from paged_kv.engine.speculative_scheduler import SpeculativeScheduler

Record = dict[str, Any]


class SchedulerReplay:
    """One trace, step by step."""

    def __init__(self, trace: Record, **options: Any) -> None:
        self.trace = trace
        self.config = config = trace["config"]
        groups = [
            KVCacheGroupSpec([f"layer.{i}"], make_spec(group))
            for i, group in enumerate(config["groups"])
        ]
        self.manager = KVCacheManager(
            KVCacheConfig(config["num_blocks"], [], groups, config["retention_interval"]),
            max_model_len=config["max_model_len"],
            scheduler_block_size=config["scheduler_block_size"],
            hash_block_size=config["hash_block_size"],
            max_in_flight_tokens=config["max_in_flight_tokens"],
            enable_caching=config["enable_caching"],
            watermark=config["watermark"],
        )
        self.batch = InputBatch(
            self.manager,
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
        )
        # What vLLM does, also where it is a fault.
        options.setdefault("evict_uncomputed_blocks", False)
        scheduler_config = SchedulerConfig(
            max_num_batched_tokens=config["max_num_batched_tokens"],
            max_model_len=config["max_model_len"],
            policy=config["policy"],
            enable_chunked_prefill=config["enable_chunked_prefill"],
            long_prefill_token_threshold=config["long_prefill_token_threshold"],
            reserve_full_prompt=config["scheduler_reserve_full_isl"],
            **options,
        )
        self.scheduler = Scheduler(self.manager, self.batch, scheduler_config)
        if config["num_spec_tokens"]:
            self.scheduler = SpeculativeScheduler(
                self.manager,
                self.batch,
                scheduler_config,
                num_draft_tokens=config["num_spec_tokens"],
            )
        self.live: dict[str, Request] = {}
        self.table_lengths: dict[str, list[int]] = {}
        self.state = RecordedState(trace, self.manager)

    def run(self) -> None:
        self.state.check(self.trace["init"], self.live, "at the beginning")
        for i, step in enumerate(self.trace["steps"]):
            where = f"{self.trace['name']}, step {i}"
            for pre in step.get("pre", []):
                assert getattr(self, f"pre_{pre['op']}")(pre) == pre.get("ret"), where
            output = self.scheduler.schedule()
            assert self.describe(output) == step["out"], f"{where}: schedule"
            if "mid" in step:
                assert self.queues() == step["mid"], f"{where}: queues"
            assert self.update(output, step["sampled"]) == step["upd"], f"{where}: update"
            if step.get("drafts"):
                self.scheduler.update_draft_token_ids(step["drafts"])
            self.manager.check_integrity()
            self.batch.check_integrity()
            self.live = {r: live for r, live in self.live.items() if not live.is_finished()}
            self.state.check(step, self.live, where)

    # ---- what happens before a step

    def pre_add(self, pre: Record) -> None:
        record = pre["req"]
        max_tokens = record["max_tokens"]
        request = Request(
            record["id"],
            record["prompt"],
            SamplingParams(
                max_tokens=max_tokens, stop_token_ids=record.get("stop_token_ids"), ignore_eos=True
            ),
            max_num_tokens=min(len(record["prompt"]) + max_tokens, self.config["max_model_len"]),
            priority=record.get("priority", 0),
            arrival_time=record["arrival_time"],
            block_hasher=get_request_block_hasher(self.config["hash_block_size"]),
        )
        self.live[request.request_id] = request
        self.scheduler.add_request(request)

    def pre_abort(self, pre: Record) -> None:
        self.scheduler.finish_requests([pre["r"]], RequestStatus.FINISHED_ABORTED)

    def pre_reset(self, pre: Record) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests=bool(pre["running"]))

    # ---- a step

    def describe(self, output) -> Record:
        """A step's schedule in the trace's form."""
        running = output.requests[: output.num_running]
        cached = [*running, *output.resumed]
        new = [request for request in output.admitted if request not in output.resumed]
        blocks = {request.request_id: self.new_blocks(request) for request in running}
        blocks |= {request.request_id: self.all_blocks(request) for request in output.admitted}
        ids = [request.request_id for request in output.requests]
        return {
            "n": [
                list(item) for item in zip(ids, output.num_scheduled_tokens.tolist(), strict=True)
            ],
            "new": [request.request_id for request in new],
            "cached": [request.request_id for request in cached],
            "resumed": sorted(request.request_id for request in output.resumed),
            "blocks": blocks,
            "nct": dict(zip(ids, output.num_computed_tokens.tolist(), strict=True)),
            "preempted": sorted({request.request_id for request in output.preempted}),
            "finished": sorted(output.finished_req_ids),
            "spec": output.draft_token_ids,
        }

    def all_blocks(self, request: Request) -> list[list[int]]:
        tables = list(self.manager.get_block_ids(request.request_id))
        self.table_lengths[request.request_id] = [len(table) for table in tables]
        return tables

    def new_blocks(self, request: Request) -> list[list[int]] | None:
        lengths = self.table_lengths[request.request_id]
        tables = self.all_blocks(request)
        new = [table[length:] for table, length in zip(tables, lengths, strict=True)]
        return new if any(new) else None

    def queues(self) -> Record:
        return {
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
        }

    def update(self, output, sampled: dict[str, list[int]]) -> Record:
        lengths = {request.request_id: request.num_tokens for request in output.requests}
        if self.config["num_spec_tokens"]:
            finished = self.scheduler.update_from_accepted(output, sampled)
        else:
            ids = [request.request_id for request in output.sampling_requests()]
            assert ids == [rid for rid, _ in self.sampled_in_order(output, sampled)]
            token_ids = np.array([sampled[rid][0] for rid in ids], np.int32)
            finished = self.scheduler.update_from_output(output, token_ids)
        new = {
            request.request_id: request.all_token_ids[lengths[request.request_id] :].tolist()
            for request in output.requests
        }
        return {
            "fin": {request.request_id: finish_reason(request.status) for request in finished},
            "tok": {rid: token_ids for rid, token_ids in new.items() if token_ids},
        }

    @staticmethod
    def sampled_in_order(output, sampled):
        ids = [request.request_id for request in output.requests]
        return [(rid, sampled[rid]) for rid in ids if sampled.get(rid)]
