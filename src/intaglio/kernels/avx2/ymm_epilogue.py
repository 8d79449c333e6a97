"""Epilogues of GEMM microkernels in 256-bit registers: scale, add a residual operand, round, pack and store.

Registers: rax limits, r8 factors, rdx result, rcx residual operand, r9 its factors, rsi, rbx their remainders, r10
channels to write; with scales of rows, rcx these and r9 the bias. ymm0 scratch, ymm1 zero point of the residual
operand, ymm2-3 bounds. All others may hold sums.
"""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.kernels.assembly import REMAINDER_CONSTANTS, field, limit, split
from intaglio.kernels.tile_spec import PACKED_RESULTS, TileSpec

SCRATCH, OTHER_ZERO, LOW_HALF, HIGH_HALF = (f"%ymm{i}" for i in range(4))
Pair = tuple[str, str]
"""Registers with the sums of a pixel: channels 0 to 7, and 8 to 15."""


PIXEL_ADDRESSES = (
    "(%rax)",
    "(%rax,%rbx)",
    "(%rax,%rbx,2)",
    "(%rbp)",
    "(%rbp,%rbx)",
    "(%rbp,%rbx,2)",
    "(%rbp,%r15)",
)
"""Addresses of the activations of up to seven pixels; rbp points to those of the fourth."""
EPILOGUE_CONSTANTS = {**REMAINDER_CONSTANTS, "intaglio_pixels": "    .long 0,4,1,5,2,6,3,7\n"}
"""Constants that the epilogue reads: those of `split`, and the order of dwords that separates two packed pixels."""


def pixel_pointers(rows: int) -> dict[str, str]:
    """Return the registers that point to activations, with the lines that set them at the start of a tap."""
    lines = {"%rax": "mov %rdx,%rax", "%rbp": "lea (%rdx,%r15),%rbp"}
    return lines if rows > 3 else {"%rax": lines["%rax"]}


def load_biases(pixels: Sequence[Pair]) -> list[str]:
    """Return the lines that initialize all sums with the bias."""
    lines = ["# accumulators start with the bias", f"mov {field('bias')},%rax"]
    return lines + [f"vmovdqu {32 * half}(%rax),{pair[half]}" for pair in pixels for half in range(2)]


def _xmm(register: str) -> str:
    """Return the lower half of a register."""
    return register.replace("ymm", "xmm")


def epilogue(spec: TileSpec, pixels: Sequence[Pair], waiting: Pair | None = None) -> list[str]:
    """Return the lines that finish pixel by pixel. r10 holds the number of channels.

    Args:
        spec: parameters of the kernel.
        pixels: for each pixel, the registers with the sums of 8 channels each; none of the first four.
        waiting: memory with the sums of one more pixel, which registers of the first take.
    """
    add = spec.result == "add"
    lines = ["# epilogue, pixel by pixel", f"mov {field('limits')},%rax"]
    lines += [f"mov {field('factor')},%r8", f"mov {field('out')},%rdx"]
    lines += [f"mov {field('mask')},%r10", "popcnt %r10d,%r10d"]
    if add:
        lines += [f"mov {field('residual')},%rcx", f"mov {field('residual_factor')},%r9"]
        lines += [f"vpbroadcastd {limit('other_zero_point')},{OTHER_ZERO}"] * (not spec.residual_remainder)
    if spec.result == "rows":
        lines += [f"mov {field('row_scale')},%rcx", f"mov {field('row_bias')},%r9"]
    lines += [f"mov {field('remainder')},%rsi"] * spec.remainder
    lines += [f"mov {field('residual_remainder')},%rbx"] * spec.residual_remainder
    if spec.clamps_float:
        lines += [
            f"vbroadcastss {limit('convertible_low')},{LOW_HALF}",
            f"vbroadcastss {limit('convertible_high')},{HIGH_HALF}",
        ]
    together = 2 if spec.result in PACKED_RESULTS and not spec.remainder else 1
    for first in range(0, len(pixels), together):
        lines += _finished(spec, pixels[first : first + together])
    if waiting is not None:
        lines += [f"vmovdqu {memory},{sums}" for memory, sums in zip(waiting, pixels[0], strict=True)]
        lines += _finished(spec, pixels[:1])
    return lines


