"""AVX512-VNNI depthwise microkernels as assembly (codegen/depthwise.py says how they compute).

One column of one quad is 2 loads, 2 interleaving loads of bytes each way, 4 of words; then 4 vpdpbusd for every tap
column and output row that looks at it, weights from memory. Registers: 0..3 the quad, 4..7 rows being interleaved, four
accumulators a pixel from 8 on.
"""

from __future__ import annotations

from intaglio.codegen.assembly import kernel_text, limit
from intaglio.codegen.depthwise import DEPTHWISE_FIELDS, DepthwiseSpec

POINTERS = ("r8", "r9", "r10", "r11")
"""The four rows of a quad."""


def emit(spec: DepthwiseSpec) -> str:
    """The kernel as a top-level assembly statement and its declaration."""
    lines = ["push %rbx", *_start(spec), *_columns(spec), *_epilogue(spec), "vzeroupper", "pop %rbx", "ret"]
    note = f"{spec.rows} x {spec.columns} pixels x {spec.channels} channels, {spec.cost:.1f} vector operations a pixel"
    return kernel_text(spec.name, "DepthwiseTile", note, lines)


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
    return [*lines, "xor %edx,%edx"]


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
    """float32(acc) * factor, rounded, packed twice with saturation, the zero point added on 16-bit lanes between."""
    lines = [f"mov {_field('limits')},%rax", f"mov {_field('factor')},%r8", f"mov {_field('mask')},%r10",
             "kmovq %r10,%k1", f"mov {_field('out')},%rdx", f"mov {_field('out_pixel')},%rbx"]  # fmt: skip
    v = [_register(spec, i) for i in range(8)]
    lines += [f"vmovups {_bytes(spec) * part}(%r8),{v[part]}" for part in range(4)]
    lines += [f"vmovdqu64 {limit('zero_point16')},{v[4]}", f"vmovdqu64 {limit('low8')},{v[5]}",
              f"vmovdqu64 {limit('high8')},{v[6]}"]  # fmt: skip
    for row in range(spec.rows):
        lines.append("mov %rdx,%r9")
        for column in range(spec.columns):
            lines += _pixel(spec, row, column, v)
            lines += ["add %rbx,%r9"] if column + 1 < spec.columns else []
        lines += [f"add {_field('out_line')},%rdx"] if row + 1 < spec.rows else []
    return lines


def _pixel(spec: DepthwiseSpec, row: int, column: int, v: list[str]) -> list[str]:
    parts = [_acc(spec, row, column, part) for part in range(4)]
    lines, spread = [], f"{{1to{4 * spec.lanes}}}"
    for part, acc in enumerate(parts):
        lines += [f"vcvtdq2ps {acc},{acc}", f"vmulps {v[part]},{acc},{acc}"]
        if spec.guard:
            lines += [f"vmaxps {limit('convertible_low')}{spread},{acc},{acc}",
                      f"vminps {limit('convertible_high')}{spread},{acc},{acc}"]  # fmt: skip
        lines.append(f"vcvtps2dq {acc},{acc}")
    a, b, c, d = parts
    return [*lines, f"vpackssdw {b},{a},{a}", f"vpackssdw {d},{c},{c}", f"vpaddsw {v[4]},{a},{a}",
            f"vpaddsw {v[4]},{c},{c}", f"vpackuswb {c},{a},{a}", f"vpmaxub {v[5]},{a},{a}",
            f"vpminub {v[6]},{a},{a}", f"vmovdqu8 {a},(%r9){{%k1}}"]  # fmt: skip
