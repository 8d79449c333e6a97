"""Check the selectors of a recipe against all recordings of a model, and against the modules that may still run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from intaglio.eager.model_copies import own_modules
from intaglio.eager.segments.segment import Segment
from intaglio.errors import CaptureError
from intaglio.ir import Origin
from intaglio.quant.calibrate.prepare import origins_of
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.selectors import matches

logger = logging.getLogger("intaglio")


def check_selectors(recipe: Recipe, model: nn.Module, segments: Sequence[Segment], is_complete: bool) -> None:
    """Check that each selector matches an operator of a recording or a module of the model.

    Modules that no recording contains may run in later calls. If all calls have run, these selectors are logged.

    Args:
        recipe: Recipe with the selectors.
        model: Model that was recorded.
        segments: Segments of its recordings. Each has the selectors that match its operators.
        is_complete: Whether no further recordings follow. Selectors of operators (``op:``) are only checked then.

    Raises:
        SelectorError: A selector matches none; the message lists the nearest names.
    """
    captured = [segment.captured for segment in segments if not isinstance(segment.error, CaptureError)]
    classes = {path: type(module).__name__ for path, module in own_modules(model).items()}
    classes.update({path: name for one in captured for path, name in one.classes.items()})
    recorded = [origin for one in captured for origin in origins_of(one)]
    unrecorded = [
        entry
        for entry in recipe.entries
        if not any(matches(entry[0], origin, classes) is not None for origin in recorded)
    ]
    names_operators = is_complete and len(captured) == len(segments)
    checked = tuple(entry for entry in unrecorded if names_operators or not entry[0].startswith("op:"))
    modules = [Origin(path, "", "") for path in classes]
    replace(recipe, entries=checked).check([*recorded, *modules], classes)
    for selector, _ in unrecorded if is_complete else ():
        logger.warning("selector %r matches no operator that calibration has run", selector)
