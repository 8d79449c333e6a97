"""GEMM microkernels for AArch64, which multiply four bytes of a channel by four of a pixel.

Weights have the memory layout of AVX512-VNNI: a register of 16 bytes holds four channels. The loop over input channels
is inline assembly, and results are computed in C++ with intrinsics (native/tiles/neon_tile.h). Four steps of 4 input
channels by 6 pixels by 16 outputs, 1536 products, take

    activations  6 loads
    weights      16 loads
    products     96 dot products

and 2 instructions of the loop, 120 in all. With i8mm (`NEON_I8MM`) an instruction multiplies signed by unsigned bytes.
Without it (`NEON_DOT`) both are signed: 128 is subtracted from activations, which takes 6 instructions more, and 128
times the sum of the weights is added, which is computed once for neighbouring tiles.

The instructions are counted and the kernels run under an emulator; no speed was measured.
"""

from __future__ import annotations

from functools import partial

from intaglio.kernels.cpp_tiles import cpp_family, cpp_kernel
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import TileSpec, tile_offset

NEON_TILE_ROWS = {1: 6}
NEON_REGISTERS = """
// x0-x5 activations of each pixel, x6 and x10 number of taps and those left, x8 bytes between rows of taps, x9 rows of
// taps left, x11 row of taps, x12 tap, x13 steps left, x14 weights, x15 bytes between pixels, x16 steps of a tap, x17
// bytes between taps. v0-v23 four registers of sums for each pixel, v24-v29 activations, v30 weights, v31 bytes of 128.
"""
FIELDS = {"b": 14, "a": 11, "a_pixel": 15, "tap_rows": 9, "a_row": 8, "taps": 6, "a_tap": 17, "run": 16}
"""Fields of ``struct Tile``, and the registers that they are loaded into."""
STEPS_AT_ONCE = 4
"""Steps whose activations a register holds."""


def emit(spec: TileSpec, dot: str) -> str:
    """Return the text of one kernel. ``dot`` is the instruction that multiplies weights by activations."""
    name = f"products_of_{spec.name}"
    products = f"int32_t acc[{spec.rows}][16]; {name}(t, &start, acc)"
    kernel = cpp_kernel(spec, products, "neon", "const NeonStart start = neon_start(t); ")
    return f"{_products(name, spec.rows, dot)}{kernel}"


def _products(name: str, rows: int, dot: str) -> str:
    """Return a C++ function that writes the sums of a tile of so many pixels."""
    lines = [f"ldr x{register}, [%[t], #{tile_offset(field)}]" for field, register in FIELDS.items()]
    lines += ["ld1 {v0.4s, v1.4s, v2.4s, v3.4s}, [%[start]]"]
    lines += [f"mov v{4 * i + j}.16b, v{j}.16b" for i in range(1, rows) for j in range(4)]
    lines += ["movi v31.16b, #128"] * (dot == "sdot")
    lines += ["1:", "mov x12, x11", "mov x10, x6"]
    lines += ["2:", "mov x0, x12", *(f"add x{i}, x{i - 1}, x15" for i in range(1, rows))]
    lines += [f"subs x13, x16, #{STEPS_AT_ONCE}", "b.lt 4f"]
    lines += ["3:", *(f"ldr q{24 + i}, [x{i}], #16" for i in range(rows)), *_centered(rows, dot)]
    lines += [line for step in range(STEPS_AT_ONCE) for line in _step(rows, dot, step)]
    lines += [f"subs x13, x13, #{STEPS_AT_ONCE}", "b.ge 3b"]
    lines += ["4:", f"adds x13, x13, #{STEPS_AT_ONCE}", "b.eq 6f"]
    lines += ["5:", *(f"ld1r {{v{24 + i}.4s}}, [x{i}], #4" for i in range(rows)), *_centered(rows, dot)]
    lines += [*_step(rows, dot, 0), "subs x13, x13, #1", "b.ne 5b"]
    lines += ["6:", "add x12, x12, x17", "subs x10, x10, #1", "b.ne 2b"]
    lines += ["add x11, x11, x8", "subs x9, x9, #1", "b.ne 1b", "mov x0, %[sums]"]
    lines += [f"st1 {{{', '.join(f'v{4 * i + j}.4s' for j in range(4))}}}, [x0], #64" for i in range(rows)]
    text = "\n".join(f'        "{line}\\n"' for line in lines)
    changed = [*(f"x{i}" for i in range(18) if i != 7), *(f"v{i}" for i in range(32)), "cc", "memory"]
    clobbers = ", ".join(f'"{name}"' for name in changed)
    head = f"static void {name}(const struct Tile* t, const NeonStart* start, int32_t (*sums)[16])"
    operands = '[t] "r"(t), [start] "r"(start), [sums] "r"(sums)'
    return f"{head} {{\n    asm volatile(\n{text}\n        :: {operands} : {clobbers});\n}}\n"


def _centered(rows: int, dot: str) -> list[str]:
    """Return the lines that make activations signed."""
    return [f"eor v{24 + i}.16b, v{24 + i}.16b, v31.16b" for i in range(rows)] if dot == "sdot" else []


def _step(rows: int, dot: str, step: int) -> list[str]:
    """Return the lines of one step: 4 input channels by all pixels by 16 outputs."""
    lines = []
    for j in range(4):
        lines += ["ldr q30, [x14], #16"]
        lines += [f"{dot} v{4 * i + j}.4s, v30.16b, v{24 + i}.4b[{step}]" for i in range(rows)]
    return lines


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    return cpp_family(family, [NEON_REGISTERS.lstrip(), *texts], "tiles/neon_tile.h")


NEON_I8MM = Isa("neon_i8mm", NEON_TILE_ROWS, False, ".cpp", partial(emit, dot="sudot"), join)
NEON_DOT = Isa("neon_dot", NEON_TILE_ROWS, False, ".cpp", partial(emit, dot="sdot"), join)
