# SPDX-License-Identifier: Apache-2.0
"""The ``paged-kv`` command."""

from __future__ import annotations

from paged_kv.cli.main import main

__all__ = ["main"]
