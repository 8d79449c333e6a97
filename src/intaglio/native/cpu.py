"""CPU features of this machine: supported instruction sets, best first, and cache sizes."""

from __future__ import annotations

import ctypes
import platform
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

CPUINFO = Path("/proc/cpuinfo")
CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")


class IsaName(StrEnum):
    """Instruction sets that kernels exist for, best first."""

    AMX_INT8 = "amx_int8"
    AVX512VNNI = "avx512vnni"
    AVXVNNI = "avxvnni"
    AVX2 = "avx2"
    NEON_I8MM = "neon_i8mm"
    NEON_DOT = "neon_dot"
    PORTABLE = "portable"


AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    IsaName.AMX_INT8.value: (*AVX512_FLAGS, "-mamx-tile", "-mamx-int8"),
    IsaName.AVX512VNNI.value: AVX512_FLAGS,
    IsaName.AVXVNNI.value: ("-mavx2", "-mf16c", "-mavxvnni"),
    IsaName.AVX2.value: ("-mavx2", "-mf16c"),
    IsaName.NEON_I8MM.value: ("-march=armv8.2-a+dotprod+i8mm",),
    IsaName.NEON_DOT.value: ("-march=armv8.2-a+dotprod",),
    IsaName.PORTABLE.value: (),
}
"""Compiler flags per instruction set, best first. They never depend on the machine that compiles (no
``-march=native``).
"""

AVX512_CPU = frozenset({"avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})

CPU_FLAGS: dict[str, frozenset[str]] = {
    IsaName.AMX_INT8.value: AVX512_CPU | {"amx_tile", "amx_int8"},
    IsaName.AVX512VNNI.value: AVX512_CPU,
    IsaName.AVXVNNI.value: frozenset({"avx2", "f16c", "avx_vnni"}),
    IsaName.AVX2.value: frozenset({"avx2", "f16c"}),
    IsaName.NEON_I8MM.value: frozenset({"asimddp", "i8mm"}),
    IsaName.NEON_DOT.value: frozenset({"asimddp"}),
    IsaName.PORTABLE.value: frozenset(),
}
"""Flags that /proc/cpuinfo must list for each instruction set."""

AARCH64 = frozenset({IsaName.NEON_I8MM.value, IsaName.NEON_DOT.value})
"""Instruction sets of 64-bit ARM processors; all others but the portable one are those of x86-64."""


ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18
"""Number of a system call of x86-64 Linux, its request for registers that a process does not have at its start, and the
number of the registers of AMX."""


class Caches(NamedTuple):
    """Sizes in bytes of a core's first- and second-level data caches and of the shared last-level cache."""

    l1: int
    l2: int
    l3: int


TYPICAL_CACHES = Caches(32 << 10, 1 << 20, 16 << 20)
"""Sizes assumed where the system does not report them, as in some containers."""


def read_flags(text: str) -> frozenset[str]:
    """Return the CPU flags of the first processor in the text of /proc/cpuinfo."""
    for line in text.splitlines():
        if line.startswith(("flags", "Features")):  # the latter on AArch64
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def supported(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the instruction sets that these CPU flags allow, best first; the last is always "portable"."""
    return tuple(isa for isa, needed in CPU_FLAGS.items() if needed <= flags)


def isas_of_architecture() -> tuple[str, ...]:
    """Return the instruction sets that processors of this machine's architecture may have, best first."""
    arm = platform.machine() == "aarch64"
    return tuple(isa for isa in CPU_FLAGS if isa == IsaName.PORTABLE or (isa in AARCH64) == arm)


@cache
def isas() -> tuple[str, ...]:
    """Return the instruction sets that this CPU supports, best first; the last is always "portable"."""
    try:
        found = supported(read_flags(CPUINFO.read_text()))
    except OSError:
        return (IsaName.PORTABLE.value,)
    return tuple(isa for isa in found if isa != IsaName.AMX_INT8 or may_use_tiles())


def may_use_tiles() -> bool:
    """Ask the system for the tile registers of AMX and return whether all threads of this process may use them."""
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA) == 0


@cache
def cpu_name() -> str:
    """Return the processor's model name from /proc/cpuinfo, or "unknown"."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@cache
def caches() -> Caches:
    """Return the cache sizes of this machine in bytes; sizes that the system does not report are `TYPICAL_CACHES`."""
    found = {level: size for level, size in map(_cache, CACHE_FOLDER.glob("index*")) if size}
    return Caches(*(found.get(level, typical) for level, typical in enumerate(TYPICAL_CACHES, start=1)))


def _cache(folder: Path) -> tuple[int, int]:
    """Return (level, bytes) of one sysfs cache entry; 0 bytes for instruction caches and unreadable entries."""
    try:
        kind, level, size = ((folder / name).read_text().strip() for name in ("type", "level", "size"))
        return int(level), 0 if kind == "Instruction" else _bytes(size)
    except (OSError, ValueError):
        return 0, 0


def _bytes(size: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    return int(size[:-1]) << units[size[-1]] if size[-1:] in units else int(size)
