"""Files of quantized models that generate: the configurations, and the file of every program, in one."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio import config as package
from intaglio.errors import ArtifactError
from intaglio.integrations.transformers.folders import (
    CONFIG_FILE,
    GENERATION_FILE,
    Configs,
    ProgramList,
    config_text,
    configs_of,
    entries_of,
    program_file,
)
from intaglio.runtime import QuantizedModel
from intaglio.runtime.saved.archive import GENERATOR_ENTRY, SAVE_AGAIN, from_json, write
from intaglio.runtime.saved.members import Member

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig


def write_generator(
    path: Path,
    programs: Mapping[str, QuantizedModel],
    listed: ProgramList,
    float_class: type[Any],
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
    library: bool,
) -> None:
    """Write a model to one file. Raise `ArtifactError` and write nothing if that is not possible."""
    members = {CONFIG_FILE: config_text(float_class.__name__, config).encode()}
    if generation_config is not None:
        members[GENERATION_FILE] = generation_config.to_json_string().encode()
    with tempfile.TemporaryDirectory() as folder:
        for name, program in programs.items():
            file = Path(folder) / program_file(name)
            program.save(file, library=library)
            members[file.name] = file.read_bytes()
    write(path, {"intaglio": package.VERSION, GENERATOR_ENTRY: entries_of(listed)}, members)


def stored_configs(path: Path, members: Mapping[str, Member], given: type[Any] | None) -> Configs:
    """Return the class of the float model and its configurations from the members of a file, as `configs_of` does."""
    generation = _entries(path, members, GENERATION_FILE) if GENERATION_FILE in members else None
    return configs_of(path, _entries(path, members, CONFIG_FILE), generation, given)


def _entries(path: Path, members: Mapping[str, Member], name: str) -> dict[str, Any]:
    """Return the object in a JSON member."""
    try:
        entries = from_json(members[name].read())
    except (KeyError, ValueError) as error:
        raise ArtifactError(str(path), None, f"'{name}' is missing or no JSON: {error}", remedy=SAVE_AGAIN) from error
    if not isinstance(entries, dict):
        raise ArtifactError(str(path), None, f"'{name}' is not a JSON object", remedy=SAVE_AGAIN)
    return entries
