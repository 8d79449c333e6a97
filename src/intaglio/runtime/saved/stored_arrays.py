"""Arrays in the safetensors format that are read one by one, when they are asked for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from intaglio.ir import Constants, StoredArray
from intaglio.runtime.saved.archive import from_json
from intaglio.runtime.saved.members import Member

LENGTH_BYTES = 8
"""Size of the number in front of the JSON header, which is the length of the header."""
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


def stored_arrays(member: Member) -> Constants:
    """Return the arrays of a member of a model file, which are read when they are asked for.

    The library safetensors reads single arrays of whole files only, not of a file inside of another one.

    Raises:
        ValueError: the header is invalid, or an array is not inside of the member.
    """
    length = int.from_bytes(member.read(0, min(LENGTH_BYTES, member.size)), "little")
    begin = LENGTH_BYTES + length
    if begin > member.size:
        raise ValueError(f"the header of {member.name} is longer than the member")
    header = from_json(member.read(LENGTH_BYTES, length))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {member.name} is not a JSON object")
    entries = {name: _stored(member, begin, name, entry) for name, entry in header.items() if name != METADATA}
    return Constants(entries, member.digest)


def _stored(member: Member, begin: int, name: str, entry: Any) -> StoredArray:
    """Return the array of an entry of the header; the bytes of all arrays begin at ``begin``."""
    shape, dtype, places = entry["shape"], entry["dtype"], entry["data_offsets"]
    lists = isinstance(shape, list) and isinstance(places, list)
    if not (lists and len(places) == 2 and dtype in SAFETENSORS_TYPES):
        raise ValueError(f"{name!r:.60} in {member.name} is not a known kind of array")
    if not all(type(number) is int and number >= 0 for number in (*shape, *places)):
        raise ValueError(f"{name!r:.60} in {member.name} has sizes that are no numbers")
    (first, end), element = places, np.dtype(SAFETENSORS_TYPES[str(dtype)])
    size = end - first
    if size != math.prod(shape) * element.itemsize or begin + end > member.size:
        raise ValueError(f"{name!r:.60} in {member.name} does not fit its bytes")

    def read() -> np.ndarray:
        array = np.empty(size, np.uint8)
        member.fill(array.data, begin + first)
        return array.view(element).reshape(shape)

    return StoredArray(tuple(shape), element, read)
