"""Calls of a program whose inputs grow by its results, such as the keys and values of a cache.

The inputs lie in blocks of memory with room for more tokens. A call takes its addresses from these blocks, without a
tensor of Python for each of them: a decoder of 24 layers has 48, and a step of one token is short. Where the program
can, it writes new values behind the earlier ones (`External.grows`), so that attention reads both in one piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from intaglio.errors import INDEX_OUT_OF_RANGE
from intaglio.ir import Dim, DType, External, Input, symbols_of
from intaglio.runtime.artifact import CInt64
from intaglio.runtime.calls.call_plans import CallPlan, Frame, SizeEvaluator, with_memory_errors
from intaglio.runtime.calls.segment_values import AXES_OF_IMAGES, segments_of
from intaglio.signature import TORCH_DTYPES, check_memory, check_tensors, match_shapes
from intaglio.torch_private import foreach_copy

if TYPE_CHECKING:
    from intaglio.runtime.program_module import ProgramModule

Kind = TypeVar("Kind", bound=Hashable)
TOKENS, AXES = 2, 4
"""Axis of tokens, and number of axes, of inputs that grow: [batch, heads, tokens, size]."""
TOKENS_OF_A_PLAN = 64
"""A plan is for a number of earlier tokens that is a multiple of this, so that not every step makes one."""
MAX_PLANS = 64
"""Number of plans that are kept."""
MAX_FRAMES = 4
"""Number of idle frames that are kept."""


@dataclass(frozen=True)
class _Results:
    """New values of some inputs of a group, which the program writes in the same layout.

    Attributes:
        first: name of the first of them.
        members: their places in the group.
        entries: their entries in the table of external tensors.
    """

    first: str
    members: np.ndarray
    entries: np.ndarray


@dataclass(frozen=True)
class _Group:
    """Inputs of equal type, which lie in one block of memory.

    Attributes:
        places: their places among the inputs that grow.
        entries: their entries in the table of external tensors.
        results: the results that they grow by, by layout.
        dtype: their data type.
        grows: the program itself writes new values behind all of them.
    """

    places: tuple[int, ...]
    entries: np.ndarray
    results: tuple[_Results, ...]
    dtype: torch.dtype
    grows: bool


class EarlierTokens(NamedTuple):
    """Tokens in one block of memory that a call reads.

    Attributes:
        memory: [tensors, batch, heads, capacity, size], of which the call may write what is behind the tokens it reads.
        first: position of the first token that it reads.
        length: number of tokens that it reads.
    """

    memory: Tensor
    first: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of each tensor that the call reads."""
        _, batch, heads, _, size = self.memory.shape
        return batch, heads, self.length, size

    @property
    def address(self) -> int:
        """Return the address of the first element that the call reads."""
        return self.memory.data_ptr() + self.first * self.memory.stride(1 + TOKENS) * self.memory.itemsize


class _Tables:
    """A frame, its tables as arrays, and what they are set to.

    Attributes:
        frame: the frame.
        external: addresses of external tensors.
        strides: strides of external tensors, in elements.
        grows: 1 for each external tensor behind which the program writes.
        blocks: address and strides of every block.
        sizes: sizes and strides of the new values, for each group and layout.
        new: memory of the new values, for each group and layout.
    """

    def __init__(self, frame: Frame, externals: Sequence[External]) -> None:
        self.frame = frame
        self.blocks: list[tuple[int, tuple[int, ...]]] = []
        self.sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.new: list[list[Tensor]] = []
        self.external = np.ctypeslib.as_array((CInt64 * len(frame.external)).from_buffer(frame.external))
        self.strides = np.ctypeslib.as_array(frame.strides).reshape(-1, 5)
        self.grows = (ctypes.c_uint8 * len(externals))(*[entry.grows for entry in externals])
        frame.run.grows = self.grows


