"""Shared parts of the assembly printers: function frames, operands of the structs, loops over taps.

The code is x86-64, System V. rdi holds the `Tile` throughout. While products are accumulated, rsi points to the
weights, rbx is the distance between pixels, r15 three times that, rdx points to a tap, r14 to a row of taps; rcx, r13,
r12 count steps, taps and rows of taps; rbp is unused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest

from intaglio.kernels.instruction_set import KernelFamily
from intaglio.kernels.tile_spec import LIMITS_FIELDS, TileSpec, tile_offset

CALLEE_SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")
FUNCTION_ENTRY = tuple(f"push %{register}" for register in CALLEE_SAVED)
FUNCTION_EXIT = ("vzeroupper", *(f"pop %{register}" for register in reversed(CALLEE_SAVED)), "ret")


def tile_function(spec: TileSpec, lines: Sequence[str], name: str = "") -> str:
    """Return the text of a kernel that executes ``lines`` for each of ``count`` tiles.

    ``lines`` must leave rdx at the pixel after the tile's last. The same holds for rcx if there is a residual operand
    or rows have scales, and for rsi and rbx if results and residual operand have 16 bits.
    """
    moved = [f"mov %rdx,{field('out')}", *[f"mov %rcx,{field('residual')}"] * (spec.result == "add")]
    moved += [f"mov %rcx,{field('row_scale')}"] * (spec.result == "rows")
    moved += [f"mov %rsi,{field('remainder')}"] * spec.remainder
    moved += [f"mov %rbx,{field('residual_remainder')}"] * spec.residual_remainder
    moved += [f"imul ${spec.rows},{field('a_pixel')},%rax", f"add %rax,{field('a')}"]
    body = [*FUNCTION_ENTRY, "0:", *lines, "# next tile", *moved, f"decq {field('count')}", "jnz 0b", *FUNCTION_EXIT]
    return kernel_text(name or spec.name, f"{spec.rows} pixels x {16 * spec.blocks} channels -> {spec.result}", body)


def kernel_text(name: str, note: str, lines: Sequence[str]) -> str:
    """Return the text of a function that takes one pointer to a struct. Its name is local to the object file."""
    body = "\n".join(line if line.startswith("#") or line.endswith(":") else f"    {line}" for line in lines)
    return f"""
# {name}: {note}
    .p2align 6
    .type {name},@function
{name}:
{body}
    .size {name},.-{name}
