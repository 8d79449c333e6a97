"""What is kept of a session by copies, pickles and state dictionaries, and the way back.

Graphs are not kept: they are made again from the recordings when they are first needed, with the weights the model has
then. Beside a recording stands its *entry*, JSON: what was counted, or the parameters that came of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from intaglio.eager.chain import Chain
from intaglio.eager.copies import Attachment
from intaglio.eager.recorder import Recording
from intaglio.eager.replay import text_of
from intaglio.errors import ArtifactError, InputError
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.parameters import Parameters

if TYPE_CHECKING:
    from intaglio.eager.session import Session

logger = logging.getLogger("intaglio")

KEY = "_auto_quant_state"
"""First part of our names in a state dictionary; behind it the number of a recording, or `FLOW`."""
FLOW = "flow"
VERSION = 2
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


def store(session: Session) -> Stored:
    """What a session has seen, counted and chosen."""
    weights = digest(session.origin)
    numbers = {chain: number for number, chain in enumerate(session.chains)}
    entries = {str(number): _entry(chain, weights) for chain, number in numbers.items()}
    follows = [
        [*((-1, 0) if place is None else (numbers[place[0]], place[1])), numbers[chain], index]
        for place, ends in session.edges.items()
        for chain, index in ends
    ]
    entries[FLOW] = {
        "version": VERSION,
        "runs": session.runs,
        "follows": follows,
        "turns": sorted(session.turns, key=str),
        "outside": sorted(session.outside),
    }
    return Stored(tuple(chain.recording for chain in session.chains), entries)


def _entry(chain: Chain, weights: str) -> Entry:
    free = {str(number): sorted(axes) for number, axes in chain.recording.free.items()}
    entry: Entry = {"version": VERSION, "operators": lines(chain.recording), "weights": weights, "free": free}
    if chain.reference is not None:
        return {**entry, "parameters": chain.reference.parameters.to_json()}
    if chain.given is not None:
        entry["parameters"] = chain.given.to_json()
    if chain.prepared is not None:
        found = chain.prepared.observers.items()
        entry["statistics"] = {name: observer.statistics.to_dict() for name, observer in found}
        entry["batch"] = chain.prepared.watch.batch
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


def restore(session: Session, stored: Stored) -> None:
    """Chains of the recordings, by the weights that the model has now.

    Parameters stay; of other weights than they were made for the scales are chosen anew. Statistics of other weights
    are dropped: such a model is as never run.
    """
    weights, dropped = digest(session.origin), False
    for number, recording in enumerate(stored.recordings):
        entry = stored.entries[str(number)]
        free = {int(number): set(axes) for number, axes in entry["free"].items()}
        chain = Chain(replace(recording, free=free), session.origin, session.quantizer)
        same = entry["weights"] == weights
        if "parameters" in entry:
            given = Parameters.from_json(entry["parameters"])
            chain.given = given if same else given.without_weights()
        if not session.records:
            chain = chain.converted(chain.given, session.origin)
        elif same:
            _count(chain, entry)
        else:
            dropped = dropped or bool(stored.entries[FLOW]["runs"])
        session.add(chain)
        for event in chain.events:
            session.place(event)
    session.runs = 0 if dropped else stored.entries[FLOW]["runs"]
    turns = stored.entries[FLOW]["turns"]
    session.turns = {(first and tuple(first), second and tuple(second)) for first, second in turns}
    session.outside = {(path, name, function) for path, name, function in stored.entries[FLOW]["outside"]}
    for start, index, end, event in stored.entries[FLOW]["follows"]:
        place = None if start < 0 else (session.chains[start], index)
        session.edges.setdefault(place, []).append((session.chains[end], event))
    if dropped:
        logger.warning("the weights changed since calibration: what was counted is dropped; calibrate again")


def _count(chain: Chain, entry: Entry) -> None:
    """The statistics of an entry, as if they had been counted here."""
    if chain.prepared is None or "statistics" not in entry:
        return
    own, kept = chain.prepared.observers, entry["statistics"]
    if own.keys() != kept.keys():
        odd = ", ".join(sorted(own.keys() ^ kept.keys())[:5])
        raise InputError("state", None, f"statistics of other sites: {odd}", remedy="prepare with the same recipe")
    for name, observer in own.items():
        observer.statistics = Statistics.from_dict(kept[name])
    chain.prepared.watch.batch = entry["batch"]


# -- state dictionaries -----------------------------------------------------------------------------------------------


class Saving(Attachment):
    """Hook of a model's state dictionary: one uint8 tensor an entry, beside what the model has."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, entry in self.session.kept().entries.items():
            text = bytearray(json.dumps(entry, sort_keys=True), "utf-8")
            state[f"{prefix}{KEY}.{name}"] = torch.frombuffer(text, dtype=torch.uint8)


class Loading(Attachment):
    """Hook of every module that a state dictionary is loaded into: its graphs are made again when they are needed.

    The model itself (``whole``) takes its entries.
    """

    def __init__(self, session: Session, whole: bool) -> None:
        self.session, self.whole = session, whole

    def __call__(
        self,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        session = self.session
        stored, head = session.kept(), f"{prefix}{KEY}."
        given: dict[str, Entry] = {}
        if self.whole:
            for key in [key for key in state if key.startswith(head)]:
                name = key.removeprefix(head)
                given[name] = _fitting(key, name, read(key, state.pop(key)), session, stored)
            missing += [head + name for name in stored.entries if strict and name not in given]
        session.suspend(replace(stored, entries={**stored.entries, **given}))


def read(key: str, tensor: Any) -> Entry:
    """The entry in a tensor of a state dictionary. `ArtifactError` when there is none."""
    try:
        entry = json.loads(bytes(tensor.tolist()))
        version = entry["version"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(key, None, f"no state of a prepared or converted model: {error}") from error
    if version != VERSION:
        raise ArtifactError(key, None, f"version {version}; this intaglio reads {VERSION}")
    return dict(entry)


def _fitting(key: str, name: str, entry: Entry, session: Session, stored: Stored) -> Entry:
    """The entry, of a recording that this model has. `InputError` for another's."""
    if name == FLOW:
        return entry
    remedy = "prepare the model with the same example inputs, and let it run the same ways once"
    if name not in stored.entries:
        first = entry["operators"][2].strip()
        problem = f"a recording that begins with {first!r}; this model has {len(stored.recordings)} recordings"
        raise InputError(key, None, problem, remedy=remedy)
    pairs = zip(entry["operators"], [*stored.entries[name]["operators"], "nothing more"], strict=False)
    other = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if other is not None or len(entry["operators"]) != len(stored.entries[name]["operators"]):
        seen, own = other or ("nothing more", stored.entries[name]["operators"][len(entry["operators"])])
        problem = f"the operators differ: {seen.strip()!r} in the state, {own.strip()!r} here"
        raise InputError(key, None, problem, remedy=remedy)
    if not session.records and "parameters" not in entry and "statistics" in entry:
        problem = "statistics of a prepared model; this one is converted"
        raise InputError(key, None, problem, remedy="load them into a prepared model, and convert that")
    return entry
