"""`Snapshot`: saves the state of a session before a calibration call, to restore it if the call fails."""

from __future__ import annotations

from typing import Any

from intaglio.eager.session_protocol import RecordedState


class Snapshot:
    """The recordings and statistics of a session at one time; calling the snapshot restores them.

    Two changes are not undone: axes of a recording that became dynamic stay dynamic, and a recording that was disabled
    because the model writes to its constants stays disabled.
    """

    def __init__(self, session: RecordedState) -> None:
        self.session = session
        self.segments = list(session.segments)
        self.index = {key: list(entries) for key, entries in session.index.items()}
        self.successors = {place: list(ends) for place, ends in session.successors.items()}
        self.source_lines = {key: list(lines) for key, lines in session.source_lines.items()}
        self.sets: list[tuple[set[Any], set[Any]]] = [
            (found, set(found))
            for found in (session.transitions, session.unrecorded, session.float_operators, session.call_structures)
        ]
        prepared = [(segment, segment.prepared) for segment in self.segments if segment.prepared is not None]
        self.batches = {segment: one.observer_state.batch for segment, one in prepared}
        self.statistics = {
            segment: {name: observer.statistics for name, observer in one.observers.items()}
            for segment, one in prepared
        }

    def __call__(self) -> None:
        """Restore the recordings, the statistics and the batch counters of the session."""
        session = self.session
        session.segments[:] = self.segments
        session.index = {
            key: [entry for entry in entries if entry[0].refused is None] for key, entries in self.index.items()
        }
        session.successors, session.source_lines = self.successors, self.source_lines
        for found, before in self.sets:
            found.intersection_update(before)
        for segment, statistics in self.statistics.items():
            assert segment.prepared is not None
            segment.prepared.observer_state.batch = self.batches[segment]
            for name, observer in segment.prepared.observers.items():
                observer.statistics = statistics.get(name, observer.statistics)
