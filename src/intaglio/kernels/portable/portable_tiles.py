"""GEMM microkernels in plain C++, which run on any processor and serve as the readable form of the assembly kernels."""

from __future__ import annotations

from intaglio.kernels.cpp_tiles import cpp_family, cpp_kernel
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import TileSpec


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel, in which the number of output pixels is fixed."""
    return cpp_kernel(spec, f"int32_t acc[{spec.rows}][16]; portable_products(t, {spec.rows}, acc)")


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family; the functions that all kernels call are in native/tiles/portable_tile.h."""
    return cpp_family(family, texts, "tiles/portable_tile.h")


PORTABLE = Isa("portable", {1: 4}, False, ".cpp", emit, join)
