"""The native library that each process loads once: thread pool, copies of results, and kernels for quantizing."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from intaglio.errors import BuildError, IntaglioError
from intaglio.native import compile as compiler
from intaglio.native import cpu as machine
from intaglio.native.cache_folder import trusted_folder
from intaglio.native.compiler_runs import yield_cores
from intaglio.native.toolchain import Toolchain, find_toolchain
from intaglio.native.units import library_units

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
"""C type of the function that threads run: ``void body(void* context, int thread, int threads)``."""

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads", "omp_pause_resource_all")
"""Functions of an OpenMP library that starts threads as GCC's does."""

QUANTIZING = ("statistics", "squared_sums", "weight_columns", "row_errors", "scale_errors")
SOURCE = "".join(f'#include "base/{name}.cpp"\n' for name in ("pool", "openmp", "planes")) + "".join(
    f'#include "quantizing/{name}.cpp"\n' for name in QUANTIZING
)
USUAL_HEADERS = '#include "layers/matmul.h"\n#include "elementwise/activation.h"\n#include "sequences/attention.h"\n'
"""Includes of the parts of the library that most programs are linked with."""


class NativeCounts(ctypes.Structure):
    """Mirror of ``IntaglioCounts`` in statistics.cpp."""

    _fields_ = (
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("nans", ctypes.c_int64),
        ("infinities", ctypes.c_int64),
        ("zeros", ctypes.c_int64),
        ("exponent", ctypes.c_int64),
    )


_ARRAY, _COUNT, _INT, _VALUE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_double
SIGNATURES = {
    "intaglio_parallel": (BODY, ctypes.c_void_p, _INT),
    "intaglio_parallel_shared": (BODY, ctypes.c_void_p, _INT),
    "intaglio_parallel_program": (BODY, ctypes.c_void_p, _INT),
    "intaglio_parallel_between_islands": (BODY, ctypes.c_void_p, _INT),
    "intaglio_use_openmp": (ctypes.c_void_p,) * 5,
    "intaglio_planes": (_ARRAY, _ARRAY, _COUNT, _COUNT, _COUNT, _INT),
    "intaglio_channel_extrema": (_ARRAY, _COUNT, _COUNT, _COUNT, _INT, _ARRAY, _ARRAY),
    "intaglio_count": (_ARRAY, _COUNT, _COUNT, _INT, *[_ARRAY] * 5, ctypes.POINTER(NativeCounts)),
    "intaglio_squared_sums": (_ARRAY, _ARRAY, _COUNT, _INT, _ARRAY),
    "intaglio_round_columns": (*[_ARRAY] * 10, _VALUE, _VALUE, _INT),
    "intaglio_split_rows": (_ARRAY, _ARRAY, _COUNT, _COUNT, _INT, *[_ARRAY] * 3),
    "intaglio_row_errors": (*[_ARRAY] * 3, _COUNT, _COUNT, _INT, _ARRAY),
    "intaglio_scale_errors": (_ARRAY, _ARRAY, _COUNT, _COUNT, _VALUE, _VALUE, _INT, _ARRAY),
}


@dataclass(frozen=True)
class RuntimeLibrary:
    """The native library in a file of a model.

    Attributes:
        content: Bytes of the shared object.
        isa: Instruction set.
        key: Digest of the text that it was compiled from.
    """

    content: bytes = field(repr=False)
    isa: str
    key: str


_trusted: list[RuntimeLibrary] = []
"""The library that `use_trusted` was called with last."""


def use_trusted(library: RuntimeLibrary) -> None:
    """Let `runtime` load a library from a file that the user trusts, so that it needs no compiler.

    It is used if this version's text was compiled for an instruction set of this machine, if the process has not loaded
    a library before, and if the cache does not have one.
    """
    if library.isa in machine.isas() and library.key == compiler.text_key(SOURCE, library.isa):
        _trusted[:] = [library]


