"""JSON encoding of values, dimensions, types and graphs; `signature_codec` has the rest. Decoding creates only the
types listed here.

Decoded names and attributes are printed into C++ source, so names are checked and attributes must be a single line of
text. What is saved can be loaded: other attributes are refused when they are written. A malformed entry raises
`ValueError`, `TypeError`, `KeyError` or `IndexError`, which callers turn into `ArtifactError`.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from intaglio.ir import (
    Constants,
    Dim,
    DType,
    Expression,
    Graph,
    Groups,
    NumberArray,
    Op,
    Origin,
    Packing,
    PerRow,
    PerRowGroup,
    QParams,
    Ref,
    TensorType,
)
from intaglio.ir.dims import FloorDiv
from intaglio.runtime.saved.constant_codec import decode_constant, encode_constant

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SHORT_ARRAY = 4
"""Maximum number of parameters per channel that are written in the JSON text. Longer arrays are stored in a tensor."""

NUMPY_DTYPES: Mapping[DType, Any] = {
    DType.U8: np.uint8,
    DType.S8: np.int8,
    DType.I16: np.int16,
    DType.I32: np.int32,
    DType.I64: np.int64,
    DType.F16: np.float16,
    DType.F32: np.float32,
    DType.F64: np.float64,
    DType.BOOL: np.bool_,
}
INTEGER_BOUNDS = {
    DType.U8: (0, 2**8 - 1),
    DType.S8: (-(2**7), 2**7 - 1),
    DType.U16: (0, 2**16 - 1),
    DType.I16: (-(2**15), 2**15 - 1),
    DType.I32: (-(2**31), 2**31 - 1),
}
TORCH_TYPES: Mapping[str, Any] = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
NUMPY_SCALARS = ("bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64")


class NotStorableError(ValueError):
    """Raised for a value that has no form in a file."""


# ---- values -------------------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """Return a value as JSON: None, numbers, complex ones among them, strings, lists and tuples of them, symbolic
    dimensions, torch dtypes, layouts and memory formats, and the CPU device. Raise `NotStorableError` for other values.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):  # torch.fx has a subclass of list
        return [encode(item) for item in value]
    if isinstance(value, Expression):
        return {"dim": encode_dim(value)}
    if isinstance(value, np.generic) and value.dtype.name in NUMPY_SCALARS:
        return {"numpy": [value.dtype.name, encode(value.item())]}
    for name, kind in TORCH_TYPES.items():
        if type(value) is kind:
            return {name: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device) and value.type == "cpu":
        return {"device": "cpu"}
    raise NotStorableError(f"{type(value).__name__} {str(value)[:60]!r}")