def _finished(spec: TileSpec, pixels: Sequence[Pair]) -> list[str]:
    """Return the lines that finish one pixel, or two whose results are quantized values."""
    lines = []
    for low, high in pixels:
        if spec.result == "rows":
            lines += [*_row_scaled(low, 0), *_row_scaled(high, 1), "add $4,%rcx"]
            continue
        lines += [*_scaled(spec, low, 0), *_scaled(spec, high, 1)]
        lines += [f"add {field('residual_pixel')},%rcx"] * (spec.result == "add")
        lines += [f"add {field('residual_remainder_pixel')},%rbx"] * spec.residual_remainder
    if spec.result not in PACKED_RESULTS:
        lines += _floats(*pixels[0])
    elif spec.remainder:
        lines += [*_remainders(spec, *pixels[0]), f"add {field('remainder_pixel')},%rsi"]
    elif len(pixels) == 1:
        lines += _quantized(spec, *pixels[0])
    else:
        lines += _quantized_pair(spec, *pixels)
    return [*lines, f"add {field('out_pixel')},%rdx"]


def _scaled(spec: TileSpec, sums: str, half: int) -> list[str]:
    """Return the lines for float32(acc) * factor (+ float32(q - zero point) * factor), clamped to the convertible
    range.

    16 channels of the residual operand are read regardless of the mask: the planner leaves 64 bytes after every buffer.
    """
    lines = [f"vcvtdq2ps {sums},{sums}", f"vmulps {32 * half}(%r8),{sums},{sums}"]
    if spec.result == "add":
        lines += [f"vpmovzxbd {8 * half}(%rcx),{SCRATCH}"]
        if spec.residual_remainder:  # 255 times the 8-bit value plus the remainder; the zero point has no free register
            lines += [
                f"vpslld $8,{SCRATCH},{OTHER_ZERO}",
                f"vpsubd {SCRATCH},{OTHER_ZERO},{SCRATCH}",
                f"vpmovzxbd {8 * half}(%rbx),{OTHER_ZERO}",
                f"vpaddd {OTHER_ZERO},{SCRATCH},{SCRATCH}",
                f"vpbroadcastd {limit('other_zero_point')},{OTHER_ZERO}",
            ]
        if spec.residual_remainder or not spec.saturates:
            lines += [f"vpsubd {OTHER_ZERO},{SCRATCH},{SCRATCH}"]
        lines += [
            f"vcvtdq2ps {SCRATCH},{SCRATCH}",
            f"vmulps {32 * half}(%r9),{SCRATCH},{SCRATCH}",
            f"vaddps {SCRATCH},{sums},{sums}",
        ]
    if spec.clamps_float:
        lines += [f"vmaxps {LOW_HALF},{sums},{sums}", f"vminps {HIGH_HALF},{sums},{sums}"]
    return lines


def _row_scaled(sums: str, half: int) -> list[str]:
    """Return the lines for (float32(acc) * scale of the row) * scale of the channel + bias."""
    lines = [f"vcvtdq2ps {sums},{sums}", f"vbroadcastss (%rcx),{SCRATCH}", f"vmulps {SCRATCH},{sums},{sums}"]
    return [*lines, f"vmulps {32 * half}(%r8),{sums},{sums}", f"vaddps {32 * half}(%r9),{sums},{sums}"]


def _words(spec: TileSpec, low: str, high: str) -> list[str]:
    """Return the lines that round and pack to 16 bits in the first register, with channels 4 to 7 behind 8 to 11."""
    lines = [f"vcvtps2dq {low},{low}", f"vcvtps2dq {high},{high}", f"vpackssdw {high},{low},{low}"]
    return lines + [f"vpaddsw {limit('zero_point16')},{low},{low}"] * (not spec.saturates)


def _clamped(spec: TileSpec, packed: str) -> list[str]:
    """Return the lines that clamp quantized values, unless saturation has done so."""
    bounds = (("max", "low8"), ("min", "high8")) if not spec.saturates else ()
    return [f"vp{which}ub {limit(bound)},{packed},{packed}" for which, bound in bounds]


