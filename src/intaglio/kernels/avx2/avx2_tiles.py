"""AVX2 GEMM microkernels in assembly. They multiply 16-bit numbers, so no sum saturates as with vpmaddubsw.

Weights have the memory layout of AVX512-VNNI, four bytes of a channel in a dword. A dword is split in registers into
its even and odd bytes as two pairs of 16-bit numbers, activations by a mask and a shift, weights by arithmetic shifts;
vpmaddwd multiplies even by even and odd by odd. One step of 4 channels by 4 pixels by 16 outputs, 256 products, takes

    weights      2 loads, 6 shifts
    activations  4 broadcasts, 4 masks, 4 shifts
    products     16 vpmaddwd, 16 vpaddd

These are 52 instructions and 4 of the loop, or 14 per 64 products. Weights widened in memory would save 4 of the 52 and
made the loop 6% faster when measured, but a first-level cache holds only half as many of them.

Registers: ymm0..3 mask, activations and a product, ymm4..7 weights, then two accumulators per pixel.
"""

from __future__ import annotations

from intaglio.kernels.assembly import REMAINDER_CONSTANTS, family_text, field, limit, split, tap_loops, tile_function
from intaglio.kernels.instruction_set import Isa, KernelFamily
from intaglio.kernels.tile_spec import TileSpec

AVX2_MAX_TILE_ROWS = {1: 4}
AVX2_REGISTERS = """
AVX2, System V. rdi: struct Tile.
Products: rsi weights, rax activations, rbx bytes between pixels, r15 three times that, rdx a tap, r14 a row of taps;
rcx, r13, r12 count steps, taps, rows of taps. ymm0 mask of even bytes, ymm1 odd and ymm2 even activations, ymm3 a
product, ymm4-5 even and ymm6-7 odd weights, ymm8-15 two accumulators a pixel.
Epilogue: rax limits, rdx result, rcx residual operand, rsi, rbx their remainders, r10 channels to write. ymm0 scratch,
ymm1 zero point of the residual operand, ymm2-3 bounds, ymm4-5 factors, ymm6-7 factors of the residual operand.
"""
MASK, ODD_A, EVEN_A, PRODUCT = (f"%ymm{i}" for i in range(4))
EVEN_W, ODD_W = ("%ymm4", "%ymm5"), ("%ymm6", "%ymm7")
PIXEL_ADDRESSES = ("(%rax)", "(%rax,%rbx)", "(%rax,%rbx,2)", "(%rax,%r15)")

# The epilogue reuses these registers.
SCRATCH, OTHER_ZERO, LOW_HALF, HIGH_HALF = MASK, ODD_A, EVEN_A, PRODUCT
FACTOR, OTHER_FACTOR = EVEN_W, ODD_W
HALVES = (0, 1)


def emit(spec: TileSpec) -> str:
    """Return the text of one kernel."""
    return tile_function(spec, [*_biases(spec), *tap_loops(["mov %rdx,%rax"], _step(spec)), *_epilogue(spec)])


def acc(pixel: int, half: int) -> str:
    """Return the register with the accumulators of 8 channels."""
    return f"%ymm{8 + 2 * pixel + half}"


def xmm(register: str) -> str:
    """Return the lower half of a register."""
    return register.replace("ymm", "xmm")


def _biases(spec: TileSpec) -> list[str]:
    """Return the lines that initialize every accumulator with the bias and build the mask of even bytes."""
    lines = [
        "# accumulators start with the bias",
        f"vpcmpeqd {MASK},{MASK},{MASK}",
        f"vpsrlw $8,{MASK},{MASK}",
        f"mov {field('bias')},%rax",
    ]
    return lines + [f"vmovdqu {32 * half}(%rax),{acc(i, half)}" for i in range(spec.rows) for half in HALVES]


def _step(spec: TileSpec) -> list[str]:
    """Return the lines of one step: 4 input channels by all pixels by 16 outputs."""
    lines = []
    for half in HALVES:
        even, odd = EVEN_W[half], ODD_W[half]
        lines += [f"vmovdqu {32 * half}(%rsi),{odd}", f"vpsllw $8,{odd},{even}"]
        lines += [f"vpsraw $8,{odd},{odd}", f"vpsraw $8,{even},{even}"]
    for i in range(spec.rows):
        lines += [
            f"vpbroadcastd {PIXEL_ADDRESSES[i]},{ODD_A}",
            f"vpand {MASK},{ODD_A},{EVEN_A}",
            f"vpsrlw $8,{ODD_A},{ODD_A}",
        ]
        for weights, activations in ((EVEN_W, EVEN_A), (ODD_W, ODD_A)):
            lines += [f"vpmaddwd {weights[0]},{activations},{PRODUCT}", f"vpaddd {PRODUCT},{acc(i, 0)},{acc(i, 0)}"]
            lines += [f"vpmaddwd {weights[1]},{activations},{activations}"]
            lines += [f"vpaddd {activations},{acc(i, 1)},{acc(i, 1)}"]
    return [*lines, "add $4,%rax", "add $64,%rsi"]