def decode(value: Any) -> Any:
    """Return the value that `encode` wrote."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    match tag:
        case "float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
        case "complex":
            real, imaginary = map(decode, content)
            return complex(real, imaginary)
        case "tuple":
            return tuple(decode(item) for item in content)
        case "dim":
            return decode_dim(content)
        case "numpy":
            name, number = content
            return np.dtype(NUMPY_SCALARS[NUMPY_SCALARS.index(name)]).type(decode(number))
        case "device":
            return torch.device({"cpu": "cpu"}[content])
        case "dtype" | "memory_format" | "layout":
            found = getattr(torch, checked_identifier(content))
            if type(found) is TORCH_TYPES[tag]:
                return found
    raise ValueError(f"{tag!r} is not a known kind of value")


def checked_identifier(text: Any) -> str:
    """Return ``text`` if it is a valid name in C and Python. Raise `ValueError` otherwise."""
    if not isinstance(text, str) or not IDENTIFIER.fullmatch(text):
        raise ValueError(f"{text!r:.60} is not a name")
    return sys.intern(text)


def checked_value_name(text: Any) -> str:
    """Return ``text`` if it is a valid name of a value, made of letters and digits of any script and ``_``. Raise
    `ValueError` otherwise."""
    if not isinstance(text, str) or not text.replace("_", "0").isalnum():
        raise ValueError(f"{text!r:.60} is not the name of a value")
    return sys.intern(text)


def checked_line(text: Any) -> str:
    """Return ``text`` if it cannot end a C++ comment, that is, if it has no line break and no backslash. Raise
    `ValueError` otherwise."""
    if not isinstance(text, str) or not text.isprintable() or "\\" in text:
        raise ValueError(f"{text!r:.60} is not a single line of text")
    return text


def encode_line(text: str) -> Any:
    """Return a text as JSON: itself if `checked_line` accepts it, else the hexadecimal digits of its UTF-8 bytes."""
    try:
        return checked_line(text)
    except ValueError:
        return {"hex": text.encode(errors="surrogatepass").hex()}


def decode_line(entry: Any) -> str:
    """Return the text that `encode_line` wrote. Comments of generated C++ escape it again."""
    if isinstance(entry, dict):
        return bytes.fromhex(entry["hex"]).decode(errors="surrogatepass")
    return sys.intern(checked_line(entry))


def checked_integer(value: Any) -> int:
    """Return ``value`` if it is an integer. Raise `TypeError` otherwise."""
    if type(value) is not int:
        raise TypeError(f"{value!r:.60} is not an integer")
    return value


# ---- dimensions and types -----------------------------------------------------------------------------------------


def encode_dim(dim: Dim) -> Any:
    """Return an integer, or a list of [atoms, coefficient] in which an atom is a symbol or [numerator, divisor]."""
    if isinstance(dim, int):
        return dim
    return [[[_encode_atom(atom) for atom in monomial], coefficient] for monomial, coefficient in dim.terms]


def _encode_atom(atom: str | FloorDiv) -> Any:
    return atom if isinstance(atom, str) else [encode_dim(atom.numerator), atom.divisor]


def decode_dim(value: Any) -> Dim:
    """Return the dimension that `encode_dim` encoded."""
    if type(value) is int:
        return value
    return Expression(tuple((tuple(map(_decode_atom, atoms)), checked_integer(factor)) for atoms, factor in value))


def _decode_atom(value: Any) -> str | FloorDiv:
    if isinstance(value, str):
        return checked_identifier(value)
    numerator, divisor = decode_dim(value[0]), checked_integer(value[1])
    if isinstance(numerator, int) or divisor < 1:
        raise ValueError(f"{value!r:.60} is not a floor division")
    return FloorDiv(numerator, divisor)


class ParameterTable:
    """Parameters per channel, concatenated in one float64 tensor. Equal arrays are stored once."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.values = np.zeros(0) if values is None else values
        self.parts: list[np.ndarray] = []
        self._start: dict[Sequence[float], int] = {}
        self._count = 0

    def put(self, values: Sequence[float]) -> Any:
        """Return a few numbers as a list, or else store them and return their position."""
        if len(values) <= SHORT_ARRAY:
            return list(values)
        if values not in self._start:
            self._start[values] = self._count
            self._count += len(values)
            self.parts.append(np.array(values, np.float64))
        return {"at": self._start[values], "count": len(values)}

    def get(self, entry: Any) -> tuple[float, ...] | NumberArray[float]:
        """Return the numbers that `put` stored. Raise `ValueError` if the position is invalid."""
        if isinstance(entry, list):
            return tuple(float(value) for value in entry)
        start, count = checked_integer(entry["at"]), checked_integer(entry["count"])
        found = self.values[start : start + count]
        if start < 0 or len(found) != count:
            raise ValueError(
                f"{count} numbers from position {start} on are needed, but only {len(self.values)} numbers are stored"
            )
        return NumberArray(found)

    def array(self) -> np.ndarray:
        """Return the stored numbers, f64[n]."""
        return np.concatenate(self.parts) if self.parts else np.zeros(0)


