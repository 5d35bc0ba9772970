# SPDX-License-Identifier: Apache-2.0
"""Loads the ops library and makes its ops refuse inputs that require grad.

Importing this module registers ``torch.ops.paged_kv.*``. Their schemas and CPU kernels are C++
(cpp/ops); the kernels for fake tensors are in ``_attention_fakes`` and ``_cache_fakes``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["load_library", "op_names"]

_NAMESPACE = "paged_kv"


def load_library() -> None:
    """Loads ``_ops`` through the import system, which also finds it in an editable install.

    Raises:
        ImportError: The package was installed without its ops library.
    """
    spec = importlib.util.find_spec("paged_kv._ops")
    if spec is None or spec.origin is None:
        msg = "paged_kv._ops was not found: the package is not built; run `pip install .`"
        raise ImportError(msg)
    torch.ops.load_library(spec.origin)


def op_names() -> list[str]:
    """Returns the names of all registered ops, sorted."""
    names = torch._C._dispatch_get_all_op_names()
    prefix = f"{_NAMESPACE}::"
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _requires_grad(arguments: Iterable[Any]) -> bool:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                return True
        elif isinstance(argument, (list, tuple)) and _requires_grad(argument):
            return True
    return False


def _grad_refusing_kernel(name: str) -> Callable[..., None]:
    op = getattr(torch.ops.paged_kv, name).default

    def kernel(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        if torch.is_grad_enabled() and _requires_grad([*args, *kwargs.values()]):
            msg = (
                f"{_NAMESPACE}::{name} has no gradient, but an input requires grad: "
                "call it under torch.inference_mode() or torch.no_grad(), or detach the input"
            )
            raise RuntimeError(msg)
        with torch._C._AutoDispatchBelowAutograd():
            op(*args, **kwargs)

    return kernel


load_library()

# Without a kernel for the Autograd key, torch would run the op and cut the graph silently. The key
# is not dispatched in inference mode, so there this costs nothing (elsewhere: 4 us a call).
_autograd_kernels = torch.library.Library(_NAMESPACE, "IMPL")
for _name in op_names():
    _autograd_kernels.impl(_name, _grad_refusing_kernel(_name), "Autograd")
