# SPDX-License-Identifier: Apache-2.0
"""All products of one pass of SmolLM2-135M with its weights: our op, torch's and oneDNN's.

Weights lie in order in huge pages. oneDNN's are packed (as ``torch.compile`` does with frozen
weights), which costs as much memory again. The bound is that of reading all weights once, or of the
multiply-adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import paged_kv.ops
from machine_probe import Bound, fma_sampler, read_sampler
from paged_kv.kv_cache_memory import zeros_in_huge_pages
from timing import Row, call_sampler, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Product = Callable[[Tensor, Tensor], object]

NUM_LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # out, in
HEAD_SHAPE = (49152, 576)
NUM_ROWS = (1, 4, 16, 64, 256)
MAX_SAMPLES = 9


def rows(num_samples: int) -> Iterator[Row]:
    """One row a number of tokens; weights in float32, and ours in bfloat16 too."""
    shapes = [*LAYER_SHAPES * NUM_LAYERS, HEAD_SHAPE]
    torch.manual_seed(0)
    weights = _in_order(shapes, torch.float32)
    narrow = _in_order(shapes, torch.bfloat16)
    for weight, copy in zip(weights, narrow, strict=True):
        copy.copy_(weight.normal_())
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
    num_threads = torch.get_num_threads()
    for num_rows in NUM_ROWS:
        inputs = {size: torch.randn(num_rows, size) for size in (576, 1536)}

        def run(product: Product, of: Sequence[Tensor], inputs: dict = inputs) -> None:
            for (_, size), weight in zip(shapes, of, strict=True):
                product(inputs[size], weight)

        num_flops = 2 * num_rows * sum(weight.numel() for weight in weights)
        timings = take_turns(
            {
                "ours": call_sampler(lambda: run(_ours, weights)),
                "torch": call_sampler(lambda: run(functional.linear, weights)),
                "oneDNN, packed": call_sampler(lambda: run(_onednn, packed)),
                "ours, weights in bf16": call_sampler(lambda: run(_ours, narrow)),
                "read": read_sampler(weights, num_threads),
                "compute": fma_sampler(num_flops, num_threads),
            },
            min(num_samples, MAX_SAMPLES),
        )
        bound = Bound(timings.pop("read"), timings.pop("compute"))
        ours = timings.pop("ours")
        yield Row(
            f"products of {num_rows} rows, fp32",
            ours,
            timings,
            num_flops / ours.median_s / 1e9,
            "GFLOP/s",
            bound,
        )


def _in_order(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Matrices of these shapes, one after the other."""
    sizes = [out_features * in_features for out_features, in_features in shapes]
    memory = zeros_in_huge_pages((sum(sizes),), dtype=dtype)
    parts = torch.split(memory, sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _ours(x: Tensor, weight: Tensor) -> None:
    paged_kv.ops.linear(x.new_empty(x.shape[0], weight.shape[0]), x, weight)


def _onednn(x: Tensor, weight: Tensor) -> None:
    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
