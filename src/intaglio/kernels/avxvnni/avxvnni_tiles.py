"""AVX-VNNI GEMM microkernels in assembly: vpdpbusd with 256-bit registers, as processors for clients have it.

Weights have the memory layout of AVX512-VNNI, four bytes of a channel in a dword. One step of 4 channels by 6 pixels by
16 outputs, 384 products, takes 12 vpdpbusd, which two units execute in 6 cycles, and 8 loads: 6 broadcasts of
activations and 2 of weights. Each sum waits for its last product for 4 or 5 cycles, so tiles of 5 pixels and more keep
both units busy.

A tile of 7 pixels leaves one register to weights. Half of them are an operand of 7 vpdpbusd, which makes 15 loads: 7.5
cycles for 7 cycles of products on cores that load two vectors in a cycle. It reads the weights once for more pixels,
which pays where they do not stay in the first-level cache, and takes lines of 7 pixels at once (ResNet-50 on one
thread of a Zen 5: 18.4 ms with tiles of 7 pixels only, 17.3 ms with both).

Registers: ymm0 and ymm2 weights, ymm1 activations, then two accumulators per pixel. The epilogue needs four registers,
so the sums of the seventh pixel wait below the stack pointer until those of the first are stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.kernels.assembly import family_text, field, tap_loops, tile_function
from intaglio.kernels.avx2.ymm_epilogue import (
    EPILOGUE_CONSTANTS,
    PIXEL_ADDRESSES,
    Pair,
    epilogue,
    load_biases,
    pixel_pointers,
)
from intaglio.kernels.avx2.ymm_int4 import YMM_INT4_CONSTANTS, YMM_INT4_REGISTERS, YMM_INT4_TILE_ROWS
from intaglio.kernels.avxvnni.avxvnni_int4 import AvxVnniInt4Kernel
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import ONE_LEVEL, STREAMED_ROWS, TileSpec

AVXVNNI_MAX_TILE_ROWS, AVXVNNI_FAST_TILE_ROWS = {1: 7}, {1: 6}
AVXVNNI_REGISTERS = """
AVX-VNNI, System V. rdi: struct Tile.
Products: rsi weights, rax activations, rbp those of the fourth pixel, rbx bytes between pixels, r15 three times that,
rdx a tap, r14 a row of taps; rcx, r13, r12 count steps, taps, rows of taps; r8 from weights to those to prefetch. ymm0
weights, ymm1 activations, ymm2 weights of the other 8 channels except with 7 pixels, ymm2-15 two accumulators a pixel,
from ymm15 on.
Epilogue: rax limits, r8 factors, rdx result, rcx residual operand, r9 its factors, rsi, rbx their remainders, r10
channels to write. ymm0 scratch, ymm1 zero point of the residual operand, ymm2-3 bounds.
"""
WEIGHTS, ACTIVATIONS, OTHER_WEIGHTS = "%ymm0", "%ymm1", "%ymm2"
STEPS = 4
"""Number of steps between two jumps. Additions to pointers take turns of the units that execute vpdpbusd; on a Xeon,
tiles of 7 pixels reached 78 % of the peak with one step, 87 % with two and 94 % with four, with weights in the
second-level cache."""
BELOW_STACK = ("-32(%rsp)", "-64(%rsp)")
"""Memory that belongs to a function without calls."""


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel."""
    if spec.int4:
        return AvxVnniInt4Kernel(spec).text()
    pixels = [(f"%ymm{15 - 2 * i}", f"%ymm{14 - 2 * i}") for i in range(spec.rows)]
    pointers = pixel_pointers(spec.rows)
    one, several = (_steps(pixels, list(pointers), count) for count in (1, STEPS))
    if spec.rows <= STREAMED_ROWS:
        ahead, prefetches = [], [f"{ONE_LEVEL.prefetch} {ONE_LEVEL.ahead + 64 * step}(%rsi)" for step in range(STEPS)]
    else:
        # Every fourth step prefetches one cache line, another one for every tile, so that the next panel is cached in
        # time.
        ahead = ["# prefetch the next panel of weights", f"mov {field('ahead')},%r8", f"addq $64,{field('ahead')}"]
        prefetches = ["prefetcht1 (%rsi,%r8)"]
    several[:0] = prefetches
    lines = [*load_biases(pixels), *ahead, *tap_loops([*pointers.values()], one, several, STEPS)]
    if spec.rows < AVXVNNI_MAX_TILE_ROWS[1]:
        return tile_function(spec, [*lines, *epilogue(spec, pixels)])
    lines += [f"vmovdqu {sums},{address}" for sums, address in zip(pixels[-1], BELOW_STACK, strict=True)]
    return tile_function(spec, [*lines, *epilogue(spec, pixels[:-1], BELOW_STACK)])


def _steps(pixels: Sequence[Pair], pointers: Sequence[str], count: int) -> list[str]:
    """Return the lines of some steps: 4 input channels each by all pixels by 16 outputs."""
    lines = []
    for step in range(count):
        other = f"{64 * step + 32}(%rsi)"
        lines += [f"vmovdqu {64 * step}(%rsi),{WEIGHTS}"]
        if len(pixels) < AVXVNNI_MAX_TILE_ROWS[1]:
            lines += [f"vmovdqu {other},{OTHER_WEIGHTS}"]
            other = OTHER_WEIGHTS
        for address, (low, high) in zip(PIXEL_ADDRESSES, pixels, strict=False):
            lines += [f"vpbroadcastd {4 * step}{address},{ACTIVATIONS}"]
            lines += [f"{{vex}} vpdpbusd {WEIGHTS},{ACTIVATIONS},{low}"]
            lines += [f"{{vex}} vpdpbusd {other},{ACTIVATIONS},{high}"]
    return [*lines, *(f"add ${4 * count},{pointer}" for pointer in pointers), f"add ${64 * count},%rsi"]


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    return family_text(
        family, texts, AVXVNNI_REGISTERS + YMM_INT4_REGISTERS, {**EPILOGUE_CONSTANTS, **YMM_INT4_CONSTANTS}
    )


AVXVNNI = Isa(
    "avxvnni",
    AVXVNNI_MAX_TILE_ROWS,
    True,
    ".s",
    emit,
    join,
    int4_tile_rows=YMM_INT4_TILE_ROWS,
    fast_tile_rows=AVXVNNI_FAST_TILE_ROWS,
)
