"""Records of a compiled program: source, constants, callbacks, and a description of every step for the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir.dims import Dim, Shape
from intaglio.ir.graph import Op
from intaglio.ir.types import DType


@dataclass(frozen=True)
class Schedule:
    """Execution parameters of a partition with a GEMM; results do not depend on them.

    Attributes:
        tile_rows: Output pixels of a microkernel.
        tile_columns: Blocks of 16 output channels of a microkernel.
        split_channels_below: Threads divide panels of channels below this number of output pixels, else pixels.
        chunk_bytes: Bytes of input activations that stay in cache while all panels pass over them.
    """

    tile_rows: int = 1
    tile_columns: int = 1
    split_channels_below: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True)
class External:
    """Entry of the table of the caller's tensors.

    Attributes:
        value: Name of the value.
        shape: Logical shape.
        dtype: Element type.
        is_output: The program writes the tensor.
        row_major: Tensors of three to five axes are row-major instead of channels last.
        dense: The layout must be exactly this one, because steps that do not accept arbitrary strides read the tensor.
        first_segment: First segment with a step of the program that reads or writes the tensor.
        last_segment: Last such segment; smaller than ``first_segment`` if only islands use the tensor.
        grows: In calls with memory for more behind the tensor, the program appends new values there.
    """

    value: str
    shape: Shape
    dtype: DType
    is_output: bool
    row_major: bool = False
    dense: bool = False
    first_segment: int = 0
    last_segment: int = -1
    grows: bool = False

    @property
    def is_image(self) -> bool:
        """Return whether the program accesses the tensor as an image with channels last."""
        return len(self.shape) in (3, 4, 5) and not self.row_major

    def strides(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the strides of the tensor when the program writes it: dense, with channels last for images."""
        order = [0, *range(2, len(sizes)), 1] if self.is_image else range(len(sizes))
        steps, step = [0] * len(sizes), 1
        for axis in reversed(order):
            steps[axis] = step
            step *= max(sizes[axis], 1)
        return tuple(steps)


@dataclass(frozen=True)
class IslandCall:
    """Call of an island between two segments, with the externals that it reads and writes."""

    key: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after_segment: int


@dataclass(frozen=True)
class ArenaLocation:
    """Location of a quantized value in the arena.

    Attributes:
        at: Index of the buffer's offset in the program's table.
        start: Bytes from this offset to the first element.
        shape: Logical shape.
        strides: Strides in bytes along the logical axes.
        frame: Bytes of the whole buffer if it has a halo, else 0.
    """

    at: int
    start: Dim
    shape: Shape
    strides: Shape
    frame: Dim = 0


@dataclass(frozen=True)
class HostCall:
    """Call of a host operator between two segments.

    ``inputs`` are locations in the arena, or ``None`` for constants of the graph; ``output`` is the location of the
    result.
    """

    key: str
    op: Op
    inputs: tuple[ArenaLocation | None, ...]
    output: ArenaLocation
    after_segment: int


@dataclass(frozen=True)
class Cost:
    """Cost of a step.

    Attributes:
        macs: Multiply-accumulates.
        units: Approximate number of units that threads can divide.
        bytes: Bytes of activations read and written.
        barrier_group: Steps of one group need no barrier between them.
        segment: Segment of the program that the step belongs to.
    """

    macs: Dim = 0
    units: Dim = 1
    bytes: Dim = 0
    barrier_group: int = 0
    segment: int = 0


@dataclass(frozen=True)
class StepInfo:
    """Description of a step for readers and for the runtime.

    Attributes:
        name: Name of the partition.
        kinds: Kinds of its operators.
        types: Types of its values.
        cost: Cost of the step.
        island: Key of the island, if it is one.
        path: Module of its anchor.
        kernel: Largest microkernel of the step, else the function that implements it.
        tile: Output pixels and channels of the microkernel.
    """

    name: str
    kinds: str
    types: str
    cost: Cost = Cost()
    island: str = ""
    path: str = ""
    kernel: str = ""
    tile: tuple[int, int] | None = None


@dataclass(frozen=True)
class RangeCheck:
    """A float value whose clipped elements a program counts while it quantizes them.

    Attributes:
        value: Name of the float value.
        path: Module that reads the quantized value.
        low: Lower end of the calibrated range.
        high: Upper end of the calibrated range.
        size: Number of elements.
    """

    value: str
    path: str
    low: float
    high: float
    size: Dim


@dataclass(frozen=True, eq=False)
class Program:
    """Generated C++ source, the constants it reads, and all that the runtime needs to call it. It compares by identity.

    ``kernels`` are the microkernel families that it is linked with (`kernels.KernelFamily`). ``range_checks`` are the
    values whose clipped elements it counts, in the order of the counts. With ``fits_smaller_sizes``, offsets of buffers
    for some sizes are offsets for smaller sizes, too.
    """

    name: str
    source: str
    isa: str
    constants: np.ndarray
    symbols: tuple[str, ...]
    externals: tuple[External, ...]
    calls: tuple[IslandCall | HostCall, ...]
    segments: int
    buffers: int
    notes: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[StepInfo, ...] = ()
    kernels: tuple[Any, ...] = ()
    range_checks: tuple[RangeCheck, ...] = ()
    fits_smaller_sizes: bool = False
