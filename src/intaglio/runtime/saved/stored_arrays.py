"""Arrays in the safetensors format that are read one by one, when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from intaglio.runtime.saved.archive import from_json
from intaglio.runtime.saved.members import Member

LENGTH_BYTES = 8
"""Of the number in front that says how long the JSON header is."""
METADATA = "__metadata__"
SAFETENSORS_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
"""Element types by their names in a header."""

Layout = tuple[tuple[int, ...], np.dtype]
"""Shape and element type."""


class StoredArrays(Mapping[str, np.ndarray]):
    """The arrays of a member of a model file. Each is read when it is asked for, and not kept.

    Raises:
        ValueError: the header is invalid, or an array is not inside of the member.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        length = int.from_bytes(member.read(0, min(LENGTH_BYTES, member.size)), "little")
        self._begin = LENGTH_BYTES + length
        if self._begin > member.size:
            raise ValueError(f"the header of {member.name} is longer than the member")
        header = from_json(member.read(LENGTH_BYTES, length))
        if not isinstance(header, dict):
            raise ValueError(f"the header of {member.name} is not a JSON object")
        self._entries = {name: self._entry(name, entry) for name, entry in header.items() if name != METADATA}

    def _entry(self, name: str, entry: Mapping[str, object]) -> tuple[int, int, Layout]:
        """Return first byte, bytes, shape and element type of an array."""
        shape, dtype, places = entry["shape"], entry["dtype"], entry["data_offsets"]
        if not (
            isinstance(shape, list) and isinstance(places, list) and len(places) == 2 and dtype in SAFETENSORS_TYPES
        ):
            raise ValueError(f"{name!r:.60} in {self.member.name} is not a known kind of array")
        if not all(type(number) is int and number >= 0 for number in (*shape, *places)):
            raise ValueError(f"{name!r:.60} in {self.member.name} has sizes that are no numbers")
        (begin, end), element = places, np.dtype(SAFETENSORS_TYPES[str(dtype)])
        if end - begin != math.prod(shape) * element.itemsize or self._begin + end > self.member.size:
            raise ValueError(f"{name!r:.60} in {self.member.name} does not fit its bytes")
        return self._begin + begin, end - begin, (tuple(shape), element)

    def __getitem__(self, name: str) -> np.ndarray:
        start, size, (shape, dtype) = self._entries[name]
        array = np.empty(size, np.uint8)
        self.member.fill(array.data, start)
        return array.view(dtype).reshape(shape)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def layout(self, name: str) -> Layout:
        """Return the shape and the element type of an array, without reading it."""
        return self._entries[name][2]
