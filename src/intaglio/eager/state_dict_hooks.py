"""State dictionary hooks that save and load calibration statistics and parameters beside the model's tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from intaglio.eager.model_copies import Attachment
from intaglio.eager.serialization import FLOW_ENTRY, STATE_VERSION, Entry, SerializedSession
from intaglio.eager.session import Session
from intaglio.errors import ArtifactError, InputError

STATE_KEY = "_auto_quant_state"
"""First part of our keys in a state dictionary. The number of a recording, or `FLOW_ENTRY`, follows it."""


class SaveHook(Attachment):
    """State dictionary hook that adds one uint8 tensor per entry to the model's own tensors."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Add the session's entries to a state dictionary, each as JSON in a uint8 tensor."""
        for name, entry in self.session.serialized_state().entries.items():
            text = bytearray(json.dumps(entry, sort_keys=True), "utf-8")
            state[f"{prefix}{STATE_KEY}.{name}"] = torch.frombuffer(text, dtype=torch.uint8)


class LoadHook(Attachment):
    """Hook that runs before a state dictionary is loaded into a module. The next call rebuilds the graphs.

    Attributes:
        session: Session of the model.
        is_root: True for the hook of the model itself, which also reads the stored entries.
    """

    def __init__(self, session: Session, is_root: bool) -> None:
        self.session, self.is_root = session, is_root

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
        """Take the session's entries out of a state dictionary; the next call rebuilds the graphs from them."""
        session = self.session
        stored, head = session.serialized_state(), f"{prefix}{STATE_KEY}."
        given: dict[str, Entry] = {}
        if self.is_root:
            for key in [key for key in state if key.startswith(head)]:
                name = key.removeprefix(head)
                given[name] = _checked_entry(key, name, decode_entry(key, state.pop(key)), session, stored)
            missing += [head + name for name in stored.entries if strict and name not in given]
        session.suspend(replace(stored, entries={**stored.entries, **given}))


def decode_entry(key: str, tensor: Any) -> Entry:
    """Decode the entry in a tensor of a state dictionary.

    Raises:
        ArtifactError: The tensor holds no entry, or one of another version.
    """
    try:
        entry = json.loads(bytes(tensor.tolist()))
        version = entry["version"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        remedy = "load a state dictionary that state_dict() of such a model returned"
        raise ArtifactError(
            key, None, f"it does not hold the state of a prepared or converted model: {error}", remedy=remedy
        ) from error
    if version != STATE_VERSION:
        problem = f"its version is {version}, but this version of intaglio reads version {STATE_VERSION}"
        raise ArtifactError(key, None, problem, remedy="load it with the version that saved it, or calibrate again")
    return dict(entry)


def _checked_entry(key: str, name: str, entry: Entry, session: Session, stored: SerializedSession) -> Entry:
    """Return the entry if it fits a recording of this model.

    Raises:
        InputError: The model has no such recording, its operators differ, or statistics are loaded into a converted
            model.
    """
    if name == FLOW_ENTRY:
        return entry
    remedy = "prepare the model with the same example inputs, and call it so that it runs the same operators once"
    if name not in stored.entries:
        first = entry["operators"][2].strip()
        problem = f"the model has no recording that begins with {first!r}; it has {len(stored.recordings)} recordings"
        raise InputError(key, None, problem, remedy=remedy)
    pairs = zip(entry["operators"], [*stored.entries[name]["operators"], "no operator"], strict=False)
    other = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if other is not None or len(entry["operators"]) != len(stored.entries[name]["operators"]):
        seen, own = other or ("no operator", stored.entries[name]["operators"][len(entry["operators"])])
        problem = f"the operators differ: {seen.strip()!r} in the state, {own.strip()!r} here"
        raise InputError(key, None, problem, remedy=remedy)
    here = stored.entries[name].get("modules", {})
    for path, kind in entry.get("modules", {}).items():
        if here.get(path, kind) != kind:
            problem = f"the module {path!r} is a {kind} in the state, and a {here[path]} here"
            raise InputError(key, None, problem, remedy="load the state into a model with the same modules")
    if not session.is_recording and "parameters" not in entry and "statistics" in entry:
        problem = "the state has statistics of a prepared model, but this model is converted"
        raise InputError(key, None, problem, remedy="load the state into a prepared model, and convert that")
    return entry
