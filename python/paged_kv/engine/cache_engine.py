# SPDX-License-Identifier: Apache-2.0
"""The tensors that hold keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_kv import ops
from paged_kv._cache_panels import panel_shapes
from paged_kv._core import AttentionSpec, UniformTypeKVCacheSpecs
from paged_kv.engine.memory import available_memory_bytes
from paged_kv.kv_cache import KVCache
from paged_kv.kv_cache_memory import preferred_layout, zeros_in_huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from paged_kv._core import KVCacheConfig, KVCacheTensor

__all__ = ["CacheEngine", "check_kv_scales"]


class CacheEngine:
    """Memory of all layers' caches, and of the swap space; copies of whole blocks.

    Layers of different groups share memory as `KVCacheConfig.kv_cache_tensors` says: a block of the
    pool belongs to one group at a time. A block of a layer holds its keys, then its values, in the
    layout of `paged_kv.kv_cache_memory.preferred_layout`.

    On a CPU pages cost nothing before they are used, but the first use of each is slow: a step that
    begins new blocks may wait for many megabytes to be zeroed.

    Args:
        kv_cache_config: Groups of layers and where they lie.
        kv_cache_dtype: How keys and values are stored, see `paged_kv.kv_cache.KVCache`.
        kv_scales: For layers of a quantised cache, by name: ``(k_scale, v_scale)``; others have 1.
        num_swap_blocks: Blocks in the host's memory.
        device: Where the caches are.
        touch: Use all pages of the caches now, once, which takes as long as writing them does.

    Attributes:
        kv_caches: The cache of each layer, by name.
        num_blocks: Blocks in each cache, the null block included.
        num_bytes: Bytes of all caches.
        num_swap_bytes: Bytes of the swap space.

    Raises:
        ValueError: Scales of a layer that there is not, or of another number of heads.
        MemoryError: The caches are larger than the memory that is available.

    Source:
        vLLM ``worker/cache_engine.py::CacheEngine`` (before v1).
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        kv_cache_dtype: str = "auto",
        kv_scales: Mapping[str, tuple[Tensor, Tensor]] | None = None,
        num_swap_blocks: int = 0,
        device: torch.device | str = "cpu",
        touch: bool = False,
    ) -> None:
        self.num_blocks = kv_cache_config.num_blocks
        tensors = kv_cache_config.kv_cache_tensors
        self.num_bytes = max((tensor.size for tensor in tensors), default=0)
        self.num_swap_bytes = num_swap_blocks * (self.num_bytes // self.num_blocks)
        _check_memory(
            f"{self.num_blocks} KV blocks", self.num_bytes, device, "use fewer blocks (num_blocks)"
        )
        needed = self.num_swap_bytes + (self.num_bytes if torch.device(device).type == "cpu" else 0)
        _check_memory("KV cache and swap space", needed, "cpu", "use less swap_space_bytes")
        memory = zeros_in_huge_pages((self.num_bytes,), dtype=torch.uint8, device=device)
        if touch:
            memory.zero_()
        specs = dict(_layer_specs(kv_cache_config))
        check_kv_scales(kv_scales, specs, kv_cache_dtype)
        one = torch.ones(1, device=device)
        places = {name: place for tensor in tensors for name, place in _layer_places(tensor)}
        self.kv_caches = {
            name: KVCache(
                *_keys_and_values(memory, places[name], spec, self.num_blocks),
                kv_cache_dtype,
                *(scale.to(device) for scale in (kv_scales or {}).get(name, (one, one))),
            )
            for name, spec in specs.items()
        }
        self._regions = [
            memory[begin : begin + self.num_blocks * stride].view(self.num_blocks, stride)
            for begin, stride in sorted(set(places.values()))
        ]
        self._swap_regions = [
            torch.zeros(
                num_swap_blocks, region.shape[1], dtype=torch.uint8, pin_memory=memory.is_cuda
            )
            for region in self._regions
        ]
        # A page's keys and its values: what the op that copies blocks takes.
        self._halves = [
            (region[:, : region.shape[1] // 2], region[:, region.shape[1] // 2 :])
            for region in self._regions
        ]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within the cache, in all layers: ``(source, destination)``."""
        if not copies:
            return
        keys, values = zip(*self._halves, strict=True)
        mapping = torch.tensor(copies, dtype=torch.int64, device=self._regions[0].device)
        ops.copy_blocks(list(keys), list(values), mapping)

    def swap_out(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to the swap space: ``(block of the cache, block of the space)``."""
        _swap(self._regions, self._swap_regions, copies)

    def swap_in(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from the swap space: ``(block of the space, block of the cache)``."""
        _swap(self._swap_regions, self._regions, copies)


def _swap(
    sources: Sequence[Tensor], destinations: Sequence[Tensor], copies: Sequence[tuple[int, int]]
) -> None:
    if not copies:
        return
    mapping = torch.tensor(copies, dtype=torch.int64)
    for source, destination in zip(sources, destinations, strict=True):
        ops.swap_blocks(source, destination, source.shape[1], mapping)


def _layer_specs(config: KVCacheConfig) -> Iterator[tuple[str, AttentionSpec]]:
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            layer_spec = (
                spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
            )
            if not isinstance(layer_spec, AttentionSpec):
                msg = f"layer {name} has no keys and values: {layer_spec}"
                raise TypeError(msg)
            yield name, layer_spec


def _layer_places(tensor: KVCacheTensor) -> Iterator[tuple[str, tuple[int, int]]]:
    """Each layer, with the byte where its block 0 begins and the bytes of a block."""
    for i, name in enumerate(tensor.layers):
        yield name, (tensor.offset + i * tensor.layer_stride, tensor.block_stride)


def check_kv_scales(
    kv_scales: Mapping[str, tuple[Tensor, Tensor]] | None,
    specs: Mapping[str, AttentionSpec],
    kv_cache_dtype: str,
) -> None:
    """Raise ``ValueError`` if there are scales of no layer, too many or too few, or none needed."""
    if kv_scales is None:
        return
    if kv_cache_dtype == "auto":
        msg = "kv_scales are those of a quantised cache, but kv_cache_dtype is 'auto'"
        raise ValueError(msg)
    for name, scales in kv_scales.items():
        if name not in specs:
            msg = f"kv_scales: the model has no layer {name!r}; its first is {next(iter(specs))!r}"
            raise ValueError(msg)
        for scale in scales:
            if scale.shape not in ((1,), (specs[name].num_kv_heads,)):
                msg = (
                    f"kv_scales: layer {name!r} takes 1 scale or {specs[name].num_kv_heads}, one a "
                    f"KV head, got {list(scale.shape)}"
                )
                raise ValueError(msg)


def _keys_and_values(
    memory: Tensor, place: tuple[int, int], spec: AttentionSpec, num_blocks: int
) -> tuple[Tensor, Tensor]:
    """Views of a layer's memory, in the layout that its device reads fastest."""
    begin, block_bytes = place
    dtype: torch.dtype = getattr(torch, spec.dtype)
    pages = memory[begin : begin + num_blocks * block_bytes].view(dtype).view(num_blocks, -1)
    num_elements = spec.num_kv_heads * spec.block_size * spec.head_size
    key_shape, value_shape = _shapes(spec, num_blocks, dtype, memory.device)
    # Pages may be padded: these views have gaps.
    key = pages[:, :num_elements].view(key_shape)
    value = pages[:, num_elements : 2 * num_elements].view(value_shape)
    return key, value


def _shapes(
    spec: AttentionSpec, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and of values."""
    sizes = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    layout = preferred_layout(device, block_size=spec.block_size, head_size=spec.head_size)
    return panel_shapes(*sizes, dtype) if layout == "panels" else (sizes, sizes)


def _check_memory(what: str, num_bytes: int, device: torch.device | str, remedy: str) -> None:
    # Checked here since pages that are only reserved come without an error.
    available = available_memory_bytes(device)
    if num_bytes > available:
        msg = f"{what} take {_gib(num_bytes)}, {_gib(available)} are available: {remedy}"
        raise MemoryError(msg)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
