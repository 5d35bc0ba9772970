# SPDX-License-Identifier: Apache-2.0
"""What the forward pass of a step reads besides weights, caches and block tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paged_kv.engine.device import upload

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor

__all__ = ["StepArrays", "StepTensors"]

_NO_ROW = -1


class StepTensors(NamedTuple):
    """`StepArrays` on the device."""

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    rows: Tensor
    seq_lens: Tensor


class StepArrays(NamedTuple):
    """The tokens of a step's requests, laid end to end, and where each request begins.

    Attributes:
        input_ids: ``[num_tokens]`` int64.
        positions: ``[num_tokens]`` int64, place of each token in its request.
        query_start_loc: ``[num_seqs + 1]`` int32, first token of each request, then the total.
        rows: ``[num_seqs]`` int32, the requests' rows in the `InputBatch`.
        seq_lens: ``[num_seqs]`` int32, tokens of each request, this step's included.
    """

    input_ids: npt.NDArray[Any]
    positions: npt.NDArray[Any]
    query_start_loc: npt.NDArray[Any]
    rows: npt.NDArray[Any]
    seq_lens: npt.NDArray[Any]

    @classmethod
    def empty(cls) -> StepArrays:
        """A step without requests."""
        int32, int64 = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return cls(int64, int64, np.zeros(1, np.int32), int32, int32)

    def is_decode(self) -> bool:
        """Whether each request has one token; all have at least one."""
        return len(self.input_ids) == len(self.rows)

    def padded(self, size: int) -> StepArrays:
        """The same in arrays for ``size`` tokens of as many requests.

        Padding requests have no token, no row and no length: nothing is computed for them or
        written to a cache. Padding tokens (0, at 0) belong to no request.

        Raises:
            ValueError: There are more tokens or requests than that.
        """
        return StepArrays(
            _padded(self.input_ids, size, 0),
            _padded(self.positions, size, 0),
            _padded(self.query_start_loc, size + 1, self.query_start_loc[-1]),
            _padded(self.rows, size, _NO_ROW),
            _padded(self.seq_lens, size, 0),
        )

    def to_device(self, device: torch.device, out: Tensor | None = None) -> StepTensors:
        """See :func:`~paged_kv.engine.device.upload`."""
        return StepTensors(*upload(self, device, out))


def _padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    result = np.full(size, value, array.dtype)
    result[: len(array)] = array
    return result
