"""Folders with config.json and safetensors files, whose tensors are read one at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from intaglio.errors import ArtifactError, UnsupportedError
from intaglio.output_paths import read_text

CONFIG_NAME = "config.json"
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that hold Python's pickles."""
PICKLE_PROBLEM = "this file holds a Python pickle, which may run any code when it is read"
PICKLE_REMEDY = (
    "if you trust it, write a safetensors file: "
    "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"
)
QUANTIZE_FLOAT = "quantize the float model: intaglio.quantize(model, data)"
OTHER_PATH = "pass a folder with config.json and safetensors files, or a GGUF file"
DAMAGED = "get the file again: it is damaged, or not completely downloaded"
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class TensorFolder:
    """The tensors in the safetensors files of a folder, by name.

    Attributes:
        folder: the folder.
        files: name of each tensor -> file that holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _files_of(folder):
            for name in self._opened(file).keys():  # noqa: SIM118  # it has no __iter__
                if name in self.files:
                    problem = f"{name!r:.100} is in two files, {self.files[name].name} and {file.name}"
                    raise ArtifactError(str(folder), None, problem, remedy=DAMAGED)
                self.files[name] = file

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, which is not read."""
        return tuple(self._opened(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the element type of a tensor as safetensors names it, such as "BF16"."""
        return str(self._opened(self.files[name]).get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored.

        Raises:
            ArtifactError: the tensor is missing, or the file is damaged.
        """
        if name not in self.files:
            raise ArtifactError(str(self.folder), None, f"the tensor {name!r:.100} is missing", remedy=DAMAGED)
        try:
            found: torch.Tensor = self._opened(self.files[name]).get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(self.files[name], error) from error
        return found

    def float_tensor(self, name: str) -> torch.Tensor:
        """Return a copy of a float tensor as float32.

        Raises:
            UnsupportedError: the tensor has another type.
        """
        found = self.tensor(name)
        if found.dtype not in FLOAT_TYPES:
            kind = self.dtype(name)
            problem = f"it is {kind}, and belongs to no quantized layer; F32, F16 and BF16 are read"
            raise UnsupportedError(name, None, problem, remedy=QUANTIZE_FLOAT)
        return found.to(torch.float32, copy=True)

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(file), framework="pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise _damaged(file, error) from error
        return self._open[file]


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in config.json; an empty one without the file.

    Raises:
        ArtifactError: the file is malformed.
    """
    path = folder / CONFIG_NAME
    if not path.exists():
        return {}
    check_regular(path)
    try:
        entries = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(str(path), None, f"it is not JSON: {error}", remedy=DAMAGED) from error
    if not isinstance(entries, dict):
        raise ArtifactError(str(path), None, "it is not a JSON object", remedy=DAMAGED)
    return entries


def check_no_pickle(path: Path) -> None:
    """Raise `UnsupportedError` for the name of a file that holds a pickle."""
    if path.suffix.lower() in PICKLES:
        raise UnsupportedError(str(path), None, PICKLE_PROBLEM, remedy=PICKLE_REMEDY)


def check_regular(path: Path) -> None:
    """Raise `ArtifactError` unless a path is that of a regular file, which can be opened without waiting."""
    if not os.path.isfile(path):
        problem = "it is not a regular file" if os.path.exists(path) else "there is no such file"
        raise ArtifactError(str(path), None, problem, remedy=DAMAGED)


def _files_of(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder: those of its index, or else all of them."""
    index = folder / INDEX_FILE
    if index.exists():
        check_regular(index)
        files = [folder / name for name in sorted(_index(index))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        for pickle in sorted(path for path in folder.iterdir() if path.suffix.lower() in PICKLES):
            check_no_pickle(pickle)
        raise ArtifactError(str(folder), None, "it has no safetensors files", remedy=OTHER_PATH)
    for file in files:
        check_regular(file)
    return files


def _index(path: Path) -> set[str]:
    """Return the names of the files in an index."""
    try:
        entries = json.loads(read_text(path))
        names = set(entries["weight_map"].values())
        odd = [name for name in names if not isinstance(name, str) or not _is_plain(name)]
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ArtifactError(str(path), None, f"it is not an index of tensors: {error}", remedy=DAMAGED) from error
    if odd:
        problem = f"it names {odd[0]!r:.100}, which is not a safetensors file in this folder"
        raise ArtifactError(str(path), None, problem, remedy=DAMAGED)
    return names


def _is_plain(name: str) -> bool:
    """Return whether a name is that of a safetensors file, without a folder."""
    return name.endswith(".safetensors") and os.path.basename(name) == name and "\0" not in name


def _damaged(file: Path, error: Exception) -> ArtifactError:
    return ArtifactError(str(file), None, f"it cannot be read: {error}", remedy=DAMAGED)