def encode_type(kind: TensorType, parameters: ParameterTable) -> Any:
    """Return an element type, shape and quantization parameters as JSON."""
    entry: dict[str, Any] = {"shape": [encode_dim(dim) for dim in kind.shape], "dtype": kind.dtype.value}
    if kind.q is not None:
        entry["q"] = _encode_q(kind.q, parameters)
    if kind.packing is not None:
        entry["packing"] = {key: value for key, value in asdict(kind.packing).items() if value or key != "lows"}
    return entry


def decode_type(entry: Any, parameters: ParameterTable) -> TensorType:
    """Return the type that `encode_type` wrote. Raise `ValueError` if sizes or the range of quantized values are
    invalid."""
    shape = tuple(decode_dim(dim) for dim in entry["shape"])
    if any(isinstance(dim, int) and dim < 0 for dim in shape):
        raise ValueError(f"the shape {shape} has a negative size")
    dtype = DType(entry["dtype"])
    q = _decode_q(entry["q"], parameters) if "q" in entry else None
    if q is not None:
        low, high = INTEGER_BOUNDS.get(dtype, (0, -1))  # floats and booleans hold no quantized values
        if not low <= q.qmin < q.qmax <= high:
            raise ValueError(f"quantized values from {q.qmin} to {q.qmax} do not fit data type {dtype}")
    return TensorType(shape, dtype, q, _decode_packing(entry["packing"]) if "packing" in entry else None)


def _decode_packing(entry: Any) -> Packing:
    packing = Packing(**{checked_identifier(key): checked_integer(value) for key, value in entry.items()})
    if not (0 < packing.bits < 8 and -128 <= packing.low <= 0 <= packing.group and packing.lows >= 0):
        raise ValueError(f"{packing} is not a known packing")
    return packing


AXES_BY_NAME: Mapping[str, type[PerRow | PerRowGroup]] = {"rows": PerRow, "row groups": PerRowGroup}
NAMES_OF_AXES: Mapping[Any, str] = {axis: name for name, axis in AXES_BY_NAME.items()}


def _encode_q(q: QParams, parameters: ParameterTable) -> Any:
    """Return quantization parameters as JSON. A zero point that all channels share is written once."""
    scale = {"value": q.scale.value} if isinstance(q.scale, Ref) else parameters.put(q.scale)
    zeros: Any
    if isinstance(q.zero_point, Ref):
        zeros = {"value": q.zero_point.value}
    else:
        same = len(q.zero_point) > SHORT_ARRAY and len(set(q.zero_point)) == 1
        zeros = {"all": q.zero_point[0]} if same else list(q.zero_point)
    axis: Any = {"groups": q.axis.size} if isinstance(q.axis, Groups) else q.axis
    axis = NAMES_OF_AXES.get(type(axis), axis)
    return {"scale": scale, "zero_point": zeros, "qmin": q.qmin, "qmax": q.qmax, "axis": axis}


def _decode_q(entry: Any, parameters: ParameterTable) -> QParams:
    scale, zeros, axis = entry["scale"], entry["zero_point"], entry["axis"]
    scales = Ref(checked_value_name(scale["value"])) if "value" in scale else parameters.get(scale)
    points: Ref | tuple[int, ...] | NumberArray[int]
    if isinstance(zeros, dict):
        points = (
            Ref(checked_value_name(zeros["value"]))
            if "value" in zeros
            else NumberArray(np.broadcast_to(np.int64(checked_integer(zeros["all"])), _count(scales)))
        )
    else:
        points = tuple(map(checked_integer, zeros))
    if not (isinstance(scales, Ref) or scales) or not (isinstance(points, Ref) or points):
        raise ValueError("quantization parameters without a scale or a zero point")
    if isinstance(axis, dict):
        axis = Groups(checked_integer(axis["groups"]))
    elif axis is not None:
        axis = AXES_BY_NAME[axis]() if axis in AXES_BY_NAME else checked_integer(axis)
    return QParams(scales, points, checked_integer(entry["qmin"]), checked_integer(entry["qmax"]), axis)


