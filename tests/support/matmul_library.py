"""Native code under test, compiled once per instruction set and called directly, on memory that ends at a guard page.

`kernels(isa)` holds every microkernel of an instruction set behind `matmul`, and the planner's `place`.
"""

import ctypes
import hashlib
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache

import numpy as np
import pytest

from intaglio.kernels import ISAS, TileSpec
from intaglio.kernels.depthwise_spec import depthwise_checks
from intaglio.kernels.kernel_units import kernel_units
from intaglio.kernels.tile_spec import RESULTS, layout_checks
from intaglio.native import cpu as machine
from intaglio.native.compile import build, load
from intaglio.native.native_library import parallel_address
from intaglio.native.units import TranslationUnit
from intaglio.plan.arena import conflicts_of
from support import software_tiles
from support.slow_params import slow_params_except

HAS_VBMI = "avx512vbmi" in machine.read_flags(machine.CPUINFO.read_text())
"""Whether this machine runs the kernels that look up quantized values."""
RUNNABLE_ISAS = [name for name in machine.isas() if name in ISAS]
"""Instruction sets this machine runs and the generator has kernels for."""
SOFTWARE_ISAS = ["amx_int8"] * ("avx512vnni" in RUNNABLE_ISAS and "amx_int8" not in RUNNABLE_ISAS)
"""Instruction sets whose kernels run in part in software (software_tiles.cpp), because this machine does not have
them."""
CPP_ISA_PARAMS = slow_params_except(
    *[isa for isa in RUNNABLE_ISAS if isa != "avxvnni"],
    of=RUNNABLE_ISAS,
    reason="what is written in C++ is the same for AVX-VNNI as for AVX2",
)
"""Parameters for tests of kernels that are written in C++."""
BEST_ISA_PARAMS = [
    *RUNNABLE_ISAS[:1],
    *(
        pytest.param(isa, marks=pytest.mark.slow(reason="kernels and programs are tested on every set elsewhere"))
        for isa in RUNNABLE_ISAS[1:]
    ),
]
"""Parameters for tests above the kernels: the best set always, the others with `make slow`."""


IMAGES = ("in", "out", "residual", "remainder", "residual_remainder")
NUMBERS = (
    "stride_y",
    "stride_x",
    "top",
    "left",
    "panels",
    "blocks",
    "panel_bytes",
    "out_bytes",
    "first_channel",
    "flat",
    "rows",
    "lines",
    "mask",
    "last_mask",
    "kernels",
    "last_kernels",
    "widened_kernels",
    "widened_last_kernels",
    "transformed",
    "sums_kernels",
    "sums_last_kernels",
    "split_channels_below",
    "chunk_bytes",
    "tile.a_pixel",
    "tile.b",
    "tile.tap_rows",
    "tile.a_row",
    "tile.taps",
    "tile.a_tap",
    "tile.run",
    "tile.bias",
    "tile.factor",
    "tile.out_pixel",
    "tile.residual_pixel",
    "tile.residual_factor",
    "tile.limits",
    "tile.table",
    "table.entries",
    "tile.remainder_pixel",
    "tile.residual_remainder_pixel",
    "tile.row_scale",
    "tile.row_bias",
    "tile.levels",
)
"""Fields of ``struct Matmul``: its images, then numbers and addresses."""
PROT_NONE = 0
NO_HALO = -1
"""Value of a halo in calls that run ``matmul``."""
SLACK = 64
"""Bytes the planner leaves behind every buffer; kernels may read them."""
EXPORT = 'extern "C" __attribute__((visibility("default")))'


