"""GGUF files: their metadata, and the place and type of each tensor. The file is not trusted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from intaglio.checkpoints.gguf_blocks import BLOCK_TYPES, TYPE_NAMES
from intaglio.checkpoints.tensor_folder import DAMAGED, QUANTIZE_FLOAT
from intaglio.errors import ArtifactError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Versions that are read. They have the same layout; files of version 3 may also be big-endian."""
ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32
MAX_TENSOR_AXES = 4
MAX_NESTED_ARRAYS = 4
NUMBER_TYPES: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""NumPy types of numbers in the metadata, by their number in the file."""
BOOL_TYPE, STRING_TYPE, ARRAY_TYPE = 7, 8, 9
SMALLEST_VALUE = {BOOL_TYPE: 1, STRING_TYPE: 8, ARRAY_TYPE: 12}
"""Least number of bytes that a value takes."""
SMALLEST_PAIR, SMALLEST_INFO = 13, 32
"""Least number of bytes of an entry of the metadata, and of the description of a tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file.

    Attributes:
        name: its name.
        shape: its sizes, those of the outermost axis first.
        type_name: name of its type, one of `BLOCK_TYPES`.
        start: first byte.
        size: number of bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    start: int
    size: int


class GgufFile:
    """A GGUF file whose header was read and checked.

    Attributes:
        path: the file.
        metadata: values by key. Arrays are lists.
        tensors: places of the tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ArtifactError: the file is damaged or malformed.
            UnsupportedError: its version, or the type of a tensor, is not read.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            with open(path, "rb") as file:
                self._read(_Header(path, file, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise ArtifactError(str(path), None, f"it cannot be read: {error}", remedy=DAMAGED) from error

    def blocks(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a tensor as u8[blocks, bytes of a block].

        Raises:
            ArtifactError: the file was changed since its header was read.
        """
        tensor = self.tensors[name]
        data = np.empty(tensor.size, np.uint8)
        try:
            with open(self.path, "rb") as file:
                file.seek(tensor.start)
                count = file.readinto(data.data)
        except OSError as error:
            raise ArtifactError(str(self.path), None, f"it cannot be read: {error}", remedy=DAMAGED) from error
        if count != tensor.size:
            problem = f"it ends inside of the tensor {name!r:.100}"
            raise ArtifactError(str(self.path), None, problem, remedy=DAMAGED)
        return data.reshape(-1, BLOCK_TYPES[tensor.type_name].octets)

    def _read(self, header: _Header) -> None:
        tensors, pairs = _counts(header)
        for _ in range(pairs):
            key = header.name("key")
            if key in self.metadata:
                raise header.malformed(f"its metadata has the key {key!r:.100} twice")
            self.metadata[key] = header.value(header.number("<u4"))
        found = [_tensor_info(header) for _ in range(tensors)]
        alignment = self.metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise header.malformed(f"its alignment is {alignment!r:.60}, which is not a power of two")
        data_start = -(-header.position // alignment) * alignment
        for tensor in found:
            if tensor.name in self.tensors:
                raise header.malformed(f"it has the tensor {tensor.name!r:.100} twice")
            if tensor.start % alignment:
                problem = f"{tensor.name!r:.100} begins at byte {tensor.start}, which is no multiple of {alignment}"
                raise header.malformed(problem)
            placed = StoredTensor(tensor.name, tensor.shape, tensor.type_name, data_start + tensor.start, tensor.size)
            self.tensors[tensor.name] = placed
        self._check_places(header)

    def _check_places(self, header: _Header) -> None:
        """Raise `ArtifactError` for tensors that overlap, or are not inside of the file."""
        end, before = 0, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: tensor.start):
            if tensor.start < end:
                raise header.malformed(f"its tensors {before!r:.100} and {tensor.name!r:.100} overlap")
            end, before = tensor.start + tensor.size, tensor.name
            if end > header.size:
                problem = f"the tensor {before!r:.100} ends at byte {end}, but the file has {header.size} bytes"
                raise header.malformed(problem)


