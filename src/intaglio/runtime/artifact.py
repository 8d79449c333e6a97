"""`Artifact`: a compiled program and its constants, loaded into this process. This module does not use PyTorch."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from intaglio.errors import BuildError
from intaglio.ir import Program
from intaglio.kernels.kernel_units import kernel_units
from intaglio.native import cpu as machine
from intaglio.native.compile import build, load, read_library, text_key
from intaglio.native.native_library import parallel_address

CInt64 = ctypes.c_int64


class RunArguments(ctypes.Structure):
    """ctypes counterpart of ``struct Run`` in native/base/run.h."""

    _fields_ = (
        ("dims", ctypes.POINTER(CInt64)),
        ("offsets", ctypes.POINTER(CInt64)),
        ("arena", ctypes.c_void_p),
        ("constants", ctypes.c_void_p),
        ("external", ctypes.POINTER(ctypes.c_void_p)),
        ("strides", ctypes.POINTER(CInt64)),
        ("barrier", ctypes.c_void_p),
        ("bytes", ctypes.POINTER(ctypes.c_uint8)),
        ("times", ctypes.POINTER(CInt64)),
        ("outside", ctypes.POINTER(ctypes.c_int32)),
        ("clipped", ctypes.POINTER(CInt64)),
        ("grows", ctypes.POINTER(ctypes.c_uint8)),
        ("shares", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Artifact:
    """A program, the shared library compiled from it, and its entry points.

    Attributes:
        program: source text, constants and steps.
        path: file of the shared library.
        constants: u8[n], the constants, aligned to 64 bytes.
        library: the loaded library.
        parallel: address of the function that runs a segment on several threads.
    """

    program: Program
    path: Path
    constants: np.ndarray
    library: ctypes.CDLL = field(repr=False)
    parallel: int = 0

    def plan(self, symbols: Mapping[str, int]) -> CallLayout:
        """Return the offset of every buffer for these sizes of the dynamic dimensions."""
        dims = (CInt64 * max(len(self.program.symbols), 1))(*[symbols[name] for name in self.program.symbols])
        offsets = (CInt64 * max(self.program.buffers, 1))()
        return CallLayout(dims, offsets, self.library.intaglio_plan(dims, offsets))

    def run(self, frame: RunArguments, segment: int, threads: int) -> None:
        """Run one segment and return when it is done. The global interpreter lock is released meanwhile."""
        self.library.intaglio_run(ctypes.byref(frame), segment, threads, self.parallel)

    def library_bytes(self) -> bytes:
        """Return the bytes of the shared library, compiled again if the cache no longer has it."""
        return read_library(self.path if self.path.exists() else build_program(self.program))

    def __deepcopy__(self, memo: object) -> Artifact:
        """Return the artifact itself, which is immutable."""
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the program only. Unpickling finds the library in the cache or compiles it."""
        return build_artifact, (self.program,)


@dataclass(frozen=True)
class CallLayout:
    """Memory plan of a call.

    Attributes:
        dims: sizes of the dynamic dimensions.
        offsets: offset of every buffer in the arena.
        bytes: size of the arena.
    """

    dims: ctypes.Array[CInt64]
    offsets: ctypes.Array[CInt64]
    bytes: int


def build_program(program: Program) -> Path:
    """Compile a program, or find it in the cache, link its kernels and return the library. Raise `BuildError` on
    failure."""
    units = kernel_units(program.kernels, program.isa)
    return build(program.source, name=program.name, isa=program.isa, units=units)


def program_key(program: Program) -> str:
    """Return the digest of the text that a program's library is compiled from."""
    return text_key(program.source, program.isa, kernel_units(program.kernels, program.isa))


def build_artifact(program: Program) -> Artifact:
    """Compile a program, or find it in the cache, and load it. Raise `BuildError` on failure."""
    return open_artifact(program, build_program(program))


def open_artifact(program: Program, path: Path) -> Artifact:
    """Load the library at ``path``, which was compiled from the text of ``program``.

    Raises:
        BuildError: this machine does not support the instruction set, or the library does not have the entry points.
    """
    if program.isa not in machine.isas():  # a pickle may come from a machine with other instruction sets
        raise BuildError(
            program.name,
            None,
            f"the program is for {program.isa}, but this machine runs {', '.join(machine.isas())}",
            remedy="save the model with model.save; intaglio.load opens such files on every machine",
        )
    library = load(path)
    if not (hasattr(library, "intaglio_plan") and hasattr(library, "intaglio_run")):
        raise BuildError(
            str(path), None, "the library does not contain a program", remedy="load the file without trust=True"
        )
    library.intaglio_plan.restype = CInt64
    library.intaglio_plan.argtypes = (ctypes.POINTER(CInt64), ctypes.POINTER(CInt64))
    library.intaglio_run.restype = None
    library.intaglio_run.argtypes = (ctypes.POINTER(RunArguments), ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
    return Artifact(program, path, aligned(program.constants), library, parallel_address(bool(program.calls)))


def aligned(array: np.ndarray, boundary: int = 64) -> np.ndarray:
    """Return the bytes of an array at an address that is a multiple of ``boundary``, copied if necessary."""
    if array.ctypes.data % boundary == 0 and array.flags.c_contiguous:
        return array.view(np.uint8).ravel()
    memory = np.empty(array.nbytes + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    result = memory[start : start + array.nbytes]
    result[:] = array.view(np.uint8).ravel()
    return result
