"""`InterceptedRun`: one call of a model whose operators are intercepted."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from intaglio.eager.interception import InterceptionMode, uninterrupted
from intaglio.eager.recording.events import Event, Length, fill, tensors
from intaglio.eager.recording.recorder import UNROLLED, Recorder, source_line
from intaglio.eager.recording.torch_functions import QUESTION_FUNCTIONS, plain_name, works_in_place
from intaglio.eager.segments.inplace import is_private, prepare_write, reshape, targets
from intaglio.eager.segments.qtensor import QTensor, plain
from intaglio.eager.segments.trace_frame import TraceFrame
from intaglio.eager.session import Session
from intaglio.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, FeatureDropout


class _Current(threading.local):
    """The run of the current thread.

    Attributes:
        run: Call that is running, or None.
        make: Constructor of the next run. If it is None, `InterceptedRun` is used.
    """

    run: InterceptedRun | None = None
    make: Callable[[Session, str], InterceptedRun] | None = None

    @contextlib.contextmanager
    def made_as(self, make: Callable[[Session, str], InterceptedRun]) -> Iterator[None]:
        """Construct runs with `make` inside the `with` block."""
        outer, self.make = self.make, make
        try:
            yield
        finally:
            self.make = outer


current = _Current()


def call_intercepted(
    session: Session, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the session's model, or its module at `path` if that is called directly, with operators intercepted."""
    if session.stored is not None:
        session.resume()
    run, outer = (current.make or InterceptedRun)(session, path), current.run
    if outer is not None:
        with DisableTorchFunction():
            outer.settle()
    current.run = run
    counts = session.all_or_nothing() if session.records else contextlib.nullcontext()
    try:
        with counts, torch.no_grad(), torch.autocast("cpu", enabled=False), run:
            run.begin(args, kwargs)
            result = forward(*args, **kwargs)
            result = run.end(result)
            if run.at is not None:
                run.at.leave()
            return result
    finally:
        current.run = outer


