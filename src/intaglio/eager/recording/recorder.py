"""Recording what a float model does while it runs: `Recorder` makes the events of one `Recording`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

from intaglio.eager.recording.events import Event, Extent, Held, Length, RecordedTensor, fill, tensors
from intaglio.torch_private import pytree, storage_key

UNROLLED = 64
"""So many runs of one line of code have parameters of their own; those behind share the last one's."""


@dataclass(eq=False)
class Recording:
    """A straight line of operators that was seen to run.

    ``inputs``: the values that come from elsewhere, with the tensors they were. ``call``: arguments of the model,
    values in place of tensors, of a recording that begins where the model does. ``results``: what the model returned
    if it ends there, else what is needed behind: a pytree spec and its leaves. ``types``: element type of each value.
    ``free``: input -> axes, besides the batch, that calls of other sizes were seen for.
    """

    events: list[Event] = field(default_factory=list)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    types: dict[int, torch.dtype] = field(default_factory=dict)
    call: tuple[Any, Any] | None = None
    results: Any = None
    free: dict[int, set[int]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """The results as they are nested: a pytree's spec is for one version of PyTorch."""
        tree, entries = self.results
        return {**vars(self), "results": pytree.tree_unflatten(entries, tree)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        entries, tree = pytree.tree_flatten(state["results"])
        vars(self).update(state, results=(tree, entries))

    def __deepcopy__(self, memo: Any) -> Recording:
        """Around the same tensors and operators: once it is made a segment of, only what is free changes."""
        return dataclasses.replace(self, free={number: set(axes) for number, axes in self.free.items()})


class Recorder:
    """Knows tensors by identity while the model runs in float."""

    def __init__(self, known: dict[int, str]) -> None:
        """``known``: id of every tensor the model holds -> its dotted name."""
        self.recording, self.known = Recording(), known
        self.slots: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []  # a tensor that died could hand its id to another
        self.read = -1
        """Index of the last operator before numbers of a tensor were looked at."""
        self.looked_at: dict[RecordedTensor, None] = {}

    def look(self, tensors_: list[torch.Tensor]) -> None:
        """The model looks at numbers of these: control flow may depend on them."""
        made = {number for event in self.recording.events for number in event.outputs}
        self.read = len(self.recording.events)
        self.looked_at.update(
            {RecordedTensor(self.slots[id(t)]): None for t in tensors_ if self.slots.get(id(t)) in made}
        )

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.recording.call = fill((args, kwargs), self._leaf)

    def end(self, result: Any) -> None:
        """What the model returned, of a recording that lasts to its end."""
        entries, tree = pytree.tree_flatten(result)
        if not all(isinstance(entry, (torch.Tensor, int, float, str, type(None))) for entry in entries):
            entries, tree = pytree.tree_flatten(tuple(tensors(entries)))
        made = {**self.slots, **dict.fromkeys(self.known, 0)}
        if self.recording.call is None:
            entries, tree = pytree.tree_flatten(tuple(e for e in entries if id(e) in self.slots))
        if all(id(entry) in made for entry in entries if isinstance(entry, torch.Tensor)):
            self.recording.results = tree, [self._leaf(entry) for entry in entries]

    def close(self) -> None:
        """Without an end, the results are the values that somebody still holds."""
        if self.recording.results is None:
            made = {number for event in self.recording.events for number in event.outputs}
            alive = [t for t in self.kept if self.slots.get(id(t)) in made and _alive(t)]
            entries, tree = pytree.tree_flatten(tuple(dict.fromkeys(map(self._leaf, alive))))
            self.recording.results = tree, entries
        if self.looked_at:
            tree, entries = self.recording.results
            both = pytree.tree_unflatten(entries, tree), tuple(self.looked_at)
            entries, tree = pytree.tree_flatten(both)
            self.recording.results = tree, entries

    def release(self, path: str, tensor: torch.Tensor) -> None:
        """A tensor that the model holds is about to be written to: what was read of it so far is an input."""
        number = self._new(tensor)
        del self.slots[id(tensor)]
        self.recording.inputs[number] = tensor.clone()

        def swap(leaf: Any) -> Any:
            return RecordedTensor(number) if isinstance(leaf, Held) and leaf.path == path else leaf

        for event in self.recording.events:
            event.args, event.kwargs = fill(event.args, swap), fill(event.kwargs, swap)
            event.result = fill(event.result, swap)

    def value(self, tensor: torch.Tensor) -> int:
        """Its number; a tensor seen for the first time comes from elsewhere."""
        if id(tensor) not in self.slots:
            self._read_elsewhere()
            self.recording.inputs[self._new(tensor)] = tensor
        return self.slots[id(tensor)]

    def _read_elsewhere(self) -> None:
        """A tensor comes from where nothing is intercepted, as from TorchScript; it may be made of values that no
        operator of the recording reads."""
        read = {number for event in self.recording.events for number in event.inputs}
        made = [number for event in self.recording.events for number in event.outputs if number not in read]
        self.looked_at.update(dict.fromkeys(map(RecordedTensor, made)))

    def _new(self, tensor: torch.Tensor) -> int:
        number = len(self.recording.types)
        self.recording.types[number] = tensor.dtype
        self.slots[id(tensor)] = number
        self.kept.append(tensor)
        return number

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            path = self.known.get(id(leaf))
            return Held(path) if path is not None else RecordedTensor(self.value(leaf))
        if isinstance(leaf, Length):
            return self._extent(leaf)
        return leaf

    def _extent(self, length: Any) -> Any:
        if not isinstance(length, Length):
            return length
        operation, *operands = length.origin
        if operation == "size":
            return Extent("size", (self._leaf(operands[0]), operands[1]))
        return Extent(operation, tuple(map(self._extent, operands)))

    def takes(self, args: Any, kwargs: dict[str, Any], in_place: bool) -> bool:
        """Whether the operator can be part of a recording: it does not write where others may look, and has the types
        that its inputs give it."""
        if "out" in kwargs or torch.is_autocast_enabled("cpu"):
            return False
        if not in_place:
            return True
        target = args[0] if args else None
        return isinstance(target, torch.Tensor) and self._owned(target)

    def _owned(self, tensor: torch.Tensor) -> bool:
        """A value made here that no other tensor alive shares memory with."""
        number = self.slots.get(id(tensor))
        if number is None or number in self.recording.inputs:
            return False
        place = storage_key(tensor)
        return not any(t is not tensor and storage_key(t) == place and _alive(t) for t in self.kept)

    def arguments(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """As the event holds them; to be asked before the operator runs."""
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
        """``given``: what `arguments` said; ``args``, ``kwargs``, ``result``: the tensors themselves."""
        changed = None
        if in_place:
            self.slots.pop(id(args[0]), None)
            changed = self._new(args[0])
        made = fill(result, lambda leaf: self._result(leaf) if isinstance(leaf, torch.Tensor) else leaf)
        recorded = self.recording
        views = () if in_place else self._views(tensors((args, kwargs)), tensors(result))
        event = Event(len(recorded.events), function, path, call, *given, made, changed, views, source_line())
        recorded.events.append(event)
        return event

    def _result(self, tensor: torch.Tensor) -> Any:
        path = self.known.get(id(tensor))
        if path is not None:
            return Held(path)
        return RecordedTensor(self.slots[id(tensor)] if id(tensor) in self.slots else self._new(tensor))

    def _views(
        self, taken: list[torch.Tensor], made: list[torch.Tensor]
    ) -> tuple[tuple[int, RecordedTensor | Held], ...]:
        """Values of results that lie in the memory of something taken, with that."""
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


def _alive(tensor: torch.Tensor) -> bool:
    """Whether anyone but the recorder holds it."""
    return sys.getrefcount(tensor) > 4


def source_line() -> str:
    """``file:line, in function`` of the innermost frame that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not (name == "torch" or name.startswith(("torch.", "intaglio."))):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return ""


def in_file(source: str) -> str:
    """A source line without the folder its file lies in."""
    return source.replace("\\", "/").rpartition("/")[2]
