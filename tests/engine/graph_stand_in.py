# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph does, on any device: ops recorded once, and repeated without Python.

As with a graph, a replay knows only the tensors that were used when it was recorded, with the
shapes and the numbers that they had as arguments; new tensors, other sizes or changed attributes
have no effect on it. What a graph refuses to capture is refused: tensors that are elsewhere, and
looks at their values.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from paged_kv.engine.op_recorder import OpRecorder


class GraphStandIn(OpRecorder):
    """Takes the place of `CudaGraphRecorder`; replays begin with memory full of garbage.

    Attributes:
        made: All of them, the last one last.
        tapes: The ops of each capture.
        num_replays: Of all of them.
    """

    made: ClassVar[list[GraphStandIn]] = []

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.tapes = []
        self.num_replays = 0
        self.made.append(self)

    def capture(self, run):
        run()  # the warm-up
        repeat = super().capture(run)

        def replay():
            self.num_replays += 1
            fill_with_garbage(self.arena, self._device)
            repeat()

        return replay

    def _move_to_arena(self, tape):
        self.tapes.append(super()._move_to_arena(tape))
        return self.tapes[-1]


def fill_with_garbage(arena, device="cpu"):
    """NaN and -1."""
    memory = torch.empty(arena.num_bytes, dtype=torch.uint8, device=device)
    arena.tensor_like(memory, 0).fill_(0xFF)
