"""GEMM microkernels for weights of 4 bits in 256-bit registers, which expand weights and multiply sums of groups.

`codegen.int4_packing` has the layout: 64 input channels of a panel are a line of multiples, then 8 steps of 64 bytes. A
byte of a step has two values, those of channels k and k + 4, so that 32 bytes expand to two registers with 4 input
channels of 8 output channels each. The products of 32 input channels, which share a multiple, are added first; then
their sum is multiplied, once instead of every weight. Output channels 0 to 7 of a group are finished before 8 to 15
begin. The loop has 193 instructions for 1024 weights with AVX-VNNI and 221 with AVX2, and 76 or 100 more for each
further row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from intaglio.kernels.assembly import field, tile_function
from intaglio.kernels.avx2.ymm_epilogue import PIXEL_ADDRESSES, epilogue, load_biases
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES, ONE_LEVEL, TileSpec

YMM_INT4_TILE_ROWS = {1: 3}
"""Maximum number of tile rows for each number of blocks; registers limit them."""
LOW_HALVES, EIGHTS, LOW, HIGH = (f"%ymm{register}" for register in range(4))
FIRST_FREE = 4
YMM_INT4_REGISTERS = """
4-bit weights: rsi weights, rax activations, rbx bytes between pixels; rcx counts lines. ymm0 mask of low halves, ymm1
the factor 8, ymm2-3 weights, then activations, sums of a group for each pixel, and two accumulators a pixel.
"""
LINE_BYTES = INT4_MULTIPLES + 64 * INT4_CHANNELS // 8
YMM_INT4_CONSTANTS = {"intaglio_int4": "    .long 0x0f0f0f0f,0x08080808\n"}


class YmmInt4Kernel(ABC):
    """Prints one kernel. Subclasses print those of one register, as an instruction set has them."""

    def __init__(self, spec: TileSpec) -> None:
        self.spec = spec
        first_pair, first_sums = 16 - 2 * spec.rows, 16 - 3 * spec.rows
        self.pixels = [(f"%ymm{first}", f"%ymm{first + 1}") for first in range(first_pair, 16, 2)]
        self.sums = [f"%ymm{register}" for register in range(first_sums, first_pair)]
        self.activations = [f"%ymm{register}" for register in range(FIRST_FREE, first_sums)]

    def text(self) -> str:
        """Return the text of the kernel."""
        return tile_function(
            self.spec, [*load_biases(self.pixels), *self.products(), *epilogue(self.spec, self.pixels)]
        )

    @abstractmethod
    def multiples(self, at: str, second: bool) -> Iterator[str]:
        """Yield the lines that load the multiples of 8 output channels to the register `LOW`. ``second``: those of the
        second 32 input channels of a line, in the high halves of bytes.
        """

    @abstractmethod
    def product(self, weights: str, activations: str, sums: str, first: bool) -> Iterator[str]:
        """Yield the lines that add the products of a register to the sums of a group. ``first``: of a new group."""

    @abstractmethod
    def scaled(self, sums: str) -> Iterator[str]:
        """Yield the lines that multiply the sums of a group by the multiples and widen them to 32 bits."""

    def products(self) -> list[str]:
        """Return the lines that add all products to the accumulators."""
        lines = ["# products: lines of 64 input channels", f"mov {field('b')},%rsi", f"mov {field('a')},%rax"]
        lines += [f"mov {field('a_pixel')},%rbx", f"mov {field('run')},%rcx"]
        lines += [f"shr ${(INT4_CHANNELS // 4).bit_length() - 1},%rcx"]
        lines += [f"vpbroadcastd intaglio_int4+{4 * i}(%rip),{name}" for i, name in enumerate((LOW_HALVES, EIGHTS))]
        lines += [".p2align 4", "3:", f"{ONE_LEVEL.prefetch} {ONE_LEVEL.int4_ahead}(%rsi)"]
        for group in range(INT4_CHANNELS // INT4_GROUP):
            for half in range(2):
                lines += self.group(group, half)
        return [*lines, f"add ${INT4_CHANNELS},%rax", f"add ${LINE_BYTES},%rsi", "dec %rcx", "jnz 3b"]

    def group(self, group: int, half: int) -> Iterator[str]:
        """Yield the lines that multiply 32 input channels of all pixels by 8 output channels."""
        for step in range(4 * group, 4 * group + 4):
            offset = INT4_MULTIPLES + 64 * step
            if not half:
                yield f"{ONE_LEVEL.prefetch} {ONE_LEVEL.int4_ahead + offset}(%rsi)"
            yield f"vmovdqu {offset + 32 * half}(%rsi),{HIGH}"
            yield f"vpand {HIGH},{LOW_HALVES},{LOW}"
            yield f"vpsrlw $4,{HIGH},{HIGH}"
            yield f"vpand {HIGH},{LOW_HALVES},{HIGH}"
            for weights in (LOW, HIGH):
                yield f"vpsubb {EIGHTS},{weights},{weights}"
            for quad, weights in enumerate((LOW, HIGH)):
                for pixel, sums in enumerate(self.sums):
                    spread = self.activations[(quad * len(self.sums) + pixel) % len(self.activations)]
                    yield f"vpbroadcastd {8 * step + 4 * quad}{PIXEL_ADDRESSES[pixel]},{spread}"
                    yield from self.product(weights, spread, sums, step == 4 * group and not quad)
        yield from self.multiples(f"{8 * half}(%rsi)", group == 1)
        for sums, pair in zip(self.sums, self.pixels, strict=True):
            yield from self.scaled(sums)
            yield f"vpaddd {sums},{pair[half]},{pair[half]}"
