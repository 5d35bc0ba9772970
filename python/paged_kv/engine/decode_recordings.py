# SPDX-License-Identifier: Apache-2.0
"""Recordings of decode steps: the ops of a whole forward pass repeated without Python's model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paged_kv.engine.op_recorder import OpRecorder
from paged_kv.engine.step_inputs import StepArrays

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paged_kv.engine.decode_graphs import GraphRecorder
    from paged_kv.engine.step_inputs import StepTensors

__all__ = ["MAX_RECORDED_SIZE", "NUM_STEPS_BEFORE_RECORDING", "DecodeRecordings"]

MAX_RECORDED_SIZE = 64
"""Most requests of a step that is worth recording.

A recording saves the same few milliseconds whatever the size, and the work grows with it: of
SmolLM2's steps they are a fifth with one request and a fiftieth with 64.
"""

NUM_STEPS_BEFORE_RECORDING = 4
"""Steps of a size before it is recorded.

So many would have saved what a recording costs. A batch whose requests end one after the other has
each size for a few steps only.
"""


class DecodeRecordings:
    """Forward passes of steps with one token a request, on a CPU, recorded as their sizes come.

    Where `DecodeGraphs` pads a batch, this has a recording for each size, as on a CPU padding costs
    work. A size is recorded when it comes for the fifth time, by the step itself.

    Args:
        forward: Computes the hidden states, ``[num_seqs, hidden_size]``, of a step's inputs.
            Everything else that it reads has to stay where it is.
        hidden: ``[largest size, hidden_size]``: where results go.
        recorder: What records. ``None``: `OpRecorder`.

    Notes:
        Cost: a step that is recorded takes as long as some five of the same size that are not.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from paged_kv.engine.decode_recordings import DecodeRecordings
        >>> from paged_kv.engine.step_inputs import StepArrays
        >>> num_calls = 0
        >>> def forward(inputs):
        ...     global num_calls
        ...     num_calls += 1
        ...     return inputs.input_ids[:, None] * 2.0
        >>> recordings = DecodeRecordings(forward, torch.zeros(4, 1))
        >>> one_each = np.arange(4, dtype=np.int32)
        >>> for i in range(20):
        ...     ids = np.array([i, i + 1, i + 2])
        ...     step = StepArrays(ids, np.zeros(3, np.int64), one_each, one_each[:3], one_each[1:])
        ...     result = recordings.run(step)
        >>> result.tolist(), num_calls
        ([[38.0], [40.0], [42.0]], 5)
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], Tensor],
        hidden: Tensor,
        recorder: GraphRecorder | None = None,
    ) -> None:
        self._forward = forward
        self._hidden = hidden
        self._recorder = recorder or OpRecorder(hidden.device)
        self._inputs = StepArrays.empty().padded(len(hidden))
        self._num_steps = [0] * (len(hidden) + 1)  # by size, those before it was recorded
        self._replays: dict[int, Callable[[], None]] = {}

    def fits(self, step: StepArrays) -> bool:
        """Whether the step is one to record."""
        return len(step.rows) <= len(self._hidden) and step.is_decode()

    def run(self, step: StepArrays) -> Tensor:
        """Compute a step that `fits`.

        Returns:
            ``[num_seqs, hidden_size]``, a view that the next call overwrites.
        """
        for array, values in zip(self._inputs, step, strict=True):
            array[: len(values)] = values
        size = len(step.rows)
        replay = self._replays.get(size)
        if replay is not None:
            replay()
        elif self._num_steps[size] < NUM_STEPS_BEFORE_RECORDING:
            self._num_steps[size] += 1
            self._pass_of(size)()
        else:
            self._replays[size] = self._recorder.capture(self._pass_of(size))
        return self._hidden[:size]

    def _pass_of(self, size: int) -> Callable[[], None]:
        """What computes a step of this size, from where its inputs are copied to."""
        input_ids, positions, query_start_loc, rows, seq_lens = self._inputs
        arrays = StepArrays(
            input_ids[:size],
            positions[:size],
            query_start_loc[: size + 1],
            rows[:size],
            seq_lens[:size],
        )
        inputs, hidden = arrays.to_device(self._hidden.device), self._hidden[:size]

        def run() -> None:
            hidden.copy_(self._forward(inputs))

        return run
