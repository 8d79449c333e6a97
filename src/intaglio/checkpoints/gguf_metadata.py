"""Metadata of language models in GGUF files: the settings of their architecture, checked when they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from intaglio.checkpoints.tensor_folder import DAMAGED, QUANTIZE_FLOAT
from intaglio.errors import ArtifactError, UnsupportedError

ARCHITECTURE_KEY = "general.architecture"


@dataclass(frozen=True)
class Architecture:
    """An architecture whose models and tensors have known counterparts in ``transformers``.

    Attributes:
        model: name of the class of ``transformers``.
        rotates_neighbours: whether the rows of queries and keys that are rotated together are neighbours in the file.
            In ``transformers`` they are half a head apart.
    """

    model: str
    rotates_neighbours: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", rotates_neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
}
"""Architectures by their name in the file. Models of Mistral are "llama" there."""


@dataclass(frozen=True)
class ModelSettings:
    """The settings of a model in the metadata of a file.

    Attributes:
        metadata: values by key.
        name: name of the architecture, by which its keys begin.
    """

    metadata: Mapping[str, Any]
    name: str

    @staticmethod
    def of(metadata: Mapping[str, Any]) -> ModelSettings:
        """Return the settings of the architecture that the metadata names."""
        return ModelSettings(metadata, str(metadata.get(ARCHITECTURE_KEY)))

    @property
    def architecture(self) -> Architecture | None:
        """Return the architecture, or ``None`` if it is not a known one."""
        return ARCHITECTURES.get(self.name)

    def value(self, key: str) -> Any:
        """Return the value of a key of the architecture, or ``None``."""
        return self.metadata.get(f"{self.name}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer.

        Raises:
            ArtifactError: it is something else, or missing without a default.
            UnsupportedError: layers have different values.
        """
        found = self.value(key)
        found = default if found is None else found
        if isinstance(found, list):
            problem = "it has a value for each layer; models whose layers are equal are read"
            raise UnsupportedError(f"{self.name}.{key}", None, problem, remedy=QUANTIZE_FLOAT)
        if type(found) is not int or found < 1:
            raise self._malformed(key, found, "a positive integer")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number.

        Raises:
            ArtifactError: it is something else, or missing without a default.
        """
        found = self.value(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            raise self._malformed(key, found, "a positive number")
        return float(found)

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.count("attention.head_count")

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and values."""
        return self.count("attention.head_count_kv", self.heads)

    @property
    def head_size(self) -> int:
        """Return the number of channels of a head."""
        return self.count("attention.key_length", self.count("embedding_length") // self.heads)

    def _malformed(self, key: str, found: Any, wanted: str) -> ArtifactError:
        problem = (
            f"the metadata lacks it; it must be {wanted}" if found is None else f"it is {found!r:.60}, not {wanted}"
        )
        return ArtifactError(f"{self.name}.{key}", None, problem, remedy=DAMAGED)
