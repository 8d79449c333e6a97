"""Changes of the tensors that graphs hold as constants, between and during the calls of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from intaglio.eager.recording.tensor_changes import TensorWatch
from intaglio.eager.segments.segment import Segment


class OwnChanges(NamedTuple):
    """Changes that a call of the model made itself.

    Attributes:
        names: Names of the tensors.
        outdated: Segments whose graphs hold one of them.
        layers: Keys of the leaf modules of these segments that have one of them.
    """

    names: list[str]
    outdated: list[Segment]
    layers: list[Any]


class HeldTensors:
    """Notices changes of the tensors that graphs hold as constants.

    Changes between calls, such as the step of an optimizer, are new weights. Tensors that a call changes itself are
    state of the model: they are not watched any more.

    Attributes:
        notices_change: Returns whether any watched tensor has changed.
        is_settled: Whether calls are not searched for changes of their own any more.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor], segments: Sequence[Segment]) -> None:
        self._model, self._tensors, self._segments = model, tensors, segments
        self._own: set[str] = set()
        self.watch(True)

    def watch(self, is_recording: bool) -> None:
        """Notice changes from now on. A converted model only watches the tensors that its graphs hold."""
        names = self._tensors.keys() - self._own
        self._is_recording = is_recording
        self._watch = TensorWatch(self._model, self._tensors, names if is_recording else names & self._held())
        self.notices_change, self.is_settled = self._watch.notices_change, False

    def _followed(self) -> list[Segment]:
        return [segment for segment in self._segments if segment.refused is None]

    def _held(self) -> set[str]:
        return set[str]().union(*(segment.constants for segment in self._followed()))

    def changed_between_calls(self) -> list[str]:
        """Return the names of tensors that graphs hold or that modules had, and that differ now."""
        if not self.notices_change():
            return []
        found = self._watch.changed() & self._held() | self._watch.replaced()
        if not found:
            self.watch(self._is_recording)
        return sorted(found)

    def end_call(self) -> OwnChanges | None:
        """Return what a call has changed, and stop watching it. A converted model is searched after one call only."""
        self.is_settled = not self._is_recording
        if not self.notices_change():
            return None
        changed, replaced = self._watch.changed(), self._watch.replaced()
        outdated = [
            segment
            for segment in self._followed()
            if (changed - replaced) & segment.constants or replaced & segment.constants_inside
        ]
        self._own |= changed
        self.watch(self._is_recording)
        self.is_settled = not self._is_recording
        events = [event for segment in outdated for event in segment.events if event.function is None]
        layers = [event.key for event in events if any(name.startswith(f"{event.path}.") for name in changed)]
        return OwnChanges(sorted(changed), outdated, layers)


def listed(names: Sequence[str]) -> str:
    """Format names for a message, the first of many."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


MAX_LISTED = 4
"""Number of tensors that a message names."""
