"""AVX2 GEMM microkernels in assembly. They multiply 16-bit numbers, so no sum saturates as with vpmaddubsw.

Weights have the memory layout of AVX512-VNNI, four bytes of a channel in a dword. A dword is split in registers into
its even and odd bytes as two pairs of 16-bit numbers, activations by a mask and a shift, weights by arithmetic shifts;
vpmaddwd multiplies even by even and odd by odd. One step of 4 channels by 4 pixels by 16 outputs, 256 products, takes

    weights      2 loads, 6 shifts
    activations  4 broadcasts, 4 masks, 4 shifts
    products     16 vpmaddwd, 16 vpaddd

These are 52 instructions and 4 of the loop, or 14 per 64 products. Weights widened in memory would save 4 of the 52 and
made the loop 6% faster when measured, but a first-level cache holds only half as many of them.

Registers: ymm0..3 mask, activations and a product, ymm4..7 weights, then two accumulators per pixel.
"""

from __future__ import annotations

from intaglio.kernels.assembly import family_text, tap_loops, tile_function
from intaglio.kernels.avx2.avx2_int4 import AVX2_INT4_CONSTANTS, Avx2Int4Kernel
from intaglio.kernels.avx2.ymm_epilogue import EPILOGUE_CONSTANTS, PIXEL_ADDRESSES, epilogue, load_biases
from intaglio.kernels.avx2.ymm_int4 import YMM_INT4_REGISTERS, YMM_INT4_TILE_ROWS
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import STREAM_AHEAD, STREAMED_ROWS, TileSpec

AVX2_MAX_TILE_ROWS = {1: 4}
AVX2_REGISTERS = """
AVX2, System V. rdi: struct Tile.
Products: rsi weights, rax activations, rbx bytes between pixels, r15 three times that, rdx a tap, r14 a row of taps;
rcx, r13, r12 count steps, taps, rows of taps. ymm0 mask of even bytes, ymm1 odd and ymm2 even activations, ymm3 a
product, ymm4-5 even and ymm6-7 odd weights, ymm8-15 two accumulators a pixel.
Epilogue: rax limits, r8 factors, rdx result, rcx residual operand, r9 its factors, rsi, rbx their remainders, r10
channels to write. ymm0 scratch, ymm1 zero point of the residual operand, ymm2-3 bounds.
"""
MASK, ODD_A, EVEN_A, PRODUCT = (f"%ymm{i}" for i in range(4))
EVEN_W, ODD_W = ("%ymm4", "%ymm5"), ("%ymm6", "%ymm7")

HALVES = (0, 1)


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel."""
    if spec.int4:
        return Avx2Int4Kernel(spec).text()
    pixels = [(acc(i, 0), acc(i, 1)) for i in range(spec.rows)]
    mask = [f"vpcmpeqd {MASK},{MASK},{MASK}", f"vpsrlw $8,{MASK},{MASK}"]
    products = tap_loops(["mov %rdx,%rax"], _step(spec))
    return tile_function(spec, [*load_biases(pixels), *mask, *products, *epilogue(spec, pixels)])


def acc(pixel: int, half: int) -> str:
    """Return the register with the accumulators of 8 channels."""
    return f"%ymm{8 + 2 * pixel + half}"


def _step(spec: TileSpec) -> list[str]:
    """Return the lines of one step: 4 input channels by all pixels by 16 outputs."""
    lines = []
    for half in HALVES:
        even, odd = EVEN_W[half], ODD_W[half]
        lines += [f"vmovdqu {32 * half}(%rsi),{odd}", f"vpsllw $8,{odd},{even}"]
        lines += [f"vpsraw $8,{odd},{odd}", f"vpsraw $8,{even},{even}"]
    for i in range(spec.rows):
        lines += [
            f"vpbroadcastd {PIXEL_ADDRESSES[i]},{ODD_A}",
            f"vpand {MASK},{ODD_A},{EVEN_A}",
            f"vpsrlw $8,{ODD_A},{ODD_A}",
        ]
        for weights, activations in ((EVEN_W, EVEN_A), (ODD_W, ODD_A)):
            lines += [f"vpmaddwd {weights[0]},{activations},{PRODUCT}", f"vpaddd {PRODUCT},{acc(i, 0)},{acc(i, 0)}"]
            lines += [f"vpmaddwd {weights[1]},{activations},{activations}"]
            lines += [f"vpaddd {activations},{acc(i, 1)},{acc(i, 1)}"]
    prefetches = [f"prefetchnta {STREAM_AHEAD}(%rsi)"] * (spec.rows <= STREAMED_ROWS)
    return [*prefetches, *lines, "add $4,%rax", "add $64,%rsi"]


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    return family_text(
        family, texts, AVX2_REGISTERS + YMM_INT4_REGISTERS, {**EPILOGUE_CONSTANTS, **AVX2_INT4_CONSTANTS}
    )


AVX2 = Isa("avx2", AVX2_MAX_TILE_ROWS, False, ".s", emit, join, int4_tile_rows=YMM_INT4_TILE_ROWS)