def is_gguf(path: Path) -> bool:
    """Return whether a regular file begins as GGUF files do.

    Raises:
        ArtifactError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ArtifactError(str(path), None, f"it cannot be read: {error}", remedy=DAMAGED) from error


class _Header:
    """The beginning of a file, from which values are taken one after the other. Counts are checked against the number
    of bytes that are left, before memory is taken for them."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.size, self.position = path, size, 0
        self._file = file

    def malformed(self, problem: str) -> ArtifactError:
        return ArtifactError(str(self.path), None, problem, remedy=DAMAGED)

    def take(self, count: int) -> bytes:
        self.check_count(count, 1, "bytes")
        data = self._file.read(count)
        if len(data) != count:
            raise self.malformed("it was changed while it was read")
        self.position += count
        return data

    def check_count(self, count: int, smallest: int, what: str) -> int:
        """Return a count of values that take at least a number of bytes each, if the file can hold them."""
        left = self.size - self.position
        if count * smallest > left:
            raise self.malformed(f"its header says that {count} {what} follow, but {left} bytes are left")
        return count

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def numbers(self, kind: str, count: int) -> list[Any]:
        size = np.dtype(kind).itemsize
        found: list[Any] = np.frombuffer(self.take(count * size), kind).tolist()
        return found

    def text(self) -> bytes:
        return self.take(self.number("<u8"))

    def name(self, what: str) -> str:
        """Return a text that must be UTF-8."""
        found = self.text()
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise self.malformed(f"the {what} {found[:60]!r} is not UTF-8") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return a value of the metadata. Texts that are not UTF-8 have replacement characters."""
        if kind in NUMBER_TYPES:
            return self.number(NUMBER_TYPES[kind])
        if kind == BOOL_TYPE:
            return self.bools(1)[0]
        if kind == STRING_TYPE:
            return self.text().decode(errors="replace")
        if kind != ARRAY_TYPE or depth == MAX_NESTED_ARRAYS:
            raise self.malformed(f"its metadata has a value of type {kind} inside of {depth} arrays")
        inner, count = self.number("<u4"), self.number("<u8")
        if inner in NUMBER_TYPES:
            return self.numbers(NUMBER_TYPES[inner], count)
        if inner == BOOL_TYPE:
            return self.bools(count)
        self.check_count(count, SMALLEST_VALUE.get(inner, 1), "values")
        return [self.value(inner, depth + 1) for _ in range(count)]

    def bools(self, count: int) -> list[bool]:
        data = self.take(count)
        if data.strip(b"\0\1"):
            raise self.malformed("its metadata has a boolean that is neither 0 nor 1")
        return [bool(octet) for octet in data]


def _counts(header: _Header) -> tuple[int, int]:
    """Return the numbers of tensors and of entries of the metadata."""
    if header.take(len(MAGIC)) != MAGIC:
        raise header.malformed("it does not begin with the letters GGUF")
    version = header.number("<u4")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        named = f"the big-endian version {swapped}" if swapped in VERSIONS else f"version {version}"
        problem = f"it is of {named} of GGUF; versions 2 and 3, little-endian, are read"
        raise UnsupportedError(str(header.path), None, problem, remedy=QUANTIZE_FLOAT)
    tensors, pairs = header.numbers("<u8", 2)
    header.check_count(tensors, SMALLEST_INFO, "tensors")
    header.check_count(pairs, SMALLEST_PAIR, "entries of metadata")
    return tensors, pairs


def _tensor_info(header: _Header) -> StoredTensor:
    """Return a tensor whose first byte is counted from that of all tensors."""
    name = header.name("tensor name")
    axes = header.number("<u4")
    if not 1 <= axes <= MAX_TENSOR_AXES:
        raise header.malformed(f"the tensor {name!r:.100} has {axes} axes; 1 to {MAX_TENSOR_AXES} are possible")
    shape = tuple(reversed(header.numbers("<u8", axes)))
    number, start = header.number("<u4"), header.number("<u8")
    kind = TYPE_NAMES.get(number, f"of number {number}")
    if kind not in BLOCK_TYPES:
        problem = f"its type {kind} is not read; {', '.join(BLOCK_TYPES)} are"
        raise UnsupportedError(f"{name:.200}", None, problem, remedy=QUANTIZE_FLOAT)
    blocks = BLOCK_TYPES[kind]
    if not prod(shape) or shape[-1] % blocks.values:
        problem = f"the tensor {name!r:.100} of shape {list(shape)} does not have rows of {kind} blocks of "
        raise header.malformed(f"{problem}{blocks.values} values")
    return StoredTensor(name, shape, kind, start, prod(shape) // blocks.values * blocks.octets)
