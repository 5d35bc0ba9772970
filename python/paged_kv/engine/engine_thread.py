# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine and serves callers of event loops."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paged_kv.engine.errors import EngineDeadError, EngineGenerateError
from paged_kv.engine.outputs import RequestOutput, RequestUpdate

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from paged_kv.engine.inputs import EncodedPrompt
    from paged_kv.engine.llm_engine import LLMEngine
    from paged_kv.engine.sampling_params import SamplingParams

__all__ = ["Call", "EngineThread"]

Item: TypeAlias = RequestUpdate | RequestOutput | BaseException


@dataclass(slots=True, eq=False)
class Call:
    """One caller that waits for one request.

    Attributes:
        request_id: Unique among the calls that run.
        wants_snapshots: Whether it gets a `RequestOutput` after each step, else each update.
        loop: The caller's event loop.
        inbox: What the caller has not taken yet, in order; filled in the loop's thread. An
            exception is raised to the caller, is nobody else's, and comes last.
        has_snapshot: Whether a snapshot is on its way that the caller has not taken. Set by the
            engine's thread, reset by the caller's.
    """

    request_id: str
    wants_snapshots: bool
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Item] = field(repr=False)
    has_snapshot: bool = False


class EngineThread:
    """Steps an engine in a thread of its own while there is work, and sleeps while there is none.

    Others hand it commands, which run between two steps; so the engine is used by this thread
    alone and needs no lock. A caller's wait is at most the step that is running.

    Args:
        engine: From now on used by this thread only, but for `LLMEngine.check_request`.

    Attributes:
        is_stopping: Whether `stop` was called.

    Notes:
        A daemon, so that a program can end without telling it; but before the interpreter goes,
        it is stopped and joined, as a thread that dies inside of a kernel would crash the program.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.is_stopping = False
        self._engine = engine
        self._calls: dict[str, Call] = {}
        # A SimpleQueue: the garbage collector may call `stop` in any thread, at any point.
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._has_ended = False
        self._end_lock = threading.Lock()  # no command is queued that nobody would run
        self._thread = threading.Thread(target=self._run, name="paged_kv engine", daemon=True)
        self._thread.start()
        atexit.register(self.join)

    # ---- for any thread; none of these waits for a step, but for join

    def add(
        self, call: Call, prompt: EncodedPrompt, params: SamplingParams, *, priority: int
    ) -> bool:
        """Queue a request; ``False``: the thread has ended."""
        return self._post(lambda: self._add(call, prompt, params, priority))

    def drop(self, call: Call) -> bool:
        """Abort the request of a call, if it still runs, and tell its caller nothing."""
        return self._post(lambda: self._drop([call]))

    def abort(self, request_id: str, when_done: Callable[[], None]) -> bool:
        """Abort a request and tell its caller; then call ``when_done`` in this thread."""
        return self._post(lambda: self._abort(request_id, when_done))

    def stop(self) -> None:
        """Let the thread end after the step that is running. Callers that wait get an error."""
        self.is_stopping = True
        self._commands.put(_do_nothing)  # wakes it

    def join(self) -> None:
        """Stop, and wait until the thread has ended. Idempotent."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> bool:
        with self._end_lock:
            if not self._has_ended:
                self._commands.put(command)
            return not self._has_ended

    # ---- the thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self.is_stopping:
                self._run_commands(wait=not self._engine.has_unfinished_requests())
                if not self.is_stopping:
                    self._step()
        except BaseException as error:  # noqa: BLE001  (raised to the callers)
            failure = error
            self.is_stopping = True
        with self._end_lock:
            self._has_ended = True
        self._run_commands(wait=False)
        self._end_all(EngineDeadError, "the engine was shut down", failure)
        atexit.unregister(self.join)

    def _run_commands(self, *, wait: bool) -> None:
        if wait:
            self._commands.get()()
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def _step(self) -> None:
        try:
            updates = self._engine.step()
            snapshots = {
                request_id: self._engine.get_output(request_id)
                for request_id in {update.request_id for update in updates}
                if self._wants_snapshot_now(request_id)
            }
        except BaseException as error:  # noqa: BLE001  (raised to the callers)
            msg = f"a step of the engine failed: {type(error).__name__}: {error}"
            self._end_all(EngineGenerateError, msg, error)
            return
        mail: list[tuple[Call, Item]] = []
        for update in updates:
            call = self._calls.get(update.request_id)
            if call is None:
                continue
            if call.loop.is_closed():  # nobody will take this
                self._drop([call])
                continue
            if update.result is not None:
                del self._calls[update.request_id]
            if not call.wants_snapshots:
                mail.append((call, update))
            elif update.result is not None:
                mail.append((call, update.result))
            elif update.request_id in snapshots:  # once, though n completions got a token
                call.has_snapshot = True
                mail.append((call, snapshots.pop(update.request_id)))
        self._deliver(mail)

    def _wants_snapshot_now(self, request_id: str) -> bool:
        """A caller that has not taken the last one gets the next later, and the result for sure."""
        call = self._calls.get(request_id)
        if call is None or not call.wants_snapshots or call.has_snapshot:
            return False
        return self._engine.has_request(request_id)

    # ---- commands

    def _add(
        self, call: Call, prompt: EncodedPrompt, params: SamplingParams, priority: int
    ) -> None:
        if self.is_stopping:
            self._deliver([(call, EngineDeadError("the engine was shut down"))])
            return
        try:
            self._engine.add_request(call.request_id, prompt, params, priority=priority)
        except Exception as error:  # noqa: BLE001  (raised to the caller)
            self._deliver([(call, error)])
            return
        self._calls[call.request_id] = call

    def _drop(self, calls: Iterable[Call]) -> None:
        for call in calls:
            if self._calls.get(call.request_id) is call:
                del self._calls[call.request_id]
                self._engine.abort_request([call.request_id])

    def _abort(self, request_id: str, when_done: Callable[[], None]) -> None:
        call = self._calls.pop(request_id, None)
        outputs = self._engine.abort_request([request_id])
        if call is not None and call.wants_snapshots:
            self._deliver([(call, output) for output in outputs])
        elif call is not None:
            self._deliver([(call, RuntimeError(f"request {request_id!r} was aborted"))])
        when_done()

    def _end_all(
        self, error_type: type[RuntimeError], message: str, cause: BaseException | None
    ) -> None:
        """Raise to every caller; none of their requests stays in the engine.

        Each gets an error of its own: raising one grows its traceback.
        """
        calls, self._calls = list(self._calls.values()), {}
        self._engine.abort_request([call.request_id for call in calls])
        errors = [error_type(message) for _ in calls]
        for error in errors:
            error.__cause__ = cause
        self._deliver(zip(calls, errors, strict=True))

    def _deliver(self, mail: Iterable[tuple[Call, Item]]) -> None:
        """Hand items to their callers; wakes each event loop once."""
        mail_of_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Item]]] = {}
        for call, item in mail:
            mail_of_loop.setdefault(call.loop, []).append((call, item))
        for loop, letters in mail_of_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, letters)
            except RuntimeError:  # the loop was closed just now
                self._drop(call for call, _ in letters)


def _put_all(mail: list[tuple[Call, Item]]) -> None:
    for call, item in mail:
        call.inbox.put_nowait(item)


def _do_nothing() -> None:
    pass
