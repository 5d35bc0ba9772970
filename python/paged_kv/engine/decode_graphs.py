# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decode steps: the launches of a whole forward pass replayed by one call.

Not run on a GPU yet: tests replay such steps with a recorder that works on a CPU.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Protocol

import torch

from paged_kv.engine.device import upload_bytes
from paged_kv.engine.step_inputs import StepArrays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from paged_kv.engine.step_inputs import StepTensors

__all__ = ["CudaGraphRecorder", "DecodeGraphs", "GraphRecorder", "default_graph_sizes"]

# Sizes lie this far apart, beyond _COARSE_FROM twice as far: padding costs little there.
_SIZE_STEP = 8
_COARSE_FROM = 256
# Launches of larger steps are hidden behind their work.
_MAX_SIZE = 512


def default_graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, 8, then every 8th, from 256 on every 16th, up to 512.

    The last one is ``max_num_seqs`` if that is less than 512: no batch is too large.

    Args:
        max_num_seqs: Most requests of a step, at least 1.

    Returns:
        The sizes, in increasing order.

    Source:
        vLLM 0.32 ``config/vllm.py::VllmConfig._set_cudagraph_sizes`` (the distances).

    Example:
        >>> from paged_kv.engine.decode_graphs import default_graph_sizes
        >>> default_graph_sizes(20)
        (1, 2, 4, 8, 16, 20)
    """
    largest = min(max_num_seqs, _MAX_SIZE)
    fine = range(_SIZE_STEP, _COARSE_FROM, _SIZE_STEP)
    coarse = range(_COARSE_FROM, _MAX_SIZE, 2 * _SIZE_STEP)
    return (*(size for size in (1, 2, 4, *fine, *coarse) if size < largest), largest)


class GraphRecorder(Protocol):
    """Makes something of a function that repeats what it has done on the device."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` and record it.

        Args:
            run: Reads and writes tensors of the device that stay where they are; waits for
                nothing, and looks at no value of a tensor.

        Returns:
            Repeats the work on the same tensors, whatever values they have then.
        """


class CudaGraphRecorder:
    """Captures CUDA graphs, which share one pool of memory.

    So at most one of them may run at a time, and what one leaves in the pool lasts until the next
    one runs: results have to be copied to memory outside.

    Args:
        device: A CUDA device.

    Notes:
        Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Graphs share memory only if they were captured on one stream.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """See :meth:`GraphRecorder.capture`. Runs ``run`` twice, and waits for the device."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # what only a first call does, such as to load kernels, cannot be captured
            # Other threads may go on using the device.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                run()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


class DecodeGraphs:
    """Forward passes of steps with one token a request, captured for some batch sizes.

    A step of n requests is padded to the next size: its inputs are copied to where the graph reads
    them, with requests behind them that have no token (`StepArrays.padded`).

    Captures when constructed, the largest size first, in whose memory the others find room.

    Args:
        forward: Computes the hidden states, ``[size, hidden_size]``, of inputs that are padded to
            a size. Everything else that it reads on the device has to stay where it is.
        sizes: Batch sizes, in increasing order.
        hidden: ``[sizes[-1], hidden_size]`` on the device: where results go.
        recorder: What captures. ``None``: `CudaGraphRecorder`.

    Notes:
        Cost: two passes of each size. A replay is one copy to the device and one launch.

    Source:
        vLLM 0.32 ``v1/worker/gpu/cudagraph_utils.py::CudaGraphManager`` (the idea).

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from paged_kv.engine.decode_graphs import DecodeGraphs
        >>> from paged_kv.engine.step_inputs import StepArrays
        >>> class CallAgain:  # instead of a graph: fits any device
        ...     def capture(self, run):
        ...         return run
        >>> def forward(inputs):
        ...     return inputs.input_ids[:, None] * 2.0
        >>> graphs = DecodeGraphs(forward, [1, 4], torch.zeros(4, 1), CallAgain())
        >>> one_each = np.arange(4, dtype=np.int32)
        >>> ids = np.array([5, 6, 7])
        >>> step = StepArrays(ids, np.zeros(3, np.int64), one_each, one_each[:3], one_each[1:])
        >>> graphs.fits(step), graphs.run(step).tolist()
        (True, [[10.0], [12.0], [14.0]])
    """

    def __init__(
        self,
        forward: Callable[[StepTensors], Tensor],
        sizes: Sequence[int],
        hidden: Tensor,
        recorder: GraphRecorder | None = None,
    ) -> None:
        recorder = recorder or CudaGraphRecorder(hidden.device)
        self._sizes = list(sizes)
        self._hidden = hidden
        num_bytes = upload_bytes(StepArrays.empty().padded(self._sizes[-1]))
        self._inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=hidden.device)
        self._replays = {
            size: self._capture(forward, size, recorder) for size in reversed(self._sizes)
        }

    def fits(self, step: StepArrays) -> bool:
        """Whether there is a graph for the step."""
        return len(step.rows) <= self._sizes[-1] and step.is_decode()

    def run(self, step: StepArrays) -> Tensor:
        """Compute a step that `fits`.

        Returns:
            ``[num_seqs, hidden_size]``, a view that the next call overwrites.
        """
        num_seqs = len(step.rows)
        size = self._sizes[bisect.bisect_left(self._sizes, num_seqs)]
        step.padded(size).to_device(self._hidden.device, self._inputs)
        self._replays[size]()
        return self._hidden[:num_seqs]

    def _capture(
        self, forward: Callable[[StepTensors], Tensor], size: int, recorder: GraphRecorder
    ) -> Callable[[], None]:
        inputs = StepArrays.empty().padded(size).to_device(self._hidden.device, self._inputs)
        hidden = self._hidden[:size]

        def run() -> None:
            hidden.copy_(forward(inputs))

        return recorder.capture(run)