def runtime_library(isa: str) -> RuntimeLibrary:
    """Return the library for an instruction set, from `use_trusted` or built. Raise `BuildError` if that fails."""
    key = compiler.text_key(SOURCE, isa)
    found = [library for library in _trusted if library.key == key]
    if found and not compiler.is_built(SOURCE, name="runtime", isa=isa):
        return found[0]
    return RuntimeLibrary(compiler.read_library(compiler.build(SOURCE, name="runtime", isa=isa)), isa, key)


def open_library(isa: str) -> ctypes.CDLL:
    """Build thread pool and kernels for ``isa`` and load them with their argument types set."""
    return _opened(compiler.build(SOURCE, name="runtime", isa=isa))


def _opened(path: Path) -> ctypes.CDLL:
    """Load a library with its argument types set, and pass it PyTorch's OpenMP."""
    library = compiler.load(path)
    for name, types in SIGNATURES.items():
        function = getattr(library, name, None)
        if function is None:
            problem = f"this library of the kernel cache has no function {name}, so intaglio did not write it"
            raise BuildError(str(path), None, problem, remedy="delete the file and run the program again")
        function.argtypes, function.restype = types, None
    if (found := _openmp_of_torch()) is not None:
        library.intaglio_use_openmp(*found)
    return library


@cache
def _openmp_of_torch() -> list[int | None] | None:
    """Return the addresses of `OPENMP` in the library that PyTorch is linked with; ``None`` if there is none."""
    try:
        with Path("/proc/self/maps").open() as lines:
            paths = (line.split(maxsplit=5)[-1].strip() for line in lines)
            path = next((path for path in paths if path.endswith("/libtorch_cpu.so")), None)
        if path is None:
            return None
        library = ctypes.CDLL(path)  # symbols of the libraries that it is linked with are found through it
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in OPENMP]
    except (OSError, AttributeError):
        return None


def shares_threads() -> bool:
    """Return whether programs can run in the threads of PyTorch."""
    return _openmp_of_torch() is not None


@cache
def runtime() -> ctypes.CDLL:
    """Return the library of this process; raise `BuildError` if it cannot be built."""
    isa = machine.isas()[0]
    if _trusted and not compiler.is_built(SOURCE, name="runtime", isa=isa):
        return _opened(compiler.install(_trusted[0].content, name="runtime"))
    return open_library(isa)


def build_ahead() -> None:
    """Build the library, and the parts that most programs are linked with, in the background if the cache lacks them.

    Functions that need them wait for them and report errors.

    Raises:
        BuildError: No compiler is found, so what is about to be quantized could not be compiled.
    """
    toolchain = find_toolchain("quantize")
    if not runtime.cache_info().currsize:
        _background[:] = [threading.Thread(target=_build_quietly, args=[toolchain], name="intaglio-build")]
        _background[0].start()


_background: list[threading.Thread] = []
"""The thread that `build_ahead` started last."""


def builds_in_background() -> bool:
    """Return whether what `build_ahead` started is not finished yet."""
    return any(thread.is_alive() for thread in _background)


def _build_quietly(toolchain: Toolchain) -> None:
    """Build with the compiler and the cache folder of this moment, also if the environment changes meanwhile."""
    yield_cores()
    with contextlib.suppress(IntaglioError):
        isa, folder = machine.isas()[0], trusted_folder("kernels")
        compiler.build(SOURCE, name="runtime", isa=isa)
        compiler.build_units(library_units(USUAL_HEADERS), isa=isa, toolchain=toolchain, folder=folder)


@cache
def runtime_if_built() -> ctypes.CDLL | None:
    """Return the library of this process; warn and return ``None`` if it cannot be built."""
    try:
        return runtime()
    except BuildError as error:
        warnings.warn(
            f"quantizing works in NumPy and PyTorch, several times slower, because native code failed: {error}",
            stacklevel=3,
        )
        return None


@cache
def parallel_address(between_islands: bool = False) -> int:
    """Return the address of the function that runs the segments of generated programs, an ``IntaglioParallel`` of
    pool.h.

    Args:
        between_islands: whether float islands, which PyTorch computes, are between segments.
    """
    library = runtime()
    function = library.intaglio_parallel_between_islands if between_islands else library.intaglio_parallel_program
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
