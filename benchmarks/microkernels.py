"""Every microkernel of an instruction set alone, against the measured peak: how much of it each tile reaches.

    python benchmarks/microkernels.py                          the best instruction set of this CPU
    python benchmarks/microkernels.py --isa avx2 --only "tile_4x1_u8"
    python benchmarks/microkernels.py --only "depthwise*"

One thread; inputs, weights and results stay in the first two levels of cache. A kernel is called as programs call it,
through `matmul` and `depthwise` of the library, for sums over --bytes activations. Blocks of it and of the loop on
registers that gives the peak take turns; the best block of each counts. A cycle is a third of the time of a dependent
multiplication of integers, measured in the same turns.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import record
from rich.console import Console
from rich.table import Table

from intaglio.codegen.context import limits
from intaglio.codegen.emitters.emit_depthwise import pack_depthwise
from intaglio.kernels import ISAS, DepthwiseSpec, Isa, TileSpec, depthwise_tiles
from intaglio.kernels.kernel_units import kernel_units
from intaglio.kernels.tile_spec import PACKED_RESULTS
from intaglio.native.compile import build, load
from intaglio.native.cpu import isas
from intaglio.native.peak_throughput import int8_counter
from intaglio.plan.scheduling.kernel_selection import cheapest_depthwise_tile

TAPS, STRIDES = (3, 5, 7), (1, 2)
"""Of the depthwise kernels that are timed: the tallest tile of each."""
CHANNELS = 64
"""Of a depthwise block."""
INPUT_BYTES = 128 << 10
"""Of activations a call reads at most, so that they and as many weights fit the second level."""
MOST_TILES = 32
BLOCK_SECONDS = 0.001
"""Of one block."""

SOURCE = """
#define PUBLIC extern "C" __attribute__((visibility("default")))

static double seconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

// Dependent multiplications of 64-bit integers take three cycles each on every x86-64 of the last ten years.
PUBLIC double kernels_multiply(int64_t count) {
    uint64_t value = 3;
    const double start = seconds();
    for (int64_t i = 0; i < count; i += 8)
        __asm__ volatile("imul %0, %0; imul %0, %0; imul %0, %0; imul %0, %0;"
                         "imul %0, %0; imul %0, %0; imul %0, %0; imul %0, %0" : "+r"(value));
    return seconds() - start;
}

// One panel of channels over one line of pixels, of `bytes` activations each; `size` pixels by channels are a tile.
PUBLIC double kernels_matmul(int64_t kernel, const int64_t* v, int64_t calls) {
    const int64_t pixels = v[0], channels = v[1], bytes = v[2], item = v[3], rows = v[4], pixel = v[16];
    struct Matmul m = {};
    m.in = image((uint8_t*)v[5], 1, 1, pixels, pixel, 0, 0);
    m.out = image((uint8_t*)v[6], 1, 1, pixels, channels * item, 0, 0);
    m.stride_y = m.stride_x = m.panels = m.flat = 1;
    m.blocks = channels / 16, m.out_bytes = item, m.rows = rows, m.chunk_bytes = 1 << 20;
    m.mask = m.last_mask = channels < 64 ? (1ll << channels) - 1 : -1;
    m.kernels = m.last_kernels = tile_tables[kernel];
    m.tile.a_pixel = pixel, m.tile.tap_rows = m.tile.taps = 1, m.tile.run = bytes / 4;
    m.tile.b = (const int8_t*)v[7], m.tile.bias = (const int32_t*)v[8], m.tile.factor = (const float*)v[9];
    m.tile.limits = (const struct Limits*)v[10], m.tile.out_pixel = channels * item;
    m.tile.table = (const uint8_t*)v[12];
    m.tile.row_scale = (const float*)v[15], m.tile.row_bias = m.tile.factor;
    if (v[11]) {
        m.residual = image((uint8_t*)v[11], 1, 1, pixels, channels, 0, 0);
        m.tile.residual_pixel = channels, m.tile.residual_factor = (const float*)v[9];
    }
    if (v[13]) m.remainder = image((uint8_t*)v[13], 1, 1, pixels, channels, 0, 0), m.tile.remainder_pixel = channels;
    if (v[14]) {
        m.residual_remainder = image((uint8_t*)v[14], 1, 1, pixels, channels, 0, 0);
        m.tile.residual_remainder_pixel = channels;
    }
    const double start = seconds();
    for (int64_t i = 0; i < calls; ++i) matmul(&m, 0, 1);
    return seconds() - start;
}

