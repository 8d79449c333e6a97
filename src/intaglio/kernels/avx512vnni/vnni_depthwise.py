"""AVX512-VNNI depthwise microkernels in assembly; kernels/depthwise_spec.py describes the algorithm.

One column of one quad takes 4 loads, 4 instructions that interleave bytes and 4 that interleave words; then, for every
tap column and output row that reads it, 4 loads of weights and 8 vpdpbusd for two neighbouring pixels. Loads count
most: a core with 512-bit units executes two a cycle, of 64 or of 8 bytes, so that rows are addressed by their distance
instead of by pointers in memory. The epilogue of an output row is placed among the products of the next one, and that
of completed pixels among those of the next input column, since the scheduler does not look far enough ahead to overlap
the two. Zen 5 computes a pixel in the first-level cache in 10 cycles with 3x3 taps, 13.5 with a stride of 2, and 26.5
with 5x5 taps; `DepthwiseSpec.cost` counts 8, 10.8 and 22.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from intaglio.kernels.assembly import (
    FUNCTION_ENTRY,
    FUNCTION_EXIT,
    kernel_text,
    lookup_stages,
    quantize_stages,
    software_pipelined,
)
from intaglio.kernels.depthwise_spec import DEPTHWISE_FIELDS, QUAD_REGISTERS, DepthwiseSpec

ROW_ADDRESSES = ("(%rdx)", "(%rdx,%r9)", "(%rdx,%r9,2)", "(%rdx,%r10)")
"""Addresses of the four rows of a quad."""
FIXED_REGISTERS = {
    "rax": "limits",
    "rbx": "pixel",
    "rbp": "table",
    "rsi": "weights",
    "rcx": "in",
    "r9": "line",
    "r11": "out_pixel",
    "r12": "factor",
    "r13": "out",
    "r15": "out_line",
}
DEPTHWISE_REGISTERS = """
AVX512-VNNI, System V. rdi: struct DepthwiseTile.
rax limits, rbx bytes between input columns, rbp lookup table, rsi weights, r12 factors, r13 result, r14 next pixel,
r11 and r15 bytes between output columns and rows, rcx first input column of the tile, rdx the quad being read, r9 bytes
between input rows, r10 three times that, k1 channels to write. From 0 on quads of the input columns that are read
together, then 4 rows being interleaved, or weights, then four accumulators a pixel.
"""
"""Header comment of a generated file. `FIXED_REGISTERS` are the fields that stay in registers for the whole kernel.

