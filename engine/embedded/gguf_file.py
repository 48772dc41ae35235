"""Reads GGUF files: metadata, tensor descriptions, and tensors as mapped bytes. Bounded against hostile files.

The `gguf` package builds an object for every metadata string and trusts every length; this reader does neither, which
is why it is our own (docs/decisions/0004-gguf-reader.md). Format: ggml's docs/gguf.md, version 3 (and 2).
"""

from __future__ import annotations

import itertools
import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.errors import ModelFileError

MAX_METADATA = 4096
MAX_TENSORS = 65536
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 1024

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class TensorType(IntEnum):
    """The tensor types that are read; ggml's own numbers."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


# Values in one block and bytes that it takes.
_BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q8_0: (32, 34),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` is row-major (ggml's dimensions reversed), ``offset`` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file. Use as a context manager; arrays from ``data`` are valid while it is open."""

    def __init__(self, path: Path) -> None:
        """Raises ``ModelFileError`` when the header, a length or a tensor does not fit the file."""
        self._path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{path}: cannot be read: {error}") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except ModelFileError:
            self._bytes.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bytes.close()

    def data(self, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """A tensor's raw bytes, copied out of the map."""
        return np.frombuffer(self._bytes[info.offset : info.offset + info.num_bytes], dtype=np.uint8)

    def _read_header(self) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        if self._take(4) != b"GGUF":
            raise self._error("it does not start with GGUF; accepted: a GGUF file or a Hugging Face folder")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version}; accepted: 2 and 3 (little-endian)")
        num_tensors, num_metadata = self._scalar("<Q"), self._scalar("<Q")
        if num_tensors > MAX_TENSORS or num_metadata > MAX_METADATA:
            raise self._error(f"{num_tensors} tensors and {num_metadata} metadata entries are claimed")
        metadata = {}
        for _ in range(num_metadata):
            key = self._string(MAX_NAME_BYTES)
            metadata[key] = self._value(self._scalar("<I"), nested=False)
        described = [self._describe() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._error(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        placed = [self._place(*d, start) for d in described]
        self._check_apart(placed)
        return metadata, {t.name: t for t in placed}

    def _check_apart(self, tensors: Sequence[TensorInfo]) -> None:
        """No two tensors share a name or bytes: else a small file could ask for any amount of memory."""
        in_order = sorted(tensors, key=lambda t: t.offset)
        for before, after in itertools.pairwise(in_order):
            if before.offset + before.num_bytes > after.offset:
                raise self._error(f"tensors {before.name} and {after.name} overlap: it is corrupt")
        if len({t.name for t in tensors}) < len(tensors):
            raise self._error("two tensors have the same name: it is corrupt")

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(MAX_NAME_BYTES)
        num_dimensions = self._scalar("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _place(self, name: str, shape: tuple[int, ...], type_number: int, offset: int, start: int) -> TensorInfo:
        try:
            kind = TensorType(type_number)
        except ValueError as error:
            accepted = ", ".join(t.name for t in TensorType)
            raise self._error(f"tensor {name} has ggml type {type_number}; accepted: {accepted}") from error
        values, size = _BLOCKS[kind]
        count = 1
        for dimension in shape:
            count *= dimension
        if count == 0 or shape[-1] % values:
            raise self._error(f"tensor {name} of type {kind.name} has shape {shape}")
        num_bytes = count // values * size
        if start + offset + num_bytes > len(self._bytes):
            raise self._error(f"tensor {name} ends beyond the file: it is truncated or corrupt")
        return TensorInfo(name, shape, kind, start + offset, num_bytes)

    def _value(self, kind: int, *, nested: bool) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string(len(self._bytes))
        if kind == _ARRAY and not nested:
            return self._array()
        raise self._error(f"metadata of type {kind} at byte {self._at}")

    def _array(self) -> Any:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind in _SCALARS:
            dtype = np.dtype(
                _SCALARS[kind].replace("B", "u1").replace("?", "b1") if kind in (0, 7) else _SCALARS[kind]
            )
            return np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        # Each string takes at least its length's eight bytes, so a claimed count cannot outgrow the file.
        if count * 8 > len(self._bytes) - self._at:
            raise self._error(f"an array of {count} strings is longer than the file")
        return [self._value(kind, nested=True) for _ in range(count)]

    def _string(self, limit: int) -> str:
        length = self._scalar("<Q")
        if length > limit:
            raise self._error(f"a string of {length} bytes at byte {self._at}")
        return self._take(length).decode("utf-8", errors="replace")

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._bytes):
            raise self._error(f"it ends at byte {len(self._bytes)}, {end} were needed: truncated or corrupt")
        taken = self._bytes[self._at : end]
        self._at = end
        return taken

    def _error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path}: {what}")
