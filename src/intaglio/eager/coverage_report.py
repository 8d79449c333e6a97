"""Coverage of a converted model: how much of its recordings runs in int8, and what runs in float for which reason. What
notebooks show of prepared and converted models."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from intaglio import build
from intaglio.argument_checks import check_arguments_except
from intaglio.eager.model_copies import Attachment
from intaglio.eager.quantization_state import session_of
from intaglio.eager.recording.events import RecordedTensor, leaves, operator_or_class
from intaglio.eager.recording.float_calls import FloatWork, batch_of, counted
from intaglio.eager.segments.segment import Segment
from intaglio.eager.session import Session
from intaglio.errors import InputError, UnsupportedError
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.lower import Lowered, requantize
from intaglio.quant.calibrate.prepare import annotate, with_selectors_of
from intaglio.quant.qdq.convert import Reference
from intaglio.runtime import Coverage, FloatPart
from intaglio.runtime.reports.clipping import Clipping


@check_arguments_except("converted")
def coverage(converted: nn.Module) -> Coverage:
    """Return how much of a converted model runs in int8, and why the rest does not, over all recordings.

    Operators that several recordings contain count once for each. What runs in float outside of recordings is listed
    too; after calls with operators that calibration has not seen, these are included.

    Args:
        converted: Model from `convert`.

    Returns:
        The report that a `QuantizedModel` has as its attribute ``coverage``.

    Raises:
        InputError: The model is not converted.
    """
    session = _converted_session(converted, "coverage")
    found = Coverage(0, 0, 0, 0, 0, (), _bytes_of(session), 0)
    notes: dict[str, None] = {}
    size = 0
    for segment in session.segments:
        lowered = _lowered(segment)
        part = _of_segment(segment) if lowered is None else build.coverage_of(lowered)
        size += 0 if lowered is None else sum(array.nbytes for array in lowered.graph.constants.values())
        found = found.with_body(part)
        notes.update(dict.fromkeys(part.notes))
    found = found.with_body(_outside_recordings(session))
    clipped = tuple(f"calls clipped {value}" for value in session.clipping.report().values)
    return found.with_sizes(found.bytes_before, size, (*notes, *clipped))


@check_arguments_except("converted")
def clipping(converted: nn.Module) -> Clipping:
    """Return which float values calls have had outside of their calibrated ranges, as `QuantizedModel.clipping` does.

    The values that operators outside of recordings make, such as those of branches that calibration has not seen, are
    among them when an operator in int8 reads them.

    Args:
        converted: Model from `convert`.

    Raises:
        InputError: The model is not converted.
    """
    return _converted_session(converted, "clipping").clipping.report()


@check_arguments_except("converted")
def assert_int8(converted: nn.Module, macs: float = 1.0) -> None:
    """Raise `AssertionError`, with the reasons, if less than this share of multiply-accumulates runs in int8.

    Args:
        converted: Model from `convert`.
        macs: Share of the multiply-accumulates of all recordings, from 0 to 1.
    """
    coverage(converted).assert_int8(macs)


class NotebookView(Attachment):
    """Attribute ``_repr_html_`` of a prepared or converted model, which notebooks call. Its text is one line.

    The text of the model itself stays that of its class, which lists the modules.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self) -> str:
        """Return the recordings, and the coverage of a converted model, as HTML."""
        session = self.session
        session.refresh()
        rows, more = shortened([_recording_row(*entry) for entry in enumerate(session.segments)], "recordings")
        columns = ("recording", "from", "runs in", "operators", "sites")
        shown = element("p", repr(self)) + html_table(columns, rows, more, text=3)
        return shown if session.is_recording else shown + coverage(session.model)._repr_html_()

    def __repr__(self) -> str:
        session = self.session
        session.refresh()
        count = len(session.segments)
        recordings = f"{count} recording{'s' * (count != 1)}"
        name = type(session.model).__name__
        if session.is_recording:
            calls = f"{session.runs} call{'s' * (session.runs != 1)} seen"
            return f"{name}(prepared define-by-run: {recordings}, {calls})"
        return f"{name}(converted define-by-run: {recordings}, {coverage(session.model).macs_text} in int8)"


def attach_view(session: Session) -> None:
    """Let notebooks show the model of a session, unless its class has HTML of its own."""
    if not hasattr(type(session.model), "_repr_html_"):
        object.__setattr__(session.model, "_repr_html_", NotebookView(session))


def _recording_row(number: int, segment: Segment) -> tuple[object, ...]:
    """Return number, first operator, precision with the reason for float, and sizes of a recording."""
    graph = segment.reference or segment.prepared
    if segment.refused is not None or graph is None:
        reason = segment.refused if segment.error is None else segment.error.problem
        return number, segment.events[0], f"float: {reason}", len(segment.events), ""
    sites = graph.qparams if isinstance(graph, Reference) else graph.observers
    place = "int8" if isinstance(graph, Reference) else "float, with observers"
    return number, segment.events[0], place, len(segment.events), len(sites)


def _converted_session(model: nn.Module, asked: str) -> Session:
    session = session_of(model)
    if session.is_recording:
        raise InputError(asked, None, "the model is prepared, not converted", remedy="call eager.convert(model) first")
    return session


def _lowered(segment: Segment) -> Lowered | None:
    """Return the integer graph of a recording, or ``None`` if it runs in float."""
    return None if segment.reference is None or segment.refused is not None else requantize(segment.reference)


def _of_segment(segment: Segment) -> Coverage:
    """Return the coverage of a recording that runs in float."""
    if isinstance(segment.error, UnsupportedError):
        skips = annotate(segment.captured, with_selectors_of(segment.quantizer, segment.captured)).skipped
        found = tuple(FloatPart(s.origin.path, s.origin.operator, s.reason, s.macs, s.origin.source) for s in skips)
    else:
        reason = str(segment.refused) if segment.error is None else segment.error.problem
        found = tuple(
            FloatPart(
                event.path, operator_or_class(segment.model, event.path, event.function), reason, macs, event.source
            )
            for event, macs in zip(segment.events, _macs_of_operators(segment), strict=True)
        )
    return _in_float(found, 1)


def _macs_of_operators(segment: Segment) -> list[int]:
    """Return the multiply-accumulates of each operator for a batch of one, by running them on the recorded tensors."""
    values, found = dict(segment.recording.inputs), []
    batch = batch_of(list(values.values()))
    for event in segment.events:
        work = FloatWork()
        with contextlib.suppress(RuntimeError, LookupError, TypeError, ValueError), torch.no_grad():
            with counted(batch) as work:
                spec, result = segment.run_event(event, values.__getitem__, lambda n, axis: values[n].shape[axis])
            pairs = zip(leaves(spec), leaves(result), strict=True)
            values.update({leaf.index: tensor for leaf, tensor in pairs if isinstance(leaf, RecordedTensor)})
        found.append(work.macs)
    return found


def _outside_recordings(session: Session) -> Coverage:
    calls = session.float_calls.items()
    found = tuple(FloatPart(path, name, reason, macs, line) for (path, name, line), (reason, macs) in calls)
    return _in_float(found, len(found))


def _in_float(found: tuple[FloatPart, ...], islands: int) -> Coverage:
    return Coverage(0, sum(part.macs for part in found), 0, len(found), islands, found, 0, 0)


def _bytes_of(session: Session) -> int:
    tensors: list[torch.Tensor] = [*session.model.parameters(), *session.model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_floating_point())
