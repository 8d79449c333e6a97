"""GEMM microkernels for AArch64, which multiply bytes of weights by bytes of activations.

Weights have the memory layout of AVX512-VNNI: a register of 16 bytes holds four input channels (a step) of four output
channels. The loop over input channels is inline assembly, and results are computed in C++ with intrinsics
(native/tiles/neon_tile.h). There are two loops:

Dot products multiply a step of four outputs by a step of one pixel. Four steps of 6 pixels by 16 outputs, 1,536
products, take 6 loads of activations, 8 loads of two registers of weights, 96 dot products and 2 instructions of the
loop, 112 in all. With `NEON_DOT` both operands are signed: 128 is subtracted from activations, which takes 7
instructions more, and 128 times the sum of the weights is added, which is computed once for neighbouring tiles.

Products of matrices (`NEON_I8MM`) multiply two steps of two outputs by two steps of two pixels, signed by unsigned
bytes. Two steps of 6 pixels by 16 outputs, 768 products, take

    activations  6 loads, every second of them into the upper half of a register
    weights      4 loads of two registers, 8 interleavings of the four channels of two steps
    products     24

and 2 instructions of the loop, 44 in all. Tiles of up to `DOT_ROWS` pixels use dot products of
signed and unsigned bytes.

So an instruction does 12.9 products with `NEON_DOT` and 17.5 with `NEON_I8MM`. The kernels of XNNPACK for 4 rows by 16
outputs do 13.0 (4x16c4-minmax-rndnu-aarch64-neondot-ld128.S) and 17.7 (qs8-qc8w-gemm-4x16c8-minmax-fp32-neoni8mm.c, one
instruction for each intrinsic); their activations are signed, and weights for matrices are stored interleaved.

The instructions are counted and the kernels run under an emulator; no speed was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from intaglio.kernels.cpp_tiles import cpp_family, cpp_kernel
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import TileSpec, tile_offset

NEON_TILE_ROWS = {1: 6}
DOT_ROWS = 3
"""Largest number of pixels of a tile for which products of matrices take no fewer instructions than dot products."""
NEON_REGISTERS = """
// x0-x5 activations of each pixel, x6 and x10 number of taps and those left, x8 bytes between rows of taps, x9 rows of
// taps left, x11 row of taps, x12 tap, x13 steps left, x14 weights, x15 bytes between pixels, x16 steps of a tap, x17
// bytes between taps. Loops of dot products: v0-v23 four registers of sums for each pixel, v24-v29 activations, v30 and
// v31 weights, v31 first bytes of 128. Loops of products of matrices: v0-v23 eight registers of sums for two pixels,
// v24-v26 activations of two pixels, v27-v31 weights.
"""
FIELDS = {"b": 14, "a": 11, "a_pixel": 15, "tap_rows": 9, "a_row": 8, "taps": 6, "a_tap": 17, "run": 16}
"""Fields of ``struct Tile``, and the registers that they are loaded into."""


@dataclass(frozen=True)
class NeonLoop:
    """Lines that add up the products of a tile.

    Attributes:
        pixels: Pixels that have a register with their address.
        start: Write what ``start`` points to into all sums.
        steps: Number of steps of ``block``.
        block: Add the products of so many steps.
        step: Add the products of one step.
        end: Store the sums, pixel by pixel, to the address in x0.
    """

    pixels: int
    start: list[str]
    steps: int
    block: list[str]
    step: list[str]
    end: list[str]


def emit(spec: TileSpec, dot: str) -> str:
    """Return the text of one kernel. ``dot`` is the instruction that multiplies weights by activations."""
    name = f"products_of_{spec.name}"
    products = f"int32_t acc[{spec.rows}][16]; {name}(t, &start, acc)"
    kernel = cpp_kernel(spec, products, "neon", "const NeonStart start = neon_start(t); ")
    loop = _matrix_loop(spec.rows) if dot == "sudot" and spec.rows > DOT_ROWS else _dot_loop(spec.rows, dot)
    return f"{_products(name, spec.rows, loop)}{kernel}"


def _products(name: str, rows: int, loop: NeonLoop) -> str:
    """Return a C++ function that writes the sums of a tile of so many pixels."""
    lines = [f"ldr x{register}, [%[t], #{tile_offset(field)}]" for field, register in FIELDS.items()]
    lines += [*loop.start, "1:", "mov x12, x11", "mov x10, x6", "2:", "mov x0, x12"]
    lines += [f"add x{i}, x{i - 1}, x15" for i in range(1, rows)]
    lines += [f"mov x{i}, x{i - 1}" for i in range(rows, loop.pixels)]
    lines += [f"subs x13, x16, #{loop.steps}", "b.lt 4f"]
    lines += ["3:", *loop.block, f"subs x13, x13, #{loop.steps}", "b.ge 3b"]
    lines += ["4:", f"adds x13, x13, #{loop.steps}", "b.eq 6f"]
    lines += ["5:", *loop.step, "subs x13, x13, #1", "b.ne 5b"]
    lines += ["6:", "add x12, x12, x17", "subs x10, x10, #1", "b.ne 2b"]
    lines += ["add x11, x11, x8", "subs x9, x9, #1", "b.ne 1b", "mov x0, %[sums]", *loop.end]
    text = "\n".join(f'        "{line}\\n"' for line in lines)
    changed = [*(f"x{i}" for i in range(18) if i != 7), *(f"v{i}" for i in range(32)), "cc", "memory"]
    clobbers = ", ".join(f'"{name}"' for name in changed)
    head = f"static void {name}(const struct Tile* t, const NeonStart* start, int32_t (*sums)[16])"
    operands = '[t] "r"(t), [start] "r"(start), [sums] "r"(sums)'
    return f"{head} {{\n    asm volatile(\n{text}\n        :: {operands} : {clobbers});\n}}\n"


def _dot_loop(rows: int, dot: str) -> NeonLoop:
    """Return the loop of dot products. A block takes as many steps as a register holds of a pixel."""
    start = ["ld1 {v0.4s, v1.4s, v2.4s, v3.4s}, [%[start]]"]
    start += [f"mov v{4 * i + j}.16b, v{j}.16b" for i in range(1, rows) for j in range(4)]
    signed = ["movi v31.16b, #128", *(f"eor v{24 + i}.16b, v{24 + i}.16b, v31.16b" for i in range(rows))]
    signed *= dot == "sdot"
    block = [*(f"ldr q{24 + i}, [x{i}], #16" for i in range(rows)), *signed]
    block += [line for step in range(4) for line in _dot_step(rows, dot, step)]
    step = [*(f"ld1r {{v{24 + i}.4s}}, [x{i}], #4" for i in range(rows)), *signed, *_dot_step(rows, dot, 0)]
    end = [_stored(4 * i) for i in range(rows)]
    return NeonLoop(rows, start, 4, block, step, end)


def _dot_step(rows: int, dot: str, step: int) -> list[str]:
    """Return the lines of one step: 4 input channels by all pixels by 16 outputs."""
    lines = []
    for j in range(4):
        lines += ["ldp q30, q31, [x14], #32"] * (j % 2 == 0)
        lines += [f"{dot} v{4 * i + j}.4s, v{30 + j % 2}.16b, v{24 + i}.4b[{step}]" for i in range(rows)]
    return lines


def _matrix_loop(rows: int) -> NeonLoop:
    """Return the loop of products of matrices. A register of sums has two outputs of a pixel and of the next one; an
    odd last pixel is computed twice.
    """
    pairs = (rows + 1) // 2
    start = ["ld1 {v24.4s, v25.4s, v26.4s, v27.4s}, [%[start]]"]
    start += [f"dup v{c}.2d, v{24 + c // 2}.d[{c % 2}]" for c in range(8)]
    start += [f"mov v{8 * pair + c}.16b, v{c}.16b" for pair in range(1, pairs) for c in range(8)]
    block, step = [], []
    for pair in range(pairs):
        block += [f"ldr d{24 + pair}, [x{2 * pair}], #8", f"ld1 {{v{24 + pair}.d}}[1], [x{2 * pair + 1}], #8"]
        step += [f"ldr s{24 + pair}, [x{2 * pair}], #4", f"ld1 {{v{24 + pair}.s}}[2], [x{2 * pair + 1}], #4"]
    # The last load moves the address of the weights. Steps of one multiply the other half of each row by zero.
    block += ["ldp q27, q28, [x14, #32]", "ldp q29, q30, [x14, #96]", *_matrix_step(pairs, 4, 29)]
    block += ["ldp q29, q30, [x14, #64]", "ldp q27, q28, [x14], #128", *_matrix_step(pairs, 0, 29)]
    step += ["ldp q27, q28, [x14, #32]", *_matrix_step(pairs, 4, 27)]
    step += ["ldp q27, q28, [x14], #64", *_matrix_step(pairs, 0, 27)]
    end = []
    for i in range(rows):
        sums = range(i // 2 * 8, i // 2 * 8 + 8, 2)
        end += [f"zip{i % 2 + 1} v{24 + j}.2d, v{first}.2d, v{first + 1}.2d" for j, first in enumerate(sums)]
        end += [_stored(24)]
    return NeonLoop(2 * pairs, start, 2, block, step, end)


def _matrix_step(pairs: int, first: int, second: int) -> list[str]:
    """Return the lines of two steps of 8 outputs, from the register of sums ``first`` on. The weights of the first step
    are in v27 and v28, those of the second from v``second`` on.
    """
    lines = []
    for half in range(2):
        sums, one, other = first + 2 * half, 27 + half, second + half
        lines += [f"zip1 v31.4s, v{one}.4s, v{other}.4s", f"zip2 v{one}.4s, v{one}.4s, v{other}.4s"]
        for c, weights in enumerate((31, one)):
            lines += [f"usmmla v{8 * i + sums + c}.4s, v{24 + i}.16b, v{weights}.16b" for i in range(pairs)]
    return lines


def _stored(first: int) -> str:
    """Return the line that stores four registers of sums."""
    return f"st1 {{{', '.join(f'v{first + j}.4s' for j in range(4))}}}, [x0], #64"


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    return cpp_family(family, [NEON_REGISTERS.lstrip(), *texts], "tiles/neon_tile.h")


NEON_I8MM = Isa("neon_i8mm", NEON_TILE_ROWS, False, ".cpp", partial(emit, dot="sudot"), join)
NEON_DOT = Isa("neon_dot", NEON_TILE_ROWS, False, ".cpp", partial(emit, dot="sdot"), join)
