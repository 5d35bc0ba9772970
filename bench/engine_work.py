# SPDX-License-Identifier: Apache-2.0
"""The work of the engine suite, the same for every engine: prompts, and what one sample is.

Imported by `bench_engine` and, in processes of their own, by the workers of its peers. All are
driven through `Engine`; a sample is the wall-clock time of whole requests, from their prompts to
the last token. Every sample has prompts of its own, so that a prefix cache finds only what a case
means it to find.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    TokenIds = list[int]

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
WARM_UP = "warm up "
# Of the case without a model.
SCHEDULER_STEP = "scheduler step, 256 decoding requests"
NUM_REQUESTS = 256
NUM_CONTEXT_TOKENS = 512
NUM_STEPS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that come at once.

    Attributes:
        num_requests: How many.
        prompt_lengths: Tokens of the prompts, in turn.
        num_new_tokens: Tokens that each generates.
        num_shared_tokens: Tokens of a prefix that all prompts of all samples share.
        repeats: The same prompts have been served before.
        prefix_caching: Whether the engine may reuse prefixes.
    """

    num_requests: int
    prompt_lengths: tuple[int, ...]
    num_new_tokens: int
    num_shared_tokens: int = 0
    repeats: bool = False
    prefix_caching: bool = True

    def prompts(self, seed: str) -> list[TokenIds]:
        """Prompts of random ids; the shared prefix does not depend on the seed."""
        shared = _random_ids("shared prefix", self.num_shared_tokens)
        lengths = [
            self.prompt_lengths[i % len(self.prompt_lengths)] for i in range(self.num_requests)
        ]
        return [
            shared + _random_ids(f"{seed} {i}", num_tokens) for i, num_tokens in enumerate(lengths)
        ]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that go through the layers; the last new one does not, nor does a cached one."""
        prompts = sum(map(len, self.prompts("")))
        if self.repeats:
            return self.num_requests * self.num_new_tokens
        if self.prefix_caching:
            prompts -= self.num_requests * self.num_shared_tokens
        return prompts + self.num_requests * (self.num_new_tokens - 1)


def mixed(num_requests: int) -> Case:
    """Requests of three prompt lengths, as many of each as there can be."""
    return Case(num_requests, (32, 128, 256), 64)


CASES = {
    "1 request": mixed(1),
    "16 requests": mixed(16),
    "64 requests": mixed(64),
    "first token of 256": Case(1, (256,), 1),
    "first token of 256, prefix cached": Case(1, (256,), 1, repeats=True),
    "64 requests, shared prefix of 512": Case(64, (32,), 16, num_shared_tokens=512),
}
WITHOUT_CACHE = Case(64, (32,), 16, num_shared_tokens=512, prefix_caching=False)


class Engine(ABC):
    """What differs between engines."""

    @abstractmethod
    def generate(self, prompts: Sequence[TokenIds], num_new_tokens: int) -> int:
        """Serve all prompts, greedily, whatever end token comes; return how many are new."""


def make_sampler(engine: Engine, case: Case) -> Callable[[], float]:
    """A function that takes one sample and gives its seconds. The first one warms up here."""
    seeds = count()

    def sample() -> float:
        prompts = case.prompts(f"sample {next(seeds)}")
        if case.repeats:
            engine.generate(prompts, case.num_new_tokens)
        start = time.perf_counter()
        num_tokens = engine.generate(prompts, case.num_new_tokens)
        seconds = time.perf_counter() - start
        if num_tokens != case.num_requests * case.num_new_tokens:
            msg = f"{num_tokens} new tokens for {case}"
            raise RuntimeError(msg)
        return seconds

    warm_up = Case(
        min(case.num_requests, 2),
        case.prompt_lengths[:1],
        2,
        num_shared_tokens=case.num_shared_tokens,
    )
    engine.generate(warm_up.prompts("warm up"), warm_up.num_new_tokens)
    return sample


def _random_ids(seed: str, num_tokens: int) -> TokenIds:
    # Ids below 1000 have special tokens and bytes among them.
    generator = random.Random(seed)
    return [generator.randrange(1000, 40_000) for _ in range(num_tokens)]
