# SPDX-License-Identifier: Apache-2.0
"""The engine against vLLM's CPU build and transformers, on the weights of SmolLM2-135M.

Engines live in processes of their own and take turns, sample by sample; `engine_work` is the work,
``peer_*_engine.py`` say how a peer is driven. Beside them stands the least time that the work can
take here: its operations at the rate of torch's fp32 matrix products over the very weights, or
reading the weights once a token, whichever is longer.

Weights are bfloat16 numbers, as the model's publisher and most others give them. In fp32 all
engines compute in float32 with these; ours, too, but it keeps them in 16 bits. `WIDE_CASES` are run
once more with weights that need 32 bits.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import engine_work
from engine_work import CASES, WITHOUT_CACHE, Case, make_sampler
from machine_probe import Bound, read_sampler
from model_folder import write_model_folder
from paged_kv import LLM, SamplingParams
from paged_kv.models import LoadedModel, load_model
from peer import Peer
from scheduler_step import NUM_REQUESTS, SCHEDULER_STEP, step_sampler
from timing import Row, Timing, call_sampler, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Sampler = Callable[[], float]

MODEL = "smollm2-135m"
NUM_BLOCKS = 3200  # as many requests as there are, at their full length
GEMM_ROWS = 256
MAX_SAMPLES = 3  # a sample takes seconds, up to minutes
SETTLE_S = 0.05
WEIGHT_BYTES, FP32_BYTES = 2, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WIDE_CASES = {case: f"fp32, {case}, 32-bit weights" for case in ("1 request", "16 requests")}
BEST_DTYPE = "best dtype"
# A peer that took so many times as long as in fp32 is not run again in a dtype: CPUs without units
# for 16 bits may take a quarter of an hour for the larger cases.
MAX_DTYPE_SLOWDOWN = 2.0
SHARED_PREFIX = "64 requests, shared prefix of 512"
CACHE = f"fp32, {SHARED_PREFIX}, against ours without the prefix cache"
KV_SLOTS = "KV slots, 16 requests of 257 to 397"
VLLM, TRANSFORMERS = "vllm", "transformers"
WORKERS = {
    name: Path(__file__).with_name(f"peer_{name}_engine.py") for name in (VLLM, TRANSFORMERS)
}
NAMES = {VLLM: "vLLM", TRANSFORMERS: "transformers"}


class PagedKV(engine_work.Engine):
    """paged_kv's LLM over token ids."""

    def __init__(self, loaded: LoadedModel, **options: bool) -> None:
        self.llm = LLM(
            replace(loaded, tokenizer=None),
            num_blocks=NUM_BLOCKS,
            max_num_seqs=engine_work.MAX_NUM_SEQS,
            max_num_batched_tokens=engine_work.MAX_NUM_BATCHED_TOKENS,
            max_model_len=min(engine_work.MAX_MODEL_LEN, loaded.config.max_position_embeddings),
            **options,
        )

    def generate(self, prompts: Sequence[list[int]], num_new_tokens: int) -> int:
        """All prompts in one call."""
        params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        results = self.llm.generate(list(prompts), params)
        return sum(len(result.outputs[0].token_ids) for result in results)


@dataclass(frozen=True, slots=True)
class Share:
    """A row that is a share and no time: KV slots that held no token when most were held."""

    case: str
    share: float
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.case:48s} {self.share:7.2%} empty of {self.num_bytes / 2**20:.1f} MiB"

    def as_dict(self) -> dict[str, object]:
        """The row as JSON can hold it."""
        return {"case": self.case, "empty_share": self.share, "bytes": self.num_bytes}


