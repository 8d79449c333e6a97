"""`Quantizer`: decides what is quantized and how, by a recipe, patterns, records and annotators of a user's own."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from intaglio.errors import InputError, SelectorError
from intaglio.ops import OpDef
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.recipes.choices import OutputType
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.recipe import OPEN_RECIPE, Recipe, as_tuple, toml_table, toml_text
from intaglio.quant.recipes.user_patterns import QuantizerPattern


@dataclass(frozen=True)
class Quantizer:
    """Decides what is quantized and how: a recipe over the fusion rows and operator records.

    ``input``: what the bytes of the only input stand for, or of several by name. ``patterns``: if any, only what these
    match is quantized, and what selects or clamps values beside it; names stand for built-in ones (`patterns.builtin`).
    ``operators``: records of a user's own. ``skip_first``, ``skip_last``: leave in float what computes and is reached
    from an input, or reaches an output, without crossing another quantized operator that computes. ``annotator``: says
    node by node what is quantized (`intaglio.annotation`); the recipe then says the rest, and what stays in float.
    ``outputs``: "int8" makes of every float32 result of an operator levels with scale and zero point (`Integers`).
    ``int8_buffers``: float32 buffers that the model changes and that are to be kept as levels: their names, with the
    wildcards of selectors, or ``True`` for all.
    """

    recipe: Recipe = OPEN_RECIPE
    input: Image | Mapping[str, Image] | None = None
    patterns: Iterable[QuantizerPattern | str] = ()
    operators: Iterable[OpDef] = ()
    skip_first: bool = False
    skip_last: bool = False
    annotator: Annotator | None = None
    outputs: str = "float"
    int8_buffers: bool | str | Iterable[str] = ()

    def __post_init__(self) -> None:
        if self.outputs not in tuple(OutputType):
            raise SelectorError("quantizer", None, f"outputs = {self.outputs!r}; there are 'float' and 'int8'")
        if self.annotator is not None and (self.patterns or self.skip_first or self.skip_last):
            raise SelectorError(
                "quantizer",
                None,
                "an annotator beside patterns or skipped ends",
                remedy="let the annotator say what is quantized",
            )
        if isinstance(self.patterns, str):
            object.__setattr__(self, "patterns", (self.patterns,))
        if not isinstance(self.int8_buffers, (bool, str)):
            object.__setattr__(self, "int8_buffers", tuple(self.int8_buffers))
        for name in ("patterns", "operators"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @staticmethod
    def of(given: Quantizer | Annotator | None) -> Quantizer:
        """What `prepare` was given: one of these, what it annotates by, or nothing."""
        if given is None or isinstance(given, Quantizer):
            return given or Quantizer()
        if not hasattr(given, "annotate"):
            raise InputError(
                "quantizer",
                None,
                f"takes a Quantizer, or what has a method annotate(module), got a {type(given).__name__}",
            )
        return Quantizer(annotator=given)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Selectors of the buffers that are to be levels."""
        return ("*",) if self.int8_buffers is True else as_tuple(self.int8_buffers or ())

    @property
    def integers(self) -> bool:
        """Whether results leave as levels."""
        return self.outputs == OutputType.INT8

    @property
    def has_text(self) -> bool:
        """Whether `to_toml` holds all of it: patterns, operators, skipped ends, annotators, outputs and buffers have no
        text."""
        ends = self.skip_first or self.skip_last or self.integers or self.buffers
        return not (self.patterns or self.operators or ends or self.annotator)

    def to_toml(self) -> str:
        """Return the recipe as TOML, without parameters, a table ``[input."name"]`` for each image ("": the only)."""
        images = {"": self.input} if isinstance(self.input, Image) else (self.input or {})
        tables = [toml_table(f"{INPUT}.{toml_text(name)}", dataclasses.asdict(i)) for name, i in images.items()]
        return "\n".join([self.recipe.with_parameters(None).to_toml(), *tables])

    @staticmethod
    def from_toml(text: str) -> Quantizer:
        """Inverse of `to_toml`."""
        tables = tomllib.loads(text).get(INPUT, {})
        images = {name: Image(**table) for name, table in tables.items()}
        recipe = Recipe.from_toml(text.partition(f"\n[{INPUT}.")[0])
        return Quantizer(recipe, images.get("", images))


INPUT = "input"
"""Name of the tables of a quantizer's text that are none of its recipe."""
