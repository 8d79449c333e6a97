"""Files of partly quantized models: the file of every part, and the tensors of the float rest."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from intaglio.build import open_model
from intaglio.errors import MALFORMED, ArtifactError
from intaglio.integrations import adapted_parts_of
from intaglio.parts.find_parts import replace_module
from intaglio.parts.part_module import QuantizedPart
from intaglio.runtime import Coverage, FloatPart
from intaglio.runtime.saved.archive import SAVE_AGAIN, read, read_member, write

FLOATS = "float.safetensors"
SAME_ARCHITECTURE = "pass a float model of the class and sizes that was quantized"


def write_parts(
    path: Path,
    model: nn.Module,
    parts: Mapping[str, QuantizedPart],
    coverage: Coverage,
    library: bool,
    version: str,
) -> None:
    """Write a file. Raise `ArtifactError` if that is not possible."""
    members = {FLOATS: safetensors.torch.save(rest_of(model))}
    names = {f"part{index}": where for index, where in enumerate(parts)}
    with tempfile.TemporaryDirectory() as folder:
        for name, where in names.items():
            parts[where].int8.save(Path(folder) / name, library=library)
            members[name] = (Path(folder) / name).read_bytes()
    adapted = [where for where, part in parts.items() if part.adapted is not None]
    write(path, {"intaglio": version, "parts": names, "adapted": adapted, "coverage": asdict(coverage)}, members)


def read_parts(path: Path, float_model: nn.Module, trust: bool) -> Coverage:
    """Put the parts and tensors of a file into a float model.

    Args:
        path: the file.
        float_model: a model of the architecture that was quantized, which is changed.
        trust: whether to run compiled programs of the file.

    Returns:
        The coverage that the file holds.

    Raises:
        ArtifactError: the file is damaged or belongs to another model.
    """
    manifest, members = read(path)
    names = manifest.get("parts")
    if not isinstance(names, dict):
        problem = "it holds a whole int8 model, and no parts of one"
        raise ArtifactError(str(path), None, problem, remedy="call intaglio.load(path)")
    known = adapted_parts_of(float_model)
    try:
        adapted = {where: known.get(where) for where in manifest.get("adapted", [])}
        if missing := [where for where, one in adapted.items() if one is None]:
            problem = f"{missing[0]} takes other arguments in the file than in {type(float_model).__name__}"
            raise ArtifactError(str(path), None, problem, remedy=SAME_ARCHITECTURE)
        for name, where in names.items():
            old = _submodule(path, float_model, where)
            int8 = open_model(path, read_member(path, members, name), trust=trust)
            replace_module(float_model, old, QuantizedPart(where, int8, old, adapted.get(where)))
        _load_rest(path, float_model, safetensors.torch.load(members[FLOATS].read()))
        return _coverage(manifest["coverage"])
    except (*MALFORMED, safetensors.SafetensorError) as error:
        problem = f"its contents are damaged: {type(error).__name__}: {error}"
        raise ArtifactError(str(path), None, problem, remedy=SAVE_AGAIN) from error


def _submodule(path: Path, model: nn.Module, where: str) -> nn.Module:
    try:
        return model.get_submodule(where)
    except AttributeError as error:
        problem = f"a part belongs to {where}, which {type(model).__name__} does not have"
        raise ArtifactError(str(path), None, problem, remedy=SAME_ARCHITECTURE) from error


def rest_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of a model outside of its parts, by name."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named if not _is_in_part(model, name)}


def _is_in_part(model: nn.Module, name: str) -> bool:
    """Return whether a tensor belongs to a part. Modules inside of a part that other code calls do not."""
    module, part = model, None
    for step in name.split(".")[:-1]:
        module = module.get_submodule(step)
        if isinstance(module, QuantizedPart):
            part = module
        elif part is not None and any(module is one for one in part.outside_modules()):
            part = None
    return part is not None


def _load_rest(path: Path, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    own = rest_of(model)
    differing = {name for name in {*own, *tensors} if _kind(own.get(name)) != _kind(tensors.get(name))}
    if differing:
        problem = f"its tensors are not those of the model; the first that differs is {min(differing)}"
        raise ArtifactError(str(path), None, problem, remedy=SAME_ARCHITECTURE)
    named = dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))
    with torch.no_grad():
        for name, tensor in tensors.items():
            named[name].copy_(tensor)


def _kind(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype)


def _coverage(stored: Mapping[str, Any]) -> Coverage:
    groups = {name: tuple(FloatPart(**part) for part in stored[name]) for name in ("floats", "hosts", "loops")}
    numbers = {field.name: stored[field.name] for field in fields(Coverage) if field.name not in groups}
    return Coverage(**{**numbers, **groups, "notes": tuple(stored["notes"])})