r13 advances from output column to output column; r14 is the address of the next pixel's result.
"""


def emit(spec: DepthwiseSpec) -> str:
    """Return the text of one kernel."""
    begin = [*FUNCTION_ENTRY, *(f"mov {_field(name)},%{register}" for register, name in FIXED_REGISTERS.items())]
    begin += ["lea (%r9,%r9,2),%r10", f"kmovq {_field('mask')},%k1", *_first_columns(spec), "0:"]
    end = [*_carry(spec), f"decq {_field('count')}", "jnz 0b", f"mov %r13,{_field('out')}", *FUNCTION_EXIT]
    note = f"{spec.rows} x {spec.columns} pixels x {spec.channels} channels, at least {spec.cost[0]:.1f} cycles a pixel"
    return kernel_text(spec.name, note, [*begin, *_biases(spec), *_columns(spec), *end])


def _field(name: str) -> str:
    return f"{8 * DEPTHWISE_FIELDS.index(name)}(%rdi)"


def _register(spec: DepthwiseSpec, index: int) -> str:
    return f"%{'zmm' if spec.lanes == 4 else 'ymm'}{index}"


def _quad(spec: DepthwiseSpec, column: int) -> list[str]:
    """Return the registers of a quad of an input column; the column `DepthwiseSpec.live` later has the same."""
    return [_register(spec, QUAD_REGISTERS * (column % spec.live) + i) for i in range(QUAD_REGISTERS)]


def _spare(spec: DepthwiseSpec) -> list[str]:
    """Return the registers of rows that are being interleaved, and then of weights."""
    return [_register(spec, QUAD_REGISTERS * spec.live + i) for i in range(QUAD_REGISTERS)]


def _acc(spec: DepthwiseSpec, row: int, column: int, part: int) -> str:
    return _register(spec, QUAD_REGISTERS * (spec.live + 1 + row * spec.columns + column) + part)


def _bytes(spec: DepthwiseSpec) -> int:
    """Return the number of channels in a vector, which is its size in bytes."""
    return 16 * spec.lanes


def _biases(spec: DepthwiseSpec) -> list[str]:
    """Return the lines that initialize every accumulator with the bias."""
    lines = ["# accumulators start with the bias", f"mov {_field('bias')},%r14"]
    for row in range(spec.rows):
        for column in range(spec.columns):
            for part in range(4):
                acc = _acc(spec, row, column, part)
                first = row == column == 0
                source = f"{_bytes(spec) * part}(%r14)" if first else _acc(spec, 0, 0, part)
                lines.append(f"{'vmovdqu64' if first else 'vmovdqa64'} {source},{acc}")
    return lines


def _first_columns(spec: DepthwiseSpec) -> list[str]:
    """Return the lines that interleave the columns that later tiles take from the tile before."""
    lines = ["mov %rcx,%rdx"] * (spec.carried > 0)
    for column in range(spec.carried):
        lines += [f"# input column {column}", *_interleave(spec, column, 0), "add %rbx,%rdx"]
    return lines


def _carry(spec: DepthwiseSpec) -> list[str]:
    """Return the lines that prepare the next tile: its first columns, or their address."""
    first = spec.columns * spec.stride[1]
    if not spec.carried:
        return [f"imul ${first},%rbx,%r14", "add %r14,%rcx"]
    if first % spec.live == 0:
        return []
    return [f"vmovdqa64 {a},{b}" for a, b in zip(_quad(spec, first), _quad(spec, 0), strict=True)]


def _columns(spec: DepthwiseSpec) -> list[str]:
    """Return the lines of all input columns: their products and, among these, the epilogues of completed pixels."""
    lines: list[str] = []
    done: list[str] = []
    for quad in range(spec.quads):
        lines += [] if spec.carried else _first_address(quad)
        for column in range(spec.columns_read):
            last = quad == spec.quads - 1
            group = next((g for g in spec.groups() if last and column == _last_column(spec, g)), ())
            among = ", among its products the results of pixels before" if done else ""
            lines += [f"# quad {quad} of input column {column}{among}"]
            rows = [_products(spec, column, quad, r) for r in range(spec.rows)]
            step = [] if column < spec.carried else [*_interleave(spec, column, quad), "add %rbx,%rdx"]
            if not spec.reads(column):
                step = step[-1:]
            if column == spec.columns_read - 1 and last and spec.result != "f32":
                lines += [*_spread_evenly([*step, *rows[0]], done), *_last_results(spec, group, rows)]
                continue
            lines += _spread_evenly([*step, *chain(*rows)], done)
            done = _results(spec, group) if group else []
            if spec.result == "f32":  # the epilogue needs the registers that interleave the next column
                lines, done = lines + done, []
    return lines


def _first_address(quad: int) -> list[str]:
    """Return the lines that set rdx to the first row of a quad in the first column of the tile."""
    eights, fours = divmod(4 * quad, 8)
    lines = ["lea (%rcx,%r9,8),%rdx" if eights else "mov %rcx,%rdx"]
    return lines + ["lea (%rdx,%r9,4),%rdx"] * (fours // 4)


def _last_column(spec: DepthwiseSpec, group: Sequence[int]) -> int:
    """Return the last input column of which a group of output columns takes products."""
    return group[-1] * spec.stride[1] + spec.taps[1] - 1


def _last_results(spec: DepthwiseSpec, group: Sequence[int], rows: Sequence[list[str]]) -> list[str]:
    """Return the lines of the last column behind the products of its first row: the products of each other row, with
    the epilogue of the row before among them, and the last epilogue."""
    lines = ["mov %r13,%r14"]
    for row, products in enumerate(rows[1:]):
        lines += _spread_evenly(products, _row_results(spec, group, row))
    return [*lines, *_row_results(spec, group, spec.rows - 1), *_advance(group)]


def _spread_evenly(lines: Sequence[str], others: Sequence[str]) -> list[str]:
    """Distribute the second list evenly over the first; both keep their order."""
    if not lines:
        return [*others]
    woven: list[str] = []
    for index, line in enumerate(lines):
        woven += [line, *others[index * len(others) // len(lines) : (index + 1) * len(others) // len(lines)]]
    return woven


def _interleave(spec: DepthwiseSpec, column: int, quad: int) -> list[str]:
    """Return the lines that turn four rows of a column into four registers; each dword holds a channel of all rows.

    Rows behind the last one that the tile reads have weights of zero; the last one takes their place.
    """
    made, spare = _quad(spec, column), _spare(spec)
    read = min(QUAD_REGISTERS, spec.rows_read - 4 * quad)
    a, b, c, d = (made[min(row, read - 1)] for row in range(4))
    return [
        *(f"vmovdqu64 {address},{register}" for address, register in zip(ROW_ADDRESSES[:read], made, strict=False)),
        f"vpunpcklbw {b},{a},{spare[0]}",
        f"vpunpckhbw {b},{a},{spare[1]}",
        f"vpunpcklbw {d},{c},{spare[2]}",
        f"vpunpckhbw {d},{c},{spare[3]}",
        f"vpunpcklwd {spare[2]},{spare[0]},{made[0]}",
        f"vpunpckhwd {spare[2]},{spare[0]},{made[1]}",
        f"vpunpcklwd {spare[3]},{spare[1]},{made[2]}",
        f"vpunpckhwd {spare[3]},{spare[1]},{made[3]}",
    ]


def _products(spec: DepthwiseSpec, column: int, quad: int, row: int) -> list[str]:
    """Return the dot products of an output row whose last operand is in an input column and quad."""
    lines = []
    if (row, quad) not in spec.pairs():
        return []
    index = spec.pairs().index((row, quad))
    for group in spec.groups():
        tap = column - group[-1] * spec.stride[1]
        if not 0 <= tap < spec.taps[1]:
            continue
        for part, register in enumerate(_spare(spec)):
            weight = f"{((index * spec.taps[1] + tap) * 4 + part) * _bytes(spec)}(%rsi)"
            if len(group) > 1:
                lines.append(f"vmovdqu64 {weight},{register}")
                weight = register
            for x in group:
                operand = _quad(spec, column - (group[-1] - x) * spec.stride[1])[part]
                lines.append(f"vpdpbusd {weight},{operand},{_acc(spec, row, x, part)}")
    return lines


def _results(spec: DepthwiseSpec, group: Sequence[int]) -> list[str]:
    """Return the epilogue of a group of output columns."""
    rows = chain.from_iterable(_row_results(spec, group, row) for row in range(spec.rows))
    return ["mov %r13,%r14", *rows, *_advance(group)]


def _row_results(spec: DepthwiseSpec, group: Sequence[int], row: int) -> list[str]:
    """Return the epilogue of some pixels of an output row: float32(acc) * factor, rounded, packed, stored."""
    pixels = (_pixel(spec, row, x, place, place == len(group) - 1) for place, x in enumerate(group))
    return software_pipelined(pixels)


def _advance(group: Sequence[int]) -> list[str]:
    """Return the line that moves the address of the results behind a group of output columns."""
    return ["lea (%r13,%r11,2),%r13" if len(group) > 1 else "add %r11,%r13"]


def _pixel(spec: DepthwiseSpec, row: int, column: int, place: int, last: bool) -> Iterator[list[str]]:
    """Yield the stages of a pixel's epilogue. `place` is its number in its group, and `last` whether it is the last."""
    address, ends = "(%r14,%r11)" if place else "(%r14)", ["add %r15,%r14"] * last
    parts = [_acc(spec, row, column, part) for part in range(4)]
    yield [f"vcvtdq2ps {acc},{acc}" for acc in parts]
    yield [f"vmulps {_bytes(spec) * part}(%r12),{acc},{acc}" for part, acc in enumerate(parts)]
    if spec.result == "f32":
        yield from _in_order(spec, parts)
        yield [*(f"vmovups {acc},{_bytes(spec) * part or ''}{address}" for part, acc in enumerate(parts)), *ends]
        return
    yield from quantize_stages(parts, spec.saturates, spec.clamps_float, spec.looks_up)
    if spec.looks_up:
        indices, spare, first, third = (part.replace("ymm", "zmm") for part in parts)
        yield [f"vmovdqu64 (%rbp),{first}", f"vmovdqu64 128(%rbp),{third}"]
        yield from lookup_stages(indices, spare, "rbp", first, third, place)
    yield [f"vmovdqu8 {parts[0]},{address}{{%k1}}", *ends]


def _in_order(spec: DepthwiseSpec, parts: list[str]) -> Iterator[list[str]]:
    """Yield the stages that transpose 128-bit lanes, so that channels are in order.

    Before, each lane of a register holds four channels, and the next four are in the next register.
    """
    a, b, c, d = parts
    free = _spare(spec)

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
