"""AVX512-VNNI microkernels as assembly: accumulators in fixed registers, which g++ would spill.

One k step is ``blocks`` loads of weights, ``rows`` broadcasts of 4 activations, ``rows * blocks`` vpdpbusd.
Registers: zmm0.. weights, then broadcasts; the last ``rows * blocks`` are accumulators.
"""

from __future__ import annotations

from intaglio.codegen import depthwise512
from intaglio.codegen.assembly import LEAVE, SAVE, field, function, limit, tap_loops
from intaglio.codegen.tile import Isa, TileSpec

POINTERS = ("rax", "r8", "r9", "r10", "r11")
"""One per three rows."""
ADDRESSES = ("(%{})", "(%{},%rbx)", "(%{},%rbx,2)")

TALLEST = {1: 14, 2: 12, 3: 8, 4: 6}


def emit(spec: TileSpec) -> str:
    """The kernel as a top-level assembly statement and its declaration."""
    kernel = _Kernel(spec)
    return function(spec, [*SAVE, *kernel.biases(), *kernel.products(), *kernel.epilogue(), *LEAVE])


class _Kernel:
    def __init__(self, spec: TileSpec) -> None:
        self.spec = spec
        self.first = 32 - spec.rows * spec.blocks
        self.spare = min(self.first - spec.blocks, 4)
        self.pointers = POINTERS[: -(-spec.rows // 3)]

    def acc(self, row: int, block: int) -> str:
        return f"%zmm{self.first + row * self.spec.blocks + block}"

    def cells(self):
        return [(i, j) for i in range(self.spec.rows) for j in range(self.spec.blocks)]

    def biases(self) -> list[str]:
        """Where every accumulator starts."""
        lines = [f"mov {field('bias')},%rax"]
        lines += [f"vmovdqu64 {64 * j}(%rax),{self.acc(0, j)}" for j in range(self.spec.blocks)]
        return lines + [f"vmovdqa64 {self.acc(0, j)},{self.acc(i, j)}" for i, j in self.cells() if i]

    def products(self) -> list[str]:
        first, *others = self.pointers
        start = [f"mov %rdx,%{first}"]
        start += [f"lea (%{low},%r15),%{high}" for low, high in zip(self.pointers, others, strict=False)]
        moves = [*(f"add $4,%{pointer}" for pointer in self.pointers), f"add ${64 * self.spec.blocks},%rsi"]
        return tap_loops(start, [*self.step(), *moves])

    def step(self) -> list[str]:
        blocks = self.spec.blocks
        lines = [f"vmovdqu64 {64 * j}(%rsi),%zmm{j}" for j in range(blocks)]
        for i in range(self.spec.rows):
            spread = f"%zmm{blocks + i % self.spare}"
            lines.append(f"vpbroadcastd {ADDRESSES[i % 3].format(self.pointers[i // 3])},{spread}")
            lines += [f"vpdpbusd %zmm{j},{spread},{self.acc(i, j)}" for j in range(blocks)]
        return lines

    def epilogue(self) -> list[str]:
        lines = [f"mov {field('limits')},%rax", f"mov {field('factor')},%r8", f"mov {field('out')},%rdx"]
        if self.spec.result == "add":
            lines += [f"mov {field('other')},%rcx", f"mov {field('other_factor')},%r9"]
        lines += [f"vmovups {64 * j}(%r8),%zmm{j}" for j in range(self.spec.blocks)]
        if self.spec.packed:
            lines += ["lea intaglio_spread(%rip),%r10"] if self.spec.result == "add" else []
        else:
            lines += [f"mov {field('mask')},%r10", "kmovw %r10d,%k1"]
        for i in range(self.spec.rows):
            lines += self.packed_row(i) if self.spec.packed else self.plain_row(i)
            lines.append(f"add {field('out_pixel')},%rdx")
            lines += [f"add {field('other_pixel')},%rcx"] if self.spec.result == "add" else []
        return lines

    def scaled(self, i: int, j: int, residual: list[str]) -> list[str]:
        """float32(acc) * factor (+ residual), clamped to what converts, then rounded."""
        acc = self.acc(i, j)
        lines = [f"vcvtdq2ps {acc},{acc}", f"vmulps %zmm{j},{acc},{acc}", *residual]
        if self.spec.guard:
            lines += [f"vmaxps {limit('convertible_low')}{{1to16}},{acc},{acc}",
                      f"vminps {limit('convertible_high')}{{1to16}},{acc},{acc}"]  # fmt: skip
        return [*lines, f"vcvtps2dq {acc},{acc}"]

    def residual(self, i: int, j: int, load: str, temporary: str) -> list[str]:
        """float32(q - zero point) * factor, added to the accumulator."""
        acc = self.acc(i, j)
        return [load, f"vpsubd {limit('other_zero_point')}{{1to16}},{temporary},{temporary}",
                f"vcvtdq2ps {temporary},{temporary}", f"vmulps {64 * j}(%r9),{temporary},{temporary}",
                f"vaddps {temporary},{acc},{acc}"]  # fmt: skip

    def packed_row(self, i: int) -> list[str]:
        """64 channels: pack twice with saturation, the zero point added on 16-bit lanes between; one store."""
        lines, temporary = [], "%zmm5"
        if self.spec.result == "add":
            lines.append("vmovdqu64 (%rcx),%zmm4")
        for j in range(4):
            load = f"vpshufb {64 * j}(%r10),%zmm4,{temporary}"
            lines += self.scaled(i, j, self.residual(i, j, load, temporary) if self.spec.result == "add" else [])
        a, b, c, d = (self.acc(i, j) for j in range(4))
        return [*lines, f"vpackssdw {b},{a},{a}", f"vpackssdw {d},{c},{c}",
                f"vpaddsw {limit('zero_point16')},{a},{a}", f"vpaddsw {limit('zero_point16')},{c},{c}",
                f"vpackuswb {c},{a},{a}", f"vpmaxub {limit('low8')},{a},{a}", f"vpminub {limit('high8')},{a},{a}",
                f"vmovdqu64 {a},(%rdx)"]  # fmt: skip

    def plain_row(self, i: int) -> list[str]:
        """Blocks of 16 channels in order; the last one under the mask."""
        lines, temporary = [], f"%zmm{self.spec.blocks}"
        for j in range(self.spec.blocks):
            acc, last = self.acc(i, j), j == self.spec.blocks - 1
            mask, zeroed = ("{%k1}", "{%k1}{z}") if last else ("", "")
            if self.spec.result == "f32":
                lines += [f"vcvtdq2ps {acc},{acc}", f"vmulps %zmm{j},{acc},{acc}"]
                lines += [f"vmovups {acc},{64 * j}(%rdx){mask}"]
                continue
            load = f"vpmovzxbd {16 * j}(%rcx),{temporary}{zeroed}"
            lines += self.scaled(i, j, self.residual(i, j, load, temporary) if self.spec.result == "add" else [])
            for operation, name in (("vpaddd", "zero_point"), ("vpmaxsd", "low"), ("vpminsd", "high")):
                lines.append(f"{operation} {limit(name)}{{1to16}},{acc},{acc}")
            lines.append(f"vpmovdb {acc},{16 * j}(%rdx){mask}")
        return lines


def spread_table() -> str:
    """Shuffle controls that spread byte ``4j + t`` of each 128-bit lane into dword t, for j = 0..3."""
    rows = []
    for j in range(4):
        lane = [value for t in range(4) for value in (4 * j + t, 128, 128, 128)]
        rows.append('    ".byte ' + ",".join(map(str, lane * 4)) + '\\n"')
    return (
        '__asm__(\n    ".section .rodata\\n.p2align 6\\n.hidden intaglio_spread\\nintaglio_spread:\\n"\n'
        + "\n".join(rows) + '\n    ".text\\n");\n'
    )  # fmt: skip


AVX512VNNI = Isa("avx512vnni", TALLEST, True, emit, spread_table(), depthwise512.emit)