def _quantized(spec: TileSpec, low: str, high: str) -> list[str]:
    """Return the lines that round, pack with saturation and store; the zero point is added to 16-bit lanes."""
    packed, upper = _xmm(low), _xmm(SCRATCH)
    lines = [*_words(spec, low, high), f"vpermq $0xd8,{low},{low}"]
    lines += [f"vextracti128 $1,{low},{upper}", f"vpackuswb {upper},{packed},{packed}", *_clamped(spec, packed)]
    return lines + _store_bytes(packed, "rdx")


def _quantized_pair(spec: TileSpec, first: Pair, second: Pair) -> list[str]:
    """Return the lines that pack two pixels into one register and store them."""
    packed, order = first
    lines = [*_words(spec, *first), *_words(spec, *second), f"vpackuswb {second[0]},{packed},{packed}"]
    lines += [f"vmovdqa intaglio_pixels(%rip),{order}", *_clamped(spec, packed), f"vpermd {packed},{order},{packed}"]
    lines += [f"vextracti128 $1,{packed},{_xmm(second[0])}", *_store_bytes(_xmm(packed), "rdx")]
    return [*lines, f"add {field('out_pixel')},%rdx", *_store_bytes(_xmm(second[0]), "rdx")]


def _remainders(spec: TileSpec, low: str, high: str) -> list[str]:
    """Return the lines that round to 16 bits, split, and store 8-bit values and remainders."""
    lines = [f"vpbroadcastd {limit('zero_point')},{SCRATCH}"] * (not spec.saturates)
    for half in (low, high):
        lines += [f"vcvtps2dq {half},{half}", *[f"vpaddd {SCRATCH},{half},{half}"] * (not spec.saturates)]
    lower = f"vpaddusw {limit('zero_point16')}" if spec.saturates else f"vpmaxuw {limit('low16')}"
    lines += [
        f"vpackusdw {high},{low},{low}",
        f"vpermq $0xd8,{low},{low}",
        f"{lower},{low},{low}",
        f"vpminuw {limit('high16')},{low},{low}",
        *split(low, high),
    ]
    for part, pointer in ((high, "rdx"), (low, "rsi")):
        lines += [f"vextracti128 $1,{part},{_xmm(SCRATCH)}", f"vpackuswb {_xmm(SCRATCH)},{_xmm(part)},{_xmm(part)}"]
        lines += _store_bytes(_xmm(part), pointer)
    return lines


def _store_bytes(packed: str, pointer: str) -> list[str]:
    """Return the lines that store 16 quantized values, or fewer in pieces, which changes the register."""
    pieces = [
        (8, [f"vmovq {packed},(%r11)", f"vpsrldq $8,{packed},{packed}"]),
        (4, [f"vmovd {packed},(%r11)", f"vpsrldq $4,{packed},{packed}"]),
        (2, [f"vpextrw $0,{packed},(%r11)", f"vpsrldq $2,{packed},{packed}"]),
        (1, [f"vpextrb $0,{packed},(%r11)"]),
    ]
    return _store([f"vmovdqu {packed},(%{pointer})"], pieces, 1, pointer)


def _floats(low: str, high: str) -> list[str]:
    """Return the lines that store 16 floats, or fewer in pieces."""
    tail = _xmm(low)
    pieces = [
        (8, [f"vmovups {low},(%r11)", f"vmovaps {high},{low}"]),
        (4, [f"vmovups {tail},(%r11)", f"vextractf128 $1,{low},{tail}"]),
        (2, [f"vmovlps {tail},(%r11)", f"vpsrldq $8,{tail},{tail}"]),
        (1, [f"vmovss {tail},(%r11)"]),
    ]
    return _store([f"vmovups {low},(%rdx)", f"vmovups {high},32(%rdx)"], pieces, 4)


def _store(full: list[str], pieces: list[tuple[int, list[str]]], item: int, pointer: str = "rdx") -> list[str]:
    """Return the lines that store 16 channels at a pointer, or exactly r10 channels in pieces of 8, 4, 2 and 1."""
    lines = ["test $16,%r10d", "jz 4f", *full, "jmp 9f", "4:", f"mov %{pointer},%r11"]
    for label, (channels, moves) in enumerate(pieces, start=5):
        lines += [f"test ${channels},%r10d", f"jz {label}f", *moves, f"add ${channels * item},%r11", f"{label}:"]
    return [*lines, "9:"]
