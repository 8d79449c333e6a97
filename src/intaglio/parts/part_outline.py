"""Outlines of the parts of a model, and checks of selectors and of what is quantized over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from intaglio.ir import Origin
from intaglio.quant.calibrate.prepare import Prepared, nothing_quantized, origins_of, quantizes_something
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing.captured import Captured


@dataclass(frozen=True)
class PartOutline:
    """A part of a model.

    Attributes:
        origins: where each of its operators comes from.
        classes: module path -> class name.
        is_quantized: whether anything in it is quantized.
    """

    origins: tuple[Origin, ...]
    classes: Mapping[str, str]
    is_quantized: bool

    @staticmethod
    def of(captured: Captured, prepared: Prepared | None) -> PartOutline:
        """Return the outline of a captured part, which is prepared unless nothing in it can be quantized."""
        is_quantized = prepared is not None and quantizes_something(prepared)
        return PartOutline(tuple(origins_of(captured)), captured.classes, is_quantized)


def check_selectors(recipe: Recipe, parts: Sequence[PartOutline]) -> None:
    """Raise `SelectorError` if a selector matches no operator of any of these parts of a model."""
    classes = {name: kind for part in parts for name, kind in part.classes.items()}
    recipe.check([one for part in parts for one in part.origins], classes)


def check_parts(parts: Sequence[PartOutline]) -> None:
    """Raise `UnsupportedError` if nothing in the parts that a model is made of is quantized."""
    if not any(part.is_quantized for part in parts):
        raise nothing_quantized("")
