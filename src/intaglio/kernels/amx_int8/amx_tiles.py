"""AMX-INT8 GEMM microkernels in assembly: products in tile registers, results with AVX-512.

A tile register has up to 16 rows of 64 bytes. One instruction multiplies a register of activations, up to 16 pixels by
64 input channels, by a register of weights, 64 input by 16 output channels, and adds the products to a register of
sums. Weights have the memory layout of AVX512-VNNI. A step takes 64 input channels, or the largest divisor of the run
of a tap that is less:

    tmm0-tmm3   sums of the tile, which start with the bias: up to 2 parts by 2 blocks, or 4 parts by 1 block
    tmm4-tmm6   activations of each part of up to 16 pixels (two parts: tmm4 and tmm5)
    tmm6, tmm7  weights of each block of 16 output channels (one block: tmm7)

The rows of a register may be at any distance in memory, so that activations are read where they are, and parts may be
lines of an image that is narrower than 16 pixels (``Tile.part_rows``).

The sums are stored to the stack, and the epilogue of AVX512-VNNI computes results from them: some pixels after every
step of the next tile, because the units of vectors are idle during products. The first 64 input channels of a tile of
32 by 32 results take 360 cycles, 64 more take 81, and the instructions alone would take 64 (Xeon, 3.8 GHz).

Kernels of the same number of parts share a function. Tile registers are configured for the heights of the parts and the
number of input channels, which takes 180 cycles and is not repeated while they stay the same (``Tile.setup``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from intaglio.kernels.assembly import FUNCTION_ENTRY, FUNCTION_EXIT, family_text, field, kernel_text
from intaglio.kernels.avx512vnni import vnni_depthwise, vnni_tiles
from intaglio.kernels.avx512vnni.vnni_int4 import INT4_TILE_ROWS
from intaglio.kernels.avx512vnni.vnni_tiles import TILE_CONSTANTS, VNNI_REGISTERS, VnniKernel
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import SETUP_FIELDS, STREAMED_ROWS, TWO_LEVELS, TileSpec

REGISTER_ROWS = 16
"""Pixels, or steps of 4 input channels, that a tile register holds."""
AMX_MAX_TILE_ROWS = {1: 4 * REGISTER_ROWS, 2: 2 * REGISTER_ROWS}
FEW_ROWS, FEW_STEPS = 4, 64
"""AVX512-VNNI computes tiles of at most so many pixels if a tap has fewer steps of 4 channels, because it needs no
configuration and has no sums to store. It also computes tiles of up to ``STREAMED_ROWS`` pixels, which take the time of
reading their weights: 400 MB on two threads, one row, 29 GB/s instead of 27.
"""
STREAMED_STEPS = 129
"""Least number of steps of 4 channels at which activations that are read once are loaded by ``tileloaddt1``.

They do not displace the weights of a panel from the first-level cache then, which the next tiles read again: products
of 512 pixels with 1,024 input and output channels take 0.76 of the time, those of 128 pixels with 768 channels 0.87,
and those of 512 channels 1.01. With several taps the same activations are read again soon; ResNet-18 took 1.08 of its
time when they were streamed too.
"""
PAGE_BYTES = 4096
"""Distance of lines of the first-level cache that are in the same set."""
EPILOGUE_ROWS = {1: 16, 2: 8}
"""Pixels whose results are computed after a step, by blocks of 16 channels. Up to 128 instructions with vectors take no
time after a step, because products leave the units of vectors idle.
"""
SMALL_GROUP = 4
"""Pixels of a group of those that are left, if there are so many."""
AMX_REGISTERS = """
AMX-INT8, System V. rdi: struct Tile; rsi at the start: pixels of a tile.
Products: r8 activations of the first part, rbp those of others, r13 bytes between pixels; r10 weights, r15 bytes
between rows of weights and of sums; r9 weights to prefetch, or 0; r14 counts steps. Rows of taps and taps are counted
in the frame.
Epilogue: as for AVX512-VNNI; r12 sums of a pixel; with scales of rows, rax bytes to the results of the next tile.
"""

_SLOT_NAMES = (
    "stack", "setup", "rows", "first", "segment", "part", "steps", "step_activations", "step_weights",
    "row", "tap", "rows_left", "taps_left", "tiles_left", "group_end", "segment_end", "tile_end", "streams",
    "quarter",
)  # fmt: skip
_CONFIGURATION = 4 * REGISTER_ROWS * 64
"""Offset in the frame of a function, behind the sums of a tile, of the configuration of tile registers."""
_SLOTS = {name: _CONFIGURATION + 64 + 8 * index for index, name in enumerate(_SLOT_NAMES)}
"""Offsets of numbers in the frame.

