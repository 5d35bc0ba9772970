# SPDX-License-Identifier: Apache-2.0
"""Imports of the libraries that only model loading needs."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_optional"]


def import_optional(module: str, purpose: str) -> Any:  # noqa: ANN401  (a module of any kind)
    """Import `module`, or say in one line what to install.

    Args:
        module: name to import, e.g. ``tokenizers``.
        purpose: what it is needed for, as the end of "is needed ...".

    Raises:
        ImportError: it isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # `module` is there, what it imports is not: its own message says more
        msg = f"{package} is needed {purpose}: pip install 'paged_kv[model]'"
        raise ImportError(msg, name=package) from None
