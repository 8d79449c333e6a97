"""What follows from the shapes of a call: offsets, sizes, threads; and the memory of calls in flight.

Everything symbolic is evaluated by one compiled function a model, so that a new shape costs little more than the
program's own plan.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import accumulate

import numpy as np
import torch

from intaglio.errors import InputError
from intaglio.ir import Dim, External, Graph, evaluator
from intaglio.ops import needs
from intaglio.runtime import threads
from intaglio.runtime.artifact import Artifact, CallLayout, RunArguments
from intaglio.signature import TORCH_DTYPES

FRAMES = 16
"""Idle frames a model keeps: calls in flight at once that find memory ready."""
ARENA_GROWTH = 1.25
"""A frame that is too small becomes larger than it must by this, so that growing shapes do not allocate each time."""


class NewShapePolicy(StrEnum):
    """What a model does in a call of a shape that was not planned."""

    PLAN = "plan"
    """Plan its memory, and run in int8."""
    FALLBACK = "fallback"
    """Run the float model."""


class Frame:
    """Memory of one call in flight: arena and the tables the program reads. Reused by calls of any shapes, never shared
    by two calls; the arena grows to the largest."""

    def __init__(self, artifact: Artifact) -> None:
        count = max(len(artifact.program.externals), 1)
        self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.external = (ctypes.c_void_p * count)()
        self.strides = (ctypes.c_int64 * (5 * count))()
        self.bytes = (ctypes.c_uint8 * count)()
        self.layout: CallLayout | None = None
        self.skipped = 0
        self.outside = ctypes.c_int32(0)
        constants = artifact.constants.ctypes.data
        self.run = RunArguments(None, None, None, constants, self.external, self.strides, None, self.bytes)
        self.run.outside = ctypes.pointer(self.outside)

    def fit(self, layout: CallLayout) -> None:
        """Lie as the plan of this call says."""
        size = layout.bytes + 64
        if self.arena.numel() < size:
            size = max(size, int(ARENA_GROWTH * self.arena.numel()))
            self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")  # given back before more is taken
            self.arena = torch.empty(size, dtype=torch.uint8, device="cpu")
            start = self.arena.data_ptr()
            self.skipped = -start % 64
            self.run.arena = start + self.skipped
        self.run.dims, self.run.offsets, self.layout = layout.dims, layout.offsets, layout

    def levels(self) -> np.ndarray:
        """The arena from where offsets count."""
        return self.arena.numpy()[self.skipped :]

    def read(self, index: int, tensor: torch.Tensor) -> None:
        """Let entry ``index`` of the table of the caller's tensors be this one, to be read."""
        first, axes = 5 * index, min(tensor.dim(), 5)
        self.external[index] = tensor.data_ptr()
        self.bytes[index] = tensor.dtype is torch.uint8
        self.strides[first : first + axes] = [*tensor.stride()[-5:]]


class Sizes:
    """All dimensions the runtime asks for, evaluated at once: needs, shapes of the caller's tensors, arguments of float
    parts."""

    def __init__(self, artifact: Artifact, graph: Graph, islands: Mapping[str, tuple[Dim, ...]]) -> None:
        self.artifact, self.needs = artifact, needs(graph)
        self.externals, self.islands = artifact.program.externals, tuple(islands)
        groups = [tuple(need.value for need in self.needs), *(e.shape for e in self.externals), *islands.values()]
        self.ends = list(accumulate(map(len, groups), initial=0))
        self.evaluate = evaluator([dim for group in groups for dim in group], artifact.program.symbols)

    def of(self, symbols: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Shape of every external, then the arguments of every float part. `InputError` for sizes the graph has no
        meaning for."""
        found = self.evaluate(*[symbols[name] for name in self.artifact.program.symbols])
        checked, *groups = [found[first:last] for first, last in zip(self.ends, self.ends[1:], strict=False)]
        if checked and min(checked) < 0:
            need = self.needs[next(index for index, value in enumerate(checked) if value < 0)]
            given = ", ".join(f"{name} = {size}" for name, size in symbols.items())
            raise InputError(need.where, need.operator, f"{need.problem}, with {given}", remedy="give larger inputs")
        return groups


class Shapes:
    """Everything that follows from the shapes of a call."""

    def __init__(self, sizes: Sizes, symbols: dict[str, int]) -> None:
        found = sizes.of(symbols)
        externals, count = sizes.externals, len(sizes.externals)
        self.artifact, self.symbols = sizes.artifact, symbols
        self.layout = sizes.artifact.plan(symbols)
        self.island_dims = dict(zip(sizes.islands, found[count:], strict=True))
        self._shares: dict[int, tuple[int, ...]] = {}
        self.written = [(e.value, s, lies(e, s)) for e, s in zip(externals, found, strict=False) if e.written]
        self.read = {e.value: s for e, s in zip(externals, found, strict=False) if not e.written}

    def shares(self, allowed: int) -> tuple[int, ...]:
        """Threads of every segment, when so many are allowed."""
        found = self._shares.get(allowed)
        if found is None:
            found = self._shares[allowed] = threads.shares(self.artifact.program, self.symbols, allowed)
        return found


def lies(external: External, sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides to allocate: dense, images with channels last."""
    order = [0, *range(2, len(sizes)), 1] if is_image(external) else range(len(sizes))
    steps, step = [0] * len(sizes), 1
    for axis in reversed(order):
        steps[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(steps)


def is_image(external: External) -> bool:
    return len(external.shape) in (3, 4, 5) and not external.rows


class Read:
    """An entry of the table of the caller's tensors that the program reads, and how."""

    def __init__(self, index: int, external: External, bytes_too: bool) -> None:
        self.index, self.external, self.bytes_too = index, external, bytes_too
        self.value, self.dtype, self.strided = external.value, TORCH_DTYPES.get(external.dtype), is_image(external)

    def readable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor with its values in memory: of any strides where each axis is read by its own, else dense."""
        known = tensor.dtype is self.dtype or self.dtype is None or (self.bytes_too and tensor.dtype is torch.uint8)
        if not known:
            problem = f"element type {tensor.dtype}; the program reads {self.external.dtype}"
            raise InputError(f"%{self.value}", None, problem, remedy="leave the types of its float parts as they are")
        tensor = tensor.resolve_neg()
        if self.external.dense:
            return _dense_as(self.external, tensor)
        return tensor if self.strided or tensor.dim() < 5 else tensor.contiguous()


def _dense_as(external: External, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without gaps in the layout of an entry; itself where it lies so."""
    if not is_image(external):
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
