# SPDX-License-Identifier: Apache-2.0
"""What takes the place of a GPU: emulated kernels, and a device that has no values."""

from __future__ import annotations

import torch
from cuda_build import ops_with_cuda_kernel
from ops.backends import emulated_library

from paged_kv.engine.sampler import SampledTokens


class EmulatedOps:
    """The ops that CUDA has, emulated; of the rest the CPU's, where a GPU would use torch's."""

    def __init__(self):
        torch.ops.load_library(emulated_library())
        self._others = torch.ops.paged_kv
        self._emulated = ops_with_cuda_kernel()

    def __getattr__(self, op):
        return getattr(torch.ops.paged_kv_emulated if op in self._emulated else self._others, op)


class MetaSampler:
    """Takes token 3, as there are no values to choose by."""

    num_tokens = 0

    def sample(self, logits, rows):
        assert logits.device.type == "meta"
        assert len(logits) == len(rows)
        self.num_tokens += len(rows)
        return SampledTokens([3] * len(rows), [None] * len(rows))