class Memory:
    """Bytes whose last one is followed by a page that cannot be touched."""

    def __init__(self, size: int = 4 << 20) -> None:
        page = mmap.PAGESIZE
        self.size = -(-size // page) * page
        self._map = mmap.mmap(-1, self.size + page)
        self.bytes = np.frombuffer(self._map, np.uint8)[: self.size]
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert mprotect(self.bytes.ctypes.data + self.size, page, PROT_NONE) == 0

    def end(self, size: int, slack: int = 0) -> np.ndarray:
        """``size`` bytes that end ``slack`` bytes before the guard page."""
        assert size + slack <= self.size
        return self.bytes[self.size - size - slack : self.size - slack]

    def hold(self, array: np.ndarray, slack: int = 0) -> int:
        """Address of a copy of ``array``."""
        view = self.end(array.nbytes, slack)
        view[:] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
        return view.ctypes.data


@dataclass(frozen=True)
class Image:
    """Arguments of ``image`` in native/base/image.h; the halo is as wide on all sides."""

    start: int = 0
    images: int = 0
    height: int = 0
    width: int = 0
    pixel: int = 0
    halo: int = 0


@dataclass(frozen=True)
class Kernels:
    """A loaded library of microkernels; ``addresses`` by name."""

    library: ctypes.CDLL
    addresses: Mapping[str, int]

    def heights(self, specs: Sequence[TileSpec]) -> ctypes.Array:
        """A table of kernels by tile height."""
        return (ctypes.c_void_p * (len(specs) + 1))(None, *[self.addresses[spec.name] for spec in specs])

    def matmul(self, images: Mapping[str, Image], numbers: Mapping[str, int], threads: int, keeps_setup: bool) -> None:
        """Run ``matmul`` on a ``struct Matmul`` of these fields, in the pool.

        ``keeps_setup``: all kernels that a thread calls share a ``struct TileSetup``, as in programs.
        """
        self._call(images, numbers, NO_HALO, threads, keeps_setup)

    def fill_halo(self, image: Image, level: int, threads: int) -> None:
        self._call({"out": image}, {}, level, threads, False)

    def _call(
        self, images: Mapping[str, Image], numbers: Mapping[str, int], halo: int, threads: int, keeps_setup: bool
    ) -> None:
        given = [value for name in IMAGES for value in astuple(images.get(name, Image()))]
        given += [numbers.get(name, 0) for name in NUMBERS]
        values = (ctypes.c_int64 * len(given))(*given)
        self.library.harness_run(values, halo, keeps_setup, threads, ctypes.c_void_p(parallel_address()))

    def place(self, lives: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[list[int], int]:
        """Offsets of the planner and the bytes it needs."""
        conflicts, ends = (np.array(numbers, np.int32) for numbers in conflicts_of(lives))
        tables = (ctypes.c_void_p(table.ctypes.data) for table in (conflicts, ends))
        offsets = (ctypes.c_int64 * len(sizes))()
        total = self.library.harness_place(*tables, (ctypes.c_int64 * len(sizes))(*sizes), len(sizes), offsets)
        return list(offsets), total


def int4_specs(isa: str) -> list[TileSpec]:
    """Kernels for 4-bit weights, one for every result: they share the epilogues of the kernels for int8 weights."""
    sizes = [(rows, blocks) for blocks, most in ISAS[isa].int4_tile_rows.items() for rows in range(1, most + 1)]
    return [TileSpec(*size, result, int4=True) for size in sizes for result in RESULTS]


@cache
def kernels(isa: str) -> Kernels:
    """Every kernel of an instruction set in one library, of those for 4-bit weights `int4_specs`."""
    specs = [*ISAS[isa].specs(), *int4_specs(isa)]
    families = {family.name: family for family in map(ISAS[isa].tiles, specs)}
    text = _text(specs, [family.declaration for family in families.values()])
    units, base = kernel_units(families.values(), isa), isa
    if isa in SOFTWARE_ISAS:
        units, base = [_software_unit(unit) for unit in units], "avx512vnni"
        text += software_tiles.SOURCE.read_text()
    library = load(build(text, name=f"kernels_{isa}", isa=base, units=units))
    library.harness_place.restype = ctypes.c_int64
    library.harness_kernel.restype = ctypes.c_void_p
    return Kernels(library, {spec.name: library.harness_kernel(i) for i, spec in enumerate(specs)})


def _software_unit(unit: TranslationUnit) -> TranslationUnit:
    """A unit of kernels whose instructions of AMX are calls."""
    text = software_tiles.in_software(unit.text())
    return replace(unit, digest=hashlib.sha256(text.encode()).hexdigest(), text=lambda: text)


def _text(specs: Sequence[TileSpec], declarations: Sequence[str]) -> str:
    images = [
        f"call.m.{name} = image((uint8_t*)v[{6 * i}], {', '.join(f'v[{6 * i + j}]' for j in (1, 2, 3, 4, 5, 5))});"
        for i, name in enumerate(IMAGES)
    ]
    numbers = [
        f"call.m.{name} = (decltype(call.m.{name}))v[{i}];" for i, name in enumerate(NUMBERS, start=6 * len(IMAGES))
    ]
    return "\n".join(
        [
            '#include "elementwise/lookup.h"',
            '#include "layers/matmul.h"',
            '#include "layers/widened.h"',
            layout_checks(),
            depthwise_checks(),
            *declarations,
            f"static const TileKernel* const tables[] = {{{', '.join(spec.family for spec in specs)}}};",
            f"static const int heights[] = {{{', '.join(str(spec.rows) for spec in specs)}}};",
            f"{EXPORT} TileKernel harness_kernel(int index) {{ return tables[index][heights[index]]; }}",
            "struct Call { struct Matmul m; int halo, keeps_setup; };",
            "static void body(void* context, int thread, int threads) {",
            "    const struct Call* call = (const struct Call*)context;",
            "    struct Matmul m = call->m;",
            "    struct TileSetup setup = {};",
            "    if (call->keeps_setup) m.tile.setup = &setup;",
            "    if (call->halo < 0) matmul(&m, thread, threads), release_tiles(&setup);",
            "    else fill_halo(&call->m.out, (uint8_t)call->halo, thread, threads);",
            "}",
            f"{EXPORT} void harness_run(",
            "    const int64_t* v, int halo, int keeps_setup, int threads, IntaglioParallel parallel) {",
            "    struct Call call = {};",
            "    call.halo = halo, call.keeps_setup = keeps_setup;",
            *["    " + line for line in (*images, *numbers)],
            "    if (call.m.table.entries) call.m.table.look_up = look_up_in_place;",
            "    parallel(body, &call, threads);",
            "}",
            f"{EXPORT} int64_t harness_place(",
            "    const int32_t* conflicts, const int32_t* ends, const int64_t* sizes, int count, int64_t* offsets) {",
            "    return place_buffers(conflicts, ends, sizes, count, offsets);",
            "}",
        ]
    )
