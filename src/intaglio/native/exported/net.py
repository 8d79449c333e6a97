"""Calls of an exported network from Python, with NumPy and without PyTorch: of the library that CMake builds here.

    from net import Network

    network = Network()
    result = network(images)  # arrays in the order of the inputs, or by their names

README.txt lists the inputs. Results are arrays, in the tuples, lists and dictionaries that the Python model returns.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
NAME = "net"
"""Prefix of the functions of the library, and part of the name of its file."""
LIBRARY_FILE = f"lib{NAME}.so"
INTERFACE = 1
"""The version of net.h that this file is written for."""
ARGUMENT, FILE, MEMORY, SHAPE = 1, 2, 6, 7
"""Status codes of net.h that are treated differently from the others."""
LARGEST_NUMBER = 2**31 - 1
"""What the library takes; a call never has more threads than cores."""
U8 = 1
ELEMENT_TYPES = ("u1", "i1", "u2", "i2", "i4", "i8", "f2", "u2", "f4", "f8", "?")
"""NumPy's name of each element type of net.h, from 1. The bits of bfloat16, which NumPy does not have, are "u2"."""


class Value(NamedTuple):
    """An input or an output: its name, its shape as text, its element type, and the number of its axes."""

    name: str
    shape: str
    dtype: np.dtype
    rank: int