def _epilogue(spec: TileSpec) -> list[str]:
    """Return the lines that load the factors and then finish pixel by pixel. r10 holds the number of channels."""
    add = spec.result == "add"
    lines = ["# epilogue: factors, then pixel by pixel", f"mov {field('limits')},%rax"]
    lines += [f"mov {field('factor')},%r8", f"mov {field('out')},%rdx"]
    lines += [f"mov {field('mask')},%r10", "popcnt %r10d,%r10d"]
    lines += [f"vmovups {32 * half}(%r8),{FACTOR[half]}" for half in HALVES]
    if add:
        lines += [f"mov {field('residual')},%rcx", f"mov {field('residual_factor')},%r9"]
        lines += [f"vmovups {32 * half}(%r9),{OTHER_FACTOR[half]}" for half in HALVES]
        lines += [f"vpbroadcastd {limit('other_zero_point')},{OTHER_ZERO}"] * (not spec.residual_remainder)
    lines += [f"mov {field('remainder')},%rsi"] * spec.remainder
    lines += [f"mov {field('residual_remainder')},%rbx"] * spec.residual_remainder
    if spec.clamps_float:
        lines += [
            f"vbroadcastss {limit('convertible_low')},{LOW_HALF}",
            f"vbroadcastss {limit('convertible_high')},{HIGH_HALF}",
        ]
    for i in range(spec.rows):
        for half in HALVES:
            lines += _scaled(spec, i, half)
        lines += _floats(i) if spec.result == "f32" else _remainders(i) if spec.remainder else _quantized(i)
        lines += [f"add {field('out_pixel')},%rdx"]
        lines += [f"add {field('residual_pixel')},%rcx"] if add else []
        lines += [f"add {field('remainder_pixel')},%rsi"] * spec.remainder
        lines += [f"add {field('residual_remainder_pixel')},%rbx"] * spec.residual_remainder
    return lines


def _scaled(spec: TileSpec, i: int, half: int) -> list[str]:
    """Return the lines for float32(acc) * factor (+ float32(q - zero point) * factor), clamped to the convertible
    range.

    16 channels of the residual operand are read regardless of the mask: the planner leaves 64 bytes after every buffer.
    """
    sums = acc(i, half)
    lines = [f"vcvtdq2ps {sums},{sums}", f"vmulps {FACTOR[half]},{sums},{sums}"]
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
        lines += [
            f"vpsubd {OTHER_ZERO},{SCRATCH},{SCRATCH}",
            f"vcvtdq2ps {SCRATCH},{SCRATCH}",
            f"vmulps {OTHER_FACTOR[half]},{SCRATCH},{SCRATCH}",
            f"vaddps {SCRATCH},{sums},{sums}",
        ]
    if spec.clamps_float:
        lines += [f"vmaxps {LOW_HALF},{sums},{sums}", f"vminps {HIGH_HALF},{sums},{sums}"]
    return lines


def _quantized(i: int) -> list[str]:
    """Return the lines that round, pack with saturation and store; the zero point is added to 16-bit lanes."""
    low, high = acc(i, 0), acc(i, 1)
    packed, upper = xmm(low), xmm(SCRATCH)
    lines = [
        f"vcvtps2dq {low},{low}",
        f"vcvtps2dq {high},{high}",
        f"vpackssdw {high},{low},{low}",
        f"vpermq $0xd8,{low},{low}",
        f"vpaddsw {limit('zero_point16')},{low},{low}",
        f"vextracti128 $1,{low},{upper}",
        f"vpackuswb {upper},{packed},{packed}",
        f"vpmaxub {limit('low8')},{packed},{packed}",
        f"vpminub {limit('high8')},{packed},{packed}",
    ]
    return lines + _store_bytes(packed, "rdx")


def _remainders(i: int) -> list[str]:
    """Return the lines that round to 16 bits, split, and store 8-bit values and remainders."""
    low, high = acc(i, 0), acc(i, 1)
    lines = [f"vpbroadcastd {limit('zero_point')},{SCRATCH}"]
    lines += [line for half in (low, high) for line in (f"vcvtps2dq {half},{half}", f"vpaddd {SCRATCH},{half},{half}")]
    lines += [
        f"vpackusdw {high},{low},{low}",
        f"vpermq $0xd8,{low},{low}",
        f"vpmaxuw {limit('low16')},{low},{low}",
        f"vpminuw {limit('high16')},{low},{low}",
        *split(low, high),
    ]
    for part, pointer in ((high, "rdx"), (low, "rsi")):
        lines += [f"vextracti128 $1,{part},{xmm(SCRATCH)}", f"vpackuswb {xmm(SCRATCH)},{xmm(part)},{xmm(part)}"]
        lines += _store_bytes(xmm(part), pointer)
    return lines


def _store_bytes(packed: str, pointer: str) -> list[str]:
    """Return the lines that store 16 quantized values, or fewer in pieces."""
    pieces = [
        (8, [f"vmovq {packed},(%r11)", f"vpsrldq $8,{packed},{packed}"]),
        (4, [f"vmovd {packed},(%r11)", f"vpsrldq $4,{packed},{packed}"]),
        (2, [f"vpextrw $0,{packed},(%r11)", f"vpsrldq $2,{packed},{packed}"]),
        (1, [f"vpextrb $0,{packed},(%r11)"]),
    ]
    return _store([f"vmovdqu {packed},(%{pointer})"], pieces, 1, pointer)


def _floats(i: int) -> list[str]:
    """Return the lines that store 16 floats, or fewer in pieces."""
    low, high = acc(i, 0), acc(i, 1)
    tail = xmm(low)
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


def join(family: KernelFamily, texts: list[str]) -> str:
    """Return the text of a family."""
    return family_text(family, texts, AVX2_REGISTERS, REMAINDER_CONSTANTS)


AVX2 = Isa("avx2", AVX2_MAX_TILE_ROWS, False, ".s", emit, join)
