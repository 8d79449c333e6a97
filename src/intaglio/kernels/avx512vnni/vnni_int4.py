"""AVX512-VNNI GEMM microkernels for weights of 4 bits, which are expanded to int8 in registers.

Weights are read once, so that a layer with few rows takes the time that memory needs. `codegen.int4_packing` has the
layout: 64 input channels of a panel are a line of multiples, then 8 steps of 64 bytes for each block of 16 output
channels. A byte of a step has two values, those of channels k and k + 4.

A 16-bit lane of a step, masked to the low halves of both bytes, is ``n0 + 256 * n1`` with values of 0..15. Its product
with a multiple m of 1..15 is ``m * n0 + 256 * m * n1`` without a carry between the bytes. For the high halves,
``16 * n0 + 4096 * n1`` times ``4096 * m``, shifted right by 16 bits, is the same. Subtracting ``8 * m`` from each byte
gives the weights ``(n - 8) * m``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from intaglio.kernels.assembly import by_levels, field
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES, Streaming, TileSpec

INT4_TILE_ROWS = {1: 6, 2: 6, 3: 4, 4: 3}
"""Maximum number of tile rows for each number of blocks; registers limit them."""
LOW_HALVES, HIGH_HALVES, EIGHTS, SPREAD = (f"%zmm{register}" for register in range(4))
"""Masks of low and high halves of bytes, the factor 8 in every byte, and the control that spreads multiples."""
FIRST_MULTIPLE = 4
"""First of three registers for each block: multiples m, ``4096 * m``, and ``8 * m`` in every byte."""
QUARTERS = ("(%rdx)", "(%rdx,%r12)", "(%rdx,%r12,2)", "(%rdx,%r13)")
"""Operands with the weights to prefetch, in each quarter of a panel."""
INT4_CONSTANTS = {
    "intaglio_int4": "    .word 0x0f0f,0xf0f0,0x0808,0\n",
    "intaglio_multiples": "".join(
        f"    .byte {','.join(str(value) for t in range(4) for value in (4 * lane + t, 128) * 2)}\n"
        for lane in range(4)
    ),
}
"""Constants of the kernels: masks and factor; byte ``4 * lane + t`` to both 16-bit lanes of dword t."""


class Int4Products:
    """Prints the products of one kernel, whose accumulators are the last registers."""

    def __init__(self, spec: TileSpec, streamings: Sequence[Streaming]) -> None:
        self.spec, self.streamings = spec, streamings
        self.first = 32 - spec.rows * spec.blocks
        first_free = FIRST_MULTIPLE + 3 * spec.blocks
        self.low, self.high, *self.spare = (f"%zmm{register}" for register in range(first_free, self.first))

    def lines(self) -> list[str]:
        """Return the lines that add all products to the accumulators."""
        lines = ["# products: lines of 64 input channels", f"mov {field('b')},%rsi", f"mov {field('a')},%rax"]
        lines += [f"mov {field('a_pixel')},%rbx", "lea (%rbx,%rbx,2),%r15", "lea (%rax,%r15),%r8"]
        lines += [f"mov {field('run')},%rcx", f"shr ${(INT4_CHANNELS // 4).bit_length() - 1},%rcx"]
        lines += [
            f"vpbroadcastw intaglio_int4+{2 * i}(%rip),{name}"
            for i, name in enumerate((LOW_HALVES, HIGH_HALVES, EIGHTS))
        ]
        lines += [f"vmovdqu64 intaglio_multiples(%rip),{SPREAD}"]
        return [*lines, *by_levels([self.loop(streaming) for streaming in self.streamings])]

    def loop(self, streaming: Streaming) -> list[str]:
        """Return the lines of the loop over lines of input channels."""
        size, streams = (INT4_MULTIPLES + 8 * 64) * self.spec.blocks, streaming.streams
        lines, moves = list[str](), [f"add ${INT4_CHANNELS},%{pointer}" for pointer in ("rax", "r8")]
        if streams > 1:
            lines += [f"mov {field('ahead')},%rdx", f"lea {streaming.int4_ahead}(%rsi,%rdx),%rdx"]
            lines += [f"imul ${size // streams},%rcx,%r12", "lea (%r12,%r12,2),%r13"]
            moves += [f"add ${size // streams},%rdx"]
        lines += [".p2align 4", "3:", *[f"{streaming.prefetch} {streaming.int4_ahead}(%rsi)"] * (streams == 1)]
        for half in range(INT4_CHANNELS // INT4_GROUP):
            lines += [line for block in range(self.spec.blocks) for line in self.multiples(block, half)]
            for step in range(4 * half, 4 * half + 4):
                lines += [line for block in range(self.spec.blocks) for line in self.step(block, step, streaming)]
        return [*lines, *moves, f"add ${size},%rsi", "dec %rcx", "jnz 3b"]

    def prefetch(self, number: int, offset: int, streaming: Streaming) -> str:
        """Return the line of a step that prefetches other weights. Streams have a line and a share of the multiples.

        Args:
            number: number of the step among those of all blocks.
            offset: bytes from the beginning of the line of input channels to the weights of the step.
            streaming: how it prefetches.
        """
        instruction, _, ahead, streams = streaming
        if streams == 1:
            return f"{instruction} {ahead + offset}(%rsi)"
        return f"{instruction} {number // streams * (64 + INT4_MULTIPLES // 8)}{QUARTERS[number % streams]}"

    def registers_of(self, block: int) -> list[str]:
        """Return the registers with the multiples of a block, in 16-bit lanes."""
        return [f"%zmm{FIRST_MULTIPLE + 3 * block + i}" for i in range(3)]

    def multiples(self, block: int, half: int) -> Iterator[str]:
        """Yield the lines that load the multiples of 32 input channels; a byte has those of both halves of a line."""
        once, shifted, eightfold = self.registers_of(block)
        yield f"vbroadcasti32x4 {16 * block}(%rsi),{once}"
        yield f"vpshufb {SPREAD},{once},{once}"
        yield f"vpsrlw $4,{once},{once}" if half else f"vpandd {LOW_HALVES},{once},{once}"
        yield f"vpsllw $12,{once},{shifted}"
        yield f"vpmullw {EIGHTS},{once},{eightfold}"

    def step(self, block: int, step: int, streaming: Streaming) -> Iterator[str]:
        """Yield the lines that multiply 8 input channels of all rows by a block of 16 output channels."""
        once, shifted, eightfold = self.registers_of(block)
        offset = INT4_MULTIPLES * self.spec.blocks + 64 * (self.spec.blocks * step + block)
        at = f"{offset}(%rsi)"
        yield self.prefetch(self.spec.blocks * step + block, offset, streaming)
        yield f"vpandd {at},{LOW_HALVES},{self.low}"
        yield f"vpandd {at},{HIGH_HALVES},{self.high}"
        yield f"vpmullw {once},{self.low},{self.low}"
        yield f"vpmulhuw {shifted},{self.high},{self.high}"
        yield f"vpsubb {eightfold},{self.low},{self.low}"
        yield f"vpsubb {eightfold},{self.high},{self.high}"
        pairs = [(row, half) for half in range(2) for row in range(self.spec.rows)]
        kept = len(pairs) <= len(self.spare)  # all blocks multiply the same activations
        for index, (row, half) in enumerate(pairs):
            spread, weights = self.spare[index % len(self.spare)], (self.low, self.high)[half]
            if block == 0 or not kept:
                yield f"vpbroadcastd {8 * step + 4 * half}{_address(row)},{spread}"
            yield f"vpdpbusd {weights},{spread},%zmm{self.first + row * self.spec.blocks + block}"


def _address(row: int) -> str:
    """Return the address of the activations of a row."""
    pointer = ("rax", "r8")[row // 3]
    return ("(%{})", "(%{},%rbx)", "(%{},%rbx,2)")[row % 3].format(pointer)