def _count(scales: Ref | Sequence[float]) -> int:
    return 1 if isinstance(scales, Ref) else len(scales)


# ---- graphs -------------------------------------------------------------------------------------------------------


def encode_graph(graph: Graph, parameters: ParameterTable, arrays: dict[str, np.ndarray], prefix: str = "") -> Any:
    """Return the graph as JSON.

    Args:
        graph: the integer graph.
        parameters: collects parameters per channel.
        arrays: gets the constants.
        prefix: prefix of the keys of constants. Those of a loop body start with the index of its operator.
    """
    for name, array in graph.constants.items():
        arrays.update(encode_constant(prefix + name, array, graph.types[name].packing))
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "constants": list(graph.constants),
        "types": {name: encode_type(kind, parameters) for name, kind in graph.types.items()},
        "ops": [_encode_op(op, parameters, arrays, f"{prefix}{index}/") for index, op in enumerate(graph.ops)],
    }


def _encode_op(op: Op, parameters: ParameterTable, arrays: dict[str, np.ndarray], prefix: str) -> Any:
    entry: dict[str, Any] = {"kind": op.kind, "inputs": list(op.inputs), "outputs": list(op.outputs)}
    if op.attrs:
        entry["attrs"] = {key: encode(_storable_attr(op, value)) for key, value in op.attrs.items()}
    if op.body is not None:
        entry["body"] = encode_graph(op.body, parameters, arrays, prefix)
    if op.origin != Origin():
        entry["origin"] = [encode_line(text) for text in (op.origin.path, op.origin.operator, op.origin.source)]
    return entry


def decode_graph(entry: Any, parameters: ParameterTable, arrays: Constants, prefix: str = "") -> Graph:
    """Return the graph that `encode_graph` wrote. Large constants that are in a file stay there.

    Raise `ValueError` if a constant does not have its declared type.
    """
    types = {checked_value_name(name): decode_type(kind, parameters) for name, kind in entry["types"].items()}
    constants = {checked_value_name(n): decode_constant(prefix + n, types[n], arrays) for n in entry["constants"]}
    for name, array in constants.items():
        if array.dtype != NUMPY_DTYPES.get(types[name].dtype):
            raise ValueError(f"constant %{name} has data type {array.dtype}, but must have {types[name].dtype}")
    ops = [_decode_op(op, parameters, arrays, f"{prefix}{index}/") for index, op in enumerate(entry["ops"])]
    inputs, outputs = _names(entry["inputs"]), _names(entry["outputs"])
    return Graph(inputs, outputs, types, tuple(ops), Constants(constants, arrays.source))


def _decode_op(entry: Any, parameters: ParameterTable, arrays: Constants, prefix: str) -> Op:
    attrs = {checked_identifier(key): _plain_attr(decode(value)) for key, value in entry.get("attrs", {}).items()}
    body = decode_graph(entry["body"], parameters, arrays, prefix) if "body" in entry else None
    path, operator, source = map(decode_line, entry.get("origin", ("", "", "")))
    kind = checked_identifier(entry["kind"])
    return Op(kind, _names(entry["inputs"]), _names(entry["outputs"]), attrs, body, Origin(path, operator, source))


def _plain_attr(value: Any) -> Any:
    """Return an attribute value whose text is a single line, because attributes are printed into C++ comments."""
    checked_line(str(value))
    return value


def _storable_attr(op: Op, value: Any) -> Any:
    """Return an attribute value. Raise `NotStorableError` if decoding would refuse its text."""
    try:
        return _plain_attr(value)
    except ValueError as error:
        raise NotStorableError(f"attribute of {op.kind} {str(op.origin)!r}: {error}") from None


def _names(entry: Any) -> tuple[str, ...]:
    return tuple(map(checked_value_name, entry))
