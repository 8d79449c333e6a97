"""Instruction sets for the kernel generators: which kernels each has and how their text is printed.

Kernels that differ only in size form a `KernelFamily`: a table of functions that is generated and assembled as a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from intaglio.kernels.depthwise_spec import DepthwiseSpec
from intaglio.kernels.tile_spec import TileSpec

LARGEST_SIZE = 1 << 40
"""Largest threshold or size in a schedule."""


@dataclass(frozen=True)
class KernelFamily:
    """Table of kernels that differ only in size.

    Attributes:
        name: Name of the table in C.
        element: Type of its elements in native/products/tile.h.
        kernels: Kernel of each element; ``None`` for unused elements.
    """

    name: str
    element: str
    kernels: tuple[TileSpec | DepthwiseSpec | None, ...]

    @property
    def declaration(self) -> str:
        """Return the C declaration of the table for programs."""
        return f"KERNEL_TABLE({self.element}, {self.name});"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Return every symbol of the family in its object file."""
        return (self.name, *(kernel.name for kernel in self.kernels if kernel is not None))


@dataclass(frozen=True)
class Isa:
    """Instruction set: its tile sizes and the functions that print its kernels.

    Attributes:
        name: Name of the instruction set.
        max_tile_rows: Maximum number of tile rows for each number of blocks.
        packs: Results leave registers through two packing instructions, which restore the channel order of a panel
            whose columns were permuted (`permutation`). Such kernels have a variant that ``saturates``.
        suffix: Suffix of a file with kernels.
        tile: Prints one GEMM kernel.
        join: Prints a family from the texts of its kernels.
        depthwise: Prints one depthwise kernel; ``None`` if the library computes depthwise convolutions
            without microkernels (native/layers/depthwise.h).
        lookup_condition: C expression that tells whether this machine supports kernels with lookup tables; empty
            without such kernels.
        has_setup: Kernels configure registers, and keep the configuration in a `struct TileSetup`.
        int4_tile_rows: Maximum number of tile rows for each number of blocks, of kernels for 4-bit weights; empty
            without such kernels.
        int4_any_rows: These kernels take less time than kernels for 8-bit weights, whatever the number of rows.
        split_channels_below: Number of output pixels from which threads divide pixels, not channels, unless the
            weights are large (``LARGE_WEIGHTS`` of plan/scheduling/schedules.py).
        fast_tile_rows: Number of tile rows, for each number of blocks, that take the least time for each row with
            weights in the first-level cache; empty where these are the maximum.
        row_taps: Taps of a row that kernels can compute together (`joins_row_taps`); 1 without such kernels.
        widens: Products are those of 16-bit numbers. Every kernel for weights of 8 bits has a variant for activations
            that were widened to 16 bits in memory, and one for sums of products.
    """

    name: str
    max_tile_rows: Mapping[int, int]
    packs: bool
    suffix: str
    tile: Callable[[TileSpec], str]
    join: Callable[[KernelFamily, list[str]], str]
    depthwise: Callable[[DepthwiseSpec], str] | None = None
    lookup_condition: str = ""
    has_setup: bool = False
    int4_tile_rows: Mapping[int, int] = field(default_factory=dict)
    int4_any_rows: bool = False
    split_channels_below: int = LARGEST_SIZE
    fast_tile_rows: Mapping[int, int] = field(default_factory=dict)
    row_taps: int = 1
    widens: bool = False

    @property
    def blocks(self) -> int:
        """Return the width of the widest tile in blocks of 16 channels."""
        return max(self.max_tile_rows)

    def kernel_text(self, spec: TileSpec | DepthwiseSpec) -> str:
        """Return the text of one kernel."""
        if isinstance(spec, TileSpec):
            return self.tile(spec)
        if self.depthwise is None:
            raise ValueError(f"the instruction set {self.name} has no depthwise kernels")
        return self.depthwise(spec)

    def family_text(self, family: KernelFamily) -> str:
        """Return the text of a family: its kernels, the constants they read, its table."""
        return self.join(family, [self.kernel_text(spec) for spec in family.kernels if spec is not None])

    def tiles(self, spec: TileSpec) -> KernelFamily:
        """Return the family of a kernel: all heights, indexed by height."""
        most = self.int4_tile_rows if spec.int4 else self.max_tile_rows
        heights = range(1, most[spec.blocks] + 1)
        return KernelFamily(spec.family, "TileKernel", (None, *(replace(spec, rows=rows) for rows in heights)))

    def specs(self) -> Iterator[TileSpec]:
        """Yield the parameters of every GEMM kernel."""
        for blocks, max_tile_rows in self.max_tile_rows.items():
            for rows in range(1, max_tile_rows + 1):
                for spec in self._specs_of(rows, blocks):
                    yield spec
                    if self.joins_row_taps(spec):
                        yield replace(spec, row_taps=self.row_taps)
                    if self.widens:
                        yield replace(spec, widened=True)
                        yield replace(spec, sums=True)

    def joins_row_taps(self, spec: TileSpec) -> bool:
        """Return whether there is a kernel like this one that computes the taps of a row together."""
        has_results = not (spec.remainder or spec.residual_remainder or spec.result == "rows")
        return self.row_taps > 1 and spec.blocks == 1 and has_results

    def _specs_of(self, rows: int, blocks: int) -> Iterator[TileSpec]:
        """Yield the parameters of the kernels of a size that compute one tap after the other."""
        yield TileSpec(rows, blocks, "f32")
        yield TileSpec(rows, blocks, "rows")
        saturating = (False, True)[: 1 + self.packs]
        for saturates, clamps_float, remainder in product(saturating, (False, True), (False, True)):
            plain = TileSpec(rows, blocks, "u8", saturates, clamps_float, remainder=remainder)
            yield plain
            if self.lookup_condition and not remainder:
                yield replace(plain, looks_up=True)
            yield replace(plain, result="add")
            yield replace(plain, result="add", residual_remainder=True)


def depthwise_tiles(spec: DepthwiseSpec) -> KernelFamily:
    """Return the family of the largest tile ``spec``: all tiles up to its size, ordered by rows, then by columns."""
    sizes = product(range(1, spec.rows + 1), range(1, spec.columns + 1))
    specs = tuple(replace(spec, rows=rows, columns=columns) for rows, columns in sizes)
    return KernelFamily(spec.family, "DepthwiseKernel", specs)
