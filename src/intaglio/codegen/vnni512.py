"""AVX512-VNNI microkernels as assembly: accumulators in fixed registers, which g++ would spill.

One k step is ``blocks`` loads of weights, ``rows`` broadcasts of 4 activations, ``rows * blocks`` vpdpbusd.
Registers: zmm0.. weights, then broadcasts; the last ``rows * blocks`` are accumulators. rdi holds the `Tile`.
"""

from __future__ import annotations

from intaglio.codegen.tile import LIMITS_FIELDS, Isa, TileSpec, tile_offset

POINTERS = ("rax", "r8", "r9", "r10", "r11")
"""One per three rows; rbx is the distance between rows, r15 three times that."""
SAVED = ("rbx", "r12", "r13", "r14", "r15")
ADDRESSES = ("(%{})", "(%{},%rbx)", "(%{},%rbx,2)")

TALLEST = {1: 14, 2: 12, 3: 8, 4: 6}


def emit(spec: TileSpec) -> str:
    """The kernel as a top-level assembly statement and its declaration."""
    kernel = _Kernel(spec)
    lines = [*kernel.prologue(), *kernel.products(), *kernel.epilogue(), *kernel.leave()]
    body = "\n".join(f'    "{line}\\n"' for line in lines)
    name = spec.name
    head = f'    ".text\\n.p2align 6\\n.globl {name}\\n.hidden {name}\\n.type {name},@function\\n{name}:\\n"'
    return (
        f"// {spec.rows} pixels x {16 * spec.blocks} channels -> {spec.result}\n"
        f'extern "C" void {name}(const struct Tile*);\n__asm__(\n{head}\n{body}\n    ".size {name},.-{name}\\n");\n'
    )


def field(name: str) -> str:
    """Memory operand of a field of the tile."""
    return f"{tile_offset(name)}(%rdi)"


def limit(name: str) -> str:
    """Memory operand of a field of the limits, whose address is in rax."""
    return f"{LIMITS_FIELDS[name]}(%rax)"


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

    def prologue(self) -> list[str]:
        """Save registers, start every accumulator at the bias."""
        lines = [f"push %{register}" for register in SAVED]
        lines += [f"mov {field('bias')},%rax"]
        lines += [f"vmovdqu64 {64 * j}(%rax),{self.acc(0, j)}" for j in range(self.spec.blocks)]
        lines += [f"vmovdqa64 {self.acc(0, j)},{self.acc(i, j)}" for i, j in self.cells() if i]
        return [*lines, f"mov {field('a_pixel')},%rbx", "lea (%rbx,%rbx,2),%r15", f"mov {field('b')},%rsi",
                f"mov {field('a')},%r14", f"mov {field('tap_rows')},%r12"]  # fmt: skip

    def products(self) -> list[str]:
        """Rows of taps, taps of a row, steps of 4 channels."""
        first, *others = self.pointers
        lines = ["1:", "mov %r14,%rdx", f"mov {field('taps')},%r13", "2:", f"mov %rdx,%{first}"]
        lines += [f"lea (%{low},%r15),%{high}" for low, high in zip(self.pointers, others, strict=False)]
        lines += [f"mov {field('run')},%rcx", ".p2align 4", "3:"]
        lines += self.step()
        lines += [f"add $4,%{pointer}" for pointer in self.pointers]
        lines += [f"add ${64 * self.spec.blocks},%rsi", "dec %rcx", "jnz 3b"]
        lines += [f"add {field('a_tap')},%rdx", "dec %r13", "jnz 2b"]
        return [*lines, f"add {field('a_row')},%r14", "dec %r12", "jnz 1b"]

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

    def leave(self) -> list[str]:
        return ["vzeroupper", *[f"pop %{register}" for register in reversed(SAVED)], "ret"]


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


AVX512VNNI = Isa("avx512vnni", TALLEST, True, emit)