class GrowingCalls:
    """Runs a program with inputs that grow by its results.

    Attributes:
        groups: for every block of memory, the places of its tensors among the inputs that grow.
        dtypes: data type of every block.
    """

    def __init__(self, program: ProgramModule, grown: Sequence[int]) -> None:
        """Prepare calls.

        Args:
            program: the program, which `can_grow`.
            grown: positions of the inputs that grow among all inputs. The results behind the first belong to them, in
                this order.
        """
        graph, signature, externals = program.graph, program.signature, program.artifact.program.externals
        self.artifact, self._sizes = program.artifact, SizeEvaluator(program.artifact, graph, {})
        index = {external.value: i for i, external in enumerate(externals)}
        entries = [signature.inputs[position] for position in grown]
        self._groups = []
        for (_, dtype), places in _by(range(len(grown)), lambda place: _kind(entries[place])):
            own = np.array([index[graph.inputs[grown[place]]] for place in places])
            results = _by_layout([index[graph.outputs[1 + place]] for place in places], externals)
            grows = all(externals[entry].grows for entry in own)
            self._groups.append(_Group(tuple(places), own, results, TORCH_DTYPES[dtype], grows))
        self.groups, self.dtypes = [one.places for one in self._groups], [one.dtype for one in self._groups]
        others = [position for position in range(len(graph.inputs)) if position not in set(grown)]
        first = [entries[group.places[0]] for group in self._groups]
        self._others = replace(signature, inputs=tuple(signature.inputs[position] for position in others))
        self._signature = replace(signature, inputs=(*self._others.inputs, *first))
        (segment,) = segments_of(program.artifact.program, graph.outputs, ())
        place_of = {graph.inputs[position]: place for place, position in enumerate(others)}
        self._read = [(entry, place_of[entry.value]) for entry in segment.read if entry.value in place_of]
        self._result = graph.outputs[0]
        new = {name for value in graph.outputs for name in _symbols_of(graph.types[value].shape)}
        self._earlier = [name for name in program.artifact.program.symbols if name not in new]
        self._result_index, self._result_dtype = index[self._result], TORCH_DTYPES[graph.types[self._result].dtype]
        self._plans: OrderedDict[tuple[int, ...], CallPlan] = OrderedDict()
        self._frames: list[_Tables] = []

    @with_memory_errors
    def run(self, program: ProgramModule, inputs: Sequence[Tensor], earlier: Sequence[EarlierTokens]) -> Tensor:
        """Run a call, write the new values behind the earlier ones, and return the first result.

        Args:
            program: the program, which counts clipped values.
            inputs: the other inputs, in the order of the signature.
            earlier: what it reads from the block of each group, with room for the new tokens behind it.

        Raises:
            InputError: an input does not fit the program.
            IndexError: a token is not in the vocabulary.
        """
        check_tensors(self._others, inputs)
        check_memory(self._others, inputs)
        symbols = match_shapes(self._signature, [*(x.shape for x in inputs), *(one.shape for one in earlier)])
        plan = self._plan_for(symbols)
        tables = self._idle_tables()
        frame = tables.frame
        if frame.layout is not plan.layout:
            frame.apply_layout(plan.layout)
        frame.set_dims([symbols[name] for name in self.artifact.program.symbols])
        sizes, strides = plan.outputs[self._result]
        result = torch.empty_strided(sizes, strides, dtype=self._result_dtype, device="cpu")
        frame.external[self._result_index] = result.data_ptr()
        kept = []  # copies in another layout, until the call ends
        for entry, place in self._read:
            kept.append(entry.prepared(inputs[place]))
            frame.set_input(entry.index, kept[-1])
        self._set_blocks(tables, plan, earlier)
        self.artifact.run(frame.run, 0, plan.thread_counts(torch.get_num_threads())[0])
        if frame.out_of_range.value:  # the frame is dropped, not reused
            raise IndexError(INDEX_OUT_OF_RANGE)
        for group, one, parts in zip(self._groups, earlier, tables.new, strict=True):
            if not group.grows:
                _append(group, one, parts)
        if clipped := frame.take_clipped():
            program.range_counts(symbols).note(clipped)
        if len(self._frames) < MAX_FRAMES:
            self._frames.append(tables)
        return result

    def _idle_tables(self) -> _Tables:
        """Return a frame for one call."""
        try:
            return self._frames.pop()
        except IndexError:
            return _Tables(Frame(self.artifact), self._sizes.externals)

    def _set_blocks(self, tables: _Tables, plan: CallPlan, earlier: Sequence[EarlierTokens]) -> None:
        """Set the addresses of the tensors of blocks and of their new values, if the frame has others."""
        at = [(one.address, one.memory.stride()) for one in earlier]
        if tables.blocks != at:
            for group, one, (address, strides) in zip(self._groups, earlier, at, strict=True):
                step = strides[0] * one.memory.itemsize
                tables.external[group.entries] = address + np.arange(len(group.places)) * step
                tables.strides[group.entries, :AXES] = strides[1:]
            tables.blocks = at
        sizes = [plan.outputs[part.first] for group in self._groups for part in group.results]
        if tables.sizes != sizes:
            tables.new = [
                [_memory_of(tables, plan, part, group.dtype) for part in group.results] for group in self._groups
            ]
            tables.sizes = sizes
        for (memory, first, length), (new, *_) in zip(earlier, tables.new, strict=True):
            if first + length + new.shape[1 + TOKENS] > memory.shape[1 + TOKENS]:
                raise ValueError(f"a block has room for {memory.shape[1 + TOKENS]} tokens, but the call needs more")

    def _plan_for(self, symbols: Mapping[str, int]) -> CallPlan:
        """Return a plan for these sizes, whose numbers of earlier tokens may be larger."""
        self._sizes.check(symbols)
        planned = dict(symbols)
        if self.artifact.program.fits_smaller_sizes:
            for name in self._earlier:
                planned[name] += -planned[name] % TOKENS_OF_A_PLAN
            if self._sizes.first_undefined(planned) is not None:  # more tokens than the model has positions
                planned = dict(symbols)
        key = tuple(planned[name] for name in self.artifact.program.symbols)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = CallPlan(self._sizes, planned)
            with contextlib.suppress(KeyError):  # other threads remove plans too
                while len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
        return found