"""


def family_text(family: KernelFamily, texts: Sequence[str], registers: str, constants: Mapping[str, str]) -> str:
    """Return an assembler file: a comment with the registers, the kernels, the constants they read, and their table.

    The table's name is the only global symbol, and it is hidden in the shared object.
    """
    comments = "".join(f"# {line}".rstrip() + "\n" for line in registers.strip().splitlines())
    read = set(re.findall(r"\bintaglio_\w+", "".join(texts)))
    addresses = "".join(f"    .quad {kernel.name if kernel is not None else 0}\n" for kernel in family.kernels)
    return "".join([
        comments,
        f'    .section .text.{family.name},"ax",@progbits\n',
        *texts,
        f'\n    .section .rodata.{family.name},"a",@progbits\n    .p2align 6\n',
        *(f"{name}:\n{text}" for name, text in constants.items() if name in read),
        f'\n    .section .data.rel.ro.local.{family.name},"aw",@progbits\n    .p2align 3\n',
        f"    .globl {family.name}\n    .hidden {family.name}\n    .type {family.name},@object\n",
        f"{family.name}:\n{addresses}    .size {family.name},.-{family.name}\n",
        '    .section .note.GNU-stack,"",@progbits\n',
    ])  # fmt: skip


def by_levels(variants: Sequence[list[str]]) -> list[str]:
    """Return the lines of the only variant, or those that choose between one for two levels of the cache and one for
    one level (``levels`` of ``struct Tile``).
    """
    if len(variants) == 1:
        return variants[0]
    two_levels, one_level = variants
    return [f"cmpq $2,{field('levels')}", "jne 14f", *two_levels, "jmp 15f", "14:", *one_level, "15:"]


def field(name: str) -> str:
    """Return the memory operand of a field of the tile."""
    return f"{tile_offset(name)}(%rdi)"


def limit(name: str) -> str:
    """Return the memory operand of a field of the limits, whose address is in rax."""
    return f"{LIMITS_FIELDS[name]}(%rax)"


def quantize_stages(row: Sequence[str], saturates: bool, clamp_float: bool, looks_up: bool) -> Iterator[list[str]]:
    """Yield the stages that round float32 steps in one to four registers and pack them to uint8 in the first register.

    Values are packed twice with saturation, and the zero point is added to 16-bit lanes in between. rax holds the
    address of the limits.

    Args:
        row: Registers with the steps of one pixel.
        saturates: The zero point is 0 and saturation replaces the clamp.
        clamp_float: Clamp in float before the conversion to int32.
        looks_up: Skip the clamp, because the lookup table that follows includes it.
    """
    bounds = []
    if clamp_float:
        spread = "{1to16}" if "zmm" in row[0] else "{1to8}"
        bounds = [f"vmaxps {limit('convertible_low')}{spread},{steps},{steps}" for steps in row]
        bounds += [f"vminps {limit('convertible_high')}{spread},{steps},{steps}" for steps in row]
    yield [*bounds, *(f"vcvtps2dq {steps},{steps}" for steps in row)]
    first, last = words = row[0], row[2 if len(row) > 2 else 0]
    packs = [f"vpackssdw {row[min(j + 1, len(row) - 1)]},{row[j]},{row[j]}" for j in range(0, len(row), 2)]
    if not saturates:
        packs += [f"vpaddsw {limit('zero_point16')},{word},{word}" for word in dict.fromkeys(words)]
    yield packs
    ends = [f"vpmaxub {limit('low8')},{first},{first}", f"vpminub {limit('high8')},{first},{first}"]
    yield [f"vpackuswb {last},{first},{first}", *ends * (not saturates and not looks_up)]


def quantize_16bit_stages(row: Sequence[str], spare: str, saturates: bool, clamp_float: bool) -> Iterator[list[str]]:
    """Yield the stages that round float32 steps in one to four registers to 16 bits and split them.

    The remainders end up in the first register of ``row``, the 8-bit values in the second or, without one, in
    ``spare``. rax holds the address of the limits.
    """
    first, count = row[0], len(row)
    bounds = []
    if clamp_float:
        bounds = [f"vmaxps {limit('convertible_low')}{{1to16}},{steps},{steps}" for steps in row]
        bounds += [f"vminps {limit('convertible_high')}{{1to16}},{steps},{steps}" for steps in row]
    shifts = [] if saturates else [f"vpaddd {limit('zero_point')}{{1to16}},{steps},{steps}" for steps in row]
    yield [*bounds, *(f"vcvtps2dq {steps},{steps}" for steps in row), *shifts]
    words = row[::2]
    packs = [f"vpackusdw {row[min(j + 1, count - 1)]},{row[j]},{row[j]}" for j in range(0, count, 2)]
    if saturates:
        packs += [f"vpaddusw {limit('zero_point16')},{word},{word}" for word in words]
    else:
        packs += [f"vpmaxuw {limit('low16')},{word},{word}" for word in words]
    yield [*packs, *(f"vpminuw {limit('high16')},{word},{word}" for word in words)]
    if count == 3:  # the halves of both are packed together, so that one register suffices for the 8-bit values
        yield split(words[0], row[1])
        yield [f"vpackuswb {row[1]},{first},{first}", *split(words[1], row[1])]
        yield [
            f"vpackuswb {row[1]},{row[2]},{row[2]}",
            f"vpunpckhqdq {row[2]},{first},{row[1]}",
            f"vpunpcklqdq {row[2]},{first},{first}",
        ]
        return
    free = row[1::2] or [spare]
    yield [line for lines in zip(*map(split, words, free), strict=True) for line in lines]
    yield [f"vpackuswb {free[-1]},{free[0]},{free[0]}", f"vpackuswb {words[-1]},{first},{first}"]


def split(word: str, quotient: str) -> list[str]:
    """Return the lines that split 16-bit values into the 8-bit value in one register and the remainder in the other.

    Both stay in 16-bit lanes. ``x // 255`` is ``x * 32897 >> 23``, and ``x % 255`` is the low byte of the sum of that
    and x.
    """
    return [
        f"vpmulhuw intaglio_rest(%rip),{word},{quotient}",
        f"vpsrlw $7,{quotient},{quotient}",
        f"vpaddw {quotient},{word},{word}",
        f"{_and(word)} intaglio_rest+64(%rip),{word},{word}",
    ]


def _and(register: str) -> str:
    return "vpandd" if "zmm" in register else "vpand"


REMAINDER_CONSTANTS = {
    "intaglio_rest": "".join(f"    .word {','.join([str(word)] * 32)}\n" for word in (32897, 255)),
}
"""Multiplier and mask that `split` reads."""


def lookup_stages(row: str, spare: str, table: str, first: str, third: str, turn: int) -> Iterator[list[str]]:
    """Yield the stages that map 64 quantized values by the lookup table at an address (AVX512-VBMI).

    Two quarters of the table are in the registers ``first`` and ``third``. Up to four calls with consecutive values of
    ``turn`` can be interleaved, because each uses a mask register of its own, if their other registers differ.
    """
    mask = f"%k{2 + turn % 4}"
    yield [f"vpmovb2m {row},{mask}", f"vmovdqa64 {row},{spare}"]
    yield [f"vpermi2b 64(%{table}),{first},{row}", f"vpermi2b 192(%{table}),{third},{spare}"]
    yield [f"vmovdqu8 {spare},{row}{{{mask}}}"]


def software_pipelined(rows: Iterable[Iterable[list[str]]]) -> list[str]:
    """Interleave the stages of rows, each of which starts one stage after the row before; older rows come first."""
    late: list[list[list[str]]] = [[[]] * index + list(stages) for index, stages in enumerate(rows)]
    return [line for together in zip_longest(*late, fillvalue=[]) for stage in together for line in stage]


def tap_loops(start: Sequence[str], step: Sequence[str], several: Sequence[str] = (), count: int = 0) -> list[str]:
    """Return three nested loops: rows of taps, taps of a row, steps of 4 channels.

    Args:
        start: Lines that prepare a tap whose first pixel is at rdx.
        step: Lines of one step, which also advance the pointers.
        several: Lines of ``count`` steps, which run as long as so many are left; none if steps run one by one.
        count: Number of steps in ``several``.
    """
    lines = ["# products: rows of taps, taps, steps of 4 input channels", f"mov {field('a_pixel')},%rbx"]
    lines += ["lea (%rbx,%rbx,2),%r15", f"mov {field('b')},%rsi"]
    lines += [f"mov {field('a')},%r14", f"mov {field('tap_rows')},%r12"]
    lines += ["1:", "mov %r14,%rdx", f"mov {field('taps')},%r13"]
    lines += ["2:", *start, f"mov {field('run')},%rcx"]
    if several:
        lines += [f"sub ${count},%rcx", "jb 5f", ".p2align 4", "4:", *several, f"sub ${count},%rcx", "jae 4b"]
        lines += ["5:", f"add ${count},%rcx", "jz 6f"]
    lines += [".p2align 4", "3:", *step, "dec %rcx", "jnz 3b", *["6:"] * bool(several)]
    lines += [f"add {field('a_tap')},%rdx", "dec %r13", "jnz 2b"]
    return [*lines, f"add {field('a_row')},%r14", "dec %r12", "jnz 1b"]
