# SPDX-License-Identifier: Apache-2.0
"""What a CUDA graph does, on any device: torch's ops recorded once, and repeated without Python.

As with a graph, a replay knows only the tensors that were used when it was recorded, with the
shapes and the numbers that they had as arguments; new tensors, other sizes or changed attributes
have no effect on it. What a graph refuses to capture is refused.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# They wait for the device to look at values, or bring values from Python to it.
REFUSED = {
    aten._local_scalar_dense,
    aten.item,
    aten.is_nonzero,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten.lift_fresh,
}
UNINITIALISED = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided}


class TapeRecorder:
    """Takes the place of `CudaGraphRecorder`.

    Attributes:
        made: All recorders, the last one last.
        tapes: One a capture.
        num_replays: Of all of them.
    """

    made: ClassVar[list[TapeRecorder]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tapes: list[Tape] = []
        self.num_replays = 0
        self.made.append(self)

    def capture(self, run):
        run()
        tape = Tape(self.device)
        with tape:
            run()
        self.tapes.append(tape)

        def replay():
            self.num_replays += 1
            tape.replay()

        return replay


class Tape(TorchDispatchMode):
    """The ops that ran while it was the mode.

    Attributes:
        steps: ``(op, arguments, keyword arguments, result)``.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket in REFUSED:
            raise AssertionError(f"a graph cannot hold {func}")
        result = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, result)):
            if tensor.device.type != self._device.type:
                raise AssertionError(f"{func} has a tensor on {tensor.device}, in a graph")
        self.steps.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.steps:
            if func.overloadpacket in UNINITIALISED:
                _fill_with_garbage(result)
            elif func._schema.is_mutable:
                func(*args, **kwargs)
            elif not _shares_memory(result, (args, kwargs)):
                again = func(*args, **kwargs)
                for old, new in zip(_tensors(result), _tensors(again), strict=True):
                    assert old.shape == new.shape
                    old.copy_(new)


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _shares_memory(result, arguments) -> bool:
    """Whether it is a view: nothing to compute."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
    return any(tensor.untyped_storage().data_ptr() in addresses for tensor in _tensors(result))


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**31))
