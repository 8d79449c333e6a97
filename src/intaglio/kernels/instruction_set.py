"""An instruction set as the generator sees it: which kernels it has and how their text is printed.

Kernels that differ only in size are one `KernelFamily`: a table of functions, generated and assembled as one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from intaglio.kernels.depthwise_spec import DepthwiseSpec
from intaglio.kernels.tile_spec import TileSpec


@dataclass(frozen=True)
class KernelFamily:
    """A table of kernels, ``name`` in C, ``element`` its type in native/products/tile.h; ``None`` without one."""

    name: str
    element: str
    kernels: tuple[TileSpec | DepthwiseSpec | None, ...]

    @property
    def declaration(self) -> str:
        """The table as a program declares it."""
        return f"KERNEL_TABLE({self.element}, {self.name});"

    @property
    def symbols(self) -> tuple[str, ...]:
        """Every name of the family that a linker may see."""
        return (self.name, *(kernel.name for kernel in self.kernels if kernel is not None))


@dataclass(frozen=True)
class Isa:
    """An instruction set: tallest tile by blocks, and the functions that print its kernels.

    ``packs``: results leave registers through two packing steps, which give the channels of a panel in order if its
    columns were permuted (`permutation`); such kernels have a form for natural results. ``tile`` and ``depthwise``
    print one kernel; without ``depthwise``, depthwise convolutions are loops that the compiler vectorises. ``join``
    makes the text of a family from those of its kernels. ``suffix``: of a file with that text. ``looks_up``: C
    expression that says whether this machine runs kernels with lookup tables; empty if there are none.
    """

    name: str
    tallest: Mapping[int, int]
    packs: bool
    suffix: str
    tile: Callable[[TileSpec], str]
    join: Callable[[KernelFamily, list[str]], str]
    depthwise: Callable[[DepthwiseSpec], str] | None = None
    looks_up: str = ""

    @property
    def blocks(self) -> int:
        """Widest tile in blocks of 16 channels."""
        return max(self.tallest)

    def kernel_text(self, spec: TileSpec | DepthwiseSpec) -> str:
        """Print one kernel."""
        if isinstance(spec, TileSpec):
            return self.tile(spec)
        if self.depthwise is None:
            raise ValueError(f"{self.name} has no depthwise kernels")
        return self.depthwise(spec)

    def family_text(self, family: KernelFamily) -> str:
        """Print a family: its kernels, the constants they read, its table."""
        return self.join(family, [self.kernel_text(spec) for spec in family.kernels if spec is not None])

    def tiles(self, spec: TileSpec) -> KernelFamily:
        """Return the family of a kernel: all heights, its table indexed by height."""
        heights = range(1, self.tallest[spec.blocks] + 1)
        return KernelFamily(spec.family, "TileKernel", (None, *(replace(spec, rows=rows) for rows in heights)))

    def specs(self) -> Iterator[TileSpec]:
        """Yield every matrix product kernel."""
        for blocks, tallest in self.tallest.items():
            for rows in range(1, tallest + 1):
                yield TileSpec(rows, blocks, "f32")
                naturals = (False, True)[: 1 + self.packs]
                for natural, guard, rest in product(naturals, (False, True), (False, True)):
                    plain = TileSpec(rows, blocks, "u8", natural, guard, rest=rest)
                    yield plain
                    if self.looks_up and not rest:
                        yield replace(plain, table=True)
                    yield replace(plain, result="add")
                    yield replace(plain, result="add", other_rest=True)


def depthwise_tiles(spec: DepthwiseSpec) -> KernelFamily:
    """Return the family of the largest tile ``spec``: smaller ones by rows, then by columns, each from 1 on."""
    sizes = product(range(1, spec.rows + 1), range(1, spec.columns + 1))
    specs = tuple(replace(spec, rows=rows, columns=columns) for rows, columns in sizes)
    return KernelFamily(spec.family, "DepthwiseKernel", specs)
