"""Changes of files: bytes, JSON values, tensors of safetensors, and members of saved models."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch

MANIFEST = "manifest.json"
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 127, 128, 255, 256, 65536, 2**31 - 1, 2**31, 2**53, 2**63, -(2**70)),
    *(0.0, -0.5, 1.5, 1e300, -1e-300, "", "x", "n", "u8", "s8", "f32", "i64", "portable", "island0", "body"),
    *("a\nb", "a\\", "\ud800", "\0", "%", "aten.erf.default", "aten.add.Tensor", "loop.loop0", "operator.getitem"),
    *([], {}, [1], [1, 2], [[]], {"value": "x"}, {"dim": [[["n"], 2]]}, {"name": "x"}, {"tuple": []}, {"all": 3}),
    *({"float": "nan"}, {"dtype": "float64"}, [[["n"], 1]], [[["n", "n"], 5]], [[[[[[["n"], 1]], 3]], 1]]),
)
SHARES = {"graph.json": 5.0, "manifest.json": 3.0, "islands.json": 3.0}
"""Texts of a saved model that are changed more often than others."""
DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)


# ---- bytes ------------------------------------------------------------------------------------------------------


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """Return the bytes with a flipped bit, a byte replaced, a part cut, removed, doubled, zeroed, moved or inserted."""
    data = bytearray(content)
    if not data:
        return bytes([draw.randrange(256)])
    at, size = draw.randrange(len(data)), min(len(data), 1 << draw.randrange(12))
    match draw.randrange(9):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            data[at] = draw.randrange(256)
        case 2:
            del data[at:]
        case 3:
            del data[at : at + size]
        case 4:
            data[at:at] = data[at : at + size]
        case 5:
            data[at : at + size] = bytes(len(data[at : at + size]))
        case 6:
            part, to = data[at : at + size], draw.randrange(len(data))
            data[to : to + len(part)] = part
        case 7:
            data[at:at] = draw.randbytes(min(size, 16))
        case 8:
            data[at : at + 8] = draw.choice((2**63, 2**32, 2**31 - 1, 0, 2**64 - 1)).to_bytes(8, "little")
    return bytes(data)


# ---- JSON -------------------------------------------------------------------------------------------------------


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside a JSON value."""
    if path:
        yield path
    if isinstance(value, (list, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def changed_json(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one place changed: replaced by junk or by another place, removed, renamed, doubled,
    exchanged, or a number near it."""
    value = copy.deepcopy(value)
    found = list(places(value))
    if not found:
        return draw.choice(JUNK)
    path = draw.choice(found)
    holder, key = _at(value, path[:-1]), path[-1]
    there = holder[key]
    match draw.choice((0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 6, 7, 7)):
        case 0:
            holder[key] = copy.deepcopy(draw.choice(JUNK))
        case 1:
            del holder[key]
        case 2:
            same = [other for other in found if len(other) == len(path)] if draw.random() < 0.5 else found
            same = [other for other in same if type(_at(value, other)) is type(there)]
            holder[key] = copy.deepcopy(_at(value, draw.choice(same)))
        case 3 if isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(there))
        case 4:
            other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key], holder[other] = holder[other], holder[key]
        case 5 if isinstance(holder, dict):
            holder[draw.choice([other[-1] for other in found if isinstance(other[-1], str)])] = holder.pop(key)
        case _ if isinstance(there, (int, float)) and not isinstance(there, bool):
            holder[key] = draw.choice((there + 1, there - 1, -there, there * 2, there * 1000, there + 0.5, there // 2))
        case _ if isinstance(there, str):
            holder[key] = _changed_text(there, draw)
        case _:
            holder[key] = copy.deepcopy(draw.choice(JUNK))
    return value


def _at(value: Any, path: Sequence[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed_text(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(("", "_", "0", "1", "\n", "\\", "é", " ", ".", "-", "x" * 300)) + text[at + 1 :]


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


# ---- tensors ----------------------------------------------------------------------------------------------------


def changed_tensors(content: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file with one tensor changed: its values, element type, shape, name or presence."""
    if draw.random() < 0.25:
        return _changed_header(content, draw)
    tensors = safetensors.torch.load(content)
    if not tensors:
        return safetensors.torch.save({"x": torch.zeros(3)})
    change_tensor(tensors, draw.choice(sorted(tensors)), draw)
    return safetensors.torch.save({key: value.contiguous() for key, value in tensors.items()})


def change_tensor(tensors: dict[str, torch.Tensor], name: str, draw: random.Random) -> None:
    """Change one of the tensors in place: its values, element type, shape, name or presence."""
    tensor = tensors[name].clone()
    match draw.randrange(8):
        case 0 | 1 | 2:
            tensors[name] = _changed_values(tensor, draw)
        case 3:
            tensors[name] = tensor.to(draw.choice(DTYPES))
        case 4:
            tensors[name] = tensor.flatten()[: draw.randrange(tensor.numel() + 1)].clone()
        case 5:
            tensors[name] = draw.choice((tensor.flatten(), tensor[None], torch.cat([tensor.flatten()] * 2)))
        case 6:
            del tensors[name]
        case 7:
            tensors[draw.choice([*tensors, "x", f"{name}0"])] = tensors.pop(name).clone()


def _changed_values(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Return a tensor with one value, or all of them, replaced: extremes of its type, NaN, or random bytes."""
    flat = tensor.flatten()
    if not len(flat):
        return tensor
    if tensor.is_floating_point():
        value: float = draw.choice((0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf"), float("-inf"), 1e-45))
    elif tensor.dtype is torch.bool:
        value = draw.choice((0, 1))
    else:
        kind = torch.iinfo(tensor.dtype)
        value = draw.choice((kind.min, kind.max, 0, 1))
    place = slice(None) if draw.random() < 0.2 else draw.randrange(len(flat))
    if draw.random() < 0.3:
        raw = flat.view(torch.uint8).numpy()
        raw[:] = np.frombuffer(draw.randbytes(len(raw)), np.uint8)
    else:
        flat[place] = value
    return flat.view(tensor.shape)


def _changed_header(content: bytes, draw: random.Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json_bytes(changed_json(json.loads(content[8 : 8 + size]), draw))
    length = len(header) if draw.random() < 0.8 else draw.choice((0, 2**63, len(content), len(header) + 1))
    return length.to_bytes(8, "little") + header + content[8 + size :]


# ---- saved models -----------------------------------------------------------------------------------------------


def members_of(content: bytes) -> dict[str, bytes]:
    """Return the members of a saved model by name."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(members: Mapping[str, bytes]) -> bytes:
    """Return a saved model of these members whose digests fit, as an attacker would write it."""
    try:
        manifest = json.loads(members[MANIFEST])
        rest = {name: content for name, content in members.items() if name != MANIFEST}
        manifest["digests"] = {name: hashlib.sha256(content).hexdigest() for name, content in rest.items()}
        members = {MANIFEST: json_bytes(manifest), **rest}
    except (ValueError, TypeError, KeyError):
        pass  # the manifest itself is damaged
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return memory.getvalue()


def change_members(members: dict[str, bytes], draw: random.Random, others: Sequence[Mapping[str, bytes]]) -> None:
    """Change one member in place: its JSON, its tensors or its bytes, or remove, add or exchange one."""
    texts = [name for name in members if name.endswith(".json")]
    tensors = [name for name in members if name.endswith(".safetensors")]
    kind = draw.choices(("json", "tensors", "bytes", "remove", "exchange", "add"), (60, 25, 5, 1, 4, 1))[0]
    if kind == "json" and texts:
        name = draw.choices(texts, [SHARES.get(name, 0.5) for name in texts])[0]
        try:
            members[name] = json_bytes(changed_json(json.loads(members[name]), draw))
        except (ValueError, RecursionError):
            members[name] = changed_bytes(members[name], draw)
    elif kind == "tensors" and tensors:
        name = draw.choice(tensors)
        try:
            members[name] = changed_tensors(members[name], draw)
        except Exception:  # it was changed before and is no longer a file of tensors
            members[name] = changed_bytes(members[name], draw)
    elif kind == "remove":
        del members[draw.choice(sorted(members))]
    elif kind == "exchange":
        name, other = draw.choice(sorted(members)), draw.choice(others)
        members[name] = other.get(name, draw.choice(list(other.values())))
    elif kind == "add":
        members[draw.choice(("x", "body/graph.json", "program-avx2.so", "../x", "/x", "manifest.json "))] = b"{}"
    elif members:
        name = draw.choice(sorted(members))
        members[name] = changed_bytes(members[name], draw)
