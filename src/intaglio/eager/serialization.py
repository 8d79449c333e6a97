"""Serialize a session for copies, pickles and state dictionaries, and restore it.

Graphs are not serialized. They are rebuilt from the recordings at the next call, with the current weights. Each
recording has an *entry* (JSON) with its statistics or with the parameters chosen from them.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from intaglio.eager.recording.call_structure import CallStructure
from intaglio.eager.recording.recorder import Recording
from intaglio.eager.recording.replay import text_of
from intaglio.eager.segments.segment import Segment
from intaglio.eager.session_protocol import RecordedState
from intaglio.errors import InputError
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.parameters import Parameters

logger = logging.getLogger("intaglio")

FLOW_ENTRY = "flow"
"""Key of the entry that holds the transitions between recordings."""
STATE_VERSION = 2
"""Version of the entry format."""
Entry = dict[str, Any]


@dataclass(frozen=True)
class SerializedSession:
    """Recordings of a session and their entries.

    Attributes:
        recordings: One `Recording` per segment.
        entries: One entry per recording, under its index as text, and one under `FLOW_ENTRY`. The entry of a recording
            has "operators" (lines), "modules" (class names by path), "weights" (digest), "free" (dynamic axes of
            inputs), and "statistics" by site with the index of the next "batch", or "parameters" (JSON). The
            `FLOW_ENTRY` entry has "runs", "follows" (transitions by index), and for strict models "turns" (pairs of
            consecutive operators), "outside" (operators outside recordings) and "calls" (structures of arguments).
            "floats" lists what runs in float outside of recordings.
    """

    recordings: tuple[Recording, ...]
    entries: Mapping[str, Entry]

    def with_other_weights(self) -> SerializedSession:
        """Return the same recordings for weights that differ from those that they were calibrated with."""
        own = {name: {**entry, "weights": ""} for name, entry in self.entries.items() if name != FLOW_ENTRY}
        return replace(self, entries={**self.entries, **own})


# -- store ------------------------------------------------------------------------------------------------------------


def store(session: RecordedState) -> SerializedSession:
    """Return the recordings of a session with their statistics or parameters."""
    weights = digest(session.origin)
    numbers = {segment: number for number, segment in enumerate(session.segments)}
    entries = {str(number): _entry(segment, weights) for segment, number in numbers.items()}
    follows = [
        [*((-1, 0) if place is None else (numbers[place[0]], place[1])), numbers[segment], index]
        for place, ends in session.successors.items()
        for segment, index in ends
    ]
    entries[FLOW_ENTRY] = {
        "version": STATE_VERSION,
        "runs": session.runs,
        "follows": follows,
        "turns": sorted(session.transitions, key=str),
        "outside": sorted(session.unrecorded),
        "calls": sorted(session.call_structures),
        "floats": [[*place, *found] for place, found in session.float_calls.items()],
    }
    return SerializedSession(tuple(segment.recording for segment in session.segments), entries)


def _entry(segment: Segment, weights: str) -> Entry:
    free = {str(number): sorted(axes) for number, axes in segment.recording.free.items()}
    leaves = {event.path for event in segment.events if event.function is None}
    classes = {path: type(segment.model.get_submodule(path)).__name__ for path in sorted(leaves)}
    entry: Entry = {
        "version": STATE_VERSION,
        "operators": lines(segment.recording),
        "modules": classes,
        "weights": weights,
        "free": free,
    }
    if segment.reference is not None:
        return {**entry, "parameters": segment.reference.parameters.to_json()}
    if segment.given is not None:
        entry["parameters"] = segment.given.to_json()
    if segment.prepared is not None:
        found = segment.prepared.observers.items()
        entry["statistics"] = {name: observer.statistics.to_dict() for name, observer in found}
        entry["batch"] = segment.prepared.observer_state.batch
    return entry


def lines(recording: Recording) -> list[str]:
    """Return one line of text per operator; recordings are compared by these lines."""
    return text_of(recording)[0].splitlines()


def digest(model: nn.Module) -> str:
    """Return the BLAKE2 digest of the tensors in the model's state dictionary."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- restore ----------------------------------------------------------------------------------------------------------


def restore(session: RecordedState, stored: SerializedSession) -> None:
    """Rebuild the segments of a session from its recordings, with the weights that the model has now.

    If the weights have changed, activation parameters are kept and weight scales are chosen again, but statistics are
    dropped: the prepared model must then be calibrated again.
    """
    weights, dropped = digest(session.origin), False
    for number, recording in enumerate(stored.recordings):
        entry = stored.entries[str(number)]
        free = {int(number): set(axes) for number, axes in entry["free"].items()}
        segment = Segment(replace(recording, free=free), session.origin, session.quantizer)
        same = entry["weights"] == weights
        if "parameters" in entry:
            given = Parameters.from_json(entry["parameters"])
            segment.given = given if same else given.without_weights()
        if not session.is_recording:
            segment = segment.converted(segment.given, session.origin, session.clipping)
        elif same:
            _load_statistics(segment, entry)
        else:
            dropped = dropped or bool(stored.entries[FLOW_ENTRY]["runs"])
        session.add(segment)
        for event in segment.events:
            session.location(event)
    session.runs = 0 if dropped else stored.entries[FLOW_ENTRY]["runs"]
    turns = stored.entries[FLOW_ENTRY]["turns"]
    session.transitions = {(first and tuple(first), second and tuple(second)) for first, second in turns}
    session.unrecorded = {(path, name, function) for path, name, function in stored.entries[FLOW_ENTRY]["outside"]}
    session.call_structures = {CallStructure(*known) for known in stored.entries[FLOW_ENTRY].get("calls", ())}
    for path, name, line, reason, macs in stored.entries[FLOW_ENTRY].get("floats", ()):
        session.float_calls[path, name, line] = reason, macs
    for start, index, end, event in stored.entries[FLOW_ENTRY]["follows"]:
        place = None if start < 0 else (session.segments[start], index)
        session.successors.setdefault(place, []).append((session.segments[end], event))
    if dropped:
        logger.warning("the weights changed since calibration, so its statistics are dropped; calibrate again")


def _load_statistics(segment: Segment, entry: Entry) -> None:
    """Load the statistics of an entry into the observers of a segment.

    Raises:
        InputError: The entry has statistics of other sites.
    """
    if segment.prepared is None or "statistics" not in entry:
        return
    own, kept = segment.prepared.observers, entry["statistics"]
    if own.keys() != kept.keys():
        odd = ", ".join(sorted(own.keys() ^ kept.keys())[:5])
        raise InputError(
            "state",
            None,
            f"its statistics are those of other sites: {odd}",
            remedy="prepare the model with the same recipe",
        )
    for name, observer in own.items():
        observer.statistics = Statistics.from_dict(kept[name])
    segment.prepared.observer_state.batch = entry["batch"]