- ``stack``: stack pointer of the caller; ``setup``: address of the `struct TileSetup` in use.
- ``rows``, ``first``, ``segment``: pixels of a tile, of its first part, and of those whose results follow each other.
- ``part``, ``step_activations``, ``step_weights``: bytes between parts, and those that a step takes.
- ``steps``: steps of a tap.
- ``row``, ``tap``: addresses of the activations of a row of taps and of a tap.
- ``rows_left``, ``taps_left``, ``tiles_left``: counters, the last one of tiles whose products are not computed.
- ``streams``: whether activations are loaded past the first-level cache.
- ``quarter``: bytes between the streams of weights that are prefetched.
- ``group_end``, ``segment_end``, ``tile_end``: addresses of the sums behind the last whole group of pixels of a
  segment, behind the segment, and behind the tile.
"""
_OWN_SETUP = max(_SLOTS.values()) + 8
"""Offset of the `struct TileSetup` of calls without one."""
_FRAME = _OWN_SETUP + 8 * len(SETUP_FIELDS)


def _slot(name: str) -> str:
    """Return the memory operand of a number in the frame."""
    return f"{_SLOTS[name]}(%rsp)"


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel: a jump to the function of its family, or to the kernel of AVX512-VNNI for few
    pixels and channels.
    """
    if spec.int4 or spec.rows <= STREAMED_ROWS:
        return vnni_tiles.emit(spec, streamings=[TWO_LEVELS])
    jump, other = [f"mov ${spec.rows},%esi", f"jmp {_function(spec)}"], ""
    if spec.rows <= FEW_ROWS:
        name = f"few_{spec.name}"
        jump, other = [f"cmpq ${FEW_STEPS},{field('run')}", f"jb {name}", *jump], vnni_tiles.emit(spec, name)
    return f"{other}{kernel_text(spec.name, f'{spec.rows} pixels', jump)}"


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    tallest = family.kernels[-1]
    if not isinstance(tallest, TileSpec) or tallest.int4:
        return vnni_tiles.join(family, texts)
    heights = range(REGISTER_ROWS, tallest.rows + 1, REGISTER_ROWS)
    functions = [_AmxFunction(replace(tallest, rows=rows)).text() for rows in heights]
    return family_text(family, [*functions, *texts], f"{AMX_REGISTERS}{VNNI_REGISTERS}", TILE_CONSTANTS)


