"""What is kept of a session by copies, pickles and state dictionaries, and the way back.

Graphs are not kept: they are made again from the recordings when they are first needed, with the weights the model has
then. Beside a recording stands its *entry*, JSON: what was counted, or the parameters that came of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from intaglio.eager.recording.recorder import Recording
from intaglio.eager.recording.replay import text_of
from intaglio.eager.segments.segment import Segment
from intaglio.eager.session_protocol import RecordedState
from intaglio.errors import InputError
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.parameters import Parameters

logger = logging.getLogger("intaglio")

FLOW = "flow"
STATE_VERSION = 2
Entry = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """``entries``: number of a recording, as text -> "operators" (lines), "weights" (digest), axes of values that are
    "free", and "statistics" by site with the number of their next "batch", or "parameters" (their JSON). Under `FLOW`:
    "runs", what "follows" what by number, and for ``strict`` the "turns" and what ran "outside" of recordings.
    """

    recordings: tuple[Recording, ...]
    entries: Mapping[str, Entry]


# -- there ------------------------------------------------------------------------------------------------------------


def store(session: RecordedState) -> Stored:
    """What a session has seen, counted and chosen."""
    weights = digest(session.origin)
    numbers = {segment: number for number, segment in enumerate(session.segments)}
    entries = {str(number): _entry(segment, weights) for segment, number in numbers.items()}
    follows = [
        [*((-1, 0) if place is None else (numbers[place[0]], place[1])), numbers[segment], index]
        for place, ends in session.edges.items()
        for segment, index in ends
    ]
    entries[FLOW] = {
        "version": STATE_VERSION,
        "runs": session.runs,
        "follows": follows,
        "turns": sorted(session.turns, key=str),
        "outside": sorted(session.outside),
    }
    return Stored(tuple(segment.recording for segment in session.segments), entries)


def _entry(segment: Segment, weights: str) -> Entry:
    free = {str(number): sorted(axes) for number, axes in segment.recording.free.items()}
    entry: Entry = {"version": STATE_VERSION, "operators": lines(segment.recording), "weights": weights, "free": free}
    if segment.reference is not None:
        return {**entry, "parameters": segment.reference.parameters.to_json()}
    if segment.given is not None:
        entry["parameters"] = segment.given.to_json()
    if segment.prepared is not None:
        found = segment.prepared.observers.items()
        entry["statistics"] = {name: observer.statistics.to_dict() for name, observer in found}
        entry["batch"] = segment.prepared.watch.batch
    return entry


def lines(recording: Recording) -> list[str]:
    """One line an operator: what tells recordings apart."""
    return text_of(recording)[0].splitlines()


def digest(model: nn.Module) -> str:
    """Of the tensors that the model's state dictionary has."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


# -- and back ---------------------------------------------------------------------------------------------------------


def restore(session: RecordedState, stored: Stored) -> None:
    """Segments of the recordings, by the weights that the model has now.

    Parameters stay; of other weights than they were made for the scales are chosen anew. Statistics of other weights
    are dropped: such a model is as never run.
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
        if not session.records:
            segment = segment.converted(segment.given, session.origin)
        elif same:
            _count(segment, entry)
        else:
            dropped = dropped or bool(stored.entries[FLOW]["runs"])
        session.add(segment)
        for event in segment.events:
            session.place(event)
    session.runs = 0 if dropped else stored.entries[FLOW]["runs"]
    turns = stored.entries[FLOW]["turns"]
    session.turns = {(first and tuple(first), second and tuple(second)) for first, second in turns}
    session.outside = {(path, name, function) for path, name, function in stored.entries[FLOW]["outside"]}
    for start, index, end, event in stored.entries[FLOW]["follows"]:
        place = None if start < 0 else (session.segments[start], index)
        session.edges.setdefault(place, []).append((session.segments[end], event))
    if dropped:
        logger.warning("the weights changed since calibration: what was counted is dropped; calibrate again")


def _count(segment: Segment, entry: Entry) -> None:
    """The statistics of an entry, as if they had been counted here."""
    if segment.prepared is None or "statistics" not in entry:
        return
    own, kept = segment.prepared.observers, entry["statistics"]
    if own.keys() != kept.keys():
        odd = ", ".join(sorted(own.keys() ^ kept.keys())[:5])
        raise InputError("state", None, f"statistics of other sites: {odd}", remedy="prepare with the same recipe")
    for name, observer in own.items():
        observer.statistics = Statistics.from_dict(kept[name])
    segment.prepared.watch.batch = entry["batch"]
