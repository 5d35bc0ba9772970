# SPDX-License-Identifier: Apache-2.0
"""The work of the host suite, written over names that vLLM and paged_kv have in common.

Imported by `bench_host` and, in a process of its own with vLLM's Python, by `peer_vllm_host`: both
run the same calls on the same input. A case is a generator: each `next()` prepares one sample,
times it, and gives its seconds, for short calls the mean of several. Time is the CPU time of the
thread, so that other work on the machine counts as little as possible; garbage collection is off.
"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work the cases are. `SMALL` is for tests."""

    num_pool_blocks: int = 100_000
    num_prompt_blocks: int = 2048
    num_requests: int = 256
    num_context_tokens: int = 512
    # Of a decode step, so that every request fills one block; of calls that are short.
    calls_per_sample: int = 16
    table_width: int = 4096  # blocks


FULL_SIZE = Sizes()
SMALL = Sizes(100, 8, 4, 32, 2, 64)


TOO_SMALL = "the pool is too small"


class Library(ABC):
    """What differs between the two: imports, constructors, and how a step is made."""

    BlockPool: Any
    KVCacheManager: Any
    KVCacheConfig: Any
    KVCacheGroupSpec: Any
    FullAttentionSpec: Any
    SlidingWindowSpec: Any
    dtype: Any

    @abstractmethod
    def to_token_ids(self, tokens: range) -> Any:
        """Tokens in the form in which an engine over this library has them."""

    @abstractmethod
    def make_request(self, name: str, token_ids: Any) -> Any:
        """A request whose blocks are hashed with sha256_cbor."""

    @abstractmethod
    def make_decode_step(self, manager: Any, requests: list[Any], width: int) -> Callable[[], None]:
        """One step of all requests, which hold blocks.

        Appends a token to each, allocates its slot, and writes new ids to rows of block tables.
        """

    @abstractmethod
    def make_table(self, num_rows: int, width: int) -> Any:
        """A BlockTable with a copy on the device, here the CPU."""

    def make_manager(self, specs: list[Any], num_blocks: int, max_model_len: int) -> Any:
        """A KVCacheManager with prefix caching, one group per spec."""
        groups = [self.KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
        return self.KVCacheManager(
            self.KVCacheConfig(num_blocks, [], groups),
            max_model_len=max_model_len,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )

    def full(self) -> Any:
        """A group of full attention."""
        return self.FullAttentionSpec(**self._shape())

    def sliding(self) -> Any:
        """A group with a window of 128 tokens."""
        return self.SlidingWindowSpec(sliding_window=128, **self._shape())

    def _shape(self) -> dict[str, Any]:
        return {
            "block_size": BLOCK_SIZE,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": self.dtype,
        }


def pool_construction(library: Library, sizes: Sizes) -> Iterator[float]:
    """BlockPool(num_blocks, enable_caching=True, hash_block_size=16)."""
    while True:
        start = time.thread_time()
        pool = library.BlockPool(sizes.num_pool_blocks, True, BLOCK_SIZE)
        yield time.thread_time() - start
        del pool


def allocate_and_cache(library: Library, sizes: Sizes) -> Iterator[float]:
    """KVCacheManager.allocate_slots of a whole prompt, whose blocks enter the prefix cache."""
    yield from _prompt(library, sizes, 0)


def hit_lookup(library: Library, sizes: Sizes) -> Iterator[float]:
    """KVCacheManager.get_computed_blocks of a prompt that is wholly cached."""
    yield from _prompt(library, sizes, 1)


def free(library: Library, sizes: Sizes) -> Iterator[float]:
    """KVCacheManager.free of that prompt's request."""
    yield from _prompt(library, sizes, 2)


def _prompt(library: Library, sizes: Sizes, which: int) -> Iterator[float]:
    """Seconds of allocation, lookup and release of one prompt; `which` of them is given."""
    num_tokens = sizes.num_prompt_blocks * BLOCK_SIZE
    manager = library.make_manager(
        [library.full()], 2 * sizes.num_prompt_blocks, 2 * num_tokens + BLOCK_SIZE
    )
    tokens = library.to_token_ids(range(num_tokens + 1))  # the last one is never a hit
    first, second = (library.make_request(name, tokens) for name in ("first", "second"))
    seconds = 0.0
    for num_calls in count(1):
        times = [time.thread_time()]
        taken = manager.allocate_slots(first, num_tokens)
        times.append(time.thread_time())
        _, num_hits, _ = manager.get_computed_blocks(second)
        times.append(time.thread_time())
        manager.free(first)
        times.append(time.thread_time())
        if taken is None or num_hits != num_tokens or not manager.reset_prefix_cache():
            msg = "the prompt was not allocated, found and freed"
            raise RuntimeError(msg)
        seconds += times[which + 1] - times[which]
        if num_calls % sizes.calls_per_sample == 0:
            yield seconds / sizes.calls_per_sample
            seconds = 0.0


def hash_prompt(library: Library, sizes: Sizes) -> Iterator[float]:
    """Request(...) with a block hasher of sha256_cbor: the hashes of all full blocks."""
    tokens = library.to_token_ids(range(sizes.num_prompt_blocks * BLOCK_SIZE))
    while True:
        start = time.thread_time()
        request = library.make_request("request", tokens)
        yield time.thread_time() - start
        if len(request.block_hashes) != sizes.num_prompt_blocks:
            msg = "the blocks were not hashed"
            raise RuntimeError(msg)


def decode_one_group(library: Library, sizes: Sizes) -> Iterator[float]:
    """A step of all requests in one group of full attention."""
    yield from _decode(library, sizes, [library.full()])


def decode_six_groups(library: Library, sizes: Sizes) -> Iterator[float]:
    """A step of all requests in one group of full and five of sliding-window attention."""
    yield from _decode(library, sizes, [library.full(), *[library.sliding() for _ in range(5)]])


def _decode(library: Library, sizes: Sizes, specs: list[Any]) -> Iterator[float]:
    """Seconds per step. Lengths are spread, so that each step fills as many blocks."""
    width = sizes.table_width
    manager = library.make_manager(specs, sizes.num_pool_blocks, width * BLOCK_SIZE)
    requests = []
    for i in range(sizes.num_requests):
        num_tokens = sizes.num_context_tokens + i % BLOCK_SIZE
        tokens = library.to_token_ids(range(1000 * i, 1000 * i + num_tokens))
        requests.append(library.make_request(str(i), tokens))
        if manager.allocate_slots(requests[-1], num_tokens) is None:
            raise RuntimeError(TOO_SMALL)
        requests[-1].num_computed_tokens = num_tokens
    step = library.make_decode_step(manager, requests, width)
    while True:
        start = time.thread_time()
        for _ in range(sizes.calls_per_sample):
            step()
        yield (time.thread_time() - start) / sizes.calls_per_sample


def commit_block_table(library: Library, sizes: Sizes) -> Iterator[float]:
    """BlockTable.commit_block_table of all rows, after a step that gave a block to 1 in 16."""
    table = library.make_table(sizes.num_requests, sizes.table_width)
    for row in range(sizes.num_requests):
        table.append_row(list(range(1, 1 + sizes.num_context_tokens // BLOCK_SIZE)), row)
    table.commit_block_table(sizes.num_requests)
    seconds = 0.0
    for num_calls in count(1):
        rows = range(num_calls % 16, sizes.num_requests, 16)
        for row in rows:
            table.append_row([7], row)
        start = time.thread_time()
        table.commit_block_table(sizes.num_requests)
        seconds += time.thread_time() - start
        if num_calls % sizes.calls_per_sample == 0:
            yield seconds / sizes.calls_per_sample
            seconds = 0.0


CASES = {
    case.__name__: case
    for case in (
        pool_construction,
        allocate_and_cache,
        hit_lookup,
        free,
        hash_prompt,
        decode_one_group,
        decode_six_groups,
        commit_block_table,
    )
}


def start(name: str, library: Library, sizes: Sizes = FULL_SIZE) -> Iterator[float]:
    """The samples of a case, after one that warms up."""
    gc.disable()
    samples = CASES[name](library, sizes)
    next(samples)
    return samples
