"""AVX512-VNNI depthwise microkernels in assembly; kernels/depthwise_spec.py describes the algorithm.

One column of one quad takes 4 loads, 4 instructions that interleave bytes and 4 that interleave words; then 4 vpdpbusd
for every tap column and output row that reads it, with weights from memory. The epilogue of a pixel is placed among the
instructions of the next input column, since the scheduler does not look far enough ahead to overlap the two. Zen 4
computes a tile of 2 by 3 pixels with 3x3 taps in 134 cycles from the first-level cache: 72 dot products and 24
multiplications share two pipes, and loads of 64 bytes take 120 cycles. Registers: 0..3 the quad, 4..7 rows that are
being interleaved, from 8 on four accumulators per pixel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from intaglio.kernels.assembly import (
    FUNCTION_ENTRY,
    FUNCTION_EXIT,
    kernel_text,
    lookup_stages,
    quantize_stages,
    software_pipelined,
)
from intaglio.kernels.depthwise_spec import DEPTHWISE_FIELDS, DepthwiseSpec

TAP_POINTERS = ("r8", "r9", "r10", "r11")
"""Pointers to the four rows of a quad."""
FIXED_REGISTERS = {
    "rax": "limits",
    "rbx": "pixel",
    "rbp": "table",
    "rsi": "weights",
    "r12": "factor",
    "r13": "out",
    "r15": "out_line",
}
DEPTHWISE_REGISTERS = """
AVX512-VNNI, System V. rdi: struct DepthwiseTile.
rax limits, rbx bytes between input columns, rbp lookup table, rsi weights, r12 factors, r13 result, r14 next pixel,
r15 bytes between output rows, rcx first input column of the tile, rdx the one being read, r8-r11 rows of a quad,
k1 channels to write. 0-3 a quad of rows, interleaved; 4-7 rows being interleaved; from 8 on four accumulators a pixel.
"""
"""Header comment of a generated file. `FIXED_REGISTERS` are the fields that stay in registers for the whole kernel.

