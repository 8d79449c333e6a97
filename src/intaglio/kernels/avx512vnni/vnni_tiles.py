"""AVX512-VNNI GEMM microkernels in assembly: accumulators are in fixed registers, which g++ would spill.

One k step has ``blocks`` loads of weights, ``rows`` broadcasts of 4 activations and ``rows * blocks`` vpdpbusd.
Registers: weights from zmm0 on, then broadcasts; the last ``rows * blocks`` are accumulators.

In the epilogue every row goes through a few stages of mutually independent instructions, and stages of neighbouring
rows are interleaved. Row after row would stall: the scheduler holds some 64 instructions, two or three rows, for the
whole latency of a row. 64 quantized values take 5 to 7 cycles in addition to the products, instead of 10 to 13 (Zen 4,
64 to 1024 input and 16 to 96 output channels).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from intaglio.kernels.assembly import (
    REMAINDER_CONSTANTS,
    by_levels,
    family_text,
    field,
    limit,
    lookup_stages,
    quantize_16bit_stages,
    quantize_stages,
    software_pipelined,
    tap_loops,
    tile_function,
)
from intaglio.kernels.avx512vnni import vnni_depthwise
from intaglio.kernels.avx512vnni.vnni_int4 import INT4_CONSTANTS, INT4_TILE_ROWS, Int4Products
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import ONE_LEVEL, PACKED_RESULTS, STREAMED_ROWS, TWO_LEVELS, Streaming, TileSpec

ROW_POINTERS = ("rax", "r8", "r9", "r10", "r11")
"""Pointers to activations, one for every three rows."""
NEIGHBOUR_ADDRESSES = (
    *(f"(%{pointer}{index})" for pointer in ROW_POINTERS for index in ("", ",%rbx", ",%rbx,2")),
    "(%r11,%r15)",
    "(%r11,%rbx,4)",
    "(%r10,%rbx,8)",
)
"""Operands with the activations of neighbouring pixels."""

BOTH_LEVELS = (TWO_LEVELS, ONE_LEVEL)
"""Kernels for processors of all vendors: see ``prefetched_levels`` of native/layers/matmul.cpp."""
BLOCK_STREAMS = ("(%r8)", "(%r8,%r9)", "(%r8,%r9,2)", "(%r8,%r10)")
"""Operands with the weights to prefetch, one for each block of a panel, in parts of equal size."""
TAP_WEIGHTS = ("(%rsi)", "(%rsi,%rbp)", "(%rsi,%rbp,2)")
"""Operands with the weights of the taps of a row."""

VNNI_MAX_TILE_ROWS = {1: 16, 2: 12, 3: 8, 4: 6}
"""With one block, lines of 32, 64 and 112 pixels are whole tiles, and there are addresses for two pixels more."""
VNNI_REGISTERS = """
AVX512-VNNI, System V. rdi: struct Tile.
Products: rsi weights, rax and r8-r11 activations of three pixels each, rbx bytes between pixels, r15 three times that,
rdx a tap, r14 a row of taps; rcx, r13, r12 count steps, taps, rows of taps; rbp from weights to those to prefetch, or
to those of the next tap.
zmm0.. weights of a step, then broadcast activations; the last registers are accumulators, pixel by pixel.
Epilogue: rax limits, rdx result, rcx residual operand or scales of rows, rsi, rbx their remainders, r11 controls of
shuffles or a lookup table, k1 channels to write. zmm0.. factors, then the bias of results with scales of rows, or
controls of shuffles and the residual operand.
"""


def emit(spec: TileSpec, name: str = "", streamings: Sequence[Streaming] = BOTH_LEVELS) -> str:
    """Return the text of one kernel.

    Args:
        spec: its parameters.
        name: its symbol, if that is not the name of ``spec``.
        streamings: how it prefetches weights that it reads once, see `by_levels`.
    """
    kernel = VnniKernel(spec, streamings)
    epilogue = [*kernel.operands(), "# epilogue: pixels, each a stage behind the one before", *kernel.results()]
    return tile_function(spec, [*kernel.biases(), *kernel.products(), *epilogue], name)


class VnniKernel:
    """Prints the parts of one kernel."""

    def __init__(self, spec: TileSpec, streamings: Sequence[Streaming] = BOTH_LEVELS) -> None:
        self.spec, self.streamings = spec, streamings
        self.first = 32 - spec.rows * spec.blocks
        self.spare = min(self.first - spec.row_taps * spec.blocks, 4)
        self.addresses = NEIGHBOUR_ADDRESSES[: spec.rows + spec.row_taps - 1]
        self.pointers = ROW_POINTERS[: -(-len(self.addresses) // 3)]

    def acc(self, row: int, block: int) -> str:
        """Return the register of one accumulator."""
        return f"%zmm{self.first + row * self.spec.blocks + block}"

    def row(self, row: int) -> list[str]:
        """Return the registers of the accumulators of one pixel."""
        return [self.acc(row, j) for j in range(self.spec.blocks)]

    def cells(self) -> list[tuple[int, int]]:
        """Return all pairs of pixel and block."""
        return [(i, j) for i in range(self.spec.rows) for j in range(self.spec.blocks)]

    def biases(self) -> list[str]:
        """Return the lines that initialize every accumulator with the bias."""
        lines = ["# accumulators start with the bias", f"mov {field('bias')},%rax"]
        lines += [f"vmovdqu64 {64 * j}(%rax),{self.acc(0, j)}" for j in range(self.spec.blocks)]
        return lines + [f"vmovdqa64 {self.acc(0, j)},{self.acc(i, j)}" for i, j in self.cells() if i]

    def products(self) -> list[str]:
        """Return the lines that accumulate all products and prefetch the next panel of weights."""
        if self.spec.int4:
            return Int4Products(self.spec, self.streamings).lines()
        if self.spec.row_taps > 1:
            return self.row_products()
        start = self.first_pixels("rdx")
        moves = [*(f"add $4,%{pointer}" for pointer in self.pointers), f"add ${64 * self.spec.blocks},%rsi"]
        if self.spec.rows <= STREAMED_ROWS:
            prefetching = [self.streams(streaming) for streaming in self.streamings]
        else:
            # Every step prefetches one cache line, another one for every tile, so that the next panel is cached in
            # time.
            ahead = ["# prefetch the next panel of weights", f"mov {field('ahead')},%rbp", f"addq $64,{field('ahead')}"]
            prefetching = [(ahead, ["prefetcht1 (%rsi,%rbp)"])]
        return by_levels(
            [[*before, *tap_loops(start, [*self.step(), *prefetches, *moves])] for before, prefetches in prefetching]
        )

    def streams(self, streaming: Streaming) -> tuple[list[str], list[str]]:
        """Return the lines before all steps, and those of a step, that prefetch a line for each block."""
        (instruction, distance, _, streams), blocks = streaming, self.spec.blocks
        if streams == 1:
            return [], [f"{instruction} {distance + 64 * j}(%rsi)" for j in range(blocks)]
        first = [f"mov {field('b')},%r8", f"add {field('ahead')},%r8", f"add ${distance},%r8"]
        first += [f"mov {field('run')},%r9", f"imul {field('taps')},%r9", f"imul {field('tap_rows')},%r9"]
        first += ["shl $6,%r9", "lea (%r9,%r9,2),%r10"]
        return first, [*(f"{instruction} {address}" for address in BLOCK_STREAMS[:blocks]), "add $64,%r8"]

    def first_pixels(self, tap: str) -> list[str]:
        """Return the lines that point to the pixels of a tap, whose first pixel is at an address in a register."""
        first, *others = self.pointers
        lines = [f"mov %{tap},%{first}"]
        return lines + [f"lea (%{low},%r15),%{high}" for low, high in zip(self.pointers, others, strict=False)]

    def step(self) -> list[str]:
        """Return the lines of one step of 4 input channels."""
        blocks = self.spec.blocks
        lines = [f"vmovdqu64 {64 * j}(%rsi),%zmm{j}" for j in range(blocks)]
        for i, address in enumerate(self.addresses):
            spread = f"%zmm{blocks + i % self.spare}"
            lines.append(f"vpbroadcastd {address},{spread}")
            lines += [f"vpdpbusd %zmm{j},{spread},{self.acc(i, j)}" for j in range(blocks)]
        return lines

    def row_products(self) -> list[str]:
        """Return the lines that accumulate all products of a single block, those of the taps of a row together.

        Pixels are neighbours of a line, so that a pixel that is the first tap of one result is the second tap of the
        result before it. It is read once: otherwise the loads of a narrow tile, one for each vpdpbusd, take longer than
        the products (16 channels of 32 by 32 pixels on a Zen 5: 76 -> 85 % of the peak).
        """
        taps = self.spec.row_taps
        lines = ["# products: rows of taps, steps of 4 input channels of all taps", f"mov {field('a_pixel')},%rbx"]
        lines += ["lea (%rbx,%rbx,2),%r15", f"mov {field('b')},%rsi", f"mov {field('run')},%rbp", "shl $6,%rbp"]
        lines += [f"mov {field('a')},%r14", f"mov {field('tap_rows')},%r12"]
        lines += ["1:", *self.first_pixels("r14"), f"mov {field('run')},%rcx", ".p2align 4", "3:"]
        lines += [f"vmovdqu64 {address},%zmm{tap}" for tap, address in enumerate(TAP_WEIGHTS[:taps])]
        for i, address in enumerate(self.addresses):
            spread = f"%zmm{taps + i % self.spare}"
            lines.append(f"vpbroadcastd {address},{spread}")
            reached = [tap for tap in range(taps) if 0 <= i - tap < self.spec.rows]
            lines += [f"vpdpbusd %zmm{tap},{spread},{self.acc(i - tap, 0)}" for tap in reached]
        lines += [*(f"add $4,%{pointer}" for pointer in self.pointers), "add $64,%rsi", "dec %rcx", "jnz 3b"]
        return [*lines, "lea (%rsi,%rbp,2),%rsi", f"add {field('a_row')},%r14", "dec %r12", "jnz 1b"]

    # -- epilogue: factors from zmm0 on, then shuffle controls, then the residual operand

    def operands(self) -> list[str]:
        """Return the lines that load what all pixels of the epilogue need."""
        blocks, add, packs = self.spec.blocks, self.spec.result == "add", self.spec.result in PACKED_RESULTS
        lines = ["# epilogue: operands", f"mov {field('limits')},%rax", f"mov {field('factor')},%r8"]
        lines += [f"mov {field('out')},%rdx"]
        lines += [f"mov {field('mask')},%r10"] + [f"shr ${16 * (blocks - 1)},%r10"] * (not packs) + ["kmovq %r10,%k1"]
        if add:
            lines += [f"mov {field('residual')},%rcx", f"mov {field('residual_factor')},%r9"]
            lines += [f"lea intaglio_{'pairs' if self.spec.residual_remainder else 'spread'}(%rip),%r11"]
        lines += [f"mov {field('remainder')},%rsi"] * self.spec.remainder
        lines += [f"mov {field('residual_remainder')},%rbx"] * self.spec.residual_remainder
        lines += [f"vmovups {64 * j}(%r8),%zmm{j}" for j in range(blocks)]
        if self.spec.result == "rows":
            lines += [f"mov {field('row_scale')},%rcx", f"mov {field('row_bias')},%r9"]
            lines += [f"vmovups {64 * j}(%r9),%zmm{blocks + j}" for j in range(blocks)]
        if packs and blocks < 4:
            lines += [f"vmovdqu64 intaglio_gather{blocks}(%rip),{self.gather}"]
            lines += [f"vmovdqu64 intaglio_widen{blocks}(%rip),{self.widen}"] * add
        if self.spec.looks_up:
            lines += [f"mov {field('table')},%r11"]
            lines += [f"vmovdqu64 {128 * half}(%r11),{quarter}" for half, quarter in enumerate(self.quarters)]
        return lines

    def results(self) -> list[str]:
        """Return the lines that compute the results of all pixels and store them."""
        stages = {
            "u8": self.level_stages,
            "add": self.sum_stages,
            "f32": self.float_stages,
            "rows": self.row_stages,
        }[self.spec.result]
        return software_pipelined(map(stages, range(self.spec.rows)))

    @property
    def gather(self) -> str:
        """Return the register with the shuffle control that moves channels of a narrow tile to the front."""
        return f"%zmm{self.spec.blocks}"

    @property
    def widen(self) -> str:
        """Return the register with the shuffle control that moves channels of a residual operand to their lanes."""
        return f"%zmm{self.spec.blocks + 1}"

    @property
    def quarters(self) -> tuple[str, str]:
        """Return the registers with entries 0..63 and 128..191 of a lookup table."""
        return f"%zmm{self.spec.blocks + 1}", f"%zmm{self.spec.blocks + 2}"

    def float_stages(self, i: int) -> Iterator[list[str]]:
        """Yield the stages that dequantize and store a row, the last block under the mask."""
        row = self.row(i)
        yield [f"vcvtdq2ps {acc},{acc}" for acc in row]
        yield [f"vmulps %zmm{j},{acc},{acc}" for j, acc in enumerate(row)]
        yield self.stores(row)

    def row_stages(self, i: int) -> Iterator[list[str]]:
        """Yield the stages that dequantize and store a row with its own scale: (float32(acc) * scale of the row) *
        scale of the channel + bias."""
        row = self.row(i)
        yield [f"vcvtdq2ps {acc},{acc}" for acc in row]
        yield [*(f"vmulps (%rcx){{1to16}},{acc},{acc}" for acc in row), "add $4,%rcx"]
        yield [f"vmulps %zmm{j},{acc},{acc}" for j, acc in enumerate(row)]
        yield [f"vaddps %zmm{len(row) + j},{acc},{acc}" for j, acc in enumerate(row)]
        yield self.stores(row)

    def stores(self, row: list[str]) -> list[str]:
        """Return the lines that store a row of floats, the last block under the mask."""
        masks = [""] * (len(row) - 1) + ["{%k1}"]
        stores = [f"vmovups {acc},{64 * j}(%rdx){mask}" for j, (acc, mask) in enumerate(zip(row, masks, strict=True))]
        return [*stores, f"add {field('out_pixel')},%rdx"]

    def level_stages(self, i: int) -> Iterator[list[str]]:
        """Yield the stages of a requantized row: float32(acc) * factor, clamped to the convertible range, rounded,
        packed.
        """
        row = self.row(i)
        yield [f"vcvtdq2ps {acc},{acc}" for acc in row]
        yield [f"vmulps %zmm{j},{acc},{acc}" for j, acc in enumerate(row)]
        yield from self.rounded(row, i)

    def sum_stages(self, i: int) -> Iterator[list[str]]:
        """Yield the stages of a row with a residual: float32(acc) * factor + float32(q - zero point) * factor.

        The registers of the residual operand are reused by the next row.
        """
        row, (terms, spread) = self.row(i), self.terms_of_remainder() if self.spec.residual_remainder else self.terms()
        if self.spec.residual_remainder or not self.spec.saturates:
            spread += [f"vpsubd {limit('other_zero_point')}{{1to16}},{term},{term}" for term in terms]
        yield [*spread, *(f"vcvtdq2ps {name},{name}" for name in (*row, *terms))]
        yield [
            *(f"vmulps %zmm{j},{acc},{acc}" for j, acc in enumerate(row)),
            *(f"vmulps {64 * j}(%r9),{term},{term}" for j, term in enumerate(terms)),
            *(f"vaddps {term},{acc},{acc}" for acc, term in zip(row, terms, strict=True)),
        ]
        yield from self.rounded(row, i)

    def scratch(self, count: int) -> list[str]:
        """Return registers that each row needs for at most two stages."""
        begin = self.spec.blocks + 2 * (self.spec.blocks < 4)
        return [f"%zmm{register}" for register in range(begin, begin + count)]

    def terms(self) -> tuple[list[str], list[str]]:
        """Return registers and lines for a pixel of the residual operand, as 32-bit integers in the order of
        accumulators.
        """
        *others, loaded = terms = self.scratch(self.spec.blocks)
        lines = [f"vmovdqu8 (%rcx),{loaded}{{%k1}}{{z}}", f"add {field('residual_pixel')},%rcx"]
        lines += [f"vpermd {loaded},{self.widen},{loaded}"] * (self.spec.blocks < 4)
        return terms, lines + [f"vpshufb {64 * j}(%r11),{loaded},{term}" for j, term in enumerate([*others, loaded])]

    def terms_of_remainder(self) -> tuple[list[str], list[str]]:
        """Return the same as `terms` for 16-bit operands.

        8-bit values and remainders are interleaved; then 255 times the former and the latter are added.
        """
        blocks = self.spec.blocks
        quantized, remainder, *free = self.scratch(max(blocks, 2))
        lines = [
            f"vmovdqu8 (%rcx),{quantized}{{%k1}}{{z}}",
            f"add {field('residual_pixel')},%rcx",
            f"vmovdqu8 (%rbx),{remainder}{{%k1}}{{z}}",
            f"add {field('residual_remainder_pixel')},%rbx",
        ]
        if blocks < 4:
            lines += [f"vpermd {register},{self.widen},{register}" for register in (quantized, remainder)]
        low, high = (free[0] if free else quantized), free[1] if blocks == 4 else remainder
        lines += [f"vpunpcklbw {remainder},{quantized},{low}"]
        lines += [f"vpunpckhbw {remainder},{quantized},{high}"] * (blocks > 2)
        q, r = quantized, remainder
        terms = {1: [q], 2: [r, q], 3: [q, low, r], 4: [q, r, low, high]}[blocks]
        lines += [f"vpshufb {64 * (j % 2)}(%r11),{(low, high)[j // 2]},{term}" for j, term in enumerate(terms)]
        return terms, lines + [f"vpmaddwd 128(%r11),{term},{term}" for term in terms]

    def rounded(self, row: list[str], i: int) -> Iterator[list[str]]:
        """Yield the stages that round, pack and store a row with its channels in order, and the remainders of 16-bit
        results.
        """
        if self.spec.remainder:
            spare = f"%zmm{self.spec.blocks + 4 + i % 4}"
            yield from quantize_16bit_stages(row, spare, self.spec.saturates, self.spec.clamps_float)
            quantized, remainder = row[1] if len(row) > 1 else spare, row[0]
            gathered = [f"vpermd {part},{self.gather},{part}" for part in (quantized, remainder)] * (len(row) < 4)
            yield [
                *gathered,
                f"vmovdqu8 {quantized},(%rdx){{%k1}}",
                f"vmovdqu8 {remainder},(%rsi){{%k1}}",
                f"add {field('out_pixel')},%rdx",
                f"add {field('remainder_pixel')},%rsi",
            ]
            return
        yield from quantize_stages(row, self.spec.saturates, self.spec.clamps_float, self.spec.looks_up)
        if self.spec.looks_up:
            spare = row[1] if len(row) > 1 else f"%zmm{self.spec.blocks + 3 + i % 4}"
            yield from lookup_stages(row[0], spare, "r11", *self.quarters, i)
        gathered = [f"vpermd {row[0]},{self.gather},{row[0]}"] * (len(row) < 4)
        yield [*gathered, f"vmovdqu8 {row[0]},(%rdx){{%k1}}", f"add {field('out_pixel')},%rdx"]


def _lanes(directive: str, values: Iterable[int]) -> str:
    return f"    .{directive} {','.join(map(str, values))}\n"


def _constants() -> dict[str, str]:
    """Return the constants that kernels read, mostly shuffle controls.

    - ``spread``: byte ``4j + t`` of each 128-bit lane to dword t, for j = 0..3.
    - ``pairs``: both bytes of pair t to words of dword t, then those of pair ``4 + t``; then the factors of these
      words.
    - ``gather`` for n < 4 blocks: n dwords of every lane to the front.
    - ``widen`` for n < 4 blocks: the same dwords back to the lanes.
    """
    spread = [[value for t in range(4) for value in (4 * j + t, 128, 128, 128)] for j in range(4)]
    pairs = [[value for t in range(4) for value in (i + 2 * t, 128, i + 2 * t + 1, 128)] for i in (0, 8)]
    found = {
        "intaglio_spread": "".join(_lanes("byte", lane * 4) for lane in spread),
        "intaglio_pairs": "".join(_lanes("byte", lane * 4) for lane in pairs) + _lanes("word", (255, 1) * 16),
    }
    for blocks in (1, 2, 3):
        gather = [4 * (k // blocks) + k % blocks if k < 4 * blocks else 0 for k in range(16)]
        widen = [blocks * (k // 4) + min(k % 4, blocks - 1) for k in range(16)]
        found[f"intaglio_gather{blocks}"] = _lanes("long", gather)
        found[f"intaglio_widen{blocks}"] = _lanes("long", widen)
    return found


TILE_CONSTANTS = {**_constants(), **REMAINDER_CONSTANTS, **INT4_CONSTANTS}


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    depthwise = family.element == "DepthwiseKernel"
    return family_text(
        family, texts, vnni_depthwise.DEPTHWISE_REGISTERS if depthwise else VNNI_REGISTERS, TILE_CONSTANTS
    )


AVX512VNNI = Isa(
    "avx512vnni",
    VNNI_MAX_TILE_ROWS,
    True,
    ".s",
    emit,
    join,
    vnni_depthwise.emit,
    "has_vbmi()",
    int4_tile_rows=INT4_TILE_ROWS,
    split_channels_below=64,
    row_taps=len(TAP_WEIGHTS),
)