class _NativeValue(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("shape", ctypes.c_char_p),
        ("dtype", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
    )


_RESULTS = {
    "error": ctypes.c_char_p,
    "isa": ctypes.c_char_p,
    "input": ctypes.POINTER(_NativeValue),
    "output": ctypes.POINTER(_NativeValue),
    "output_sizes": ctypes.POINTER(ctypes.c_int64),
    "close": None,
}
"""The types of the results of functions that do not return a 32-bit integer."""


class Network:
    """The network with its weights, and the memory of one call.

    Several Python threads may call a network; its calls then follow one another. For calls side by side, open one
    network for each thread: they share the weights.

    Args:
        weights: the file of weights.
        library: the shared library; by default the one in this folder or in its folder ``build``.
        threads: threads of a call at most; 0 is the number of cores. It can be set again later.

    Raises:
        OSError: the library or the weights cannot be read.
        ValueError: these are not the weights of this network, or they are damaged, or `threads` is negative.
    """

    def __init__(
        self,
        weights: str | os.PathLike[str] = HERE / "weights.bin",
        library: str | os.PathLike[str] | None = None,
        threads: int = 0,
    ) -> None:
        self._handle = ctypes.c_void_p()
        self._lock = threading.Lock()
        self._sizes: tuple[tuple[int, ...], ...] | None = None
        self._library = ctypes.CDLL(str(library or _built_library()))
        if (found := self._function("abi")()) != INTERFACE:
            raise OSError(f"the library has version {found} of the interface instead of {INTERFACE}: build it again")
        self.threads = threads
        count_inputs, count_outputs = self._function("inputs")(), self._function("outputs")()
        self.inputs = [_value(self._function("input")(index)[0]) for index in range(count_inputs)]
        self.outputs = [_value(self._function("output")(index)[0]) for index in range(count_outputs)]
        self._check(self._function("open")(os.fsencode(weights), ctypes.byref(self._handle)), os.fspath(weights))
        self.isa: str = self._function("isa")(self._handle).decode()

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the network.

        Args:
            inputs: arrays, or what `numpy.asarray` takes without changing its element type, in the order of
                ``Network.inputs``. Any strides are read where they are.
            named: inputs by name, after those in order.

        Raises:
            TypeError: an input is missing or has another element type.
            ValueError: the network does not take these sizes, or an id is not a row of its table.
        """
        arrays = [_readable(value) for value in self._ordered(inputs, named)]
        with self._lock:
            if not self._handle:
                raise ValueError("the network is closed")
            self._plan(arrays)
            outputs = [np.empty(self._output_sizes(index), value.dtype) for index, value in enumerate(self.outputs)]
            status = self._function("run")(self._handle, _pointers(arrays), _pointers(outputs), self.threads)
        self._check(status, "inputs")
        return result_of(outputs)

    @property
    def threads(self) -> int:
        """Return the largest number of threads of a call; 0 is the number of cores."""
        return self._threads

    @threads.setter
    def threads(self, count: int) -> None:
        if not 0 <= (number := operator.index(count)) <= LARGEST_NUMBER:
            raise ValueError(f"threads must be from 0, which is the number of cores, to {LARGEST_NUMBER}, got {number}")
        self._threads = number

    def close(self) -> None:
        """Release the memory of the network. A closed network cannot be called."""
        with self._lock:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._function("close")(handle)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_library", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"Network({', '.join(f'{value.name}: {value.dtype}{value.shape}' for value in self.inputs)})"

    def _ordered(self, inputs: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        names = [value.name for value in self.inputs]
        given = dict(zip(names, inputs, strict=False)) | named
        if len(inputs) + len(named) != len(names) or set(given) != set(names):
            unknown = [f"; {name!r} is not one of them" for name in named if name not in names]
            raise TypeError(f"expected the inputs {', '.join(names)}, got {len(inputs)} in order{''.join(unknown)}")
        return [given[name] for name in names]

    def _plan(self, arrays: Sequence[np.ndarray]) -> None:
        """Plan the memory of a call if sizes have changed, and describe how its inputs lie in memory."""
        sizes = tuple(array.shape for array in arrays)
        if sizes != self._sizes:
            self._sizes = None
            held = [(ctypes.c_int64 * max(len(shape), 1))(*shape) for shape in sizes]
            pointers = (ctypes.c_void_p * max(len(held), 1))(*map(ctypes.addressof, held))
            expected = ", ".join(f"{value.name}: {value.shape}" for value in self.inputs)
            wrong = [array.ndim for array in arrays] != [value.rank for value in self.inputs]
            status = SHAPE if wrong else self._function("resize")(self._handle, pointers)
            self._check(status, f"got {', '.join(map(str, map(list, sizes)))} for {expected}")
            self._sizes = sizes
        for index, (array, value) in enumerate(zip(arrays, self.inputs, strict=True)):
            code = self._type_code(index, array, value)
            strides = (ctypes.c_int64 * max(array.ndim, 1))(*(step // array.itemsize for step in array.strides))
            if self._function("read_as")(self._handle, index, code, strides) == ARGUMENT:
                raise TypeError(f"{value.name} must have the element type {value.dtype}, got {array.dtype}")

    def _type_code(self, index: int, array: np.ndarray, value: Value) -> int:
        """Return the element type of an array in net.h; that of images may be bytes instead of the input's own."""
        own = self._function("input")(index)[0].dtype
        return own if array.dtype == value.dtype else U8 if array.dtype == np.uint8 else 0

    def _output_sizes(self, index: int) -> list[int]:
        return self._function("output_sizes")(self._handle, index)[: self.outputs[index].rank]

    def _check(self, status: int, what: str) -> None:
        if status:
            error = {FILE: OSError, MEMORY: MemoryError}.get(status, ValueError)
            raise error(f"{self._function('error')(status).decode()}: {what}")

    def _function(self, name: str) -> Any:
        function = getattr(self._library, f"{NAME}_{name}")
        function.restype = _RESULTS.get(name, ctypes.c_int32)
        return function


def _built_library() -> Path:
    """Return the library in this folder or in ``build``."""
    for folder in (HERE, HERE / "build"):
        if (folder / LIBRARY_FILE).exists():
            return folder / LIBRARY_FILE
    raise FileNotFoundError(
        f"{LIBRARY_FILE} is neither in {HERE} nor in its folder build: build it there with `cmake -S . -B build && "
        "cmake --build build`, or with the commands of README.txt"
    )


def _value(native: _NativeValue) -> Value:
    dtype = np.dtype(ELEMENT_TYPES[native.dtype - 1])
    return Value(native.name.decode(), native.shape.decode(), dtype, native.rank)


def _readable(value: Any) -> np.ndarray:
    """Return an array that the library can read in place, a copy if its strides are not multiples of an element."""
    array = np.require(value, requirements="A")
    simple = all(step >= 0 and step % array.itemsize == 0 for step in array.strides)
    return array if simple else np.ascontiguousarray(array)


def _pointers(arrays: Sequence[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(len(arrays), 1))(*(array.ctypes.data for array in arrays))


def result_of(outputs: list[np.ndarray]) -> Any:
    """Return the outputs in the structure of the Python model's result."""
    return outputs  # replaced when a network is exported
