"""`TraceFrame`: one run along a segment, which tracks operands and deferred values and computes them on demand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from types import MappingProxyType
from typing import Any, Protocol
from weakref import getweakrefcount

import torch

from intaglio.eager.recording.events import Event, ModelTensor, RecordedTensor, SizeExpression, fill, leaves
from intaglio.eager.segments.graph_parts import UnavailableError
from intaglio.eager.segments.qtensor import QTensor, become_plain, deferred_tensor, plain, set_shape
from intaglio.eager.segments.segment import Segment
from intaglio.torch_private import DisableTorchFunction, pytree, without_global_hooks

UNREFERENCED_COUNT = 3
"""Reference count of an otherwise unreferenced tensor in a loop over a dictionary.

One reference each is held by the dictionary, the loop variable and the argument of getrefcount.
"""
MAX_SPARE_SETS = 8
"""Number of size assignments for which a segment keeps tensors for reuse."""
QTENSOR_ATTRIBUTES = 3
"""Number of attributes of a `QTensor` to which user code has added none."""


class TensorHolder(Protocol):
    """Protocol for the part of a session that a frame reads."""

    model_tensors: dict[str, torch.Tensor]
    """Parameters, buffers and tensor attributes of the model by dotted name."""


class TraceFrame:
    """The position of a call in a segment, with its operands and deferred values.

    Attributes:
        next: Index of the operator that is expected next.
        bound: Tensors of values that were made outside this frame, by value number.
        deferred: Tensors of values computed by this frame, some of them not yet.
        symbols: Dynamic sizes that operands have determined.
        replaced: For values written in place to a tensor, the value that the tensor first represented.
        sizes: Shape of each value, or None while unknown.
        mismatched_axes: Axes in whose size the operands of a failed `bind` differ from the recording.
        spare: Tensors of an earlier call, by value number, for reuse.
        counted: Values that observers have already counted.
        computed: Values of `made` with contents.
    """

    def __init__(self, session: TensorHolder, segment: Segment, start: int = 0) -> None:
        self.session, self.segment, self.next = session, segment, start
        self.events: Sequence[Event] = segment.events
        self.count = len(segment.events)
        self.bound: dict[int, torch.Tensor] = {}
        self.deferred: dict[int, QTensor] = {}
        self.symbols: dict[str, int] = {}
        self.replaced: dict[int, int] = {}
        self.sizes: list[torch.Size | None] = []
        self.mismatched_axes: dict[int, tuple[int, ...]] = {}
        self.reusable: dict[int, QTensor] = {}
        self.counted: set[int] = set()
        self.computed: set[int] = set()

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Bind the arguments of the model; return whether they are nested as in the recording."""
        given, tree = pytree.tree_flatten((args, kwargs))
        spec = self.segment.argument_leaves
        if spec is None or self.segment.argument_tree != tree:
            return spec is None
        pairs = [(s.index, v) for s, v in zip(spec, given, strict=True) if type(s) is RecordedTensor]
        if all(isinstance(value, torch.Tensor) for _, value in pairs):
            self.bind(dict(pairs))
        return True

    # -- following ------------------------------------------------------------------------------------------------

    def matches(self, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is this operator on these values, and bind the operands if so."""
        slots = event.slots
        if len(args) != len(slots) or len(kwargs) != len(event.kwargs):
            return False
        if len(slots) == 1:
            value = args[0]
            if type(value) is QTensor and value.frame is self:
                for key, spec in event.kwargs.items():
                    if kwargs.get(key, self) is not spec:
                        break
                else:
                    return value.slot == slots[0]
        trial: dict[int, torch.Tensor] = {}
        for slot, spec, value in zip(slots, event.args, args, strict=True):
            if slot >= 0 and type(value) is QTensor and value.frame is self:
                if value.slot != slot:
                    return False
            elif value is not spec and not self._matches_spec(
                spec, value, trial
            ):  # constants in code are identical objects
                return False
        if kwargs:
            for key, spec in event.kwargs.items():
                value = kwargs.get(key, self)
                if value is not spec and (value is self or not self._matches_spec(spec, value, trial)):
                    return False
        return not trial or self.bind(trial)

    def bind(self, trial: dict[int, torch.Tensor]) -> bool:
        """Bind tensors to values if data types and shapes fit; return whether they do."""
        symbols = dict(self.symbols)
        with DisableTorchFunction():
            segment = self.segment
            if segment.refused is None and not all(segment.accepts(n, t, symbols) for n, t in trial.items()):
                self.mismatched_axes = {n: axes for n, t in trial.items() if (axes := segment.size_mismatch(n, t))}
                return False
        self.bound.update(trial)
        if not self.sizes or symbols != self.symbols:
            self.symbols = symbols
            self.sizes = self.segment.sizes(symbols) if self.segment.refused is None else []
            self.reusable = self.segment.reusable.pop(tuple(symbols.items()), {})
        return True

    def _matches_spec(self, spec: Any, value: Any, trial: dict[int, torch.Tensor]) -> bool:
        kind = type(spec)
        if kind is RecordedTensor:
            return isinstance(value, torch.Tensor) and self._matches_value(spec.index, value, trial)
        if kind is ModelTensor:
            return value is self.session.model_tensors.get(spec.path)
        if kind is SizeExpression:
            return isinstance(value, int) and value == self._extent(spec, trial)
        if kind is tuple or kind is list or isinstance(spec, tuple):
            return (
                isinstance(value, (tuple, list))
                and len(value) == len(spec)
                and all(self._matches_spec(s, v, trial) for s, v in zip(spec, value, strict=True))
            )
        if kind is dict:
            return (
                type(value) is dict
                and value.keys() == spec.keys()
                and all(self._matches_spec(entry, value[key], trial) for key, entry in spec.items())
            )
        if kind is slice:
            return type(value) is slice and all(
                self._matches_spec(s, v, trial)
                for s, v in zip((spec.start, spec.stop, spec.step), (value.start, value.stop, value.step), strict=True)
            )
        return value is spec or (not isinstance(value, torch.Tensor) and type(value) is kind and bool(value == spec))

    def _matches_value(self, number: int, value: torch.Tensor, trial: dict[int, torch.Tensor]) -> bool:
        if type(value) is QTensor and value.frame is self:
            return value.slot == number
        if number in self.deferred or number in self.replaced or number in self.replaced.values():
            return False
        known = self.bound.get(number, trial.get(number))
        if known is None:
            if number in self.segment.constant_values and not self._is_from_other_run(value, number):
                return False
            trial[number] = value
            return True
        return known is value

    def _is_from_other_run(self, value: torch.Tensor, number: int) -> bool:
        """Return whether a tensor is this value from another run along the same segment."""
        return (
            type(value) is QTensor
            and value.slot == number
            and value.frame is not None
            and value.frame.segment is self.segment
        )

    def _extent(self, spec: SizeExpression, trial: dict[int, torch.Tensor]) -> int | None:
        try:
            return int(spec.evaluate(lambda value, axis: self.size(value.index, axis, trial)))
        except LookupError:
            return None

    def size(self, number: int, axis: int, trial: Mapping[int, torch.Tensor] = MappingProxyType({})) -> int:
        """Return the size of an axis of a value.

        Raises:
            LookupError: The value is not known, and its shape does not follow from known ones.
        """
        known = self.bound.get(number, trial.get(number, self.deferred.get(number)))
        found = known.shape if known is not None else self.sizes[number] if self.sizes else None
        if found is None:
            raise LookupError
        return int(found[axis])

    # -- deferring ------------------------------------------------------------------------------------------------

    def defer(self, event: Event, args: tuple[Any, ...]) -> Any:
        """Return the result of the expected operator as deferred tensors."""
        self.next += 1
        if event.makes >= 0:
            return self._pending(event.makes)
        result = event.result
        if event.changed is not None:
            assert type(args[0]) is QTensor
            self._assign_value(args[0], event.changed)
            if self.segment.shapes.get(event.slots[0]) != self.segment.shapes.get(event.changed):
                size = self.sizes[event.changed] if self.sizes else None
                set_shape(args[0], self._computed_shape(event.changed) if size is None else size)
            return args[0] if type(result) is RecordedTensor else fill(result, self._result_leaf)
        return fill(result, self._result_leaf)

    def _assign_value(self, tensor: QTensor, number: int) -> None:
        """Make the caller's private tensor represent another value, as an in-place operator does."""
        if tensor.frame is self and tensor.content is None:
            old = tensor.slot
            self.replaced[number] = self.replaced.get(old, old)
            del self.deferred[old]
            tensor.slot, self.deferred[number] = number, tensor
            return
        places = [at for at, known in self.bound.items() if known is tensor]
        before, slot = tensor.frame, tensor.slot
        assert before is not None
        replacement = deferred_tensor(tensor.shape, tensor.dtype, before, slot)
        replacement.content = tensor.content
        if before.deferred.get(slot) is tensor:
            before.deferred[slot] = replacement
        self.deferred[number] = tensor
        tensor.frame, tensor.slot, tensor.content = self, number, None
        self.bound.update(dict.fromkeys(places, replacement))

    def _result_leaf(self, leaf: Any) -> Any:
        if type(leaf) is RecordedTensor:
            return self._pending(leaf.index)
        return self.session.model_tensors[leaf.path] if type(leaf) is ModelTensor else leaf

    def _pending(self, number: int) -> Any:
        known: torch.Tensor | None = self.deferred.get(number)
        if known is None:
            known = self.bound.get(number)
        if known is not None:
            return known
        recycled = self.reusable.pop(number, None)
        if recycled is not None:
            recycled.frame, recycled.slot = self, number
            self.deferred[number] = recycled
            return recycled
        size = self.sizes[number] if self.sizes else None
        if size is None:
            size = self._computed_shape(number)
        made = self.deferred[number] = deferred_tensor(size, self.segment.recording.types[number], self, number)
        return made

    def _computed_shape(self, number: int) -> torch.Size:
        """Return a shape that the known dynamic sizes do not determine, by computing the value."""
        real = self._float_value(number)
        self.bound[number] = real
        return real.shape

    def skip(self, event: Event, changed: torch.Tensor) -> None:
        """Advance past the expected operator, which ran at once and wrote to the tensor `changed`."""
        self.next = event.index + 1
        assert event.changed is not None
        self.bound[event.changed] = changed

    def release_tensors(self) -> None:
        """Turn the computed tensors that are still referenced into plain ones, at the end of a call.

        The model may have stored them on itself, in a list of the caller, or passed them to a hook.
        """
        held = [q for q in self.deferred.values() if q.content is not None and getrefcount(q) > UNREFERENCED_COUNT]
        for q in held:
            self.deferred.pop(q.slot, None)
            become_plain(q)

    def recycle_tensors(self) -> None:
        """Keep deferred tensors without other references for the next call with the same sizes.

        Creating a tensor costs more than all other work of deferring an operator.
        """
        if not self.sizes:
            return
        recyclable, changed, first = {}, self.segment.changed, self.replaced
        for q in self.deferred.values():
            if (
                getrefcount(q) == UNREFERENCED_COUNT
                and len(q.__dict__) == QTENSOR_ATTRIBUTES
                and not getweakrefcount(q)
            ):
                slot = first.get(q.slot, q.slot)
                if slot not in changed and (slot == q.slot or q.shape == self.sizes[slot]):
                    recyclable[slot] = q
            elif q.content is None:
                return  # the caller may still read its contents
        self.deferred.clear()
        for q in recyclable.values():
            q.content = None
            del q.frame
        if len(self.segment.reusable) >= MAX_SPARE_SETS:
            self.segment.reusable.clear()
        self.segment.reusable[tuple(self.symbols.items())] = recyclable

    # -- computing ------------------------------------------------------------------------------------------------

    def compute_referenced(self) -> None:
        """Compute every deferred value that is still referenced."""
        wanted = [q for q in self.deferred.values() if q.content is None and getrefcount(q) > UNREFERENCED_COUNT]
        if wanted:
            self.compute(wanted)

    def compute(self, wanted: Sequence[QTensor]) -> None:
        """Compute these values, together with other referenced ones that later operators read."""
        with DisableTorchFunction(), torch.no_grad(), torch.autocast("cpu", enabled=False):
            chosen = {q.slot: q for q in wanted if q.content is None}
            later = self.segment.last_reads
            for q in self.deferred.values():
                if q.content is None and later.get(q.slot, -1) >= self.next and getrefcount(q) > UNREFERENCED_COUNT:
                    chosen[q.slot] = q
            order = tuple(sorted(chosen))
            given = frozenset([*self.bound, *self.computed])
            try:
                self._run(given, order, chosen)
            except UnavailableError:
                for number, q in chosen.items():
                    self._compute_single(number, q)

    def _run(self, given: frozenset[int], order: tuple[int, ...], chosen: dict[int, QTensor]) -> None:
        reads, runner = self.segment.computation(given, order, frozenset(self.counted))
        with without_global_hooks():
            results = runner([self._computed(number) for number in reads])
        self.counted.update(reads, order)
        for number, result in zip(order, results, strict=True):
            chosen[number].content = result
            self.computed.add(number)

    def _compute_single(self, number: int, q: QTensor) -> None:
        """Compute a value by itself, with its float operator if the graph does not hold it."""
        try:
            self._run(frozenset([*self.bound, *self.computed]), (number,), {number: q})
        except UnavailableError:
            q.content = self._float_value(number)
            self.computed.add(number)

    def _computed(self, number: int) -> torch.Tensor:
        found = self.bound.get(number)
        return plain(self.deferred[number] if found is None else found)

    def _float_value(self, number: int) -> torch.Tensor:
        """Return a value, computed by its float operator if necessary."""
        if number in self.bound or number in self.computed:
            return self._computed(number)
        event = next(event for event in self.events if number in event.outputs)
        with DisableTorchFunction(), torch.no_grad():
            result = self.segment.run_event(event, self.operand, self.size)
        made = {
            s.index: v for s, v in zip(leaves(result[0]), leaves(result[1]), strict=True) if type(s) is RecordedTensor
        }
        return made[number]

    def operand(self, number: int) -> torch.Tensor:
        """Return the tensor of a value, and compute it first if necessary."""
        known = self.bound.get(number)
        if known is not None:
            return plain(known)
        made = self.deferred[number] if number in self.deferred else deferred_tensor((0,), torch.float32, self, number)
        if made.content is None:
            self._compute_single(number, made)
        if number not in self.deferred:
            self.bound[number] = plain(made)
        return plain(made)


def make_plain(tensor: QTensor) -> torch.Tensor:
    """Compute a deferred tensor and turn it into a plain one during a call, for everything that references it."""
    computed, frame, slot = tensor.compute(), tensor.frame, tensor.slot
    become_plain(tensor)
    if type(tensor) is QTensor:  # it has weak references
        return computed
    if isinstance(frame, TraceFrame):
        frame.deferred.pop(slot, None)
        frame.bound[slot] = tensor
    return tensor
