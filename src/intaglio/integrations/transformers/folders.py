"""Folders of quantized models: the files that `save_pretrained` writes and `from_pretrained` reads."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.errors import ArtifactError
from intaglio.output_paths import check_folder, read_text, write_text

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

MODEL_FILE = "model.intaglio"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PROGRAMS_FILE = "programs.json"
PROGRAM_NAMES = (("decoder",), ("decoder", "encoder", "cross_attention"))
"""Names of the programs of a model with a cache: of a decoder, and of an encoder-decoder."""
OTHER_FOLDER = "pass a folder that save_pretrained of an int8 model wrote"


def write_configs(folder: Path, name: str, config: PreTrainedConfig, generation: GenerationConfig | None) -> None:
    """Write the configuration files of a model.

    Args:
        folder: the folder, which is created if it does not exist.
        name: name of the float model's class, which becomes the only entry of ``architectures``.
        config: configuration of the model.
        generation: its generation configuration, if any.

    Raises:
        ArtifactError: a file cannot be written.
    """
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = copy.deepcopy(config)
    named.architectures = [name]
    write_text(folder / CONFIG_FILE, named.to_json_string())
    if generation is not None:
        write_text(folder / GENERATION_FILE, generation.to_json_string())


def read_configs(
    folder: Path, given: type[Any] | None
) -> tuple[type[PreTrainedModel], PreTrainedConfig, GenerationConfig | None]:
    """Return the class of the float model, its configuration and its generation configuration.

    Args:
        folder: the folder.
        given: the class, for a class that is not part of ``transformers``.

    Raises:
        ArtifactError: a file is missing or malformed, or names a class that ``transformers`` does not have.
    """
    from transformers import GenerationConfig

    entries = _entries(folder / CONFIG_FILE)
    kind = given or _class_named(folder, entries)
    assert kind.config_class is not None
    try:
        config = kind.config_class.from_dict(entries)
        found = folder / GENERATION_FILE
        generation = GenerationConfig.from_dict(_entries(found)) if found.exists() else None
    except ArtifactError:
        raise
    except Exception as error:  # configurations have checks of their own
        problem = f"its configuration is not one of {kind.__name__}: {type(error).__name__}: {error}"
        raise ArtifactError(str(folder), None, problem, remedy=OTHER_FOLDER) from error
    config.name_or_path = str(folder)
    return kind, config, generation


@dataclass(frozen=True)
class ProgramList:
    """The programs in the folder of a model with a cache.

    Attributes:
        names: names of the programs.
        counts_padding: see `QuantizedGenerator`.
    """

    names: tuple[str, ...]
    counts_padding: bool


def program_file(name: str) -> str:
    """Return the name of a program's file."""
    return f"{name}.intaglio"


def write_programs(folder: Path, programs: ProgramList) -> None:
    """Write the list of the programs of a model with a cache."""
    entries = {"programs": programs.names, "counts_padding": programs.counts_padding}
    write_text(folder / PROGRAMS_FILE, json.dumps(entries, indent=2) + "\n")


def read_programs(folder: Path) -> ProgramList | None:
    """Return the list of programs, or ``None`` for a model without a cache.

    Raises:
        ArtifactError: the list is malformed.
    """
    path = folder / PROGRAMS_FILE
    if not path.exists():
        return None
    entries = _entries(path)
    names, counts = entries.get("programs"), entries.get("counts_padding")
    if names not in [list(known) for known in PROGRAM_NAMES] or not isinstance(counts, bool):
        raise ArtifactError(str(path), None, "it does not list the programs of a model", remedy=OTHER_FOLDER)
    return ProgramList(tuple(names), counts)


def _entries(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        entries = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ArtifactError(str(path), None, f"it is not JSON: {error}", remedy=OTHER_FOLDER) from error
    if not isinstance(entries, dict):
        raise ArtifactError(str(path), None, "it is not a JSON object", remedy=OTHER_FOLDER)
    return entries


def _class_named(folder: Path, entries: dict[str, Any]) -> type[PreTrainedModel]:
    """Return the class of ``transformers`` that a configuration names. Nothing else is imported."""
    import transformers

    names = entries.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else None
    if name is None:
        problem = f"the architectures in {CONFIG_FILE} are {names!r:.60}, not one class"
        raise ArtifactError(str(folder), None, problem, remedy=OTHER_FOLDER)
    kind = getattr(transformers, name, None) if name.isidentifier() and not name.startswith("_") else None
    if not (
        isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and kind.config_class is not None
    ):
        problem = f"{name!r:.60}, which {CONFIG_FILE} names, is not a model of transformers {transformers.__version__}"
        remedy = "pass model_class= if it is a class of yours, or install the version that has it"
        raise ArtifactError(str(folder), None, problem, remedy=remedy)
    return kind
