# SPDX-License-Identifier: Apache-2.0
"""All products of one pass of SmolLM2-135M with its weights: our op, torch's and oneDNN's.

Weights lie in order in huge pages, ours in panels, oneDNN's packed in its own way (as
``torch.compile`` does with frozen weights). The bound is that of reading all weights once, or of
the multiply-adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

import paged_kv.ops
from machine_probe import Bound, fma_sampler, read_sampler
from paged_kv.kv_cache_memory import zeros_in_huge_pages
from paged_kv.weight_panels import pack_weight
from timing import Row, call_sampler, take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    Product = Callable[[Tensor, Tensor, int], object]

NUM_LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # out, in
HEAD_SHAPE = (49152, 576)
NUM_ROWS = (1, 4, 16, 64, 256)
MAX_SAMPLES = 9


def rows(num_samples: int) -> Iterator[Row]:
    """One row a number of tokens; weights in float32, and ours in bfloat16 too."""
    shapes = [*LAYER_SHAPES * NUM_LAYERS, HEAD_SHAPE]
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in shapes]
    panels = _in_order([pack_weight(weight) for weight in weights])
    narrow = _in_order([pack_weight(weight.bfloat16()) for weight in weights])
    weights = _in_order(weights)
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
    num_threads = torch.get_num_threads()
    for num_rows in NUM_ROWS:
        inputs = {size: torch.randn(num_rows, size) for size in (576, 1536)}

        def run(product: Product, of: Sequence[Tensor], inputs: dict = inputs) -> None:
            for (out_features, size), weight in zip(shapes, of, strict=True):
                product(inputs[size], weight, out_features)

        num_flops = 2 * num_rows * sum(weight.numel() for weight in weights)
        timings = take_turns(
            {
                "ours": call_sampler(lambda: run(_ours, panels)),
                "torch": call_sampler(lambda: run(_torch, weights)),
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


def _in_order(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies, one after the other in huge pages."""
    sizes = [weight.numel() for weight in weights]
    memory = zeros_in_huge_pages((sum(sizes),), dtype=weights[0].dtype)
    parts = torch.split(memory, sizes)
    return [
        part.view(weight.shape).copy_(weight) for part, weight in zip(parts, weights, strict=True)
    ]


def _ours(x: Tensor, panels: Tensor, out_features: int) -> None:
    paged_kv.ops.linear(x.new_empty(x.shape[0], out_features), x, panels)


def _torch(x: Tensor, weight: Tensor, _out_features: int) -> None:
    functional.linear(x, weight)


def _onednn(x: Tensor, weight: Tensor, _out_features: int) -> None:
    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
