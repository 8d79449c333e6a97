"""`InterceptedRun`: one call of a model whose operators are intercepted."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from intaglio.eager.interception import InterceptionMode, without_interception
from intaglio.eager.recording.call_structure import nesting_checked
from intaglio.eager.recording.events import Event, fill, operator_or_class, place_of, tensors, with_origins
from intaglio.eager.recording.float_calls import batch_of, counted
from intaglio.eager.recording.recorder import MAX_UNROLLED, Recorder, source_line, without_folder
from intaglio.eager.recording.torch_functions import (
    METADATA_FUNCTIONS,
    is_uninitialized,
    plain_name,
    takes_numbers,
    works_in_place,
)
from intaglio.eager.recording.unrecordable_operators import OperatorWatch, reason_of_packing
from intaglio.eager.segments.inplace import is_private, isolate_written, update_shapes, written_tensors
from intaglio.eager.segments.qtensor import QTensor, plain
from intaglio.eager.segments.trace_frame import TraceFrame, make_plain
from intaglio.eager.session import Session
from intaglio.signature.tensor_checks import check_memory_of
from intaglio.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, FeatureDropout, is_traced


class _Current(threading.local):
    """The run of the current thread.

    Attributes:
        run: Call that is running, or None.
        make: Constructor of the next run. If it is None, `InterceptedRun` is used.
    """

    run: InterceptedRun | None = None
    make: Callable[[Session, str], InterceptedRun] | None = None

    @contextlib.contextmanager
    def runs_made_by(self, make: Callable[[Session, str], InterceptedRun]) -> Iterator[None]:
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
    if session.stored is not None or session.held.notices_change():
        session.refresh()
    run, outer = (current.make or InterceptedRun)(session, path), current.run
    if outer is not None:
        with DisableTorchFunction():
            outer.compute_referenced()
    elif not is_traced():
        with nesting_checked((args, kwargs), "arguments"):
            check_memory_of((args, kwargs))
    current.run = run
    counts = session.all_or_nothing() if session.is_recording else contextlib.nullcontext()
    try:
        with counts, torch.no_grad(), torch.autocast("cpu", enabled=False), run:
            with nesting_checked((args, kwargs), "arguments"):
                run.begin(args, kwargs)
            result = forward(*args, **kwargs)
            with nesting_checked(result, "result"):
                result = run.end(result)
            for frame in list(run.frames):
                frame.release_tensors()
            if run.frame is not None:
                run.frame.recycle_tensors()
            return result
    finally:
        current.run = outer
        session.note_own_changes()


class InterceptedRun(InterceptionMode):
    """A torch function mode that defers recorded operators, and runs or records all others.

    Attributes:
        path: Path of the module that is running.
        entry: Path of the module that was called.
        frame: Position in the segment that is followed, or None.
        recorder: Recorder of new operators, or None while a segment is followed.
        frames: All frames with values that may still be read.
        last_operator: Operator that ran before those of `frame` and `recorder`.
        free_axes: Axes of tensors, by id, whose sizes are other ones in each call.
    """

    def __init__(self, session: Session, path: str) -> None:
        super().__init__()
        self.session, self.path, self.entry = session, path, path
        self.frame: TraceFrame | None = None
        self.frames: weakref.WeakSet[TraceFrame] = weakref.WeakSet()
        self.recorder: Recorder | None = None
        self.last_operator: Event | None = None
        self.tracks_modules = session.is_recording
        self.calls: dict[str, int] = {path: 1}
        self.module_stack: list[str] = [path]
        self.batch = 1
        self.free_axes: dict[int, tuple[torch.Tensor, set[int]]] = {}

    # -- begin and end --------------------------------------------------------------------------------------------

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start to follow the first segment, or to record if there is none."""
        session = self.session
        if self.entry == "":
            with DisableTorchFunction():
                session.note_call(args, kwargs)
        if session.is_recording:
            self.batch = batch_of((args, kwargs))
        if session.is_recording and not session.segments:
            self.recorder = Recorder(session.path_of_id, self.free_axes)
            with DisableTorchFunction():
                self.recorder.begin(args, kwargs)
        elif session.segments and session.segments[0].refused is None and self.entry == "":
            self._set_frame(session.start_frame(args, kwargs))

    def end(self, result: Any) -> Any:
        """Finish the recording, compute deferred values, and return the result of the call."""
        if self.recorder is not None:
            with DisableTorchFunction():
                self.recorder.end(result)
                self.close()
        self._note_transition(self.last_recorded, None, self.frame)
        with DisableTorchFunction():
            self.compute_referenced()
        return self.session.finish_call(result)

    def compute_referenced(self) -> None:
        """Compute all deferred values that are still referenced."""
        for frame in list(self.frames):
            frame.compute_referenced()

    @property
    def last_recorded(self) -> Event | None:
        """Return the last operator that is part of a recording."""
        if self.recorder is not None and self.recorder.recording.events:
            return self.recorder.recording.events[-1]
        return (
            self.frame.events[self.frame.next - 1]
            if self.frame is not None and self.frame.next > 0
            else self.last_operator
        )

    def _note_transition(self, before: Event | None, after: Event | None, at: TraceFrame | None) -> None:
        if self.entry == "":
            self.session.note_transition(before, after, at)

    def _set_frame(self, frame: TraceFrame) -> None:
        self.frame = frame
        self.frames.add(frame)

    def enter(self, path: str) -> None:
        """Note the start of a call of the module at `path`."""
        self.calls[path] = self.calls.get(path, 0) + 1
        self.module_stack.append(path)

    def leave(self, path: str) -> None:
        """Note the end of that call."""
        self.module_stack.pop()

    # -- what is intercepted --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        at, kwargs = self.frame, kwargs or {}
        if at is not None and at.next < at.count:
            event = at.events[at.next]
            if event.function is func and event.path == self.path and at.matches(event, args, kwargs):
                return (
                    at.defer(event, args)
                    if event.changed is None
                    else self._run_in_place(at, event, args, kwargs, func)
                )
        if func in METADATA_FUNCTIONS:
            return self._answer_query(func, args, kwargs)
        return self._find_or_record(func, self.path, args, kwargs, func)

    def run_leaf(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle the call of a leaf module, which counts as one operator."""
        at = self.frame
        if at is not None and at.next < at.count:
            event = at.events[at.next]
            if event.path == path and event.function is None and at.matches(event, args, kwargs):
                if event.changed is None:
                    return at.defer(event, args)
                return self._run_in_place(at, event, args, kwargs, type(module).forward.__get__(module))
        return self._find_or_record(None, path, args, kwargs, type(module).forward.__get__(module))

    def run_opaque(
        self, path: str, reason: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module that stays in float for this reason, with computed tensors and without interception."""
        with DisableTorchFunction():
            self.close()
            self.compute_referenced()
            return self._reporting(None, path, reason, forward)(*fill(args, plain), **fill(kwargs, plain))

    def _reporting(self, func: Any, path: str, reason: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes an operator in float and adds it to the report when it is new there."""
        if not reason:
            return compute
        known = self.session.float_calls
        line = without_folder(source_line()) if func is not None else ""
        place = path, operator_or_class(self.session.model, path, func), line
        if place in known:
            return compute

        def run(*args: Any, **kwargs: Any) -> Any:
            with counted(self.batch) as work:
                result = compute(*args, **kwargs)
            known[place] = reason, work.macs
            return result

        return run

    # -- other operators ------------------------------------------------------------------------------------------

    def _answer_query(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a metadata query about a tensor without computing its contents."""
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result if self.recorder is None else with_origins(plain_name(func), args, result)

    def _find_or_record(
        self, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Handle an operator that the current segment does not expect: find it in a recording, or treat it as new."""
        with DisableTorchFunction():
            if self.recorder is not None and self._begins_iteration(func, path):
                self.close()
            found = self.session.find_recorded(self.frame, func, path, args, kwargs)
            if found is not None:
                self.close()
                event = found.events[found.next]
                self._note_transition(self.last_recorded, event, self.frame)
                self._set_frame(found)
                if event.changed is None:
                    return found.defer(event, args)
                return self._run_in_place(found, event, args, kwargs, compute)
            return self._run_unrecorded(func, path, args, kwargs, compute)

    def _run_in_place(
        self, at: TraceFrame, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Run an expected in-place operator: defer it if its target is private, otherwise run it at once."""
        if is_private(args[0], self.frames):
            return at.defer(event, args)
        with DisableTorchFunction():
            result = self._run_write(args, kwargs, compute)
            at.skip(event, args[0])
            return result

    def _run_write(self, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Run an operator that writes to memory which other tensors may share."""
        written = written_tensors(args, kwargs)
        places = isolate_written(written, self.frames)
        if (
            self.session.disable_written(places, self.recorder)
            and self.frame is not None
            and self.frame.segment.refused is not None
        ):
            self.last_operator, self.frame = self.last_recorded, None
        self.close()
        real, options = tuple(fill(list(args), plain)), fill(kwargs, plain)
        given = {id(plain(tensor)): tensor for tensor in tensors((args, kwargs)) if type(tensor) is QTensor}
        result = compute(*real, **options)
        update_shapes(written)
        return fill(result, lambda leaf: given.get(id(leaf), leaf))

    def _begins_iteration(self, func: Any, path: str) -> bool:
        """Return whether this operator begins another iteration of a loop, so that the recording ends before it.

        Iterations then share one segment and its parameters. The operator has run on the same source line before, and
        the call is recursive, tensor contents were read since (a data-dependent loop), or it has run `MAX_UNROLLED`
        times.
        """
        assert self.recorder is not None
        events = [event for event in self.recorder.recording.events if event.key == (path, func)]
        if not events:
            return False
        line = source_line()
        same = [event for event in events if event.source == line]
        recursive = len(set(self.module_stack)) < len(self.module_stack)
        return bool(same) and (recursive or self.recorder.last_read > same[-1].index or len(same) >= MAX_UNROLLED)

    def _run_unrecorded(
        self, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], compute: Callable[..., Any]
    ) -> Any:
        """Run an operator that no recording has at this position, and record it if possible."""
        session, recorder = self.session, self.recorder
        if recorder is None and func is torch.Tensor.detach and type(args[0]) is QTensor:
            return make_plain(args[0]).detach()  # nn.Parameter calls it, and takes a result of the same class only
        known_float = (path, func) in session.float_operators or isinstance(func, torch.ScriptMethod)
        in_place = works_in_place(func, kwargs) if func is not None else self._is_in_place_leaf(path)
        real, options = tuple(fill(list(args), plain)), fill(kwargs, plain)
        if session.is_recording and not known_float and recorder is None:
            recorder = Recorder(session.path_of_id, self.free_axes)
        if recorder is None or known_float or not recorder.can_record(real, kwargs, in_place):
            reason = self._reason_for_float(
                func, path, known_float, in_place or "out" in kwargs, tensors((args, kwargs))
            )
            compute = self._reporting(func, path, reason, compute)
            if in_place or "out" in kwargs:
                session.report_unrecorded(func, path, self.frame, (args, kwargs))
                for tensor in written_tensors(args, kwargs):
                    self._exclude([], tensor, self.recorder)
                return self._run_write(args, kwargs, compute)
            if self.recorder is not None:
                self.recorder.note_read(tensors((real, options)))
            self.close()
            result = compute(*real, **options)
            if not known_float and tensors(result):
                session.report_unrecorded(func, path, self.frame, (args, kwargs))
            return result
        given, reason = recorder.arguments(real, options), reason_of_packing(func, real, options)
        compute = self._reporting(func, path, reason, compute)
        with OperatorWatch(options, reason) as watch:
            result = compute(*real, **options)
        if self._was_left_out(func, path):
            return result
        if watch.reason:
            session.report_unrecorded(func, path, self.frame, (args, kwargs))
            self._reporting(func, path, watch.reason, lambda: None)()
            self._exclude(tensors((real, options)), real[0] if in_place else None, recorder)
            return self._with_free_axes(result, watch.axes)
        if self.recorder is None:
            self.last_operator, self.frame, self.recorder = self.last_recorded, None, recorder
        if not tensors(result) and not in_place:
            recorder.note_read(tensors((real, options)))
            return result
        owner = path if func is not None else path.rpartition(".")[0]
        event = recorder.record(func, path, self.calls.get(owner, 1) - 1, given, real, options, result, in_place)
        if event.index == 0:
            self._note_transition(self.last_operator, event, None)
        return result

    def _was_left_out(self, func: Any, path: str) -> bool:
        """Return whether an operator that reads no tensor left a recording, whose input its result is."""
        allocates = is_uninitialized(func) and self.recorder is None
        return (allocates or takes_numbers(func)) and place_of(path, func, source_line()) in self.session.unrecorded

    def _with_free_axes(self, result: Any, axes: set[int]) -> Any:
        """Return a result whose first axis and these axes have another size in each call."""
        self.free_axes.update({id(tensor): (tensor, axes) for tensor in tensors(result)})
        return result

    def _exclude(self, read: list[torch.Tensor], changed: torch.Tensor | None, recorder: Recorder | None) -> None:
        """Keep an operator out of the recording, and the one that allocated its result."""
        filled = None if recorder is None else recorder.exclude(read, changed)
        if filled is not None:
            self.session.unrecorded.add(filled.place)

    def _reason_for_float(self, func: Any, path: str, known_float: bool, writes: bool, given: Any) -> str:
        """Return why an operator runs in float outside of recordings, for the report; empty if it is not listed."""
        if not given or (path, func) in self.session.float_operators:  # the report lists the recording of the latter
            return ""
        if isinstance(func, torch.ScriptMethod):
            return "it is TorchScript, which is not intercepted"
        if torch.is_autocast_enabled("cpu"):
            return "torch.autocast is on"
        if writes:
            return "it writes to memory that the recording does not own"
        return "" if self.session.is_recording else "calibration has not seen it here"

    def _is_in_place_leaf(self, path: str) -> bool:
        module = self.session.model.get_submodule(path)
        return bool(getattr(module, "inplace", False)) and not isinstance(module, FeatureDropout)

    def close(self) -> None:
        """End the current recording, if any, and make a segment of it."""
        recorder, self.recorder = self.recorder, None
        if recorder is not None and recorder.recording.events:
            self.session.unrecorded.update(event.place for event in recorder.close())
            with without_interception():
                segment = self.session.add_recording(recorder.recording)
            if segment.refused is None:
                self.last_operator = recorder.recording.events[-1]
