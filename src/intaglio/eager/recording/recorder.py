"""`Recorder`: records the operators of a float model while it runs, as events of one `Recording`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from intaglio.eager.recording.events import (
    Event,
    ModelTensor,
    RecordedSize,
    RecordedTensor,
    SizeExpression,
    fill,
    tensors,
)
from intaglio.eager.recording.plain_objects import iterator_inside, tensors_inside
from intaglio.eager.recording.torch_functions import is_uninitialized, takes_numbers
from intaglio.torch_private import pytree, storage_key

MAX_UNROLLED = 64
"""Number of iterations of a source line that get their own parameters. Later ones share those of the last."""


EXPORTED = (torch.Tensor, int, float, str, type(None))
"""Types of arguments and results, besides containers, that `torch.export` takes."""


@dataclass(eq=False)
class Recording:
    """A straight-line sequence of operators that the model has run.

    Attributes:
        events: The operators.
        inputs: Tensors that come from elsewhere, by value number.
        types: Data type of each value.
        call: Arguments of the model, with values for tensors, if the recording begins where the model does.
        results: Pytree spec and leaves of the model's result if the recording ends there, otherwise of the values that
            are needed afterwards.
        free: Axes of inputs, besides the batch, in which calls with other sizes were seen.
        has_extra_results: Whether `results` is a pair of the model's result and of values that are needed beside it,
            because Python code reads them or the call leaves them on a module or in a list.
    """

    events: list[Event] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    types: dict[int, torch.dtype] = field(default_factory=dict)
    call: tuple[Any, Any] | None = None
    results: Any = None
    free: dict[int, set[int]] = field(default_factory=dict)
    has_extra_results: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Store the results as nested containers, because a pytree spec is specific to one version of PyTorch."""
        tree, entries = self.results
        return {**vars(self), "results": pytree.tree_unflatten(entries, tree)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries, tree = pytree.tree_flatten(state["results"])
        vars(self).update(state, results=(tree, entries))

    def __deepcopy__(self, memo: Any) -> Recording:
        """Copy only `free`, and share tensors and events: nothing else changes once a segment is made."""
        return dataclasses.replace(self, free={number: set(axes) for number, axes in self.free.items()})


class Recorder:
    """Builds a `Recording` while the model runs in float, and identifies tensors by object identity."""

    def __init__(self, known: dict[int, str], free_axes: Mapping[int, tuple[torch.Tensor, set[int]]]) -> None:
        """Begin a recording.

        Args:
            known: Dotted name of each tensor of the model, by id.
            free_axes: Tensors, by id, with the axes in which calls have other sizes if they are inputs.
        """
        self.recording, self.known, self.free_axes = Recording(), known, free_axes
        self.slots: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []  # keeps tensors alive, so that ids are not reused
        self.last_read = -1
        """Number of operators that were recorded before the contents of a tensor were last read."""
        self.read_values: dict[RecordedTensor, None] = {}

    def note_read(self, tensors_: list[torch.Tensor]) -> None:
        """Note that the model reads the contents of these tensors, on which its control flow may depend."""
        made = {number for event in self.recording.events for number in event.outputs}
        self.last_read = len(self.recording.events)
        self.read_values.update(
            {RecordedTensor(self.slots[id(t)]): None for t in tensors_ if self.slots.get(id(t)) in made}
        )

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the arguments of the model, for a recording that begins with the call.

        Arguments of which `torch.export` does not take all are not stored: the recording then begins at the first
        operator, and tensors from the arguments are inputs like those from elsewhere.
        """
        if all(isinstance(leaf, EXPORTED) for leaf in pytree.tree_leaves((args, kwargs))):
            self.recording.call = fill((args, kwargs), self._leaf)

    def end(self, result: Any) -> None:
        """Store the model's result, for a recording that reaches the end of the call."""
        entries, tree = pytree.tree_flatten(result)
        known = {**self.slots, **dict.fromkeys(self.known, 0)}
        plain = [isinstance(entry, EXPORTED) for entry in entries]
        unknown = [isinstance(entry, torch.Tensor) and id(entry) not in known for entry in entries]
        if not all(plain) or any(unknown):
            self._keep_unread_values()
            if iterator_inside(result) is not None:
                return  # every value that is still referenced is a result
            entries, tree = pytree.tree_flatten(tuple(tensors_inside(result)))
        if self.recording.call is None:
            entries, tree = pytree.tree_flatten(tuple(e for e in entries if id(e) in self.slots))
        if all(id(entry) in known for entry in entries if isinstance(entry, torch.Tensor)):
            self.recording.results = tree, [self._leaf(entry) for entry in entries]

    def close(self) -> list[Event]:
        """Finish the recording. If it has no result, its results are the values that are still referenced.

        Returns:
            The operators that have left the recording, because their results are its inputs.
        """
        freed = self._free_numbers()
        made = {number for event in self.recording.events for number in event.outputs}
        alive = dict.fromkeys(self._leaf(t) for t in self.alive if self.slots.get(id(t)) in made and _alive(t))
        if self.recording.results is None:
            entries, tree = pytree.tree_flatten(tuple(alive))
            self.recording.results = tree, entries
        else:  # values that the call leaves on a module or in a list, unless others are computed from them
            unread = self._unread_values()
            self.read_values.update({leaf: None for leaf in alive if leaf in unread})
        for leaf in self.recording.results[1]:
            self.read_values.pop(leaf, None)
        if self.read_values:
            tree, entries = self.recording.results
            own, extra = pytree.tree_unflatten(entries, tree), tuple(self.read_values)
            has_own = any(isinstance(entry, RecordedTensor) for entry in entries)
            entries, tree = pytree.tree_flatten((own, extra) if has_own else extra)
            self.recording.results, self.recording.has_extra_results = (tree, entries), has_own
        return freed

    def _free_numbers(self) -> list[Event]:
        """Turn tensors that code makes of numbers of Python into inputs, if the recording reads nothing else.

        Otherwise the numbers of this call would be constants of the graph, and all its results too.
        """
        events = self.recording.events
        written = {number for event in events if event.changed is not None for number in event.inputs[:1]}
        freed = [event for event in events if takes_numbers(event.function) and not event.inputs]
        freed = [event for event in freed if event.makes >= 0 and event.makes not in written]
        if self.recording.inputs or len(freed) == len(events):
            return []
        self.recording.inputs.update({event.makes: self.alive[event.makes] for event in freed})
        events[:] = [event for event in events if event not in freed]
        for index, event in enumerate(events):
            event.index = index
        return freed

    def make_input(self, path: str, tensor: torch.Tensor) -> None:
        """Turn a tensor of the model that is about to be written to into an input of the operators recorded so far."""
        number = self._new_value(tensor)
        del self.slots[id(tensor)]
        self.recording.inputs[number] = tensor.clone()

        def swap(leaf: Any) -> Any:
            return RecordedTensor(number) if isinstance(leaf, ModelTensor) and leaf.path == path else leaf

        for event in self.recording.events:
            event.args, event.kwargs = fill(event.args, swap), fill(event.kwargs, swap)
            event.result = fill(event.result, swap)

    def value(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor. A tensor that is seen for the first time becomes an input."""
        if id(tensor) not in self.slots:
            self._keep_unread_values()
            number = self._new_value(tensor)
            self.recording.inputs[number] = tensor
            if id(tensor) in self.free_axes:
                axes = self.free_axes[id(tensor)][1]
                self.recording.inputs[number], self.recording.free[number] = _not_empty(tensor, axes), set(axes)
        return self.slots[id(tensor)]

    def _keep_unread_values(self) -> None:
        """Add values that no operator reads to the results.

        A new input comes from code that is not intercepted, such as TorchScript, which may have computed it from these
        values.
        """
        self.read_values.update(dict.fromkeys(self._unread_values()))

    def _unread_values(self) -> list[RecordedTensor]:
        """Return the values that no operator reads."""
        read = {number for event in self.recording.events for number in event.inputs}
        made = [number for event in self.recording.events for number in event.outputs if number not in read]
        return list(map(RecordedTensor, made))

    def exclude(self, read: list[torch.Tensor], changed: torch.Tensor | None) -> Event | None:
        """Note that an operator ran which no recording can contain, and keep recording.

        Args:
            read: Tensors that it read. The recording must compute them.
            changed: Tensor that it wrote to, or None. From now on it is an input of the recording.

        Returns:
            The operator that allocated the tensor without writing to it, if nothing has read it since. It leaves
            the recording.
        """
        made = {number for event in self.recording.events for number in event.outputs}
        values = [self.slots[id(tensor)] for tensor in read if self.slots.get(id(tensor)) in made]
        self.read_values.update(dict.fromkeys(map(RecordedTensor, values)))
        number = None if changed is None else self.slots.pop(id(changed), None)
        events = self.recording.events
        filled = next((e for e in events if is_uninitialized(e.function) and number in e.outputs), None)
        if filled is None or any(number in event.inputs for event in events):
            return None
        self.read_values.pop(RecordedTensor(filled.outputs[0]), None)
        events.remove(filled)
        for index, event in enumerate(events):
            event.index = index
        self.last_read = min(self.last_read, len(events))
        return filled

    def _new_value(self, tensor: torch.Tensor) -> int:
        number = len(self.recording.types)
        self.recording.types[number] = tensor.dtype
        self.slots[id(tensor)] = number
        self.alive.append(tensor)
        return number

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            path = self.known.get(id(leaf))
            return ModelTensor(path) if path is not None else RecordedTensor(self.value(leaf))
        if isinstance(leaf, RecordedSize):
            return self._extent(leaf)
        return leaf

    def _extent(self, length: Any) -> Any:
        if not isinstance(length, RecordedSize):
            return length
        operation, *operands = length.origin
        if operation == "size":
            tensor = self._leaf(operands[0])
            return int(length) if isinstance(tensor, ModelTensor) else SizeExpression("size", (tensor, operands[1]))
        return SizeExpression(operation, tuple(map(self._extent, operands)))

    def can_record(self, args: Any, kwargs: dict[str, Any], in_place: bool) -> bool:
        """Return whether an operator can be part of a recording.

        It must not write to memory that other tensors share, and autocast must be off, so that its inputs determine its
        types.
        """
        if "out" in kwargs or torch.is_autocast_enabled("cpu"):
            return False
        if not in_place:
            return True
        target = args[0] if args else None
        return isinstance(target, torch.Tensor) and self._is_unshared(target)

    def _is_unshared(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was made in this recording and shares memory with no other live tensor."""
        number = self.slots.get(id(tensor))
        if number is None or number in self.recording.inputs:
            return False
        place = storage_key(tensor)
        return not any(t is not tensor and storage_key(t) == place and _alive(t) for t in self.alive)

    def arguments(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments in the form that an event stores. Must be called before the operator runs."""
        return tuple(fill(list(args), self._leaf)), fill(kwargs, self._leaf)

    def record(
        self,
        function: Callable[..., Any] | None,
        path: str,
        call: int,
        given: tuple[Any, dict[str, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        in_place: bool,
    ) -> Event:
        """Append the event of an operator that has run.

        Args:
            function: Function that was called, or None for a leaf module.
            path: Path of the leaf module, or of the module that called the function.
            call: Number of earlier calls of the module whose code runs the operator.
            given: Arguments as returned by `arguments`.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.
            result: Result of the call.
            in_place: Whether the operator writes to its first argument.
        """
        changed = None
        if in_place:
            self.slots.pop(id(args[0]), None)
            changed = self._new_value(args[0])
        made = fill(result, lambda leaf: self._result(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        recorded = self.recording
        views = () if in_place else self._views(tensors((args, kwargs)), tensors(result))
        event = Event(len(recorded.events), function, path, call, *given, made, changed, views, source_line())
        recorded.events.append(event)
        return event

    def _result(self, tensor: torch.Tensor) -> Any:
        path = self.known.get(id(tensor))
        if path is not None:
            return ModelTensor(path)
        return RecordedTensor(self.slots[id(tensor)] if id(tensor) in self.slots else self._new_value(tensor))

    def _views(
        self, taken: list[torch.Tensor], made: list[torch.Tensor]
    ) -> tuple[tuple[int, RecordedTensor | ModelTensor], ...]:
        """Return the value numbers of results that share memory with an operand, each with that operand."""
        bases: dict[int, torch.Tensor] = {}
        for tensor in taken:
            bases.setdefault(storage_key(tensor), tensor)
        same = {id(tensor) for tensor in taken}
        found = []
        for tensor in made:
            base = bases.get(storage_key(tensor))
            if base is not None and id(tensor) not in same and id(tensor) in self.slots:
                found.append((self.slots[id(tensor)], self._leaf(base)))
        return tuple(found)


def _not_empty(tensor: torch.Tensor, free_axes: set[int]) -> torch.Tensor:
    """Return zeros of size 2 where the first axis or one of these has the size 0, which torch.export would fix."""
    size = [2 if not n and axis in {0, *free_axes} else n for axis, n in enumerate(tensor.shape)]
    return tensor if size == list(tensor.shape) else tensor.new_zeros(size)


def _alive(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is referenced outside the recorder."""
    return sys.getrefcount(tensor) > 4


def source_line() -> str:
    """Return `file:line, in function` of the innermost frame outside PyTorch and intaglio."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not (name == "torch" or name.startswith(("torch.", "intaglio."))):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return ""


def without_folder(source: str) -> str:
    """Return a source line without the folder of the file."""
    return source.replace("\\", "/").rpartition("/")[2]