r13 advances from output column to output column. rcx and rdx are the byte offsets of the tile's first input column and
of the current one; r14 is the address of the next pixel's result.
"""


def emit(spec: DepthwiseSpec) -> str:
    """Return the text of one kernel."""
    begin = [*FUNCTION_ENTRY, *(f"mov {_field(name)},%{register}" for register, name in FIXED_REGISTERS.items())]
    begin += [f"kmovq {_field('mask')},%k1", "xor %ecx,%ecx", "0:"]
    end = [
        f"imul ${spec.columns * spec.stride[1]},%rbx,%r14",
        "add %r14,%rcx",
        f"decq {_field('count')}",
        "jnz 0b",
        f"mov %r13,{_field('out')}",
        *FUNCTION_EXIT,
    ]
    note = f"{spec.rows} x {spec.columns} pixels x {spec.channels} channels, {spec.cost:.1f} vector operations a pixel"
    return kernel_text(spec.name, note, [*begin, *_biases(spec), *_columns(spec), *end])


def _field(name: str) -> str:
    return f"{8 * DEPTHWISE_FIELDS.index(name)}(%rdi)"


def _register(spec: DepthwiseSpec, index: int) -> str:
    return f"%{'zmm' if spec.lanes == 4 else 'ymm'}{index}"


def _acc(spec: DepthwiseSpec, row: int, column: int, part: int) -> str:
    return _register(spec, 8 + 4 * (row * spec.columns + column) + part)


def _bytes(spec: DepthwiseSpec) -> int:
    """Return the number of channels in a vector, which is its size in bytes."""
    return 16 * spec.lanes


def _biases(spec: DepthwiseSpec) -> list[str]:
    """Return the lines that initialize every accumulator with the bias."""
    lines = ["# accumulators start with the bias", f"mov {_field('bias')},%r14", "mov %rcx,%rdx"]
    for row in range(spec.rows):
        for column in range(spec.columns):
            for part in range(4):
                acc = _acc(spec, row, column, part)
                first = row == column == 0
                source = f"{_bytes(spec) * part}(%r14)" if first else _acc(spec, 0, 0, part)
                lines.append(f"{'vmovdqu64' if first else 'vmovdqa64'} {source},{acc}")
    return lines


def _columns(spec: DepthwiseSpec) -> list[str]:
    """Return the lines of all input columns: their products and, among these, the epilogues of completed pixels."""
    lines: list[str] = []
    done: list[str] = []
    for column in range(spec.columns_read):
        step: list[str] = []
        for quad in range(spec.quads):
            if spec.quads > 1 or column == 0:
                step += [f"mov {_field(f'rows{4 * quad + i}')},%{pointer}" for i, pointer in enumerate(TAP_POINTERS)]
            step += [*_interleave(spec), *_products(spec, column, quad)]
        behind = ", among its products the results of the columns before" if done else ""
        lines += [f"# input column {column}{behind}", *_spread_evenly(step, done), "add %rbx,%rdx"]
        x, rest = divmod(column - spec.taps[1] + 1, spec.stride[1])
        done = _column_epilogue(spec, x) if x >= 0 and not rest else []
        if spec.result == "f32":  # the epilogue needs the registers that interleave the next column
            lines, done = lines + done, []
    return lines + done


def _spread_evenly(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """Distribute the second list evenly over the first; both keep their order."""
    woven: list[str] = []
    for index, line in enumerate(lines):
        woven += [line, *others[index * len(others) // len(lines) : (index + 1) * len(others) // len(lines)]]
    return woven


def _interleave(spec: DepthwiseSpec) -> list[str]:
    """Return the lines that turn four rows of a column into four registers; each dword holds a channel of all rows."""
    v = [_register(spec, i) for i in range(8)]
    return [
        *(f"vmovdqu64 (%{pointer},%rdx),{v[i]}" for i, pointer in enumerate(TAP_POINTERS)),
        f"vpunpcklbw {v[1]},{v[0]},{v[4]}",
        f"vpunpckhbw {v[1]},{v[0]},{v[5]}",
        f"vpunpcklbw {v[3]},{v[2]},{v[6]}",
        f"vpunpckhbw {v[3]},{v[2]},{v[7]}",
        f"vpunpcklwd {v[6]},{v[4]},{v[0]}",
        f"vpunpckhwd {v[6]},{v[4]},{v[1]}",
        f"vpunpcklwd {v[7]},{v[5]},{v[2]}",
        f"vpunpckhwd {v[7]},{v[5]},{v[3]}",
    ]


def _products(spec: DepthwiseSpec, column: int, quad: int) -> list[str]:
    """Return the dot products of one input column and quad, for all output pixels that read it."""
    lines = []
    for index, (row, looked_at) in enumerate(spec.pairs()):
        for x in range(spec.columns):
            tap = column - x * spec.stride[1]
            if looked_at != quad or not 0 <= tap < spec.taps[1]:
                continue
            for part in range(4):
                at = ((index * spec.taps[1] + tap) * 4 + part) * _bytes(spec)
                lines.append(f"vpdpbusd {at}(%rsi),{_register(spec, part)},{_acc(spec, row, x, part)}")
    return lines


def _column_epilogue(spec: DepthwiseSpec, x: int) -> list[str]:
    """Return the epilogue of an output column: float32(acc) * factor, rounded, packed, stored row by row."""
    rows = software_pipelined(_pixel(spec, row, x) for row in range(spec.rows))
    return ["mov %r13,%r14", *rows, f"add {_field('out_pixel')},%r13"]


def _pixel(spec: DepthwiseSpec, row: int, column: int) -> Iterator[list[str]]:
    """Yield the stages of a pixel's epilogue."""
    parts = [_acc(spec, row, column, part) for part in range(4)]
    yield [f"vcvtdq2ps {acc},{acc}" for acc in parts]
    yield [f"vmulps {_bytes(spec) * part}(%r12),{acc},{acc}" for part, acc in enumerate(parts)]
    if spec.result == "f32":
        yield from _in_order(spec, parts)
        yield [*(f"vmovups {acc},{_bytes(spec) * part}(%r14)" for part, acc in enumerate(parts)), "add %r15,%r14"]
        return
    yield from quantize_stages(parts, spec.saturates, spec.clamps_float, spec.looks_up)
    if spec.looks_up:
        indices, spare, first, third = (part.replace("ymm", "zmm") for part in parts)
        yield [f"vmovdqu64 (%rbp),{first}", f"vmovdqu64 128(%rbp),{third}"]
        yield from lookup_stages(indices, spare, "rbp", first, third, row)
    yield [f"vmovdqu8 {parts[0]},(%r14){{%k1}}", "add %r15,%r14"]


def _in_order(spec: DepthwiseSpec, parts: list[str]) -> Iterator[list[str]]:
    """Yield the stages that transpose 128-bit lanes, so that channels are in order.

    Before, each lane of a register holds four channels, and the next four are in the next register.
    """
    a, b, c, d = parts
    free = [_register(spec, 4 + i) for i in range(4)]

    def joined(low: str, high: str, chosen: int, to: str) -> str:
        return f"vshuff32x4 ${chosen},{high},{low},{to}"

    if spec.lanes == 2:
        yield [
            joined(a, b, 0, free[0]),
            joined(c, d, 0, free[1]),
            joined(a, b, 3, free[2]),
            joined(c, d, 3, free[3]),
            *(f"vmovaps {register},{acc}" for register, acc in zip(free, parts, strict=True)),
        ]
        return
    yield [
        joined(a, b, 0x44, free[0]),
        joined(a, b, 0xEE, free[1]),
        joined(c, d, 0x44, free[2]),
        joined(c, d, 0xEE, free[3]),
        joined(free[0], free[2], 0x88, a),
        joined(free[0], free[2], 0xDD, b),
        joined(free[1], free[3], 0x88, c),
        joined(free[1], free[3], 0xDD, d),
    ]