def _memory_of(tables: _Tables, plan: CallPlan, part: _Results, dtype: torch.dtype) -> Tensor:
    """Return memory for new values, and set their addresses."""
    (sizes, strides), count = plan.outputs[part.first], len(part.members)
    each = math.prod(sizes)
    new = torch.empty_strided((count, *sizes), (each, *strides), dtype=dtype, device="cpu")
    tables.external[part.entries] = new.data_ptr() + np.arange(count) * (each * new.itemsize)
    return new


def _append(group: _Group, earlier: EarlierTokens, parts: Sequence[Tensor]) -> None:
    """Copy new values behind the earlier tokens."""
    free = earlier.memory.narrow(1 + TOKENS, earlier.first + earlier.length, parts[0].shape[1 + TOKENS])
    if len(parts) == 1:
        free.copy_(parts[0])
        return
    members, places = np.concatenate([one.members for one in group.results]), free.unbind()
    foreach_copy([places[member] for member in members], [new for part in parts for new in part.unbind()])


def _by_layout(entries: Sequence[int], externals: Sequence[External]) -> tuple[_Results, ...]:
    """Return results with these entries in the table of external tensors, by their layout."""
    alike = _by(range(len(entries)), lambda member: externals[entries[member]].is_image)
    return tuple(
        _Results(externals[entries[members[0]]].value, np.array(members), np.array(entries)[members])
        for _, members in alike
    )


def _by(places: Iterable[int], kind: Callable[[int], Kind]) -> list[tuple[Kind, list[int]]]:
    """Return places by their kind, in the order in which kinds appear."""
    found: dict[Kind, list[int]] = {}
    for place in places:
        found.setdefault(kind(place), []).append(place)
    return list(found.items())


def can_grow(program: ProgramModule, grown: Sequence[int]) -> bool:
    """Return whether `GrowingCalls` can run a program whose inputs at these positions grow by all results but the
    first.

    It must be a single segment, read these inputs with any strides, and give results whose sizes do not depend on the
    numbers of earlier tokens.
    """
    graph, signature, compiled = program.graph, program.signature, program.artifact.program
    one_segment = compiled.segments == 1 and not compiled.calls
    if not one_segment or program.has_side_effects or len(graph.outputs) != 1 + len(grown) or not grown:
        return False
    entries = [signature.inputs[position] for position in grown]
    if any(len(entry.type.shape) != AXES for entry in entries):
        return False
    tokens, result = {_tokens_of(entry) or "" for entry in entries}, graph.types[graph.outputs[0]]
    externals = {external.value: external for external in compiled.externals}
    if "" in tokens or tokens & _symbols_of(result.shape) or len(result.shape) == AXES_OF_IMAGES:
        return False
    return all(
        not externals[graph.inputs[position]].dense and _grows_by(entry, externals[name], tokens)
        for entry, position, name in zip(entries, grown, graph.outputs[1:], strict=True)
    )


def _grows_by(entry: Input, result: External, tokens: Set[str]) -> bool:
    """Return whether a result has the type of an input, apart from the number of tokens, which is none of these."""
    pairs = zip(entry.type.shape, result.shape, strict=True) if len(result.shape) == AXES else []
    alike = [before == new for axis, (before, new) in enumerate(pairs) if axis != TOKENS]
    free = not tokens & _symbols_of(result.shape)
    return len(alike) == AXES - 1 and all(alike) and free and entry.type.dtype == result.dtype


def _kind(entry: Input) -> tuple[tuple[Dim, ...], DType]:
    return tuple(entry.type.shape), entry.type.dtype


def _tokens_of(entry: Input) -> str | None:
    """Return the free size that is the number of earlier tokens, or ``None`` if it is computed or fixed."""
    size = entry.type.shape[TOKENS]
    return None if isinstance(size, int) else size.only_symbol


def _symbols_of(shape: Sequence[Dim]) -> set[str]:
    return {name for size in shape for name in symbols_of(size)}
