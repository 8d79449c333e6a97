"""Folders of quantized models: the files that `save_pretrained` writes and `from_pretrained` reads."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from intaglio.errors import ArtifactError
from intaglio.output_paths import check_folder, read_text, write_text

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

MODEL_FILE = "model.intaglio"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PROGRAMS_FILE = "programs.json"
DECODER, ENCODER, CROSS = "decoder", "encoder", "cross_attention"
PROGRAM_NAMES = ((DECODER,), (DECODER, ENCODER, CROSS))
"""Names of the programs of a model with a cache: of a decoder, and of an encoder-decoder."""
MASKS = "sdpa"
"""Attention for which `generate` makes the masks of a loaded model, which computes attention itself."""
OTHER_FOLDER = "pass a folder that save_pretrained of an int8 model wrote"


def config_text(name: str, config: PreTrainedConfig) -> str:
    """Return the JSON text of a configuration that names the class of the float model."""
    named = copy.deepcopy(config)
    named.architectures = [name]
    return named.to_json_string()


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
    write_text(folder / CONFIG_FILE, config_text(name, config))
    if generation is not None:
        write_text(folder / GENERATION_FILE, generation.to_json_string())


Configs = tuple[type["PreTrainedModel"], "PreTrainedConfig", "GenerationConfig | None"]
"""Class of the float model, its configuration and its generation configuration."""


def read_configs(folder: Path, given: type[Any] | None) -> Configs:
    """Return the class of the float model, its configuration and its generation configuration from a folder.

    Args:
        folder: the folder.
        given: the class, for a class that is not part of ``transformers``.

    Raises:
        ArtifactError: a file is missing or malformed, or names a class that ``transformers`` does not have.
    """
    found = folder / GENERATION_FILE
    return configs_of(folder, _entries(folder / CONFIG_FILE), _entries(found) if found.exists() else None, given)


def configs_of(
    path: Path,
    entries: dict[str, Any],
    generation: dict[str, Any] | None,
    given: type[Any] | None,
    remedy: str = OTHER_FOLDER,
) -> Configs:
    """Return the class of the float model and its configurations from their entries.

    Args:
        path: the folder or file, for errors and for the name of the model.
        entries: entries of the configuration.
        generation: those of the generation configuration, if there is one.
        given: the class, for a class that is not part of ``transformers``.
        remedy: what the error for a malformed configuration suggests.

    Raises:
        ArtifactError: the entries are malformed, or name a class that ``transformers`` does not have.
    """
    from transformers import GenerationConfig

    kind = given or _class_named(path, entries)
    assert kind.config_class is not None
    try:
        config = kind.config_class.from_dict(entries)
        generation_config = None if generation is None else GenerationConfig.from_dict(generation)
    except Exception as error:  # configurations have checks of their own
        problem = f"its configuration is not one of {kind.__name__}: {type(error).__name__}: {error}"
        raise ArtifactError(str(path), None, problem, remedy=remedy) from error
    config.name_or_path = str(path)
    config._attn_implementation = MASKS  # files do not store it, and without it `generate` makes no masks
    return kind, config, generation_config


Numbering = Literal["tokens", "mask"] | int | None
"""The ways in which models compute the positions of tokens in calls without ``position_ids``.

* ``"tokens"``: 0, 1, 2 and so on for all tokens, also those of padding;
* ``"mask"``: 0, 1, 2 and so on for the tokens where the padding mask is 1, and 0 for the others;
* an integer, the id p of the padding token: p + 1, p + 2 and so on for the other tokens, and p for padding, as RoBERTa;
* ``None``: in another way. Calls without positions are refused.
"""


@dataclass(frozen=True)
class ProgramList:
    """The programs in the folder of a model with a cache.

    Attributes:
        names: names of the programs.
        numbering: how the positions of tokens are computed in calls without them, as in the float model. `generate`
            always passes positions, in which padding does not count.
        takes_padding: whether calls may have a padding mask for the encoder's input, because the programs take it or
            the float model does not read it.
    """

    names: tuple[str, ...]
    numbering: Numbering
    takes_padding: bool = True


def program_file(name: str) -> str:
    """Return the name of a program's file."""
    return f"{name}.intaglio"


def entries_of(programs: ProgramList) -> dict[str, Any]:
    """Return a list of programs as JSON entries."""
    entries = {"programs": programs.names, "numbering": programs.numbering}
    return entries if programs.takes_padding else {**entries, "takes_padding": False}


def write_programs(folder: Path, programs: ProgramList) -> None:
    """Write the list of the programs of a model with a cache."""
    write_text(folder / PROGRAMS_FILE, json.dumps(entries_of(programs), indent=2) + "\n")


def read_programs(folder: Path) -> ProgramList | None:
    """Return the list of programs, or ``None`` for a model without a cache.

    Raises:
        ArtifactError: the list is malformed.
    """
    path = folder / PROGRAMS_FILE
    return programs_of(path, _entries(path)) if path.exists() else None


def programs_of(path: Path, entries: Any) -> ProgramList:
    """Return the list of programs from its JSON entries. Raise `ArtifactError` if it is malformed."""
    entries = entries if isinstance(entries, dict) else {}
    names, numbering, counts = entries.get("programs"), entries.get("numbering", ""), entries.get("counts_padding")
    if "numbering" not in entries and isinstance(counts, bool):  # a file of an earlier version
        numbering = "tokens" if counts else "mask"
    known, takes_padding = numbering in ("tokens", "mask", None), entries.get("takes_padding", True)
    known = (known or type(numbering) is int) and isinstance(takes_padding, bool)
    if names not in [list(one) for one in PROGRAM_NAMES] or not known:
        raise ArtifactError(str(path), None, "it does not list the programs of a model", remedy=OTHER_FOLDER)
    return ProgramList(tuple(names), numbering, takes_padding)


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
