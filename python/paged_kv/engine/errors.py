# SPDX-License-Identifier: Apache-2.0
"""What goes wrong behind the back of a caller of `AsyncLLM`."""

from __future__ import annotations

__all__ = ["EngineDeadError", "EngineGenerateError"]


class EngineGenerateError(RuntimeError):
    """A step failed in which the caller's request took part; its cause is in ``__cause__``.

    The request is gone, the engine goes on.

    Source:
        vLLM 0.32 ``v1/engine/exceptions.py::EngineGenerateError``.
    """


class EngineDeadError(RuntimeError):
    """The engine was shut down, or its thread failed; then the cause is in ``__cause__``.

    Source:
        vLLM 0.32 ``v1/engine/exceptions.py::EngineDeadError``.
    """
