# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors as lists of ops, which run again without Python and without allocations."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_kv.engine.arena import Arena, Lifetime, place_by_lifetime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch._ops import OpOverload

__all__ = ["OpRecorder", "RecordedOp"]

_aten = torch.ops.aten
# Their results hold nothing yet.
_UNINITIALISED = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
}
# Their results are their first argument, in the type, layout and memory format of the result.
_COPIES = {_aten._to_copy, _aten.clone}
# What these say of a result is known once it is there.
_RESULT_OPTIONS = {"dtype", "layout", "device", "pin_memory"}
# `lift_fresh` brings values from Python to a tensor; `resolve_neg` is what `tolist()` and `numpy()`
# call before they read a tensor.
_BETWEEN_PYTHON_AND_TENSORS = {_aten.lift_fresh, _aten.resolve_neg}
_VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RecordedOp(NamedTuple):
    """A call that writes to tensors among its arguments.

    Attributes:
        op: What was called when recording.
        call: What is called to repeat it: its kernel, or one that writes to a given result.
        args: Of ``call``.
        kwargs: Of ``call``.
    """

    op: OpOverload
    call: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OpRecorder:
    """Records ops, and repeats them on the same tensors: a `GraphRecorder` that needs no graphs.

    What the recorded function has allocated lies in one arena, which all recordings of a recorder
    share and in which tensors that are not in use at once share their places. So at most one
    recording may run at a time, and what it leaves there lasts until the next one runs: results
    have to be copied to tensors that were there before.

    The memory that recordings use, such as weights, is kept alive. They do not see if a tensor or a
    parameter is given other memory afterwards.

    Args:
        device: Where all tensors are.

    Notes:
        A replay makes no tensor. Ops may allocate within themselves, as they do without recording.

    Example:
        >>> import torch
        >>> from paged_kv.engine.op_recorder import OpRecorder
        >>> x, total = torch.tensor([1.0, 2.0]), torch.zeros(1)
        >>> def run():
        ...     total.copy_((x * 10.0).sum())
        >>> replay = OpRecorder(torch.device("cpu")).capture(run)
        >>> total.item()
        30.0
        >>> x.fill_(4.0)
        tensor([4., 4.])
        >>> replay()
        >>> total.item()
        80.0
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.arena = Arena(device)
        # Layers and recordings have tensors in the same places; by place and shape.
        self._moved: dict[object, Tensor] = {}

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run ``run`` once and record it. See :meth:`GraphRecorder.capture`.

        Call what it returns under ``torch.inference_mode()`` if this is called so.

        Raises:
            RuntimeError: ``run`` looks at the value of a tensor, makes one of values of Python's,
                or uses one that is elsewhere. It has run up to there.
        """
        tape = _Tape(self._device)
        with tape:
            run()
        return self._replay_of(self._move_to_arena(tape))

    def _replay_of(self, ops: Sequence[RecordedOp]) -> Callable[[], None]:
        calls = [partial(op.call, *op.args, **op.kwargs) for op in ops]

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def _move_to_arena(self, tape: _Tape) -> list[RecordedOp]:
        """The ops with tensors in the arena instead of those that were made while recording."""
        lifetimes = tape.lifetimes_of_storages()
        offsets, num_bytes = place_by_lifetime(list(lifetimes.values()))
        self.arena.reserve(num_bytes)
        offset_of = dict(zip(lifetimes, offsets, strict=True))

        def move(tensor: Tensor) -> Tensor:
            storage = _storage_id(tensor)
            offset = offset_of.get(storage)
            place = ("outside", storage) if offset is None else ("arena", offset)
            key = (place, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
            if key not in self._moved and offset is not None:
                self._moved[key] = self.arena.tensor_like(tensor, offset)
            elif key not in self._moved:
                # A parameter may be given other memory: this keeps what it has now.
                self._moved[key] = tensor.detach()
            return self._moved[key]

        return [
            op._replace(args=_map_tensors(move, op.args), kwargs=_map_tensors(move, op.kwargs))
            for op in tape.ops
        ]


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that run while it is the mode.

    Attributes:
        ops: Those that do work, in order.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self._device = device
        self._made: set[int] = set()  # storages

    def lifetimes_of_storages(self) -> dict[int, Lifetime]:
        """When the storages that were made meanwhile are in use, counted in ops."""
        lifetimes: dict[int, Lifetime] = {}
        for index, op in enumerate(self.ops):
            for tensor in _tensors((op.args, op.kwargs)):
                storage = _storage_id(tensor)
                if storage in self._made:
                    first = lifetimes[storage].first if storage in lifetimes else index
                    num_bytes = tensor.untyped_storage().nbytes()
                    lifetimes[storage] = Lifetime(first, index, num_bytes)
        return lifetimes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler on first use, which takes a second."""
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        _check_keeps_to_tensors(func, args)
        if _is_made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        given, fresh = list(_tensors((args, kwargs))), list(_tensors(result))
        for tensor in (*given, *fresh):
            if tensor.device.type != self._device.type:
                msg = f"{func}: a recording on {self._device} cannot hold a tensor on "
                raise RuntimeError(msg + str(tensor.device))
        # Others are views, or what has been written to.
        fresh = _without_storages_of(given, fresh)
        self._made.update(map(_storage_id, fresh))
        if func._schema.is_mutable:
            self.ops.append(_again(func, fresh, args, kwargs))
        elif fresh and func.overloadpacket not in _UNINITIALISED:
            self.ops.append(_into(fresh, func, args, kwargs))
        return result


@cache
def _is_made_of_others(func: OpOverload) -> bool:
    """Whether torch runs it by calling other ops, which are what is recorded."""
    name = func.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _check_keeps_to_tensors(func: OpOverload, args: tuple[Any, ...]) -> None:
    if func == _aten.index.Tensor:  # its result has a size of its own only where it is a mask
        masks = (torch.bool, torch.uint8)
        depends_on_values = any(index.dtype in masks for index in _tensors(args[1]))
    else:
        depends_on_values = not _VALUE_TAGS.isdisjoint(func.tags)
    if depends_on_values or func.overloadpacket in _BETWEEN_PYTHON_AND_TENSORS:
        msg = (
            f"{func}: a recording cannot hold what looks at the values of a tensor, or makes one "
            "of values of Python's (steps of an engine run without with record_decode_steps=False)"
        )
        raise RuntimeError(msg)


def _again(
    func: OpOverload, fresh: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedOp:
    """``func``, which writes to its arguments."""
    if fresh:
        msg = f"{func}: a recording cannot hold an op that writes to arguments and makes tensors"
        raise RuntimeError(msg)
    return _by_position(func, func, args, kwargs)


def _into(
    results: list[Tensor], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedOp:
    """``func`` with results that are there already."""
    if func.overloadpacket in _COPIES:
        return _by_position(func, _aten.copy_.default, (results[0], args[0]), {})
    for name in func.overloadpacket.overloads():
        out_op = getattr(func.overloadpacket, name)
        outs = [each.name for each in out_op._schema.arguments if each.is_out]
        if len(outs) == len(results) and _inputs(out_op) == _inputs(func):
            known = {each.name for each in out_op._schema.arguments}
            kept = {name: value for name, value in kwargs.items() if name in known}
            return _by_position(func, out_op, args, kept | dict(zip(outs, results, strict=True)))
    return RecordedOp(func, _compute_and_copy, (results, func, args, kwargs), {})


def _inputs(op: OpOverload) -> list[tuple[str, str]]:
    """Names and types of what decides the values of the results."""
    return [
        (each.name, str(each.type))
        for each in op._schema.arguments
        if not each.is_out and each.name not in _RESULT_OPTIONS
    ]


def _compute_and_copy(
    results: list[Tensor], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """For ops that can only give new tensors."""
    again = _without_storages_of(_tensors((args, kwargs)), _tensors(func(*args, **kwargs)))
    for result, value in zip(results, again, strict=True):
        result.copy_(value)


def _without_storages_of(given: Iterable[Tensor], results: Iterable[Tensor]) -> list[Tensor]:
    """Those of the results that do not lie in the memory of an argument."""
    storages = set(map(_storage_id, given))
    return [tensor for tensor in results if _storage_id(tensor) not in storages]


def _by_position(
    func: OpOverload, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RecordedOp:
    """A call of ``op`` with arguments by position as far as its schema lets: these are quicker."""
    positional, named = list(args), dict(kwargs)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only or not named:
            break
        positional.append(named.pop(argument.name, argument.default_value))
    # The kernel's own function skips a layer of Python.
    return RecordedOp(func, op._op, tuple(positional), named)


def _storage_id(tensor: Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_map_tensors(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
