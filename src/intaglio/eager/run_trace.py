"""Trace which recorded operators a converted model runs, and build its float counterpart for comparisons."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from intaglio.eager.intercepted_run import InterceptedRun, current
from intaglio.eager.model_copies import copy_without_attachments, plain_copy
from intaglio.eager.quantization_state import attach, session_of
from intaglio.eager.recording.replay import replay, without_recorded_outputs
from intaglio.eager.segments.qtensor import plain
from intaglio.eager.segments.segment import Segment
from intaglio.eager.segments.trace_frame import TraceFrame
from intaglio.eager.session import Session
from intaglio.errors import InputError
from intaglio.quant.calibrate.batches import Binder, binder_for
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing import Captured


@dataclass(frozen=True)
class ExecutedSpan:
    """Consecutive operators of one recording that a call has run.

    Attributes:
        number: Index of the recording.
        first: Index of the first operator.
        end: Index after the last operator.
        given: Tensors that come from outside the recording, by the name of their node in the recording's graph.
    """

    number: int
    first: int
    end: int
    given: Mapping[str, torch.Tensor]

    @property
    def bounds(self) -> tuple[int, int, int]:
        """Return recording, first operator and end, without the tensors."""
        return self.number, self.first, self.end


class TracedRun(InterceptedRun):
    """An intercepted run that stores the spans it has run in `found`."""

    def __init__(self, session: Session, path: str, found: list[ExecutedSpan]) -> None:
        super().__init__(session, path)
        self.followed: list[tuple[TraceFrame, int]] = []
        self.found = found

    def _set_frame(self, frame: TraceFrame) -> None:
        super()._set_frame(frame)
        self.followed.append((frame, frame.next))

    def end(self, result: Any) -> Any:
        """Finish the run, and add the spans of operators that each followed segment has run."""
        returned = super().end(result)
        for frame, first in self.followed:
            if frame.next > first and frame.segment.refused is None:
                places = frame.segment.node_names
                given = {places[number]: plain(tensor) for number, tensor in frame.bound.items() if number in places}
                self.found.append(ExecutedSpan(self.session.segments.index(frame.segment), first, frame.next, given))
        return returned


def run_traced(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, list[ExecutedSpan]]:
    """Call a converted model; return its result and the spans of recorded operators that ran."""
    session, found = session_of(model), list[ExecutedSpan]()
    with current.runs_made_by(
        lambda own, path: TracedRun(own, path, found) if own is session else InterceptedRun(own, path)
    ):
        return model(*args, **kwargs), found


def float_counterpart(converted: nn.Module) -> nn.Module:
    """Return a float model that follows the recordings of a converted model, on the graphs before quantization."""
    before = session_of(converted)
    if before.is_recording:
        raise InputError(
            "compare", None, "the model is prepared, not converted", remedy="call eager.convert(model) first"
        )
    twin = copy_without_attachments(converted)
    session = Session(twin, before.quantizer, leaf_classes=before.leaf_classes)
    session.take_over(before, [segment.with_float_graph(session.origin) for segment in before.segments])
    session.warned = before.warned  # both models report an unseen source line only once
    attach(session)
    return twin


def float_copy(model: nn.Module) -> nn.Module:
    """Return a float copy of a model, which may be prepared, in evaluation mode and with tensors of its own."""
    return copy_without_attachments(model).eval()


def captured_by_number(converted: nn.Module, model: nn.Module) -> dict[int, tuple[Captured, Reference]]:
    """Return the captured float graph of `model` and the reference model, by index of the recording."""
    session = session_of(converted)
    plain_model, found = plain_copy(model, session.leaf_classes), {}
    for number, segment in enumerate(session.segments):
        if segment.reference is not None:
            found[number] = _captured(segment, plain_model), segment.reference
    return found


def _captured(segment: Segment, model: nn.Module) -> Captured:
    return without_recorded_outputs(replay(segment.recording, model), segment.recording)[0]


def binder_of(converted: nn.Module) -> Binder:
    """Return a `Binder` that turns items of a data set into calls nested like the call that was recorded first."""
    segments = session_of(converted).segments
    call = segments[0].recording.call if segments else None
    if call is None:
        return binder_for(converted)
    args, kwargs = call
    names = list(inspect.signature(type(converted).forward).parameters)[1:]
    nested = type(args[0]) if args and isinstance(args[0], (tuple, list, Mapping)) else None
    return Binder(tuple(names), len(args), tuple(kwargs), nested)
