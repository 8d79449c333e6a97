"""Kernels of native/sequences/attention.h called directly, compiled once per instruction set."""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from intaglio.codegen.context import limits
from intaglio.kernels import ISAS, TileSpec
from intaglio.kernels.kernel_units import kernel_units
from intaglio.native.compile import build, load
from intaglio.native.native_library import parallel_address
from intaglio.ops.products.scratch_memory import MAX_SCRATCH_THREADS
from support.matmul_library import EXPORT

HEADS = ("base", "batch", "head", "row")
SHARED = ("limits", "scratch", "scratch_bytes", "sharers", "kernels.table", "kernels.blocks", "kernels.rows")
FIELDS = {
    "Attention": (
        *(f"{tensor}.{field}" for tensor in ("q", "k", "v", "out") for field in HEADS),
        "mask",
        "mask_bytes",
        *(f"mask_stride[{axis}]" for axis in range(4)),
        "batch",
        "heads",
        "shared",
        "queries",
        "keys",
        "depth",
        "width",
        "causal",
        "zero_q",
        *SHARED,
    ),
    "Product": (
        *(f"{tensor}.{field}" for tensor in ("a", "out") for field in HEADS),
        "b",
        "b_batch",
        "b_head",
        "depth_stride",
        "column_stride",
        "batch",
        "heads",
        "rows",
        "depth",
        "columns",
        "zero_a",
        "table.entries",
        *SHARED,
    ),
}
"""Numbers and addresses; the floats are ``factor`` and ``ratio``."""
FLOATS = {"Attention": ("factor", "ratio"), "Product": ("factor",)}
ENTRY = {"Attention": "attention", "Product": "product"}


class Kernels:
    """A library of one instruction set."""

    def __init__(self, isa: str) -> None:
        self.blocks = ISAS[isa].blocks
        self.rows = ISAS[isa].max_tile_rows[self.blocks]
        families = [ISAS[isa].tiles(TileSpec(1, blocks, "f32")) for blocks in range(1, self.blocks + 1)]
        text, units = _text([family.name for family in families]), kernel_units(families, isa)
        self.library = load(build(text, name=f"products_{isa}", isa=isa, units=units))
        self.library.harness_table.restype = ctypes.c_void_p

    def run(
        self,
        kind: str,
        numbers: Mapping[str, int],
        floats: Mapping[str, float],
        quantization: tuple[int, int, int] | None,
        threads: int,
        scratch_bytes: int,
    ) -> None:
        """``quantization``: zero point, least and greatest quantized value of the result; ``None`` for floats."""
        scratch = np.full(scratch_bytes * MAX_SCRATCH_THREADS + 64, 171, np.uint8)
        bounds = limits(*quantization, 0).copy() if quantization else None
        given = {
            "limits": bounds.ctypes.data if bounds is not None else 0,
            "scratch": scratch.ctypes.data + -scratch.ctypes.data % 64,
            "scratch_bytes": scratch_bytes,
            "sharers": MAX_SCRATCH_THREADS,
            "kernels.table": self.library.harness_table(),
            "kernels.blocks": self.blocks,
            "kernels.rows": self.rows,
            **numbers,
        }
        values = (ctypes.c_int64 * len(FIELDS[kind]))(*[given.get(name, 0) for name in FIELDS[kind]])
        reals = (ctypes.c_float * len(FLOATS[kind]))(*[floats[name] for name in FLOATS[kind]])
        entry = getattr(self.library, f"harness_{ENTRY[kind]}")
        entry(values, reals, threads, ctypes.c_void_p(parallel_address()))


@cache
def kernels(isa: str) -> Kernels:
    return Kernels(isa)


def _text(tables: Sequence[str]) -> str:
    lines = [
        '#include "sequences/attention.h"',
        '#include "elementwise/lookup.h"',
        '#include "products/product.h"',
        *(f"KERNEL_TABLE(TileKernel, {table});" for table in tables),
    ]
    lines += [f"static const TileKernel* const table[] = {{0, {', '.join(tables)}}};"]
    lines += [f"{EXPORT} const TileKernel* const* harness_table() {{ return table; }}"]
    for kind, entry in ENTRY.items():
        lines += [
            f"static void {entry}_body(void* c, int thread, int threads) {{",
            f"    {entry}((const struct {kind}*)c, thread, threads);",
            "}",
            f"{EXPORT} void harness_{entry}(const int64_t* v, const float* f, int threads, IntaglioParallel run) {{",
            f"    struct {kind} call = {{}};",
            *[f"    call.{name} = (decltype(call.{name}))v[{i}];" for i, name in enumerate(FIELDS[kind])],
            *[f"    call.{name} = f[{i}];" for i, name in enumerate(FLOATS[kind])],
            *["    if (call.table.entries) call.table.look_up = look_up_in_place;"] * (kind == "Product"),
            f"    run({entry}_body, &call, threads);",
            "}",
        ]
    return "\n".join(lines)
