# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache of an LLM engine, as a library."""

from __future__ import annotations

from paged_kv._core import InvariantError, OutOfBlocksError, __version__

__all__ = ["InvariantError", "OutOfBlocksError", "__version__"]
