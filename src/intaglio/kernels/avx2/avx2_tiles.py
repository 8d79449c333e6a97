"""AVX2 GEMM microkernels in assembly. They multiply 16-bit numbers, so no sum saturates as with vpmaddubsw.

Weights have the memory layout of AVX512-VNNI, four bytes of a channel in a dword. A dword is split in registers into
its even and odd bytes as two pairs of 16-bit numbers, activations by a mask or a shift, weights by arithmetic shifts;
vpmaddwd multiplies even by even and odd by odd. One step of 4 channels by 6 pixels by 16 outputs, 384 products, takes

    weights      4 loads, 6 shifts
    activations  12 broadcasts, 6 masks, 6 shifts
    products     24 vpmaddwd, 24 vpaddd

and 5 instructions of the loop. Activations that were widened in memory need neither masks nor shifts: two neighbouring
dwords have the even and the odd bytes of four channels. On one core of a Zen 3, whose units for products execute 1.6
vpmaddwd a cycle beside as many vpaddd, the loop then reaches 93 % of that rate, instead of 81 %. Weights widened in
memory too make it 5 % faster, but a first-level cache holds only half as many of them.

Registers: ymm0..1 weights, ymm2 activations, ymm3 a product, then two accumulators per pixel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from intaglio.kernels.assembly import family_text, field, tap_loops, tile_function
from intaglio.kernels.avx2.avx2_int4 import AVX2_INT4_CONSTANTS, Avx2Int4Kernel
from intaglio.kernels.avx2.ymm_epilogue import (
    EPILOGUE_CONSTANTS,
    PIXEL_ADDRESSES,
    Pair,
    epilogue,
    load_biases,
    pixel_pointers,
)
from intaglio.kernels.avx2.ymm_int4 import YMM_INT4_REGISTERS, YMM_INT4_TILE_ROWS
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import ONE_LEVEL, STREAMED_ROWS, TileSpec

AVX2_MAX_TILE_ROWS = {1: 6}
AVX2_REGISTERS = """
AVX2, System V. rdi: struct Tile.
Products: rsi weights, rax activations, rbp those of the fourth pixel, rbx bytes between pixels, r15 three times that,
rdx a tap, r14 a row of taps; rcx, r13, r12 count steps, taps, rows of taps. ymm0-1 weights, ymm2 activations, ymm3 a
product, ymm4-15 two accumulators a pixel.
Epilogue: rax limits, r8 factors, rdx result, rcx residual operand, r9 its factors, rsi, rbx their remainders, r10
channels to write. ymm0 scratch, ymm1 zero point of the residual operand, ymm2-3 bounds.
"""
WEIGHTS, ACTIVATIONS, PRODUCT = ("%ymm0", "%ymm1"), "%ymm2", "%ymm3"
AVX2_CONSTANTS = {"intaglio_even_bytes": "    .fill 16,2,255\n"}
"""Mask of the even bytes of activations."""


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel."""
    if spec.int4:
        return Avx2Int4Kernel(spec).text()
    pixels = [(f"%ymm{4 + 2 * i}", f"%ymm{5 + 2 * i}") for i in range(spec.rows)]
    pointers = pixel_pointers(spec.rows)
    if spec.sums:
        return tile_function(
            spec, [*load_biases(pixels), *_sums(pixels, [*pointers.values()]), *epilogue(spec, pixels)]
        )
    prefetches = [f"{ONE_LEVEL.prefetch} {ONE_LEVEL.ahead}(%rsi)"] * (spec.rows <= STREAMED_ROWS)
    step = [*prefetches, *_products(pixels, 0, spec.widened), *_products(pixels, 1, spec.widened)]
    step += [*(f"add ${8 if spec.widened else 4},{pointer}" for pointer in pointers), "add $64,%rsi"]
    return tile_function(spec, [*load_biases(pixels), *tap_loops([*pointers.values()], step), *epilogue(spec, pixels)])


def _sums(pixels: Sequence[Pair], start: Sequence[str]) -> Iterator[str]:
    """Yield the lines that add sums of products in memory to the bias."""
    yield from ("# sums of products", f"mov {field('a_pixel')},%rbx", "lea (%rbx,%rbx,2),%r15")
    yield from (f"mov {field('a')},%rdx", *start)
    for address, (low, high) in zip(PIXEL_ADDRESSES, pixels, strict=False):
        yield from (f"vpaddd {address},{low},{low}", f"vpaddd 32{address},{high},{high}")


def _products(pixels: Sequence[Pair], odd: int, widened: bool) -> Iterator[str]:
    """Yield the lines that multiply the even or the odd two of 4 input channels, of all pixels by 16 outputs."""
    for half, weights in enumerate(WEIGHTS):
        yield f"vmovdqu {32 * half}(%rsi),{weights}"
        if not odd:
            yield f"vpsllw $8,{weights},{weights}"
        yield f"vpsraw $8,{weights},{weights}"
    for address, (low, high) in zip(PIXEL_ADDRESSES, pixels, strict=False):
        yield f"vpbroadcastd {4 * odd if widened else 0}{address},{ACTIVATIONS}"
        if not widened:
            split = "vpsrlw $8" if odd else "vpand intaglio_even_bytes(%rip)"
            yield f"{split},{ACTIVATIONS},{ACTIVATIONS}"
        yield f"vpmaddwd {WEIGHTS[0]},{ACTIVATIONS},{PRODUCT}"
        yield f"vpmaddwd {WEIGHTS[1]},{ACTIVATIONS},{ACTIVATIONS}"
        yield f"vpaddd {PRODUCT},{low},{low}"
        yield f"vpaddd {ACTIVATIONS},{high},{high}"


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    constants = {**EPILOGUE_CONSTANTS, **AVX2_CONSTANTS, **AVX2_INT4_CONSTANTS}
    return family_text(family, texts, AVX2_REGISTERS + YMM_INT4_REGISTERS, constants)


AVX2 = Isa(
    "avx2",
    AVX2_MAX_TILE_ROWS,
    False,
    ".s",
    emit,
    join,
    int4_tile_rows=YMM_INT4_TILE_ROWS,
    int4_any_rows=True,
    widens=True,
)