def _parts(spec: TileSpec) -> int:
    """Return the number of registers for the activations of a tile."""
    return -(-spec.rows // REGISTER_ROWS)


def _function(spec: TileSpec) -> str:
    """Return the name of the function of tiles with so many parts."""
    return f"{spec.family}_parts{_parts(spec)}"


class _PrefetchedResults(VnniKernel):
    """Prints the results of some pixels, and prefetches the lines of the next tile: `_AmxFunction.ahead`."""

    def stores(self, row: list[str]) -> list[str]:
        if self.spec.result != "rows":
            return super().stores(row)
        return [*(f"prefetchw {64 * j}(%rdx,%rax)" for j in range(len(row))), *super().stores(row)]


class _AmxFunction:
    """Prints the function of all heights of a family with as many parts as ``spec``."""

    def __init__(self, spec: TileSpec) -> None:
        self.spec = spec
        self.blocks = spec.blocks
        self.parts = _parts(spec)
        groups = (EPILOGUE_ROWS[spec.blocks], SMALL_GROUP, 1)
        self.several, self.few, self.one = (_PrefetchedResults(replace(spec, rows=rows)) for rows in groups)
        self.sums = [(part, block) for part in range(self.parts) for block in range(self.blocks)]
        self.streams_weights = self.parts == 1 and spec.result != "add"  # the factors of a residual operand are in r9

    def text(self) -> str:
        """Return the text of the function."""
        lines = [*FUNCTION_ENTRY, "mov %rsp,%rax", f"sub ${_FRAME},%rsp", "and $-64,%rsp", f"mov %rax,{_slot('stack')}"]
        lines += [*self.sizes(), *self.setup(), *self.distances(), *self.several.operands(), *self.ahead()]
        lines += self.weights_ahead()
        lines += [f"mov {field('count')},%rbp", f"mov %rbp,{_slot('tiles_left')}", "mov %rsp,%r12"]
        lines += [f"mov %rsp,{_slot(name)}" for name in ("group_end", "segment_end", "tile_end")]
        lines += [*self.tile(), *self.results_left(), "9:", *self.leave()]
        note = f"{self.parts} registers of pixels x {16 * self.blocks} channels -> {self.spec.result}"
        return kernel_text(_function(self.spec), note, lines)

    def tile(self) -> list[str]:
        """Return the lines that compute the products of a tile and, after each step, results of the tile before."""
        lines = ["0:", "# a tile: sums start with the bias", f"mov {field('bias')},%rbp", "xor %r13d,%r13d"]
        lines += [f"tileloadd {64 * block}(%rbp,%r13,1),%tmm{self.blocks * part + block}" for part, block in self.sums]
        lines += [f"mov {field('a_pixel')},%r13", f"mov {field('b')},%r10", f"mov {field('a')},%r8"]
        lines += [f"mov %r8,{_slot('row')}", f"mov {field('tap_rows')},%rbp", f"mov %rbp,{_slot('rows_left')}"]
        lines += ["1:", f"mov {_slot('row')},%r8", f"mov %r8,{_slot('tap')}"]
        lines += [f"mov {field('taps')},%rbp", f"mov %rbp,{_slot('taps_left')}"]
        lines += ["2:", f"mov {_slot('tap')},%r8", f"mov {_slot('steps')},%r14", ".p2align 4"]
        lines += [
            "3:",
            *self.prefetches(),
            f"cmpq $0,{_slot('streams')}",
            "jne 10f",
            *self.step("tileloadd"),
            "jmp 11f",
        ]
        lines += ["10:", *self.step("tileloaddt1"), "11:"]
        lines += [f"add {_slot('step_activations')},%r8", f"add {_slot('step_weights')},%r10"]
        lines += ["4:", f"cmp {_slot('group_end')},%r12", "jae 6f", *self.results(self.several)]
        lines += ["5:", "dec %r14", "jg 3b", f"decq {_slot('taps_left')}", "jle 7f"]
        lines += [f"mov {field('a_tap')},%rbp", f"add %rbp,{_slot('tap')}", "jmp 2b"]
        lines += [
            "7:",
            f"decq {_slot('rows_left')}",
            "jle 8f",
            f"mov {field('a_row')},%rbp",
            f"add %rbp,{_slot('row')}",
        ]
        lines += ["jmp 1b", "8:", f"cmp {_slot('tile_end')},%r12", "jb 4b", f"cmpq $0,{_slot('tiles_left')}", "je 9f"]
        lines += [*self.store(), f"mov {_slot('rows')},%rbp", f"imul {field('a_pixel')},%rbp", f"add %rbp,{field('a')}"]
        return [*lines, "xor %r14d,%r14d", f"decq {_slot('tiles_left')}", "jg 0b", "jmp 4b"]

    def results_left(self) -> list[str]:
        """Return the lines for the pixels of a segment that are not a whole group, after which the next one begins."""
        lines = ["6:", "# pixels left of a segment", f"cmp {_slot('tile_end')},%r12", "jae 5b"]
        lines += [f"lea {64 * self.blocks * SMALL_GROUP}(%r12),%rbp", f"cmp {_slot('segment_end')},%rbp", "ja 1f"]
        lines += [*self.results(self.few), "1:", f"cmp {_slot('segment_end')},%r12", "jae 2f", *self.results(self.one)]
        lines += ["jmp 1b"]
        lines += ["2:", *self.skips(), f"imul ${64 * self.blocks},{_slot('segment')},%rbp"]
        lines += [f"add %rbp,{_slot('group_end')}", f"add %rbp,{_slot('segment_end')}", "# none behind the last one"]
        lines += [f"mov {_slot('tile_end')},%rbp", f"cmp %rbp,{_slot('group_end')}", "jbe 5b"]
        return [*lines, f"mov %rbp,{_slot('group_end')}", "jmp 5b"]

    def leave(self) -> list[str]:
        """Return the lines that store the pointers behind the last tile, restore registers and return."""
        pointers = {"out": "rdx", **({"residual": "rcx"} if self.spec.result == "add" else {})}
        pointers |= {"remainder": "rsi"} if self.spec.remainder else {}
        pointers |= {"residual_remainder": "rbx"} if self.spec.residual_remainder else {}
        pointers |= {"row_scale": "rcx"} if self.spec.result == "rows" else {}
        lines = [f"mov %{register},{field(name)}" for name, register in pointers.items()] + [
            f"movq $0,{field('count')}"
        ]
        lines += [f"cmpq $0,{field('setup')}", "jne 1f", "tilerelease", "1:", f"mov {_slot('stack')},%rsp"]
        return [*lines, *FUNCTION_EXIT]

    def sizes(self) -> list[str]:
        """Return the lines that store the numbers of pixels to the frame."""
        lines = ["mov %esi,%esi", "mov %rsi,%r9", f"lea {self.parts - 1}(%rsi),%rax"]
        lines += ["xor %edx,%edx", f"mov ${self.parts},%r8d", "div %r8"] * (self.parts > 1)
        lines += ["# activations that are read once, but do not fit in the first-level cache beside weights"]
        lines += [f"mov {field('taps')},%rcx", f"imul {field('tap_rows')},%rcx", "xor %r8d,%r8d", "dec %rcx"]
        lines += ["jne 2f", f"cmpq ${STREAMED_STEPS},{field('run')}", "setae %r8b", "2:", f"mov %r8,{_slot('streams')}"]
        lines += [f"mov {field('part_rows')},%rcx", "test %rcx,%rcx", "je 1f"]
        lines += ["mov %rcx,%rax", "mov %rcx,%r9", f"imul ${self.parts},%rcx,%rsi", "1:"]
        return lines + [
            f"mov %{register},{_slot(name)}"
            for register, name in (("rsi", "rows"), ("rax", "first"), ("r9", "segment"))
        ]

    def setup(self) -> list[str]:
        """Return the lines that configure the tile registers, unless they are."""
        kept = {name: f"{offset}(%rcx)" for name, offset in SETUP_FIELDS.items()}
        given = {"blocks": f"${self.blocks}", "rows": "%rsi", "first": "%r9", "run": "%r8"}
        lines = [
            f"movq $0,{_OWN_SETUP + SETUP_FIELDS['rows']}(%rsp)",
            f"lea {_OWN_SETUP}(%rsp),%rcx",
            f"cmpq $0,{field('setup')}",
        ]
        lines += [f"cmovne {field('setup')},%rcx", f"mov %rcx,{_slot('setup')}"]
        lines += [f"mov {_slot('first')},%r9", f"mov {field('run')},%r8"]
        lines += [line for name, register in given.items() for line in (f"cmpq {register},{kept[name]}", "jne 1f")]
        lines += ["jmp 4f", "1:", *(f"movq {register},{kept[name]}" for name, register in given.items())]
        lines += ["# the largest divisor of the run that a register holds", "lea 15(%r8),%r10", "shr $4,%r10"]
        lines += ["2:", "mov %r8,%rax", "xor %edx,%edx", "div %r10", "test %rdx,%rdx", "je 3f", "inc %r10", "jmp 2b"]
        lines += ["3:", f"mov %r10,{kept['steps']}", f"mov %rax,{kept['step_run']}", "lea (,%rax,4),%edx"]
        lines += [
            "vpxor %xmm0,%xmm0,%xmm0",
            f"vmovdqu64 %zmm0,{_CONFIGURATION}(%rsp)",
            f"movb $1,{_CONFIGURATION}(%rsp)",
        ]
        lines += [f"imul ${self.parts - 1},%r9,%r8", "sub %r8,%rsi"]
        for part in range(self.parts):
            rows = "%sil" if part == self.parts - 1 else "%r9b"
            lines += [line for j in range(self.blocks) for line in _shape(self.blocks * part + j, rows, "$64")]
            lines += _shape(self.activations(part), rows, "%dx")
        lines += [line for j in range(self.blocks) for line in _shape(8 - self.blocks + j, "%al", "$64")]
        return [*lines, f"ldtilecfg {_CONFIGURATION}(%rsp)", "4:"]

    def activations(self, part: int) -> int:
        """Return the tile register with the activations of a part. The last part has its own, with fewer rows."""
        return 4 + (part if self.parts < 4 else (0, 1, 0, 2)[part])

    def distances(self) -> list[str]:
        """Return the lines that store distances in memory to the frame."""
        lines = [f"mov {_slot('setup')},%r8", f"mov {SETUP_FIELDS['steps']}(%r8),%rax", f"mov %rax,{_slot('steps')}"]
        lines += [f"mov {SETUP_FIELDS['step_run']}(%r8),%rax", f"imul ${64 * self.blocks},%rax,%r9"]
        lines += ["shl $2,%rax", f"mov %rax,{_slot('step_activations')}", f"mov %r9,{_slot('step_weights')}"]
        lines += [f"mov {_slot('first')},%rax", f"imul {field('a_pixel')},%rax", f"add {field('a_skip')},%rax"]
        return [*lines, f"mov %rax,{_slot('part')}", f"mov ${64 * self.blocks},%r15d"]

    def ahead(self) -> list[str]:
        """Return the lines that compute the bytes between results of a tile and of the next one, which are prefetched.

        Rows of floats of a whole layer come from memory, and a store waits for its line: a layer of 896 input channels
        takes 0.75 to 0.9 of the time for 512 pixels. Pixels at a distance of whole pages fall in one set of the
        first-level cache, where prefetching takes 1.02 to 1.04 of the time; then the distance is 0.
        """
        if self.spec.result != "rows":
            return []
        lines = [f"mov {_slot('rows')},%rax", f"imul {field('out_pixel')},%rax", "xor %r9d,%r9d"]
        return [*lines, f"testq ${PAGE_BYTES - 1},{field('out_pixel')}", "cmovz %r9,%rax"]

    def weights_ahead(self) -> list[str]:
        """Return the lines that compute the address of weights to prefetch: some bytes behind those of the next panel.

        A layer of a single tile of up to 16 rows takes the time of reading its weights: 0.62 to 0.76 of the time.
        """
        if not self.streams_weights:
            return []
        lines = ["xor %r9d,%r9d", f"mov {field('ahead')},%rbp", f"cmpq $2,{field('levels')}", "jne 1f"]
        lines += ["test %rbp,%rbp", "je 1f", f"mov {field('b')},%r9", f"lea {TWO_LEVELS.ahead}(%r9,%rbp),%r9"]
        return [*lines, "shr $2,%rbp", f"mov %rbp,{_slot('quarter')}", "1:"]

    def prefetches(self) -> list[str]:
        """Return the lines that prefetch the weights of a step, a quarter in each quarter of a panel."""
        if not self.streams_weights:
            return []
        lines = ["test %r9,%r9", "je 12f", f"mov {_slot('quarter')},%rbp"]
        lines += self.lines_of(("(%r9)", "(%r9,%rbp)", "(%r9,%rbp,2)"))
        lines += ["lea (%rbp,%rbp,2),%rbp", *self.lines_of(["(%r9,%rbp)"])]
        return [*lines, f"mov {_slot('step_weights')},%rbp", "shr $2,%rbp", "add %rbp,%r9", "12:"]

    def lines_of(self, streams: Sequence[str]) -> list[str]:
        """Return the lines that prefetch a step's share of some streams, which are given by their operands."""
        return [f"{TWO_LEVELS.prefetch} {64 * place}{stream}" for stream in streams for place in range(4 * self.blocks)]

    def step(self, load: str) -> list[str]:
        """Return the lines of one step. ``load``: the instruction that loads activations."""
        lines, loaded = [f"{load} (%r8,%r13,1),%tmm4", *["mov %r8,%rbp"] * (self.parts > 1)], 8 - self.blocks
        for part, block in self.sums:
            if part and not block:
                lines += [f"add {_slot('part')},%rbp", f"{load} (%rbp,%r13,1),%tmm{self.activations(part)}"]
            if not part:
                lines += [f"tileloadd {64 * block}(%r10,%r15,1),%tmm{loaded + block}"]
            lines += [f"tdpbusd %tmm{loaded + block},%tmm{self.activations(part)},%tmm{self.blocks * part + block}"]
        return lines

    def store(self) -> list[str]:
        """Return the lines that store the sums of a tile to the frame, and the addresses at which they end."""
        pixel, group = 64 * self.blocks, EPILOGUE_ROWS[self.blocks]
        lines = ["# sums of the tile", "mov %rsp,%r12", f"imul ${pixel},{_slot('first')},%rbp", "mov %rsp,%r14"]
        for part, block in self.sums:
            lines += ["add %rbp,%r14"] * (part > 0 and not block)
            lines += [f"tilestored %tmm{self.blocks * part + block},{64 * block}(%r14,%r15,1)"]
        for name, size, mask in (
            ("group_end", "segment", -group),
            ("segment_end", "segment", -1),
            ("tile_end", "rows", -1),
        ):
            lines += [f"mov {_slot(size)},%rbp", *[f"and ${mask},%rbp"] * (mask != -1)]
            lines += [f"imul ${pixel},%rbp", "add %rsp,%rbp", f"mov %rbp,{_slot(name)}"]
        return lines

    def skips(self) -> list[str]:
        """Return the lines that advance the pointers of the epilogue to the next segment."""
        pointers = [("out_skip", "rdx"), *[("residual_skip", "rcx")] * (self.spec.result == "add")]
        pointers += [("remainder_skip", "rsi")] * self.spec.remainder
        pointers += [("residual_remainder_skip", "rbx")] * self.spec.residual_remainder
        return [f"add {field(name)},%{register}" for name, register in pointers]

    def results(self, kernel: VnniKernel) -> list[str]:
        """Return the lines that load the sums of some pixels from the frame and store their results."""
        at = [64 * (self.blocks * row + block) for row, block in kernel.cells()]
        loads = [
            f"vmovdqa64 {offset}(%r12),{kernel.acc(*cell)}" for offset, cell in zip(at, kernel.cells(), strict=True)
        ]
        return [*loads, f"add ${64 * len(at)},%r12", *kernel.results()]


def _shape(register: int, rows: str, row_bytes: str) -> list[str]:
    """Return the lines that write the shape of a tile register to the configuration."""
    columns = _CONFIGURATION + 16 + 2 * register
    return [f"movw {row_bytes},{columns}(%rsp)", f"movb {rows},{_CONFIGURATION + 48 + register}(%rsp)"]


AMX_INT8 = Isa(
    "amx_int8",
    AMX_MAX_TILE_ROWS,
    packs=True,
    suffix=".s",
    tile=emit,
    join=join,
    depthwise=vnni_depthwise.emit,
    lookup_condition="has_vbmi()",
    has_setup=True,
    int4_tile_rows=INT4_TILE_ROWS,
    split_channels_below=64,
)