def rows(
    num_samples: int,
    peers: Sequence[str] = (),
    peer_python: Path | None = None,
    only: str | None = None,
) -> Iterator[Row | Share]:
    """All cases in every dtype and in each engine's best, and the rows that have no peer.

    Args:
        num_samples: Samples of each engine, at most `MAX_SAMPLES` and at least two.
        peers: Names in `WORKERS`.
        peer_python: vLLM's Python.
        only: Regular expression for the names of the rows to run; None: all.
    """
    num_samples = max(2, min(num_samples, MAX_SAMPLES))
    loaded = _load_in_16_bits(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_model_folder(loaded, Path(folder))
        bounds = Bounds(loaded)
        by_case: dict[str, list[Row]] = {}
        for name, dtype in DTYPES.items():
            titles = (f"{name}, {{}}", f"{BEST_DTYPE}, {{}}")
            cases = [
                case for case in CASES if any(_is_chosen(t.format(case), only) for t in titles)
            ]
            if not cases:
                continue
            with _running(peers, peer_python, folder, dtype) as running:
                engine = PagedKV(loaded if dtype == torch.float32 else _load_in_16_bits(dtype))
                for case in cases:
                    row = _row(f"{name}, {case}", engine, case, running, bounds, num_samples)
                    yield row
                    of_dtypes = by_case.setdefault(case, [])
                    of_dtypes.append(row)
                    slow = _slower_than(of_dtypes[0], row)
                    running = {peer: p for peer, p in running.items() if NAMES[peer] not in slow}
        for case, of_dtypes in by_case.items():
            if len(of_dtypes) == len(DTYPES):
                yield best_of_dtypes(f"{BEST_DTYPE}, {case}", of_dtypes)
        wide_cases = {case: name for case, name in WIDE_CASES.items() if _is_chosen(name, only)}
        if wide_cases:
            with _running(peers, peer_python, folder, torch.float32) as running:
                # Peers keep 32 bits whatever the numbers, so theirs need not be the same.
                engine = PagedKV(load_model(MODEL))
                for case, name in wide_cases.items():
                    yield _row(
                        name, engine, case, running, bounds, num_samples, weight_bytes=FP32_BYTES
                    )
        if _is_chosen(SCHEDULER_STEP, only):
            vllm = [peer for peer in peers if peer == VLLM]
            with _running(vllm, peer_python, folder, torch.float32) as running:
                yield _scheduler_row(running, num_samples)
    if _is_chosen(CACHE, only):
        yield _cache_row(PagedKV(loaded), PagedKV(loaded, enable_prefix_caching=False))
    if _is_chosen(KV_SLOTS, only):
        yield kv_memory(loaded)


def best_of_dtypes(name: str, rows_of_dtypes: Sequence[Row]) -> Row:
    """Each engine's fastest row of a case, beside one another: none is run again."""
    references: dict[str, Timing] = {}
    for row in rows_of_dtypes:
        for peer, timing in row.references.items():
            references[peer] = min(references.get(peer, timing), timing, key=_median)
    best = min(rows_of_dtypes, key=lambda row: row.ours.median_s)
    return Row(name, best.ours, references, best.rate, best.rate_unit)


def _load_in_16_bits(dtype: torch.dtype) -> LoadedModel:
    """The model with weights rounded to bfloat16, in `dtype`."""
    loaded = load_model(MODEL, dtype=dtype)
    for parameter in loaded.model.parameters():
        parameter.copy_(parameter.bfloat16())
    return loaded


def _slower_than(first: Row, row: Row) -> set[str]:
    """The references that took more than `MAX_DTYPE_SLOWDOWN` times as long as in ``first``."""
    return {
        name
        for name, timing in row.references.items()
        if timing.median_s > MAX_DTYPE_SLOWDOWN * first.references[name].median_s
    }


class Bounds:
    """Probes over the fp32 weights of a model: reading them, and products with them."""

    def __init__(self, loaded: LoadedModel) -> None:
        weights = {
            name: w.to(torch.float32, copy=True)
            for name, w in loaded.model.weight_slots().items()
            if w.dim() == 2
        }
        self._head = weights.pop("lm_head.weight", weights["model.embed_tokens.weight"])
        weights.pop("model.embed_tokens.weight")
        self._weights = list(weights.values())
        self._inputs = {
            w.shape[1]: torch.randn(GEMM_ROWS, w.shape[1]) for w in (*self._weights, self._head)
        }

    def read(self) -> Sampler:
        """Seconds of reading all weights once."""
        return read_sampler([*self._weights, self._head], torch.get_num_threads())

    def gemm(self) -> Sampler:
        """Seconds of an fp32 operation in products of `GEMM_ROWS` rows with each weight."""
        flops = 2 * GEMM_ROWS * sum(weight.numel() for weight in (*self._weights, self._head))
        sample = call_sampler(self._multiply)
        return lambda: sample() / flops

    def flops(self, case: Case) -> int:
        """Multiplications and additions with weights; those of attention are left out."""
        layers = 2 * sum(weight.numel() for weight in self._weights) * case.num_computed_tokens
        return layers + 2 * self._head.numel() * case.num_requests * case.num_new_tokens

    def _multiply(self) -> None:
        with torch.inference_mode():
            for weight in (*self._weights, self._head):
                functional.linear(self._inputs[weight.shape[1]], weight)


def _is_chosen(name: str, only: str | None) -> bool:
    return only is None or re.search(only, name) is not None


def _median(timing: Timing) -> float:
    return timing.median_s


@contextmanager
def _running(
    peers: Sequence[str], peer_python: Path | None, folder: str, dtype: torch.dtype
) -> Iterator[dict[str, Peer]]:
    """The processes of peers, by name, as long as the context lasts."""
    with ExitStack() as stack:
        yield {
            peer: stack.enter_context(closing(_start(peer, peer_python, folder, dtype)))
            for peer in peers
        }


def _start(peer: str, peer_python: Path | None, folder: str, dtype: torch.dtype) -> Peer:
    python = peer_python if peer == VLLM else Path(sys.executable)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PAGED_KV_BENCH_MODEL": folder,
        "PAGED_KV_BENCH_DTYPE": str(dtype).removeprefix("torch."),
    }
    return Peer(python, WORKERS[peer], environment)


