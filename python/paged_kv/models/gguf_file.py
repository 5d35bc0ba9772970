# SPDX-License-Identifier: Apache-2.0
"""A bounds-checked reader of the GGUF container.

Source: the GGUF specification, ggml docs/gguf.md. Unlike the gguf package's reader it takes no
count, length or offset on trust, and reads a 50,000-token vocabulary in a fraction of a second.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.models.optional import import_optional

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["GgufFile", "GgufTensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_ALIGNMENT = 2**16
_DEFAULT_ALIGNMENT = 32
_MAX_ARRAY_DEPTH = 4

# Value types of the metadata.
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

# The least bytes an entry takes: what bounds a count by the size of the file.
_MIN_METADATA_BYTES = 8 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: its name in the file.
        shape: outermost dimension first, as torch has it (the file has the innermost first).
        quantization: a ``gguf.GGMLQuantizationType``.
        offset: of its data in the file, in bytes.
        num_bytes: of its data.
    """

    name: str
    shape: tuple[int, ...]
    quantization: Any
    offset: int
    num_bytes: int


class GgufFile:
    """The metadata and tensor directory of a GGUF file, memory-mapped.

    Args:
        path: the file.
        more_parts: the rest of it, where it was cut into several; the file is then read into memory
            and not mapped.

    Attributes:
        path: the file, or its first part.
        metadata: every key with its value: int, float, bool, str, or a list of them.
        tensors: the directory, by the names in the file.

    Raises:
        ImportError: the library gguf is not installed.
        ValueError: not a GGUF file, an unknown version or type, a count or offset that the file
            has no room for, a duplicate name. The message names the file and the entry.

    Notes:
        Cost: the header is parsed once, O(its bytes); tensor data is mapped, not read.
    """

    def __init__(self, path: Path, *more_parts: Path) -> None:
        self.path = path
        self._gguf = import_optional("gguf", "to read GGUF files")
        parts = [_map(part) for part in (path, *more_parts)]
        self._data = np.concatenate(parts) if more_parts else parts[0]
        try:
            self._parse()
        except _CorruptError as error:
            msg = f"{path}: not a valid GGUF file: {error}"
            raise ValueError(msg) from None

    def read_rows(self, name: str, *, max_elements: int = 2**24) -> Iterator[np.ndarray]:
        """Dequantise a tensor piece by piece, so that little of it exists in full.

        Args:
            name: the tensor's name in the file.
            max_elements: about how many elements a piece may have.

        Yields:
            float32 arrays ``[rows, row_length]``, in order (a vector counts as one row).

        Raises:
            ValueError: the quantisation is one that the gguf package can't undo.
        """
        tensor = self.tensors[name]
        row_length = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        row_bytes = tensor.num_bytes // num_rows
        data = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        data = np.asarray(data).reshape(num_rows, row_bytes)
        step = max(1, max_elements // row_length)
        for start in range(0, num_rows, step):
            try:
                # Garbage scales in a corrupt file overflow; the numbers are then garbage too.
                with np.errstate(all="ignore"):
                    piece = self._gguf.dequantize(data[start : start + step], tensor.quantization)
            except NotImplementedError:
                msg = (
                    f"{self.path}: tensor {name!r} is quantised as {tensor.quantization.name}, "
                    "which the gguf package can't undo"
                )
                raise ValueError(msg) from None
            yield np.asarray(piece, dtype=np.float32).reshape(-1, row_length)

    def _parse(self) -> None:
        cursor = _Cursor(self._data.data)
        if cursor.take(4) != _MAGIC:
            msg = "it doesn't begin with GGUF"
            raise _CorruptError(msg)
        version = cursor.scalar("<I")
        if version not in _VERSIONS:
            msg = f"version {version} is not supported (big-endian files are not either)"
            raise _CorruptError(msg)
        num_tensors = cursor.scalar("<Q")
        num_keys = cursor.scalar("<Q")
        cursor.check_count(num_keys, _MIN_METADATA_BYTES, "metadata entries")
        cursor.check_count(num_tensors, _MIN_TENSOR_INFO_BYTES, "tensors")

        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                msg = f"metadata key {key!r} appears twice"
                raise _CorruptError(msg)
            self.metadata[key] = _read_value(cursor, cursor.scalar("<I"), key)

        infos = [self._read_tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        _check_alignment(alignment)
        data_start = -(-cursor.offset // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for info in infos:
            self._add_tensor(*info, data_start=data_start, alignment=alignment)

    def _read_tensor_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string("a tensor's name")
        num_dims = cursor.scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            msg = f"tensor {name!r} has {num_dims} dimensions, expected 1 to {_MAX_DIMS}"
            raise _CorruptError(msg)
        shape = tuple(cursor.scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, cursor.scalar("<I"), cursor.scalar("<Q")

    def _add_tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        raw_type: int,
        offset: int,
        *,
        data_start: int,
        alignment: int,
    ) -> None:
        if name in self.tensors:
            msg = f"tensor {name!r} appears twice"
            raise _CorruptError(msg)
        try:
            quantization = self._gguf.GGMLQuantizationType(raw_type)
            block_length, block_bytes = self._gguf.GGML_QUANT_SIZES[quantization]
        except (ValueError, KeyError):
            msg = f"tensor {name!r} has the unknown type {raw_type}"
            raise _CorruptError(msg) from None
        if 0 in shape or shape[-1] % block_length != 0:
            msg = f"tensor {name!r} of type {quantization.name} has shape {list(shape)}"
            raise _CorruptError(msg)
        # Python's ints don't overflow, so this comparison is the whole check.
        num_bytes = math.prod(shape) // block_length * block_bytes
        start = data_start + offset
        if offset % alignment != 0 or start + num_bytes > len(self._data):
            msg = (
                f"tensor {name!r} needs bytes {start} to {start + num_bytes} of a file of "
                f"{len(self._data)}: the file is truncated or corrupt"
            )
            raise _CorruptError(msg)
        self.tensors[name] = GgufTensor(name, shape, quantization, start, num_bytes)


def _map(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        reason = error.strerror if isinstance(error, OSError) else str(error)
        msg = f"{path}: can't be read: {reason}"
        raise ValueError(msg) from None


class _CorruptError(Exception):
    """What is wrong with the file; the file's name is added where it is known."""


class _Cursor:
    """Reads forward through the file, refusing to pass its end."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._data) - self.offset:
            msg = f"it ends at byte {len(self._data)}, in the middle of its header"
            raise _CorruptError(msg)
        start = self.offset
        self.offset += num_bytes
        return bytes(self._data[start : self.offset])

    def scalar(self, layout: str) -> Any:  # noqa: ANN401  (int, float or bool, by `layout`)
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self, what: str) -> str:
        try:
            return self.take(self.scalar("<Q")).decode()
        except UnicodeDecodeError:
            msg = f"{what} is not UTF-8 (byte {self.offset})"
            raise _CorruptError(msg) from None

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count before anything is done `count` times."""
        if count * min_bytes > len(self._data) - self.offset:
            msg = f"it announces {count} {what}, more than the file has room for"
            raise _CorruptError(msg)


def _read_value(cursor: _Cursor, value_type: int, key: str, depth: int = 0) -> Any:  # noqa: ANN401
    if value_type in _SCALARS:
        return cursor.scalar(_SCALARS[value_type])
    if value_type == _STRING:
        return cursor.string(f"metadata {key!r}")
    if value_type != _ARRAY or depth == _MAX_ARRAY_DEPTH:
        msg = f"metadata {key!r} has the unknown type {value_type} or is nested too deeply"
        raise _CorruptError(msg)
    element_type = cursor.scalar("<I")
    count = cursor.scalar("<Q")
    layout = _SCALARS.get(element_type)
    min_bytes = struct.calcsize(layout) if layout else 8
    cursor.check_count(count, min_bytes, f"elements of metadata {key!r}")
    if layout:
        array = np.frombuffer(cursor.take(count * min_bytes), dtype=np.dtype(layout))
        return array.tolist()
    return [_read_value(cursor, element_type, key, depth + 1) for _ in range(count)]


def _check_alignment(alignment: object) -> None:
    if (
        not isinstance(alignment, int)
        or not 1 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1) != 0
    ):
        msg = f"general.alignment must be a power of two up to {_MAX_ALIGNMENT}, got {alignment!r}"
        raise _CorruptError(msg)
