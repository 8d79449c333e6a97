"""`RecordedState`: the part of a session that its snapshot and its serialized form read and write."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from intaglio.eager.recording.call_structure import CallStructure
from intaglio.eager.recording.events import Event
from intaglio.eager.segments.segment import Segment
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime.reports.clipping import ClippingMonitor


class RecordedState(Protocol):
    """Protocol for the attributes of a `Session` that hold what was recorded. `Session` documents them."""

    origin: nn.Module
    quantizer: Quantizer
    is_recording: bool
    runs: int
    segments: list[Segment]
    index: dict[Any, list[tuple[Segment, Event]]]
    successors: dict[Any, list[tuple[Segment, int]]]
    source_lines: dict[tuple[str, str], list[str]]
    transitions: set[tuple[Any, Any]]
    unrecorded: set[tuple[str, str, str]]
    float_operators: set[Any]
    call_structures: set[CallStructure]
    clipping: ClippingMonitor
    float_calls: dict[tuple[str, str, str], tuple[str, int]]

    def add(self, segment: Segment) -> None:
        """Append a segment and index its operators."""

    def location(self, event: Event) -> tuple[str, str, int]:
        """Return path, operator name and line of code of an operator."""
