"""Models of the zoo, by family: `MODELS` maps a name to a function that returns an `Entry`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from zoo_models.entry import Entry

FAMILIES = (
    "classifiers",
    "dense_vision",
    "timm_vision",
    "text",
    "multimodal",
    "audio",
    "tables_and_graphs",
    "generation",
    "blind",
)


def models() -> dict[str, Callable[[], Entry]]:
    """Return the functions of all families by name."""
    found: dict[str, Callable[[], Entry]] = {}
    for family in FAMILIES:
        found |= import_module(f"zoo_models.{family}").MODELS
    return found


def family_of(name: str) -> str:
    """Return the family that has a model of this name."""
    return next(family for family in FAMILIES if name in import_module(f"zoo_models.{family}").MODELS)