class InterceptedRun(InterceptionMode):
    """A torch function mode that defers recorded operators, and runs or records all others.

    Attributes:
        path: Path of the module that is running.
        entry: Path of the module that was called.
        at: Position in the segment that is followed, or None.
        recorder: Recorder of new operators, or None while a segment is followed.
        frames: All frames with values that may still be read.
        last: Operator that ran before those of `at` and `recorder`.
    """

    def __init__(self, session: Session, path: str) -> None:
        super().__init__()
        self.session, self.path, self.entry = session, path, path
        self.at: TraceFrame | None = None
        self.frames: weakref.WeakSet[TraceFrame] = weakref.WeakSet()
        self.recorder: Recorder | None = None
        self.last: Event | None = None
        self.watches = session.records
        self.calls: dict[str, int] = {path: 1}
        self.inside: list[str] = [path]

    # -- begin and end --------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start to follow the first segment, or to record if there is none."""
        session = self.session
        if session.records and not session.segments:
            self.recorder = Recorder(session.known)
            with DisableTorchFunction():
                self.recorder.begin(args, kwargs)
        elif session.segments and session.segments[0].refused is None and self.entry == "":
            self._move(session.entered(args, kwargs))

    def end(self, result: Any) -> Any:
        """Finish the recording, compute deferred values, and return the result of the call."""
        if self.recorder is not None:
            with DisableTorchFunction():
                self.recorder.end(result)
                self.close()
        self._turn(self.place, None, self.at)
        with DisableTorchFunction():
            self.settle()
        return self.session.finished(result)

    def settle(self) -> None:
        """Compute all deferred values that are still referenced."""
        for frame in list(self.frames):
            frame.settle()

    @property
    def place(self) -> Event | None:
        """Return the last operator that is part of a recording."""
        if self.recorder is not None and self.recorder.recording.events:
            return self.recorder.recording.events[-1]
        return self.at.events[self.at.next - 1] if self.at is not None and self.at.next > 0 else self.last

    def _turn(self, before: Event | None, after: Event | None, at: TraceFrame | None) -> None:
        if self.entry == "":
            self.session.turn(before, after, at)

    def _move(self, at: TraceFrame) -> None:
        self.at = at
        self.frames.add(at)

    def enter(self, path: str) -> None:
        """Note the start of a call of the module at `path`."""
        self.calls[path] = self.calls.get(path, 0) + 1
        self.inside.append(path)

    def leave(self, path: str) -> None:
        """Note the end of that call."""
        self.inside.pop()

    # -- what is intercepted --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        at, kwargs = self.at, kwargs or {}
        if at is not None and at.next < at.count:
            event = at.events[at.next]
            if event.function is func and event.path == self.path and at.follows(event, args, kwargs):
                return at.defer(event, args) if event.changed is None else self._change(at, event, args, kwargs, func)
        if func in QUESTION_FUNCTIONS:
            return self._answer(func, args, kwargs)
        return self._elsewhere(func, self.path, args, kwargs, func)

    def leaf(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a leaf module, which counts as one operator."""
        at = self.at
        if at is not None and at.next < at.count:
            event = at.events[at.next]
            if event.path == path and event.function is None and at.follows(event, args, kwargs):
                if event.changed is None:
                    return at.defer(event, args)
                return self._change(at, event, args, kwargs, type(module).forward.__get__(module))
        return self._elsewhere(None, path, args, kwargs, type(module).forward.__get__(module))

    def opaque(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that stays in float, with computed tensors and without interception."""
        with DisableTorchFunction():
            self.close()
            self.settle()
            return forward(*fill(args, plain), **fill(kwargs, plain))

    # -- other operators ------------------------------------------------------------------------------------------

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a metadata query about a tensor without computing its contents."""
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result if self.recorder is None else _lengths(plain_name(func), args, result)

    def _elsewhere(
        self, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Handle an operator that the current segment does not expect: find it in a recording, or treat it as new."""
        with DisableTorchFunction():
            if self.recorder is not None and self._rolls(func, path):
                self.close()
            found = self.session.find(self.at, func, path, args, kwargs)
            if found is not None:
                self.close()
                event = found.events[found.next]
                self._turn(self.place, event, self.at)
                self._move(found)
                if event.changed is None:
                    return found.defer(event, args)
                return self._change(found, event, args, kwargs, compute)
            return self._new(func, path, args, kwargs, compute)

    def _change(
        self, at: TraceFrame, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Run an expected in-place operator: defer it if its target is private, otherwise run it at once."""
        if is_private(args[0], self.frames):
            return at.defer(event, args)
        with DisableTorchFunction():
            result = self._write(args, kwargs, compute)
            at.skip(event, args[0])
            return result

    def _write(self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Run an operator that writes to memory which other tensors may share."""
        written = targets(args, kwargs)
        places = prepare_write(written, self.frames)
        if self.session.written(places, self.recorder) and self.at is not None and self.at.segment.refused is not None:
            self.last, self.at = self.place, None
        self.close()
        real, options = tuple(fill(list(args), plain)), fill(kwargs, plain)
        given = {id(plain(tensor)): tensor for tensor in tensors((args, kwargs)) if type(tensor) is QTensor}
        result = compute(*real, **options)
        reshape(written)
        return fill(result, lambda leaf: given.get(id(leaf), leaf))

    def _rolls(self, func: Any, path: str) -> bool:
        """Return whether this operator begins another iteration of a loop, so that the recording ends before it.

        Iterations then share one segment and its parameters. The operator has run on the same source line before, and
        the call is recursive, tensor contents were read since (a data-dependent loop), or it has run `UNROLLED` times.
        """
        assert self.recorder is not None
        events = [event for event in self.recorder.recording.events if event.key == (path, func)]
        if not events:
            return False
        line = source_line()
        same = [event for event in events if event.source == line]
        recursive = len(set(self.inside)) < len(self.inside)
        return bool(same) and (recursive or self.recorder.read > same[-1].index or len(same) >= UNROLLED)

    def _new(
        self, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Run an operator that no recording has at this position, and record it if possible."""
        session, recorder = self.session, self.recorder
        known_float = (path, func) in session.floats or isinstance(func, torch.ScriptMethod)
        in_place = works_in_place(func, kwargs) if func is not None else self._leaf_in_place(path)
        real, options = tuple(fill(list(args), plain)), fill(kwargs, plain)
        if session.records and not known_float and recorder is None:
            recorder = Recorder(session.known)
        if recorder is None or known_float or not recorder.takes(real, kwargs, in_place):
            if in_place or "out" in kwargs:
                session.apart(func, path, self.at, (args, kwargs))
                return self._write(args, kwargs, compute)
            if self.recorder is not None:
                self.recorder.look(tensors((real, options)))
            self.close()
            result = compute(*real, **options)
            if not known_float and tensors(result):
                session.apart(func, path, self.at, (args, kwargs))
            return result
        if self.recorder is None:
            self.last, self.at, self.recorder = self.place, None, recorder
        given = recorder.arguments(real, options)
        result = compute(*real, **options)
        if not tensors(result) and not in_place:
            recorder.look(tensors((real, options)))
            return result
        owner = path if func is not None else path.rpartition(".")[0]
        event = recorder.record(func, path, self.calls.get(owner, 1) - 1, given, real, options, result, in_place)
        if event.index == 0:
            self._turn(self.last, event, None)
        return result

    def _leaf_in_place(self, path: str) -> bool:
        module = self.session.model.get_submodule(path)
        return bool(getattr(module, "inplace", False)) and not isinstance(module, FeatureDropout)

    def close(self) -> None:
        """End the current recording, if any, and make a segment of it."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None and recorder.recording.events:
            recorder.close()
            with uninterrupted():
                segment = self.session.recorded(recorder.recording)
            if segment.refused is None:
                self.last = recorder.recording.events[-1]


def _lengths(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """Wrap sizes in `Length`, which remembers the tensor and axis they come from."""
    if name in ("shape", "size") and isinstance(result, tuple):
        return tuple(Length.of(size, "size", args[0], axis) for axis, size in enumerate(result))
    if name == "size" and len(args) > 1:
        return Length.of(result, "size", args[0], args[1])
    return Length.of(result, "size", args[0], 0) if name == "__len__" else result
