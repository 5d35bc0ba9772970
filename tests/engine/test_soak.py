# SPDX-License-Identifier: Apache-2.0
"""2,000 random requests through the real engine on a tiny pool, and as many with faults.

The model is a checksum of what lies in the cache (`digest_model`): each completion is compared
with what it must be. Afterwards nothing may be left: no block, no row, no swapped block, no object
of a request, no memory.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import random
from dataclasses import dataclass, field
from statistics import median

import pytest
from digest_model import VOCAB_SIZE, expected_output, load_digest_model
from engine.memory_use import MemoryUse

from paged_kv import OutOfBlocksError
from paged_kv.engine import EngineConfig, LLMEngine, Request, SamplingParams
from paged_kv.engine.inputs import EncodedPrompt

NUM_REQUESTS = 2000
MAX_BATCHED_TOKENS = 64
MAX_PENDING = 24
# Far more than any request needs: it waits for those before it, some of them more than once.
MAX_STEPS_WITHOUT_END = 400
# What the allocators and the interpreter may take for themselves. It hides small leaks, which
# test_2000_requests_on_one_engine_leave_no_memory_behind finds.
MAX_RSS_GROWTH_BYTES = 16 * 2**20
# A leak of anything of a request is an object of Python, or more bytes than these outside of it.
MAX_LEAKED_OBJECTS_PER_REQUEST = 0.5
MAX_LEAKED_BYTES_PER_REQUEST = 64


@dataclass(frozen=True)
class Case:
    policy: str
    preemption_mode: str
    chunked_prefill: bool
    window: int | None
    prefix_caching: bool = True

    def __str__(self) -> str:
        chunked = "chunked" if self.chunked_prefill else "whole prompts"
        window = "full" if self.window is None else "hybrid"
        caching = "cached" if self.prefix_caching else "uncached"
        return f"{self.policy}, {self.preemption_mode}, {chunked}, {window}, {caching}"


CASES = [
    Case("fcfs", "recompute", True, None),
    Case("fcfs", "swap", True, 6),
    Case("fcfs", "recompute", False, 6),
    Case("fcfs", "swap", False, None, prefix_caching=False),
    Case("priority", "recompute", True, 6),
    Case("priority", "swap", True, None),
    Case("priority", "swap", False, 6),
    Case("priority", "recompute", True, None, prefix_caching=False),
]


class FaultError(Exception):
    """Raised by a fault."""


@dataclass
class Soak:
    """Adds, aborts and serves random requests; `faults` may be planted into the engine before."""

    case: Case
    rng: random.Random
    pending: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)
    num_added: int = 0
    num_completed: int = 0
    num_faults: int = 0
    num_steps_without_end: int = 0

    def __post_init__(self) -> None:
        self.engine = LLMEngine(
            load_digest_model(self.case.window),
            EngineConfig(
                block_size=4,
                num_blocks=28 if self.case.window else 16,
                max_num_seqs=8,
                max_num_batched_tokens=MAX_BATCHED_TOKENS if not self.case.chunked_prefill else 16,
                max_model_len=44,
                enable_prefix_caching=self.case.prefix_caching,
                enable_chunked_prefill=self.case.chunked_prefill,
                scheduling_policy=self.case.policy,
                preemption_mode=self.case.preemption_mode,
                swap_space_bytes=4096,  # some blocks: not all that are preempted fit
            ),
        )
        self.prefixes = [self.random_ids(24) for _ in range(3)]

    def run(self, num_requests: int) -> None:
        while self.num_added < num_requests or self.pending:
            arrivals = self.rng.choice([0, 0, 1, 2, 3])
            for _ in range(min(arrivals, num_requests - self.num_added)):
                if len(self.pending) < MAX_PENDING:
                    self.add_request()
            if self.pending and self.rng.random() < 0.05:
                self.abort()
            self.step()

    def add_request(self) -> None:
        shared = self.rng.choice(self.prefixes)[: self.rng.choice([0, 0, 5, 12, 24])]
        prompt = shared + self.random_ids(self.rng.randint(1, 8))
        n = self.rng.choice([1, 1, 1, 2, 3])
        params = SamplingParams(
            n=n,
            temperature=float(n > 1),
            max_tokens=self.rng.randint(1, 12),
            seed=self.num_added,
            stop_token_ids=self.random_ids(self.rng.choice([0, 0, 1])),
        )
        request_id = str(self.num_added)
        self.num_added += 1
        priority = self.rng.randint(0, 3)
        self.engine.add_request(
            request_id,
            EncodedPrompt(None, tuple(prompt)),
            params,
            priority=priority,
            arrival_time=float(self.num_added),
        )
        self.pending[request_id] = (prompt, params)

    def abort(self) -> None:
        request_ids = self.rng.sample(list(self.pending), 1)
        (output,) = self.engine.abort_request(request_ids)
        self.check(output, is_whole=False)

    def step(self) -> None:
        try:
            updates = self.engine.step()
        except (FaultError, MemoryError, OutOfBlocksError):
            self.num_faults += 1
            assert not self.engine.has_unfinished_requests()
            self.pending.clear()
            self.check_nothing_is_held()
            return
        results = [update.result for update in updates if update.result is not None]
        for result in results:
            self.check(result, is_whole=True)
        self.num_completed += len(results)
        self.num_steps_without_end = 0 if results else self.num_steps_without_end + 1
        assert self.num_steps_without_end < MAX_STEPS_WITHOUT_END, "requests are stuck"

    def check(self, output, *, is_whole: bool) -> None:
        prompt, params = self.pending.pop(output.request_id)
        expected = tuple(
            expected_output(prompt, self.case.window, params.max_tokens, params.stop_token_ids)
        )
        assert len(output.outputs) == params.n
        for completion in output.outputs:
            if is_whole:
                assert completion.token_ids == expected
            else:
                assert completion.token_ids == expected[: len(completion.token_ids)]

    def check_nothing_is_held(self) -> None:
        engine = self.engine
        assert engine.scheduler.get_request_counts() == (0, 0)
        pool = engine.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == engine.cache_engine.num_blocks - 1
        engine.kv_cache_manager.check_integrity()
        assert engine.scheduler.swap_space.num_used_blocks == 0
        assert engine._batch.num_free_rows == engine.config.max_num_seqs
        assert not engine._states
        assert not engine._builders

    def random_ids(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


def plant_faults(soak: Soak, share: float) -> None:
    """Let calls that a step makes fail now and then, before or after they have done their work."""
    engine = soak.engine

    def plant(owner, name, error, share=share):
        call = getattr(owner, name)

        def failing(*args, **kwargs):
            fault = soak.rng.random()
            if fault < share / 2:
                raise error
            result = call(*args, **kwargs)
            if fault < share:
                raise error
            return result

        setattr(owner, name, failing)

    plant(engine.model_runner, "execute_model", FaultError)
    plant(engine.model_runner, "compute_logits", FaultError)
    plant(engine.model_runner._model, "forward", FaultError)
    plant(engine._sampler, "sample", FaultError)
    plant(engine.cache_engine, "swap_out", MemoryError)
    plant(engine.cache_engine, "swap_in", MemoryError)
    plant(engine.cache_engine, "copy_blocks", MemoryError)
    plant(engine._batch, "allocate_slots", OutOfBlocksError)
    plant(engine._batch, "append_token_ids", MemoryError)
    plant(engine._batch, "add", MemoryError)
    manager = FailingManager(engine.kv_cache_manager)
    engine.scheduler.kv_cache_manager = manager
    for name in ("allocate_slots", "get_computed_blocks", "fork"):
        plant(manager, name, OutOfBlocksError, share / 2)


class FailingManager:
    """A manager whose methods can be replaced: those of the core cannot."""

    def __init__(self, manager) -> None:
        self._manager = manager

    def __getattr__(self, name):
        return getattr(self._manager, name)


def num_objects(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


def soak(case: Case, fault_share: float) -> Soak:
    """Serve this case's part of the requests; check that each half leaves nothing."""
    seed = CASES.index(case) + 1
    print(f"seed {seed}")
    run = Soak(case, random.Random(seed))
    if fault_share:
        plant_faults(run, fault_share)
    num_requests_before = num_objects(Request)
    share = NUM_REQUESTS // len(CASES)
    run.run(share // 2)
    before = MemoryUse.now()
    run.run(share)
    run.check_nothing_is_held()
    assert run.engine.stats.num_requests == share
    assert run.engine.stats.num_finished_requests == share
    assert num_objects(Request) == num_requests_before
    assert (MemoryUse.now() - before).resident_bytes < MAX_RSS_GROWTH_BYTES
    assert run.engine.reset_prefix_cache()
    return run


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_requests_are_right_and_leave_nothing(case):
    run = soak(case, 0.0)
    assert run.engine.stats.num_preemptions > 0, "the pool is not small enough to prove anything"
    assert run.num_faults == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_after_a_fault_the_engine_is_empty_and_serves_on(case):
    run = soak(case, 0.004)
    assert run.num_faults > 5
    assert run.num_completed > run.num_faults


# ---- one engine that serves for long


def has_leak(run: Soak, num_requests_before: int, num_requests: int) -> bool:
    """Whether memory grows with the requests that an engine serves once it is warm.

    The median of ten parts: now and then the interpreter enlarges a table of its own.
    """
    run.run(num_requests_before)
    uses = [MemoryUse.now()]
    share = (num_requests - num_requests_before) // 10
    for _ in range(10):
        run.run(run.num_added + share)
        uses.append(MemoryUse.now())
    growths = [after - before for before, after in itertools.pairwise(uses)]
    print(*growths, sep="\n")
    return (
        median(growth.num_python_objects for growth in growths)
        > MAX_LEAKED_OBJECTS_PER_REQUEST * share
        or median(growth.malloc_bytes for growth in growths) > MAX_LEAKED_BYTES_PER_REQUEST * share
    )


def test_2000_requests_on_one_engine_leave_no_memory_behind():
    run = Soak(CASES[1], random.Random(1))
    assert not has_leak(run, 500, NUM_REQUESTS)
    run.check_nothing_is_held()


@pytest.mark.parametrize("kind", ["state", "256 bytes outside Python"])
def test_a_leak_for_each_request_would_be_noticed(kind):
    leaked = []
    leak = leaked.append if kind == "state" else lambda _state: ctypes.CDLL(None).malloc(256)
    run = Soak(CASES[1], random.Random(1))
    finish = run.engine._finish

    def finish_and_leak(state):
        leak(state)
        return finish(state)

    run.engine._finish = finish_and_leak
    assert has_leak(run, 100, 300)


def test_a_step_holds_the_longest_prompt_if_it_must_not_be_cut():
    """Else a prompt that is longer than a step would wait for ever."""
    sizes = {"block_size": 4, "num_blocks": 80, "max_num_seqs": 8, "enable_chunked_prefill": False}
    with pytest.raises(ValueError, match="at least max_model_len, here 256"):
        LLMEngine(load_digest_model(None), EngineConfig(max_num_batched_tokens=255, **sizes))
    LLMEngine(load_digest_model(None), EngineConfig(max_num_batched_tokens=256, **sizes))
