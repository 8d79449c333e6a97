"""`Session`: the state that all modules of a prepared or converted model share."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from intaglio.eager.interception import without_interception
from intaglio.eager.model_copies import own_modules, plain_copy
from intaglio.eager.recording.call_structure import CallStructure, call_structure
from intaglio.eager.recording.events import Event, operator_name, place_of, tensors
from intaglio.eager.recording.recorder import Recorder, Recording, source_line, without_folder
from intaglio.eager.recording.tensor_changes import model_tensors
from intaglio.eager.segments.held_tensors import HeldTensors, listed
from intaglio.eager.segments.qtensor import plain_results
from intaglio.eager.segments.refused_models import nothing_quantized_in
from intaglio.eager.segments.segment import Segment
from intaglio.eager.segments.trace_frame import TraceFrame
from intaglio.eager.serialization import SerializedSession, restore, store
from intaglio.eager.snapshot import Snapshot
from intaglio.errors import CaptureError, InputError, UnsupportedError
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime.reports.clipping import ClippingMonitor, ClippingPolicy
from intaglio.torch_private import storage_key

logger = logging.getLogger("intaglio")


class Session:
    """Recordings of a model, their segments, and the transitions between them.

    Attributes:
        model: Model that runs and is intercepted.
        origin: Model with the same tensors that is not intercepted.
        quantizer: Chooses the sites and their parameters.
        strict: Raise an error for operators that calibration has not seen, instead of running them in float.
        is_recording: True while the model is prepared: operators that were not seen yet are recorded.
    """

    def __init__(
        self, model: nn.Module, quantizer: Quantizer, strict: bool = False, leaf_classes: tuple[type, ...] = ()
    ) -> None:
        self.leaf_classes = leaf_classes
        self.model, self.quantizer, self.strict = model, quantizer, strict
        self.is_recording = True
        self.stored: SerializedSession | None = None
        self.lock = threading.RLock()
        self._reset()

    def _reset(self) -> None:
        """Reset the session to one without recordings, with the tensors that the model has now."""
        self.origin, self.runs = plain_copy(self.model, self.leaf_classes), 0
        self.segments: list[Segment] = []
        self.model_tensors = model_tensors(self.model)
        self.path_of_id = {id(tensor): path for path, tensor in reversed(self.model_tensors.items())}
        self.index: dict[Any, list[tuple[Segment, Event]]] = {}
        self.successors: dict[Any, list[tuple[Segment, int]]] = {}
        self.transitions: set[tuple[Any, Any]] = set()
        """Pairs of `location`s of operators that followed each other in calibration. None begins and ends a call."""
        self.source_lines: dict[tuple[str, str], list[str]] = {}
        """Source lines that an operator was recorded on, by its path and name."""
        self.unrecorded: set[tuple[str, str, str]] = set()
        """Path, name and calling function of operators that were seen but cannot be part of a recording."""
        self.call_structures: set[CallStructure] = set()
        """How the arguments of the calls in preparation and calibration were nested."""
        self.float_calls: dict[tuple[str, str, str], tuple[str, int]] = {}
        """Path, name and line of what runs in float outside of recordings, with the reason and the MACs."""
        self.clipping = ClippingMonitor(ClippingPolicy.ERROR if self.strict else ClippingPolicy.WARN)
        self.modules = own_modules(self.model)
        self.float_operators: set[Any] = set()
        self.warned: set[Any] = set()
        self.held = HeldTensors(self.model, self.model_tensors, self.segments)

    # -- serialization and copies ---------------------------------------------------------------------------------

    def serialized_state(self) -> SerializedSession:
        """Return the serializable state: recordings and their entries, without graphs."""
        with self.lock:
            if self.stored is not None:
                return self.stored
            return store(self).with_other_weights() if self.held.changed_between_calls() else store(self)

    def suspend(self, stored: SerializedSession) -> None:
        """Replace the graphs by their serialized state; the next call rebuilds them."""
        self.stored = stored

    def resume(self) -> None:
        """Rebuild the graphs from the serialized state, if the session is suspended."""
        with self.lock, without_interception(), torch.inference_mode(False):
            if self.stored is not None:
                self._reset()
                restore(self, self.stored)
                self.stored = None
                self.held.watch(self.is_recording)

    def refresh(self) -> None:
        """Rebuild the graphs if the session is suspended, or if tensors that they hold have changed between calls."""
        with self.lock:
            changed = self.held.changed_between_calls() if self.stored is None else []
            if changed:
                logger.warning("%s changed; the graphs of the model are built again", listed(changed))
                self.suspend(self.serialized_state())
            self.resume()
            for segment in self.segments if changed and not self.is_recording else ():
                if segment.refused is not None:
                    logger.warning("operators from %s run in float now: %s", segment.events[0], segment.refused)

    def note_own_changes(self) -> None:
        """Disable recordings that hold tensors which the call that ends has changed itself."""
        if self.held.is_settled or self.stored is not None:
            return
        with self.lock, without_interception():
            found = self.held.end_call()
            if found is not None and found.outdated:
                self._disable(found.outdated, found.names)
                self.float_operators.update(found.layers)

    def __getstate__(self) -> dict[str, Any]:
        names = ("model", "quantizer", "strict", "leaf_classes", "is_recording")
        return {**{name: getattr(self, name) for name in names}, "stored": self.serialized_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    # -- calls ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Hold the lock during a calibration call, and restore the session if the call fails."""
        with self.lock:
            snapshot = Snapshot(self)
            try:
                yield
            except BaseException:
                snapshot()
                raise

    def note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how the arguments of a call are nested, or check it if the session is strict and converted.

        Raises:
            InputError: Calibration has not seen a call with arguments nested like these.
        """
        if not self.is_recording and not (self.strict and self.call_structures):
            return
        found = call_structure(type(self.model).forward, args, kwargs)
        if self.is_recording:
            self.call_structures.add(found)
        elif all(found.key != known.key for known in self.call_structures):
            known_words = " or ".join(sorted(known.words for known in self.call_structures))
            raise InputError(
                "arguments",
                None,
                f"they are nested as {found.words}, but in calibration as {known_words}",
                remedy="call the model as in calibration, or convert without strict=True",
            )

    # -- recordings -----------------------------------------------------------------------------------------------

    def finish_call(self, result: Any) -> Any:
        """Return the result of a call with all deferred values computed. While calibrating, begin the next batch."""
        found = plain_results(result)
        if self.is_recording:
            self.check_modules()
            for segment in self.segments:
                segment.next_batch()
            self.runs += 1
        return found

    def add_recording(self, recording: Recording) -> Segment:
        """Add a segment for a finished recording, and collect statistics of the recorded tensors."""
        segment = Segment(recording, self.origin, self.quantizer)
        self.add(segment)
        self.transitions.update(itertools.pairwise(map(self.location, segment.events)))
        if segment.prepared is not None:
            segment.observe()
        return segment

    def disable_written(self, places: set[int], recorder: Recorder | None) -> bool:
        """Disable recordings that use tensors in this memory, which is about to be written to, as constants.

        Return True if a recording was disabled. `places` holds storage keys.
        """
        changed = {path: tensor for path, tensor in self.model_tensors.items() if storage_key(tensor) in places}
        for path, tensor in changed.items():
            if recorder is not None:
                recorder.make_input(path, tensor)
            del self.model_tensors[path]
            self.path_of_id.pop(id(tensor), None)
        followed = [segment for segment in self.segments if segment.refused is None]
        disabled = [segment for segment in followed if not changed.keys().isdisjoint(segment.constants)]
        self._disable(disabled, list(changed))
        return bool(disabled)

    def _disable(self, disabled: Sequence[Segment], changed: Sequence[str]) -> None:
        """Run the operators of these segments in float from now on, because the model writes to their constants."""
        for segment in disabled:
            segment.refused = f"the model writes to {', '.join(changed)}"
            if not self.is_recording:
                logger.warning(
                    "the model writes to %s for the first time; operators that read it run in float", ", ".join(changed)
                )
        for key, entries in list(self.index.items()):
            self.index[key] = [entry for entry in entries if entry[0] not in disabled]

    def note_transition(self, before: Event | None, after: Event | None, at: TraceFrame | None) -> None:
        """Note that operator `after` follows `before`; None is the beginning or end of a call.

        Raises:
            UnsupportedError: The session is strict and converted, and calibration has not seen this transition.
        """
        if not self.is_recording and not self.strict:
            return
        pair = before and self.location(before), after and self.location(after)
        if self.is_recording:
            self.transitions.add(pair)
        elif pair not in self.transitions:
            seen = "the call ended" if after is None else f"{after} runs"
            text = f"{seen} after {before or 'the beginning'}, unlike in calibration; expected {_expected_operator(at)}"
            found = after or before
            where, name, line = (found.path, found.name, source_line()) if found else ("", "call", "")
            raise UnsupportedError(where or type(self.model).__name__, name, text, source=line, remedy=CALIBRATE_PATH)

    def location(self, event: Event) -> tuple[str, str, int]:
        """Return path, name and ordinal of the source line of an operator, which do not depend on the file's folder."""
        lines = self.source_lines.setdefault((event.path, event.name), [])
        if event.source not in lines:
            lines.append(event.source)
        return event.path, event.name, lines.index(event.source)

    def check_modules(self) -> None:
        """Raise `CaptureError` if forward has replaced, added or removed a module that recordings refer to."""
        now = own_modules(self.model)
        for path in (*self.modules, *now):
            if now.get(path) is not self.modules.get(path):
                remedy = "create modules in __init__, and let forward choose between them"
                raise CaptureError(path, None, "forward replaces, adds or removes this module", remedy=remedy)

    def add(self, segment: Segment) -> None:
        """Append a segment. Its operators can be found from now on, unless it is refused."""
        if segment.refused is not None:
            logger.info("recording %d stays in float: %s", len(self.segments), segment.refused)
            self.float_operators.update(event.key for event in segment.events)
        else:
            self.index_operators(segment)
        self.segments.append(segment)

    def take_over(self, before: Session, made: Sequence[Segment]) -> None:
        """Take over the recordings and transitions of another session, which is not recorded any further.

        Args:
            before: Session to follow.
            made: Segments of this session, in the order of those of `before`.
        """
        self.is_recording = False
        self.transitions, self.unrecorded = set(before.transitions), set(before.unrecorded)
        self.call_structures, self.float_calls = set(before.call_structures), dict(before.float_calls)
        self.source_lines = {key: list(lines) for key, lines in before.source_lines.items()}
        pairs = dict(zip(before.segments, made, strict=True))
        for segment in made:
            self.add(segment)
        for place, ends in before.successors.items():
            key = None if place is None else (pairs[place[0]], place[1])
            self.successors[key] = [(pairs[segment], index) for segment, index in ends]
        self.held.watch(self.is_recording)

    def check_quantized(self) -> None:
        """Log which recordings stay in float because they cannot be captured.

        Raises:
            UnsupportedError: No recording is quantized, or the session is strict and one cannot be captured.
        """
        for number, segment in enumerate(self.segments):
            if isinstance(segment.error, CaptureError):
                first, count = segment.events[0], len(segment.events)
                what = f"recording {number} ({count} operators from {first}) stays in float: {segment.error.problem}"
                if self.strict:
                    raise UnsupportedError(first.path, first.name, what, source=first.source, remedy=NOT_STRICT)
                logger.warning("%s\n  at %s", what, first.source)
        in_float = all(segment.reference is None or segment.refused is not None for segment in self.segments)
        if in_float and (not self.segments or any(segment.computes for segment in self.segments)):
            raise nothing_quantized_in(self.segments)

    def index_operators(self, segment: Segment) -> None:
        """Index the operators of a segment by path and function."""
        for event in segment.events:
            self.index.setdefault(event.key, []).append((segment, event))

    def start_frame(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TraceFrame:
        """Return a frame at the beginning of the first segment, with the arguments of the model bound."""
        first = self.segments[0]
        made = TraceFrame(self, first)
        made.begin(args, kwargs)
        if made.mismatched_axes and self.is_recording and self._make_dynamic(first, made):
            made = TraceFrame(self, first)
            made.begin(args, kwargs)
        return made

    def _make_dynamic(self, segment: Segment, made: TraceFrame) -> bool:
        with without_interception():
            return segment.make_dynamic(made.mismatched_axes)

    def find_recorded(
        self, at: TraceFrame | None, func: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TraceFrame | None:
        """Find where this operator was recorded, and return a frame there with its operands bound.

        Candidates are tried in this order: an operator that followed the current position in calibration, one on the
        same source line, the next one in the current segment, the last one before it.
        """
        candidates = self.index.get((path, func))
        if not candidates:
            return None
        place = (at.segment, at.next) if at is not None else None
        known = self.successors.get(place, [])
        line = without_folder(source_line()) if len(candidates) > 1 else ""

        def order(candidate: tuple[Segment, Event]) -> tuple[bool, bool, bool, bool, int]:
            segment, event = candidate
            same = at is not None and segment is at.segment
            behind = same and at is not None and event.index >= at.next
            return (
                (segment, event.index) not in known,
                without_folder(event.source) != line,
                not same,
                not behind,
                event.index if behind or at is None else -event.index,
            )

        candidates = sorted(candidates, key=order)
        for widens in (False, True) if self.is_recording else (False,):
            for segment, event in candidates:
                found = self._frame_at(segment, event, args, kwargs, widens)
                if found is not None:
                    if self.is_recording and (segment, event.index) not in known:
                        self.successors.setdefault(place, []).append((segment, event.index))
                    return found
        return None

    def _frame_at(
        self, segment: Segment, event: Event, args: tuple[Any, ...], kwargs: dict[str, Any], widens: bool
    ) -> TraceFrame | None:
        """Return a frame that begins with this operator on these operands, or None if they do not fit.

        With `widens`, axes of the segment become dynamic where only their sizes differ from the recording.
        """
        found = TraceFrame(self, segment, event.index)
        if found.matches(event, args, kwargs):
            return found
        if widens and found.mismatched_axes and self._make_dynamic(segment, found):
            return self._frame_at(segment, event, args, kwargs, False)
        return None

    def report_unrecorded(self, func: Any, path: str, at: TraceFrame | None, given: Any) -> None:
        """Report an operator that no recording has, because recordings cannot contain it or calibration has not seen
        it.

        A converted model warns once per source line, or raises `UnsupportedError` if it is strict.
        """
        place = place_of(path, func, source_line())
        if self.is_recording:
            self.unrecorded.add(place)
        elif place not in self.unrecorded and tensors(given):
            self._report_unseen(func, path, at, given)

    def _report_unseen(self, func: Any, path: str, at: TraceFrame | None, given: Any) -> None:
        self.check_modules()
        name, line = operator_name(func), source_line()
        if (path, func, line) in self.warned:
            return
        known = self.index.get((path, func))
        what = f"calibration has not seen it with {_sizes(given)}" if known else "calibration has not seen it here"
        if self.strict:
            text = f"{what}; expected {_expected_operator(at)}"
            raise UnsupportedError(path or type(self.model).__name__, name, text, source=line, remedy=CALIBRATE_PATH)
        self.warned.add((path, func, line))
        logger.warning("%s, %s (%s): %s; it runs in float", path or type(self.model).__name__, name, line, what)


NOT_STRICT = "convert without strict=True to run these operators in float"
CALIBRATE_PATH = "calibrate with data for which the model runs these operators, or convert without strict=True"


def _expected_operator(at: TraceFrame | None) -> str:
    """Return the name of the operator that the recording expects next, for an error message."""
    return "the end of the call" if at is None or at.next >= at.count else str(at.events[at.next])


def _sizes(given: Any) -> str:
    """Format data types and shapes of tensors for a message."""
    shapes = [(t.dtype, "[nested]" if t.is_nested else list(t.shape)) for t in tensors(given)]
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{shape}" for dtype, shape in shapes)
