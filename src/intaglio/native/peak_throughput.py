"""Measurement of peak throughput: multiply-accumulates on registers and memory reads per second."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from intaglio.native import cpu as machine
from intaglio.native.compile import build, load

REPEATS = 5
PEAK_SECONDS = 0.02
"""Approximate duration of one repeat of the measurement in seconds."""
SMALLEST_READ, LARGEST_READ = 64 << 20, 1 << 30
SLICE_BYTES = 8 << 20
"""Minimum number of bytes that each core reads when all read in parallel; more than its own caches hold."""


Counter = Callable[[float], float]
"""Runs a probe for about the given number of seconds and returns G multiply-accumulates per second of the calling
thread.
"""


@dataclass(frozen=True)
class Probe:
    """Loop of multiply-accumulate instructions on registers, which measures peak throughput.

    Its chains are independent, and there are more of them than latency times issue width, so that the units never wait.

    Attributes:
        kind: ``int8`` or ``fp32``.
        isa: Instruction set that the loop belongs to.
        instruction: Instruction shown in reports.
        flags: CPU flags that the loop needs.
        registers: Registers that the loop clobbers.
        body: Instructions of one round.
        macs: Multiply-accumulates of one round.
        before: Instructions in front of the loop, whose second operand is the configuration of tile registers.
        after: Instructions behind the loop.
    """

    kind: str
    isa: str
    instruction: str
    flags: frozenset[str]
    registers: tuple[str, ...]
    body: tuple[str, ...]
    macs: int
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ("vzeroupper",)


def _tiles() -> tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...], tuple[str, ...]]:
    """Return registers, instructions and multiply-accumulates of a loop of AMX, and the instructions around it."""
    body = tuple(f"tdpbusd %%tmm7, %%tmm6, %%tmm{index}" for index in range(6))
    return (), body, 6 * 16 * 16 * 64, ("ldtilecfg %1",), ("tilerelease",)


def _zmm(name: str, macs: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return registers, instructions and multiply-accumulates of a loop of one AVX-512 instruction."""
    chains = 24
    registers = tuple(f"%%zmm{index}" for index in (*range(chains), 30, 31))
    return registers, tuple(f"{name} %%zmm30, %%zmm31, %%zmm{index}" for index in range(chains)), chains * macs


def _ymm_fma() -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return registers, instructions and multiply-accumulates of a loop of AVX2 fused multiply-adds."""
    registers = tuple(f"%%ymm{index}" for index in (*range(12), 14, 15))
    return registers, tuple(f"vfmadd231ps %%ymm14, %%ymm15, %%ymm{index}" for index in range(12)), 12 * 8


def _ymm_dots() -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return registers, instructions and multiply-accumulates of a loop of AVX-VNNI's vpdpbusd."""
    registers = tuple(f"%%ymm{index}" for index in (*range(12), 14, 15))
    return registers, tuple(f"%{{vex%}} vpdpbusd %%ymm14, %%ymm15, %%ymm{index}" for index in range(12)), 12 * 32


def _ymm_pairs() -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return registers, instructions and multiply-accumulates of a loop of vpmaddwd, AVX2's exact multiply-add for
    int8.

    It multiplies 16-bit numbers and adds the products in pairs.
    """
    body = []
    for index in range(8):
        product = f"%%ymm{8 + index % 4}"
        body += [f"vpmaddwd %%ymm14, %%ymm15, {product}", f"vpaddd {product}, %%ymm{index}, %%ymm{index}"]
    return tuple(f"%%ymm{index}" for index in (*range(12), 14, 15)), tuple(body), 8 * 16


PROBES = (
    Probe("int8", "amx_int8", "tdpbusd", frozenset({"amx_int8"}), *_tiles()),
    Probe("int8", "avx512vnni", "vpdpbusd", frozenset({"avx512_vnni"}), *_zmm("vpdpbusd", 64)),
    Probe("int8", "avxvnni", "vpdpbusd ymm", frozenset({"avx_vnni"}), *_ymm_dots()),
    Probe("int8", "avx2", "vpmaddwd", frozenset({"avx2"}), *_ymm_pairs()),
    Probe("fp32", "avx512vnni", "vfmadd231ps zmm", frozenset({"avx512f"}), *_zmm("vfmadd231ps", 16)),
    Probe("fp32", "avx2", "vfmadd231ps ymm", frozenset({"fma"}), *_ymm_fma()),
)
"""All probes, best first; the first of each kind that this CPU supports is measured."""

PEAK_SOURCE = """\
#include <time.h>

#define PUBLIC extern "C" __attribute__((visibility("default")))

// Eight tile registers of 16 rows of 64 bytes.
static const unsigned char tile_shapes[64] = {1,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,
                                              64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0, 64, 0,
                                              0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0, 0,  0,
                                              16, 16, 16, 16, 16, 16, 16, 16};

static double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

