"""GEMM microkernels in plain C++, which run on any processor and serve as the readable form of the assembly kernels."""

from __future__ import annotations

from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import TileSpec


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel: a wrapper that fixes the number of output pixels."""
    kinds = {"u8": [spec.remainder], "add": [spec.remainder, spec.residual_remainder], "f32": []}[spec.result]
    numbers = ", ".join(str(int(number)) for number in (spec.rows, *kinds))
    each = f"portable_{spec.result}(t, {numbers}), portable_next(t, {spec.rows})"
    return f"static void {spec.name}(struct Tile* t) {{ for (; t->count; --t->count) {each}; }}\n"


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family; the functions that all kernels call are in native/products/portable_tile.h."""
    names = ", ".join(kernel.name if kernel is not None else "0" for kernel in family.kernels)
    table = f"const {family.element} {family.name}[] = {{{names}}};\n"
    return "".join(['#include "products/portable_tile.h"\n\n', *texts, f"\n{family.declaration}\n{table}"])


PORTABLE = Isa("portable", {1: 4}, False, ".cpp", emit, join)
