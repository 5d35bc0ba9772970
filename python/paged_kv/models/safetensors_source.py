# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_kv.models.optional import import_optional

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import torch
    from typing_extensions import Self

__all__ = ["SafetensorsSource", "read_json"]

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class SafetensorsSource:
    """The tensors of a folder's safetensors files, opened read-only and memory-mapped.

    Use it as a context manager: leaving it closes the files.

    Args:
        folder: the folder.

    Raises:
        ImportError: the library safetensors is not installed.
        ValueError: no safetensors file, a file or the index is corrupt, or a shard is missing. The
            message names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.shapes: Mapping[str, tuple[int, ...]]
        self._safetensors = import_optional("safetensors", "to read safetensors files")
        self._exit_stack = ExitStack()
        self._file_of: dict[str, tuple[Path, Any]] = {}
        try:
            for file, names in _files(folder).items():
                self._open(file, names)
            self.shapes = {name: self._shape(name) for name in self._file_of}
        except BaseException:
            self._exit_stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file_of.clear()
        self._exit_stack.close()

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read tensor `name` into `out` (mutated), converting to its dtype.

        Raises:
            ValueError: it isn't a floating-point tensor or can't be read.
        """
        path, file = self._file_of[name]
        dtype = file.get_slice(name).get_dtype()
        if dtype not in _FLOAT_DTYPES:
            msg = f"{path}: tensor {name!r} has dtype {dtype}: F64, F32, F16 and BF16 are supported"
            raise ValueError(msg)
        try:
            out.copy_(file.get_tensor(name))
        except (self._safetensors.SafetensorError, OSError, RuntimeError) as error:
            msg = f"{path}: tensor {name!r} can't be read: {error}"
            raise ValueError(msg) from None

    def _open(self, path: Path, names: frozenset[str] | None) -> None:
        """Open `path`; `names` are the tensors the index promises, None = whatever is inside."""
        try:
            file = self._exit_stack.enter_context(self._safetensors.safe_open(path, "pt"))
        except (self._safetensors.SafetensorError, OSError, ValueError, TypeError) as error:
            msg = f"{path}: not a readable safetensors file: {error}"
            raise ValueError(msg) from None
        found = frozenset(file.keys())
        if names is not None and (missing := names - found):
            msg = f"{path}: tensor {min(missing)!r}, promised by {_INDEX_FILE}, is missing"
            raise ValueError(msg)
        for name in found if names is None else names:
            self._file_of[name] = (path, file)

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name][1].get_slice(name).get_shape())


def read_json(path: Path) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: missing, unreadable or not a JSON object; the message names the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        msg = f"{path}: not a readable JSON file: {reason}"
        raise ValueError(msg) from None
    if not isinstance(content, dict):
        msg = f"{path}: expected a JSON object, got {type(content).__name__}"
        raise ValueError(msg)  # noqa: TRY004  (the file is bad, not an argument)
    return content


def _files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The folder's weight files, and which tensors to take from each."""
    if (folder / _SINGLE_FILE).is_file():
        return {folder / _SINGLE_FILE: None}
    if (folder / _INDEX_FILE).is_file():
        return _indexed_files(folder)
    pickles = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if pickles:
        msg = (
            f"{folder}: only pickle weights ({pickles[0]}), which can run code when read: convert "
            "them to safetensors"
        )
        raise ValueError(msg)
    msg = f"{folder}: no {_SINGLE_FILE} and no {_INDEX_FILE}"
    raise ValueError(msg)


def _indexed_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    index = folder / _INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        msg = f"{index}: weight_map is missing"
        raise ValueError(msg)
    names_of: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # A plain name: an index may not point outside its folder.
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            msg = f"{index}: tensor {name!r} lies in {file!r}, not a safetensors file of the folder"
            raise ValueError(msg)
        names_of.setdefault(file, set()).add(name)
    return {folder / file: frozenset(names) for file, names in names_of.items()}
