"""Attributes of the float model that the int8 model keeps: plain values, such as class names and preprocessing
settings."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from intaglio.runtime.reports.speed import MeasuredSpeed
from intaglio.torch_private import buffers_of, parameters_of, submodules_of


@dataclass(frozen=True)
class KeptAttributes:
    """The attributes of a float model.

    Attributes:
        values: copies of the plain values, by name.
        others: name of every other attribute -> what it is, for an error.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(model: nn.Module) -> KeptAttributes:
        """Return the attributes of a model. Names with a leading underscore and names of `nn.Module` are left out."""
        found: dict[str, Any] = {}
        for kind in reversed(type(model).__mro__[: type(model).__mro__.index(nn.Module)]):
            found |= vars(kind)
        found |= {**vars(model), **parameters_of(model), **buffers_of(model), **submodules_of(model)}
        public = {name: value for name, value in found.items() if not name.startswith("_") and not _is_of_torch(name)}
        values = {name: copy.deepcopy(value) for name, value in public.items() if is_plain(value)}
        others = {name: _kind(model, name, value) for name, value in public.items() if name not in values}
        return KeptAttributes(values, others)


class ModelWithAttributes(nn.Module):
    """A module that has the plain attributes of the float model it was made from.

    Attributes:
        kept_attributes: the attributes. Those of the module itself come first.
        measured: times of the module beside those of the float model, if `quantize` measured them. Files do not keep
            them.
    """

    kept_attributes = KeptAttributes()
    measured: MeasuredSpeed | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the float model, or raise `AttributeError` with what it was there."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            kept = self.kept_attributes
            if name in kept.values:
                return kept.values[name]
            if name not in kept.others:
                raise
        listed = f": {', '.join(sorted(kept.values))}" if kept.values else ""
        raise AttributeError(
            f"the int8 model has no {name!r}, which is {kept.others[name]} of the float model; "
            f"it keeps only plain values{listed}"
        )


def is_plain(value: Any) -> bool:
    """Return whether a value is a string, a number, a bool or None, a configuration of ``transformers``, or a tuple,
    list, dictionary or dataclass of such values."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return True
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(is_plain(part) for item in value.items() for part in item)
    if any(f"{kind.__module__}.{kind.__qualname__}" in CONFIGURATIONS for kind in type(value).__mro__):
        return True
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_plain(getattr(value, entry.name)) for entry in dataclasses.fields(value))
    return False


CONFIGURATIONS = (
    "transformers.configuration_utils.PreTrainedConfig",
    "transformers.generation.configuration_utils.GenerationConfig",
)
"""Classes of other libraries whose objects are settings."""


def _is_of_torch(name: str) -> bool:
    return hasattr(nn.Module, name) or name == "training"


def _kind(model: nn.Module, name: str, value: Any) -> str:
    """Return what an attribute is, for an error."""
    if name in parameters_of(model):
        return "a parameter"
    if name in buffers_of(model):
        return "a buffer"
    if name in submodules_of(model):
        return f"a submodule ({type(value).__name__})"
    if inspect.isroutine(value) or isinstance(value, property):
        return "code"
    return f"a value of type {type(value).__name__}"
