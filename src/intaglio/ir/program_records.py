"""The finished program: its text and constants, what the runtime calls and what it is told of every step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from intaglio.ir.dims import Dim, Shape
from intaglio.ir.graph import Op
from intaglio.ir.types import DType


@dataclass(frozen=True)
class Schedule:
    """How a partition is computed; bits never depend on it.

    ``tile_rows`` output pixels by ``tile_columns`` blocks of 16 channels a microkernel. Threads share pixels; below
    ``split_channels_below`` output pixels they share panels of channels. ``chunk_bytes`` of input activations stay in
    cache while all panels pass over them.
    """

    tile_rows: int = 1
    tile_columns: int = 1
    split_channels_below: int = 0
    chunk_bytes: int = 0


@dataclass(frozen=True)
class External:
    """One entry of the table of caller's tensors: value, logical shape, element type, whether the program writes it,
    whether three to five axes lie row-major instead of channels last. ``dense``: it is read as it lies then, by other
    steps than those that take any strides."""

    value: str
    shape: Shape
    dtype: DType
    written: bool
    rows: bool = False
    dense: bool = False


@dataclass(frozen=True)
class IslandCall:
    """An island between two segments: which externals it reads and writes."""

    key: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    after_segment: int


@dataclass(frozen=True)
class Place:
    """Where the levels of a value lie in the arena: from the offset ``at`` in the program's table plus ``start`` bytes
    on, ``strides`` bytes apart along the logical axes. ``frame``: bytes of all of it where it has a halo, else 0."""

    at: int
    start: Dim
    shape: Shape
    strides: Shape
    frame: Dim = 0


@dataclass(frozen=True)
class HostCall:
    """A host operator between two segments: what it reads (places in the arena; ``None`` for a constant of the graph)
    and writes."""

    key: str
    op: Op
    inputs: tuple[Place | None, ...]
    output: Place
    after_segment: int


@dataclass(frozen=True)
class Work:
    """What a step has to do: multiply-accumulates, units that threads divide, about, bytes of activations read and
    written; the barrier group and the segment it runs in."""

    macs: Dim = 0
    units: Dim = 1
    bytes: Dim = 0
    barrier_group: int = 0
    segment: int = 0


@dataclass(frozen=True)
class StepNote:
    """A step for readers and for the runtime: partition, kinds of its operators, types, its work; the key of an island;
    the module its anchor is in.

    ``kernel``: the largest microkernel of the step and ``tile`` its output pixels and channels, else the function that
    is the step.
    """

    name: str
    kinds: str
    types: str
    work: Work = Work()
    island: str = ""
    path: str = ""
    kernel: str = ""
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """Generated C++ text, the constants it reads, and what the runtime must know to call it. Equal to itself only.

    ``kernels``: families of microkernels it is linked with (`kernels.KernelFamily`).
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
    steps: tuple[StepNote, ...] = ()
    kernels: tuple[Any, ...] = ()