PUBLIC double intaglio_read(const unsigned long* words, long count) {
    const double start = seconds();
    unsigned long sum = 0;
    for (long i = 0; i < count; ++i) sum += words[i];
    __asm__ volatile("" : : "r"(sum));
    return seconds() - start;
}
"""

PEAK_LOOP = """
PUBLIC double intaglio_%s(long rounds) {
    const double start = seconds();
    __asm__ volatile(
%s
        : "+r"(rounds) : "m"(tile_shapes) : %s);
    return seconds() - start;
}
"""


def best_probes() -> dict[str, Probe]:
    """Return the best supported probe of each kind; kinds without one are missing."""
    return {probe.kind: probe for probe in reversed(_supported_probes())}


def _supported_probes() -> list[Probe]:
    """Return the probes that this CPU supports, best first."""
    try:
        flags = machine.read_flags(machine.CPUINFO.read_text())
    except OSError:
        return []
    return [probe for probe in PROBES if probe.isa in machine.isas() and probe.flags <= flags]


def probe_source(probes: dict[str, Probe]) -> str:
    """Return the C++ source of the given probes."""
    return PEAK_SOURCE + "".join(_loop(probe) for probe in probes.values())


def _loop(probe: Probe) -> str:
    """Return the C++ function of one probe."""
    clear = [f"vpxor{'d' * ('zmm' in name)} {name}, {name}, {name}" for name in probe.registers]
    lines = [*clear, *probe.before, "1:", *probe.body, "dec %0", "jnz 1b", *probe.after]
    text = "\n".join(f'        "{line}\\n\\t"' for line in lines)
    clobbers = ", ".join(['"cc"', *(f'"xmm{name[5:]}"' for name in probe.registers)])
    return PEAK_LOOP % (probe.kind, text, clobbers)


def measure(cores: int) -> dict[str, Any]:
    """Return for each kind the rate of one core alone, and of the slowest core when all work in parallel.

    Raises:
        BuildError: The probes cannot be compiled.
    """
    probes, result = best_probes(), dict[str, Any]({"int8": None, "fp32": None})
    library = _library_of(probes)
    for kind, probe in probes.items():
        count = _rate_counter(library, probe)
        result[kind] = {
            "with": probe.instruction,
            **_rates(lambda *_, count=count: _best_rate(count, PEAK_SECONDS), cores),
        }
    result["memory"] = {"with": "one stream a core", **_rates(_read_rate(library, cores), cores)}
    return result


def read_rates(cores: int, smallest: int = SMALLEST_READ) -> dict[str, float]:
    """Return how many GB a second one core alone reads, and the slowest core when all read in parallel.

    Args:
        cores: Number of cores.
        smallest: Smallest number of bytes of the array that they read.

    Raises:
        BuildError: The probes cannot be compiled.
    """
    return _rates(_read_rate(_library_of(best_probes()), cores, smallest), cores)


def _library_of(probes: dict[str, Probe]) -> Any:
    """Return the compiled probes."""
    isa = next(iter(probes.values())).isa if probes else machine.IsaName.PORTABLE.value
    return load(build(probe_source(probes), name="doctor", isa=isa))


def int8_rates(isa: str, threads: int, seconds: float = PEAK_SECONDS) -> list[float]:
    """Return the int8 peak of each of ``threads`` parallel threads in G multiply-accumulates per second.

    Each rate is the best of some repeats of about ``seconds`` each with the instructions of ``isa``. The list is empty
    if `int8_counter` returns ``None``.
    """
    count = int8_counter(isa)
    if count is None:
        return []
    with ThreadPoolExecutor(threads) as pool:  # the calls release the interpreter's lock
        return list(pool.map(lambda _: _best_rate(count, seconds), range(threads)))


@cache
def int8_counter(isa: str) -> Counter | None:
    """Return the int8 counter of one instruction set; ``None`` without a probe for it that this CPU supports.

    Raises:
        BuildError: The probe cannot be compiled.
    """
    found = [probe for probe in _supported_probes() if (probe.kind, probe.isa) == ("int8", isa)]
    return (
        _rate_counter(load(build(probe_source({"int8": found[0]}), name="limit", isa=isa)), found[0]) if found else None
    )


def _rate_counter(library: Any, probe: Probe) -> Counter:
    """Return a counter that runs as many rounds of a probe as fill the given time."""
    function = getattr(library, f"intaglio_{probe.kind}")
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_long,)
    trial = 10_000
    per_round = min(function(trial) for _ in range(3)) / trial

    def count(seconds: float) -> float:
        rounds = max(int(seconds / max(per_round, 1e-12)), trial)
        return rounds * probe.macs / function(rounds) / 1e9

    return count


def _best_rate(count: Counter, seconds: float) -> float:
    """Return the best rate of some repeats."""
    return max(count(seconds) for _ in range(REPEATS))


def _read_rate(library: Any, cores: int, smallest: int = SMALLEST_READ) -> Callable[[int, int], float]:
    """Return a function that measures the GB per second a thread reads from its slice of an array.

    The array is larger than the caches.
    """
    function = library.intaglio_read
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_long)
    size = min(max(smallest, 2 * machine.caches().l3, cores * SLICE_BYTES), LARGEST_READ)
    words = np.ones(size // 8, np.uint64)

    def rate(core: int, sharing: int) -> float:
        count = len(words) // sharing
        start = words[core * count :].ctypes.data
        return max(8 * count / function(start, count) for _ in range(REPEATS)) / 1e9

    return rate


def _rates(rate: Callable[[int, int], float], cores: int) -> dict[str, float]:
    """Return ``rate(core, active cores)`` of one core alone, and of the slowest core when all work in parallel."""
    alone = rate(0, 1)
    with ThreadPoolExecutor(cores) as pool:  # the calls release the interpreter's lock
        return {"one_core": alone, "each_of_all": min(pool.map(lambda core: rate(core, cores), range(cores)))}