// One block of channels over an image of `height` by `width` results.
PUBLIC double kernels_depthwise(int64_t kernel, const int64_t* v, int64_t calls) {
    const int64_t height = v[0], width = v[1], channels = v[2], stride = v[3], taps = v[4], rows = v[5], columns = v[6];
    struct Depthwise d = {};
    d.in = image((uint8_t*)v[7], 1, (height - 1) * stride + taps, (width - 1) * stride + taps, channels, 0, 0);
    d.out = image((uint8_t*)v[8], 1, height, width, channels, 0, 0);
    d.stride_y = d.stride_x = stride, d.dilation_y = d.blocks = 1, d.rows = rows, d.columns = columns;
    d.kernels = d.last_kernels = depthwise_tables[kernel], d.last_mask = d.tile.mask = ~0ull;
    d.tile.weights = (const int8_t*)v[9], d.tile.bias = (const int32_t*)v[10], d.tile.factor = (const float*)v[11];
    d.tile.limits = (const struct Limits*)v[12], d.tile.table = (const uint8_t*)v[13];
    const double start = seconds();
    for (int64_t i = 0; i < calls; ++i) depthwise(&d, 0, 1);
    return seconds() - start;
}
"""

Timer = Callable[[int], float]
"""Calls -> seconds they took."""


class Memory:
    """Arrays that C++ reads by address, kept while they are needed. Random, so that no value is a special case."""

    def __init__(self) -> None:
        self._draw, self._kept = np.random.default_rng(0), list[np.ndarray]()

    def random(self, size: int, kind: type[np.generic], low: int, high: int) -> int:
        return self.hold(self._draw.integers(low, high, size).astype(kind))

    def hold(self, array: np.ndarray) -> int:
        """Address of a copy at a multiple of 64, with room behind it that kernels may read."""
        memory = np.zeros(array.nbytes + 192, np.uint8)
        start = -memory.ctypes.data % 64
        memory[start : start + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)
        self._kept.append(memory)
        return memory.ctypes.data + start


@dataclass(frozen=True)
class Case:
    """One kernel on one problem: ``bytes`` summed over for each result, results of a call, the memory it works on."""

    kernel: str
    bytes: int
    outputs: int
    time: Timer
    memory: Memory

    @property
    def macs(self) -> int:
        return self.outputs * self.bytes


def depthwise_specs(isa: Isa) -> list[DepthwiseSpec]:
    return [cheapest_depthwise_tile((k, k), (s, s)) for k, s in product(TAPS, STRIDES)] if isa.depthwise else []


def built(isa: Isa, tiles: Sequence[TileSpec], depthwise: Sequence[DepthwiseSpec], name: str) -> Path:
    """Build a library that calls these kernels through `matmul` and `depthwise`."""
    families = [*map(isa.tiles, tiles), *map(depthwise_tiles, depthwise)]
    units = kernel_units({family.name: family for family in families}.values(), isa.name)
    text = "\n".join(
        [
            '#include "layers/depthwise.h"',
            *dict.fromkeys(family.declaration for family in families),
            *table("TileKernel", "tile_tables", [spec.family for spec in tiles]),
            *table("DepthwiseKernel", "depthwise_tables", [spec.family for spec in depthwise]),
            SOURCE,
        ]
    )
    return build(text, name=name, isa=isa.name, units=units)


def table(kind: str, name: str, families: Sequence[str]) -> Iterator[str]:
    """Print a C++ array of tables of kernels."""
    yield f"static const {kind}* const {name}[] = {{{', '.join(families) or 0}}};"


def tile_case(library: Any, index: int, spec: TileSpec, summed: int) -> Case:
    (rows, channels), memory = spec.tile, Memory()
    pixel = summed * (2 if spec.widened else 1)
    tiles = max(1, min(MOST_TILES, INPUT_BYTES // (rows * pixel)))
    pixels, item, zero = rows * tiles, 1 if spec.result in PACKED_RESULTS else 4, 0 if spec.saturates else 128
    values = [
        pixels,
        channels,
        summed,
        item,
        rows,
        memory.random(pixels * pixel, np.uint8, 0, 256),
        memory.random(pixels * channels * item, np.uint8, 0, 1),
        memory.random(summed * channels, np.int8, -127, 128),
        memory.random(channels, np.int32, -4000, 4000),
        memory.hold(np.full(channels, 2.0**-12, np.float32)),
        memory.hold(limits(zero, 0, 255, zero)),
        memory.random(pixels * channels, np.uint8, 0, 256) if spec.result == "add" else 0,
        memory.random(256, np.uint8, 0, 256),
        *(
            memory.random(pixels * channels, np.uint8, 0, 255) if has else 0
            for has in (spec.remainder, spec.residual_remainder)
        ),
        memory.hold(np.ones(pixels, np.float32)),
        pixel,
    ]
    return Case(spec.name, summed, pixels * channels, timer(library.kernels_matmul, index, values), memory)


def depthwise_case(library: Any, index: int, spec: DepthwiseSpec) -> Case:
    taps, stride, memory = spec.taps[0], spec.stride[0], Memory()
    height, width = 2 * spec.rows, 4 * spec.columns
    weight = np.random.default_rng(1).integers(-127, 128, (CHANNELS, 1, taps, taps)).astype(np.int8)
    inputs = ((height - 1) * stride + taps) * ((width - 1) * stride + taps) * CHANNELS
    values = [
        height,
        width,
        CHANNELS,
        stride,
        taps,
        spec.rows,
        spec.columns,
        memory.random(inputs, np.uint8, 0, 256),
        memory.random(height * width * CHANNELS, np.uint8, 0, 1),
        memory.hold(pack_depthwise(weight, spec)),
        memory.random(CHANNELS, np.int32, -4000, 4000),
        memory.hold(np.full(CHANNELS, 2.0**-12, np.float32)),
        memory.hold(limits(128, 0, 255, 0)),
        memory.random(256, np.uint8, 0, 256),
    ]
    timed = timer(library.kernels_depthwise, index, values)
    return Case(spec.name, taps * taps, height * width * CHANNELS, timed, memory)


def timer(function: Any, index: int, values: list[int]) -> Timer:
    given = (ctypes.c_int64 * len(values))(*values)
    function.restype, function.argtypes = ctypes.c_double, (ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    return lambda calls: function(index, given, calls)


def measure(case: Case, peak: Callable[[float], float], multiply: Timer, rounds: int) -> dict[str, Any]:
    """Best blocks by turns: G MACs a second, share of the peak, cycles for 64 results."""
    calls = repeats(case.time)
    multiplications = 8 * repeats(lambda count: multiply(8 * count))
    best_peak, best, cycle = 0.0, np.inf, np.inf
    for _ in range(rounds):
        best_peak = max(best_peak, peak(BLOCK_SECONDS))
        best = min(best, case.time(calls) / calls)
        cycle = min(cycle, multiply(multiplications) / multiplications / 3)
    rate = case.macs / best / 1e9
    cycles = best / cycle * 64 / case.outputs
    return {
        "kernel": case.kernel,
        "bytes": case.bytes,
        "gmacs": rate,
        "peak": best_peak,
        "share": rate / best_peak,
        "cycles_per_64": cycles,
    }


def repeats(time: Timer) -> int:
    """Calls that fill a block."""
    trial = 8
    time(trial)
    return max(1, int(BLOCK_SECONDS / (time(trial) / trial)))


def report(isa: str, results: list[dict[str, Any]], lengths: Sequence[int]) -> Table:
    """A line a kernel; of tiles a group of columns for every number of bytes."""
    drawn = Table(title=f"{isa}, one thread: share of the peak, cycles for 64 results")
    drawn.add_column("kernel", no_wrap=True)
    for length in (*lengths, *["taps"] * any(one["kernel"].startswith("depthwise") for one in results)):
        drawn.add_column(str(length), justify="right", no_wrap=True)
    by_kernel: dict[str, dict[int, str]] = {}
    for one in results:
        figures = f"{100 * one['share']:.0f} %, {one['cycles_per_64']:.0f}"
        by_kernel.setdefault(one["kernel"], {})[one["bytes"]] = figures
    for kernel, found in by_kernel.items():
        own = list(found.values()) if kernel.startswith("depthwise") else []
        drawn.add_row(kernel, *(("" if own else found.get(length, "")) for length in lengths), *own)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    able = [name for name in isas() if name in ISAS and int8_counter(name)]
    parser.add_argument("--isa", choices=able, default=able[0] if able else None)
    parser.add_argument("--only", default="*", help="names of kernels, with * and ?")
    parser.add_argument("--bytes", type=lambda text: [int(part) for part in text.split(",")], default=[64, 256, 2304])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    if not able:
        raise SystemExit("this CPU has neither AVX512-VNNI nor AVX2; there is no peak to compare with")
    quiet, isa = record.idle(), ISAS[arguments.isa]
    tiles = [spec for spec in isa.specs() if fnmatch.fnmatch(spec.name, arguments.only) and not spec.sums]
    depthwise = [spec for spec in depthwise_specs(isa) if fnmatch.fnmatch(spec.name, arguments.only)]
    library = load(built(isa, tiles, depthwise, f"kernels_{isa.name}"))
    library.kernels_multiply.restype, library.kernels_multiply.argtypes = ctypes.c_double, (ctypes.c_int64,)
    numbered = product(enumerate(tiles), arguments.bytes)
    cases = (tile_case(library, index, spec, summed) for (index, spec), summed in numbered)
    more = (depthwise_case(library, index, spec) for index, spec in enumerate(depthwise))
    peak, multiply = int8_counter(isa.name), library.kernels_multiply
    results = [measure(case, peak, multiply, arguments.rounds) for case in chain(cases, more)]
    Console(highlight=False).print(report(isa.name, results, arguments.bytes))
    print(f"peak: {max(one['peak'] for one in results):.1f} G MACs/s")
    if not quiet:
        print("Others used this machine: figures that are not worth quoting.")
    record.append("kernels", arguments, {"idle": quiet, "kernels": results})


if __name__ == "__main__":
    main()
