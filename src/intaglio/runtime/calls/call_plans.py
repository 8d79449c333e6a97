"""Plans of calls: buffer offsets, sizes and thread counts for the shapes of a call, and memory of calls in flight.

One compiled function per model evaluates all symbolic sizes, so that a new shape costs little more than the memory plan
of the compiled program.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np
import torch

from intaglio.errors import InputError
from intaglio.ir import Dim, External, Graph, evaluator
from intaglio.ops import needs
from intaglio.runtime.artifact import Artifact, CallLayout, CInt64, RunArguments
from intaglio.runtime.calls import threads
from intaglio.runtime.reports.clipping import RangeCounts
from intaglio.signature import TORCH_DTYPES

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
MAX_IDLE_FRAMES = 16
"""Maximum number of idle frames that a model keeps for reuse."""
ARENA_GROWTH = 1.25
"""Factor by which an arena that is too small grows at least, so that increasing shapes do not allocate in every
call."""
MAX_INTERLEAVED_CHANNELS = 4
"""Largest number of channels of images that are copied channel by channel."""
UNCHANGED_FLOAT_PARTS = "do not change or move the float parts of the model"


class NewShapePolicy(StrEnum):
    """Policies for a call with shapes that were not planned."""

    PLAN = "plan"
    """Plan memory for the new shapes and run in int8."""
    FALLBACK = "fallback"
    """Run the float model."""


NO_MEMORY = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
"""Message of PyTorch's allocator."""


def with_memory_errors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that raises `InputError` for calls that need more memory than the system has."""

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise_memory_error(error)

    return checked


def raise_memory_error(error: RuntimeError) -> NoReturn:
    """Raise `InputError` for an error of PyTorch's allocator, and other errors again."""
    refused = NO_MEMORY.search(str(error))
    if refused is None:
        raise error
    problem = f"one of its buffers needs {refused[1]} bytes of memory, which the system does not have"
    raise InputError("call", None, problem, remedy="pass smaller batches, one after the other") from error


class Frame:
    """Memory of one call in flight: the arena and the tables that the program reads.

    A frame is reused by later calls of any shapes but never shared by two calls at once. The arena grows to the size of
    the largest call.
    """

    def __init__(self, artifact: Artifact) -> None:
        count = max(len(artifact.program.externals), 1)
        self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.external = (ctypes.c_void_p * count)()
        self.strides = (ctypes.c_int64 * (5 * count))()
        self.bytes = (ctypes.c_uint8 * count)()
        self.kinds: list[tuple[tuple[int, ...], torch.dtype] | None] = [None] * count
        self.layout: CallLayout | None = None
        self.alignment_offset = 0
        self.out_of_range = ctypes.c_int32(0)
        constants = artifact.constants.ctypes.data
        self.run = RunArguments(None, None, None, constants, self.external, self.strides, None, self.bytes)
        self.run.outside = ctypes.pointer(self.out_of_range)
        self.clipped = (ctypes.c_int64 * (1 + len(artifact.program.range_checks)))()
        self.run.clipped = self.clipped

    def apply_layout(self, layout: CallLayout) -> None:
        """Set sizes and buffer offsets to those of ``layout``, and enlarge the arena if it is too small."""
        size = layout.bytes + 64
        if self.arena.numel() < size:
            size = max(size, int(ARENA_GROWTH * self.arena.numel()))
            self.arena = torch.empty(0, dtype=torch.uint8, device="cpu")  # free the old arena before allocating
            self.arena = torch.empty(size, dtype=torch.uint8, device="cpu")
            start = self.arena.data_ptr()
            self.alignment_offset = -start % 64
            self.run.arena = start + self.alignment_offset
        self.run.dims, self.run.offsets, self.layout = layout.dims, layout.offsets, layout

    def set_dims(self, sizes: Sequence[int]) -> None:
        """Set the sizes of the dynamic dimensions, which may be smaller than those of the layout."""
        self.run.dims = (CInt64 * len(sizes))(*sizes)

    def take_clipped(self) -> list[int] | None:
        """Return the number of clipped elements of every checked value and reset it; ``None`` if all are 0."""
        clipped = self.clipped
        if not clipped[0]:
            return None
        found = clipped[1:]
        clipped[:] = [0] * len(clipped)
        return found

    def arena_bytes(self) -> np.ndarray:
        """Return the arena as bytes, from the 64-byte boundary that buffer offsets are relative to."""
        return self.arena.numpy()[self.alignment_offset :]

    def set_input(self, index: int, tensor: torch.Tensor) -> None:
        """Set entry ``index`` of the table of external tensors to a tensor that the program reads."""
        self.external[index] = tensor.data_ptr()
        kind = tensor.stride(), tensor.dtype
        if self.kinds[index] != kind:
            self.kinds[index], strides, first = kind, kind[0][-5:], 5 * index
            self.bytes[index] = tensor.dtype is torch.uint8
            self.strides[first : first + len(strides)] = [*strides]


