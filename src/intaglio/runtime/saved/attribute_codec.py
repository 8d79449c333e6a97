"""JSON encoding of the attributes that an int8 model keeps of the float model. Decoding creates only plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.runtime.saved.json_codec import NotStorableError, decode, encode


def encode_attributes(kept: KeptAttributes) -> Any:
    """Return attributes as JSON. Values of classes that a file cannot name, such as configurations, are left out."""
    values = {}
    for name, value in kept.values.items():
        try:
            values[name] = _encode(value)
        except (NotStorableError, RecursionError):
            continue
    return {"values": values, "others": dict(kept.others)}


def decode_attributes(entry: Any) -> KeptAttributes:
    """Return the attributes that `encode_attributes` wrote. A dataclass becomes a namespace with its fields, because
    loading imports nothing. Raise `ValueError`, `TypeError` or `KeyError` for other content."""
    others = {as_text(name): as_text(kind) for name, kind in entry["others"].items()}
    return KeptAttributes({as_text(name): _decode(value) for name, value in entry["values"].items()}, others)


def _encode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"mapping": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"items": [_encode(item) for item in value]}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"fields": {entry.name: _encode(getattr(value, entry.name)) for entry in dataclasses.fields(value)}}
    return encode(value)


def _decode(value: Any) -> Any:
    match value:
        case {"mapping": [*items]}:
            return {_decode(key): _decode(item) for key, item in items}
        case {"items": [*items]}:
            return tuple(map(_decode, items))
        case {"fields": {**fields}}:
            return SimpleNamespace(**{as_text(name): _decode(item) for name, item in fields.items()})
        case [*items]:
            return [_decode(item) for item in items]
    return decode(value)


def as_text(value: Any) -> str:
    """Return a value, or raise `TypeError` if it is not a string."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not a string")
    return value