def _row(
    name: str,
    engine: PagedKV,
    case_name: str,
    peers: dict[str, Peer],
    bounds: Bounds,
    num_samples: int,
    *,
    weight_bytes: int = WEIGHT_BYTES,
) -> Row:
    """One case; ours reads ``weight_bytes`` of each weight."""
    case = CASES[case_name]
    samplers: dict[str, Sampler] = {
        "ours": make_sampler(engine, case),
        "read": bounds.read(),
        "gemm": bounds.gemm(),
    }
    for peer, process in peers.items():
        process.sample(f"warm up {case_name}")
        samplers[NAMES[peer]] = lambda process=process: process.sample(case_name)
    timings = take_turns(samplers, num_samples, settle_s=SETTLE_S)
    bound = Bound(
        read=_times(timings.pop("read"), case.num_new_tokens * weight_bytes / FP32_BYTES),
        compute=_times(timings.pop("gemm"), bounds.flops(case)),
        compute_name="GEMM",
    )
    ours = timings.pop("ours")
    references = {n: t for n, t in timings.items() if t.median_s == t.median_s}  # nan: unsupported
    num_tokens = case.num_requests * case.num_new_tokens
    return Row(name, ours, references, num_tokens / ours.median_s, "new tok/s", bound)


def _cache_row(engine: PagedKV, without: PagedKV) -> Row:
    """Ours with the prefix cache against ours without: two samples each, which take long."""
    samplers = {"with": make_sampler(engine, CASES[SHARED_PREFIX])}
    samplers["without"] = make_sampler(without, WITHOUT_CACHE)
    timings = take_turns(samplers, 2, settle_s=SETTLE_S)
    num_tokens = WITHOUT_CACHE.num_requests * WITHOUT_CACHE.num_new_tokens
    rate = num_tokens / timings["with"].median_s
    references = {"without prefix cache": timings["without"]}
    return Row(CACHE, timings["with"], references, rate, "new tok/s")


def _scheduler_row(peers: dict[str, Peer], num_samples: int) -> Row:
    samplers: dict[str, Sampler] = {"ours": step_sampler()}
    if VLLM in peers:
        samplers[NAMES[VLLM]] = lambda: peers[VLLM].sample(SCHEDULER_STEP)
    timings = take_turns(samplers, max(num_samples, 5), settle_s=SETTLE_S)
    ours = timings.pop("ours")
    return Row(SCHEDULER_STEP, ours, timings, NUM_REQUESTS / ours.median_s / 1e6, "M/s")


def kv_memory(loaded: LoadedModel) -> Share:
    """What the cache holds at most, of requests of 256 tokens and more, blocks of 16."""
    engine = PagedKV(loaded)
    case = Case(16, (257, 300, 341, 390), 8)
    engine.generate(case.prompts("memory"), case.num_new_tokens)
    stats, cache = engine.llm.engine.stats, engine.llm.engine.cache_engine
    num_bytes = stats.peak_num_used_blocks * (cache.num_bytes // cache.num_blocks)
    return Share(KV_SLOTS, stats.peak_fragmentation, num_bytes)


def _times(timing: Timing, factor: float) -> Timing:
    return replace(
        timing,
        median_s=timing.median_s * factor,
        p10_s=timing.p10_s * factor,
        p90_s=timing.p90_s * factor,
    )