class SizeEvaluator:
    """Evaluates all symbolic sizes that the runtime needs at once: shape requirements of operators, shapes of external
    tensors and the size arguments of float islands."""

    def __init__(self, artifact: Artifact, graph: Graph, islands: Mapping[str, tuple[Dim, ...]]) -> None:
        self.artifact, self.needs = artifact, needs(graph)
        self.externals, self.islands = artifact.program.externals, tuple(islands)
        groups = [*(e.shape for e in self.externals), *islands.values()]
        self.group_ends = list(accumulate(map(len, groups), initial=0))
        self.evaluate = evaluator([dim for group in groups for dim in group], artifact.program.symbols)
        self.evaluate_needs = evaluator([need.value for need in self.needs], artifact.program.symbols)

    def shapes(self, symbols: Mapping[str, int]) -> list[tuple[int, ...]]:
        """Return the shape of every external tensor, then the size arguments of every float island.

        Raises:
            InputError: an operator is not defined for these sizes.
        """
        self.check(symbols)
        found = self.evaluate(*[symbols[name] for name in self.artifact.program.symbols])
        return [found[first:last] for first, last in zip(self.group_ends, self.group_ends[1:], strict=False)]

    def first_undefined(self, symbols: Mapping[str, int]) -> int | None:
        """Return the index of the first requirement that these sizes do not meet, or ``None``."""
        checked = self.evaluate_needs(*[symbols[name] for name in self.artifact.program.symbols])
        if not checked or min(checked) >= 0:
            return None
        return next(index for index, value in enumerate(checked) if value < 0)

    def check(self, symbols: Mapping[str, int]) -> None:
        """Raise `InputError` if an operator is not defined for these sizes."""
        if (index := self.first_undefined(symbols)) is not None:
            need = self.needs[index]
            given = ", ".join(f"{name} = {size}" for name, size in symbols.items())
            raise InputError(need.where, need.operator, f"{need.problem}, with {given}", remedy="pass larger inputs")


class CallPlan:
    """Plan of a call: everything that depends only on its shapes.

    Attributes:
        artifact: the compiled program.
        symbols: sizes of the dynamic dimensions.
        layout: buffer offsets and the size of the arena.
        island_dims: size arguments of every float island.
        outputs: shape and strides of every external tensor that the program writes, by name.
        input_shapes: shape of every external tensor that the program reads.
        range_counts: what notes the clipped elements of these calls, once one has clipped any.
    """

    def __init__(self, sizes: SizeEvaluator, symbols: dict[str, int], delay: float = 0.0) -> None:
        """Plan a call.

        Args:
            sizes: evaluates the sizes that depend on dynamic dimensions.
            symbols: sizes of the dynamic dimensions.
            delay: seconds by which threads begin a segment later; see `threads.ISLAND_DELAY_SECONDS`.
        """
        found = sizes.shapes(symbols)
        externals, count = sizes.externals, len(sizes.externals)
        self.artifact, self.symbols, self.delay = sizes.artifact, symbols, delay
        self.layout = sizes.artifact.plan(symbols)
        self.island_dims = dict(zip(sizes.islands, found[count:], strict=True))
        self.range_counts: RangeCounts | None = None
        self._thread_counts: dict[int, tuple[int, ...]] = {}
        memories: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # those of all layers are shared
        self.outputs = {}
        for entry, shape in zip(externals, found, strict=False):
            if entry.is_output:
                key = entry.is_image, shape
                if key not in memories:
                    memories[key] = shape, entry.strides(shape)
                self.outputs[entry.value] = memories[key]
        self.input_shapes = {e.value: s for e, s in zip(externals, found, strict=False) if not e.is_output}

    def check_island_result(self, name: str, result: torch.Tensor) -> None:
        """Raise `InputError` if the result of an island is not what the program reads."""
        if name in self.input_shapes and (result.shape != self.input_shapes[name] or result.device.type != "cpu"):
            given = f"it is {list(result.shape)} on {result.device}"
            problem = f"{given}, but the program reads {self.input_shapes[name]} on the CPU"
            raise InputError(f"%{name}", None, problem, remedy=UNCHANGED_FLOAT_PARTS)

    def thread_counts(self, allowed: int) -> tuple[int, ...]:
        """Return the number of threads for every segment if at most ``allowed`` may be used."""
        found = self._thread_counts.get(allowed)
        if found is None:
            program = self.artifact.program
            found = threads.thread_counts(program, self.symbols, allowed, self.delay)
            self._thread_counts[allowed] = found
        return found


class ExternalInput:
    """An entry of the table of external tensors that the program reads."""

    def __init__(self, index: int, external: External, accepts_bytes: bool) -> None:
        self.index, self.external, self.accepts_bytes = index, external, accepts_bytes
        self.value, self.dtype, self.strided = external.value, TORCH_DTYPES.get(external.dtype), external.is_image

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the program can read in place of ``tensor``.

        The program reads some entries with any strides; for others the result is contiguous in the layout of the entry.

        Raises:
            InputError: the element type differs from the one the program was compiled for.
        """
        known = tensor.dtype is self.dtype or self.dtype is None or (self.accepts_bytes and tensor.dtype is torch.uint8)
        if not known:
            problem = f"its data type is {tensor.dtype}, but the program reads {self.external.dtype}"
            raise InputError(
                f"%{self.value}", None, problem, remedy="do not change the data types of the float parts of the model"
            )
        if tensor.is_neg():
            tensor = tensor.resolve_neg()
        if self.external.dense:
            return _dense_as(self.external, tensor)
        return tensor if self.strided or tensor.dim() < 5 else tensor.contiguous()


def _dense_as(external: External, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor without gaps in the layout of an entry, without a copy if it has that layout already."""
    if not external.is_image:
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    last = tensor.movedim(1, -1)
    if tensor.dtype == torch.float32 and last.shape[-1] <= MAX_INTERLEAVED_CHANNELS and not last.is_contiguous():
        return _interleaved(last).movedim(-1, 1)
    return last.contiguous().movedim(-1, 1)


def _interleaved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor with few elements along its last axis, made by the calling thread.

    Where PyTorch copies with several threads, they wait for more work on the cores that the program needs next.
    """
    copy, source = np.empty(tensor.shape, np.float32), tensor.detach().numpy()
    for channel in range(tensor.shape[-1]):
        copy[..., channel] = source[..., channel]
    return torch.from_numpy(copy)
