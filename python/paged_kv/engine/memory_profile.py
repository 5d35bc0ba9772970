# SPDX-License-Identifier: Apache-2.0
"""What a step needs besides model and cache: measured by running one."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paged_kv.engine.decode_graphs import DecodeGraphs
from paged_kv.engine.memory import total_memory_bytes, used_memory_bytes
from paged_kv.kv_cache import KVCache, kv_cache_dtype_str_to_dtype
from paged_kv.kv_cache_memory import allocate_kv_cache, preferred_layout
from paged_kv.metadata import AttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from paged_kv.engine.config import EngineConfig
    from paged_kv.engine.step_inputs import StepTensors
    from paged_kv.models import DecoderForCausalLM, LoadedModel

__all__ = [
    "choose_kv_cache_bytes",
    "measure_graph_bytes",
    "measure_step_bytes",
    "profile_kv_cache_bytes",
]


def choose_kv_cache_bytes(loaded: LoadedModel, config: EngineConfig) -> int | None:
    """Bytes for the cache as the configuration says; None: the default for what is free."""
    if config.has_cache_size:
        return config.kv_cache_memory_bytes
    return None if config.memory_utilization is None else profile_kv_cache_bytes(loaded, config)


def profile_kv_cache_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """How much memory is left for the cache.

    Args:
        loaded: The model, in memory.
        config: ``memory_utilization`` must be set.

    Returns:
        That share of the device's memory, less what the process has now, less what a step of full
        size takes (:func:`measure_step_bytes`), less the graphs of decode steps
        (:func:`measure_graph_bytes`), less the swap space if that is on the device.

    Raises:
        ValueError: Nothing is left.

    Cost: Two steps of full size, and the capture of all graphs.

    Source:
        vLLM 0.32 ``v1/worker/gpu_worker.py::Worker.determine_available_memory``.
    """
    if config.memory_utilization is None:
        msg = "memory_utilization must be set"
        raise ValueError(msg)
    loaded.model.set_batch_invariant(config.batch_invariant)  # whose tiles need memory too
    step_bytes = measure_step_bytes(loaded, config)
    graph_bytes = measure_graph_bytes(loaded, config)
    budget = int(total_memory_bytes(config.device) * config.memory_utilization)
    used_bytes = used_memory_bytes(config.device)
    # The swap space is the host's memory.
    swap_bytes = config.usable_swap_space_bytes if config.device == "cpu" else 0
    num_bytes = budget - used_bytes - step_bytes - graph_bytes - swap_bytes
    if num_bytes <= 0:
        msg = (
            f"memory_utilization {config.memory_utilization} is {budget >> 20} MiB: model and "
            f"process take {used_bytes >> 20}, a step of {config.max_num_batched_tokens} "
            f"tokens {step_bytes >> 20}, CUDA graphs {graph_bytes >> 20}, the swap space "
            f"{swap_bytes >> 20}, which leaves nothing for the cache"
        )
        raise ValueError(msg)
    return num_bytes


@torch.inference_mode()
def measure_step_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Most bytes that a step of full size has allocated at once, besides model and cache.

    The step has ``max_num_batched_tokens`` tokens and samples ``max_num_seqs`` of them. It writes
    to no cache.
    """
    step = _DummyStep(loaded, config)
    step.run()  # what is made once: the buffers of the ops and of torch
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step.run()
        return torch.cuda.max_memory_allocated(device) - before
    before = used_memory_bytes()
    _reset_peak()
    step.run()
    return max(_peak_memory_bytes() - before, 0)


@torch.inference_mode()
def measure_graph_bytes(loaded: LoadedModel, config: EngineConfig) -> int:
    """Memory that the graphs of decode steps keep; 0 if the configuration has none.

    Captures them all, with a cache of one block, and gives their memory back.

    Cost: Two passes of each size.

    Source:
        vLLM 0.32 ``v1/worker/gpu/cudagraph_utils.py::profile_cudagraph_memory`` (which captures
        some of them).
    """
    sizes = config.decode_graph_sizes
    if not sizes:
        return 0
    model, caches = loaded.model, _dummy_caches(loaded, config)
    device, dtype = torch.device(config.device), model.dtype

    def forward(step: StepTensors) -> Tensor:
        num_seqs = len(step.rows)
        metadata = AttentionMetadata(
            query_start_loc=step.query_start_loc,
            seq_lens=step.seq_lens,
            block_tables=torch.zeros(num_seqs, 1, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_seqs,), -1, dtype=torch.int64, device=device),
            max_query_len=1,
            max_seq_len=config.block_size,
        )
        hidden: Tensor = model(
            step.input_ids,
            step.positions,
            caches,
            [metadata] * len(caches),
            check_token_ids=False,
        )
        return hidden

    before = used_memory_bytes(config.device)
    hidden = torch.zeros(sizes[-1], loaded.config.hidden_size, dtype=dtype, device=device)
    graphs = DecodeGraphs(forward, sizes, hidden)
    num_bytes = used_memory_bytes(config.device) - before
    del graphs
    return max(num_bytes, 0)


def _dummy_caches(loaded: LoadedModel, config: EngineConfig) -> list[KVCache]:
    """A cache of one block, the same for each layer."""
    device = torch.device(config.device)
    dtype = loaded.model.dtype
    cache_dtype = kv_cache_dtype_str_to_dtype(config.kv_cache_dtype, dtype)
    block_size, head_size = config.block_size, loaded.config.head_size
    layout = preferred_layout(device, block_size=block_size, head_size=head_size)
    sizes = (1, block_size, loaded.config.num_kv_heads, head_size)
    blocks = allocate_kv_cache(*sizes, dtype=cache_dtype, layout=layout, device=device)
    one = torch.ones(1, device=device)
    cache = KVCache(*blocks, config.kv_cache_dtype, one, one)
    return [cache] * loaded.config.num_layers


class _DummyStep:
    """A step whose sequences all lie in the null block."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._model: DecoderForCausalLM = loaded.model
        device = torch.device(config.device)
        num_tokens = config.max_num_batched_tokens
        limit = config.max_model_len or loaded.config.max_position_embeddings
        # Sequences as long as they may be, the last one shorter.
        self._query_lens = [min(limit, num_tokens - begin) for begin in range(0, num_tokens, limit)]
        self._num_samples = min(config.max_num_seqs, num_tokens)
        self._input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.cat([torch.arange(n, device=device) for n in self._query_lens])
        lens = torch.tensor(self._query_lens, dtype=torch.int32, device=device)
        width = -(-max(self._query_lens) // config.block_size)
        metadata = AttentionMetadata(
            query_start_loc=functional.pad(lens.cumsum(0), (1, 0)).int(),
            seq_lens=lens,
            block_tables=torch.zeros(len(lens), width, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            max_query_len=max(self._query_lens),
            max_seq_len=max(self._query_lens),
        )
        self._caches = _dummy_caches(loaded, config)
        self._metadata = [metadata] * len(self._caches)

    def run(self) -> None:
        hidden = self._model(self._input_ids, self._positions, self._caches, self._metadata)
        logits = self._model.compute_logits(hidden[: self._num_samples])
        # The sampler's copies, where every row is sampled.
        logits.clone().softmax(dim=-1)


def _reset_peak() -> None:
    # Linux counts the peak anew after this; elsewhere the peak of the whole process stays.
    path = Path("/proc/self/clear_refs")
    with contextlib.suppress(OSError):
        path.write_text("5", encoding="ascii")


def _peak_memory_bytes() -> int:
    path = Path("/proc/self/status")
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
