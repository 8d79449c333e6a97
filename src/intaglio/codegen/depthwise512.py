"""AVX512-VNNI depthwise microkernels as assembly (codegen/depthwise.py says how they compute).

One column of one quad is 2 loads, 2 interleaving loads of bytes each way, 4 of words; then 4 vpdpbusd for every tap
column and output row that looks at it, weights from memory. Registers: 0..3 the quad, 4..7 rows being interleaved, four
accumulators a pixel from 8 on.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from intaglio.codegen.assembly import kernel_text, levels, skewed
from intaglio.codegen.depthwise import DEPTHWISE_FIELDS, DepthwiseSpec

POINTERS = ("r8", "r9", "r10", "r11")
"""The four rows of a quad."""


def emit(spec: DepthwiseSpec) -> str:
    """The kernel as a top-level assembly statement and its declaration. rcx: the tile's first column, in bytes."""
    next_tile = [f"imul ${spec.columns * spec.stride[1]},{_field('pixel')},%rax", "add %rax,%rcx",
                 f"imul ${spec.columns},{_field('out_pixel')},%rax", f"add %rax,{_field('out')}",
                 f"decq {_field('count')}", "jnz 0b"]  # fmt: skip
    lines = ["push %rbx", "xor %ecx,%ecx", "0:", *_start(spec), *_columns(spec), *_epilogue(spec), *next_tile]
    note = f"{spec.rows} x {spec.columns} pixels x {spec.channels} channels, {spec.cost:.1f} vector operations a pixel"
    return kernel_text(spec.name, "DepthwiseTile", note, [*lines, "vzeroupper", "pop %rbx", "ret"])


def _field(name: str) -> str:
    return f"{8 * DEPTHWISE_FIELDS.index(name)}(%rdi)"


def _register(spec: DepthwiseSpec, index: int) -> str:
    return f"%{'zmm' if spec.lanes == 4 else 'ymm'}{index}"


def _acc(spec: DepthwiseSpec, row: int, column: int, part: int) -> str:
    return _register(spec, 8 + 4 * (row * spec.columns + column) + part)


def _start(spec: DepthwiseSpec) -> list[str]:
    lines = [f"mov {_field('bias')},%rax", f"mov {_field('weights')},%rsi", f"mov {_field('pixel')},%rbx"]
    for row in range(spec.rows):
        for column in range(spec.columns):
            for part in range(4):
                acc = _acc(spec, row, column, part)
                first = row == column == 0
                source = f"{_bytes(spec) * part}(%rax)" if first else _acc(spec, 0, 0, part)
                lines.append(f"{'vmovdqu64' if first else 'vmovdqa64'} {source},{acc}")
    return [*lines, "mov %rcx,%rdx"]


def _bytes(spec: DepthwiseSpec) -> int:
    """Of a vector."""
    return 16 * spec.lanes


def _columns(spec: DepthwiseSpec) -> list[str]:
    """Every input column, and the products of all it is part of."""
    lines = []
    for column in range(spec.columns_read):
        for quad in range(spec.quads):
            if spec.quads > 1 or column == 0:
                lines += [f"mov {_field(f'rows{4 * quad + i}')},%{pointer}" for i, pointer in enumerate(POINTERS)]
            lines += _interleave(spec)
            lines += _products(spec, column, quad)
        lines += ["add %rbx,%rdx"] if column + 1 < spec.columns_read else []
    return lines


def _interleave(spec: DepthwiseSpec) -> list[str]:
    """Four rows of a column -> four registers of dwords, the rows of a channel in each."""
    v = [_register(spec, i) for i in range(8)]
    rows = [f"(%{pointer},%rdx)" for pointer in POINTERS]
    return [
        f"vmovdqu64 {rows[0]},{v[0]}", f"vmovdqu64 {rows[2]},{v[1]}",
        f"vpunpcklbw {rows[1]},{v[0]},{v[4]}", f"vpunpckhbw {rows[1]},{v[0]},{v[5]}",
        f"vpunpcklbw {rows[3]},{v[1]},{v[6]}", f"vpunpckhbw {rows[3]},{v[1]},{v[7]}",
        f"vpunpcklwd {v[6]},{v[4]},{v[0]}", f"vpunpckhwd {v[6]},{v[4]},{v[1]}",
        f"vpunpcklwd {v[7]},{v[5]},{v[2]}", f"vpunpckhwd {v[7]},{v[5]},{v[3]}",
    ]  # fmt: skip


def _products(spec: DepthwiseSpec, column: int, quad: int) -> list[str]:
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


def _epilogue(spec: DepthwiseSpec) -> list[str]:
    """float32(acc) * factor, rounded, packed, stored."""
    lines = [f"mov {_field('limits')},%rax", f"mov {_field('factor')},%r8", f"mov {_field('mask')},%r10",
             "kmovq %r10,%k1", f"mov {_field('out')},%r9", f"mov {_field('out_pixel')},%rbx"]  # fmt: skip
    lines += ["mov %r9,%rdx", f"mov {_field('out_line')},%r11"]
    lines += [f"vmovups {_bytes(spec) * part}(%r8),{_register(spec, part)}" for part in range(4)]
    return lines + skewed(_pixel(spec, *at) for at in product(range(spec.rows), range(spec.columns)))


def _pixel(spec: DepthwiseSpec, row: int, column: int) -> Iterator[list[str]]:
    parts = [_acc(spec, row, column, part) for part in range(4)]
    yield [f"vcvtdq2ps {acc},{acc}" for acc in parts]
    yield [f"vmulps {_register(spec, part)},{acc},{acc}" for part, acc in enumerate(parts)]
    following = ["add %rbx,%rdx"] if column + 1 < spec.columns else ["add %r11,%r9", "mov %r9,%rdx"]
    if spec.result == "f32":
        yield from _in_order(spec, parts)
        yield [*(f"vmovups {acc},{_bytes(spec) * part}(%rdx)" for part, acc in enumerate(parts)), *following]
        return
    *stages, packed = levels(parts, spec.natural, spec.guard)
    yield from stages
    yield [*packed, f"vmovdqu8 {parts[0]},(%rdx){{%k1}}", *following]


def _in_order(spec: DepthwiseSpec, parts: list[str]) -> Iterator[list[str]]:
    """Four channels of each 128 bits, the next ones in the next register -> one after the other: lanes transposed."""
    a, b, c, d = parts
    free = [_register(spec, 4 + i) for i in range(4)]

    def joined(low: str, high: str, chosen: int, to: str) -> str:
        return f"vshuff32x4 ${chosen},{high},{low},{to}"

    if spec.lanes == 2:
        yield [joined(a, b, 0, free[0]), joined(c, d, 0, free[1]), joined(a, b, 3, free[2]), joined(c, d, 3, free[3]),
               *(f"vmovaps {register},{acc}" for register, acc in zip(free, parts, strict=True))]  # fmt: skip
        return
    yield [joined(a, b, 0x44, free[0]), joined(a, b, 0xEE, free[1]), joined(c, d, 0x44, free[2]),
           joined(c, d, 0xEE, free[3]), joined(free[0], free[2], 0x88, a), joined(free[0], free[2], 0xDD, b),
           joined(free[1], free[3], 0x88, c), joined(free[1], free[3], 0xDD, d)]  # fmt: skip
