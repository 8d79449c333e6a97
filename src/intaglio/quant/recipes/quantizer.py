"""The quantizer of a model: recipe, input and output types, user patterns, user operators and annotators."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from intaglio.argument_checks import check_arguments, check_arguments_except, check_fields, value_text
from intaglio.errors import InputError, SelectorError, did_you_mean
from intaglio.ops import OpDef, checked_records
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.recipes.choices import OutputType
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.recipe import OPEN_RECIPE, Recipe, Selectors, as_tuple, toml_table, toml_text
from intaglio.quant.recipes.user_patterns import QuantizerPattern

GivenPatterns = Iterable[QuantizerPattern | str | Sequence[QuantizerPattern | str]]
"""Patterns, names of built-in ones, and lists of them."""


@check_fields
@dataclass(frozen=True)
class Quantizer:
    """Configuration of what is quantized and how.

    Attributes:
        recipe: settings by selector.
        input: what the bytes of the only input represent, or of several inputs by name.
        patterns: user patterns, names of built-in ones, or lists of them such as `patterns.builtin` returns. If there
            are any, only their matches are quantized, and the data movement and clamps next to them.
        operators: records of user-defined operators.
        skip_first: leave in float the compute operators that an input reaches without passing another quantized one.
        skip_last: leave in float the compute operators that reach an output without passing another quantized one.
        annotator: annotates the quantized nodes (`intaglio.annotation`); the recipe decides everything else, and what
            stays in float.
        outputs: "int8" returns float32 results of operators as quantized values with scale and zero point (`Integers`).
        int8_buffers: float32 buffers with state that are stored quantized: names with the wildcards of selectors, or
            ``True`` for all.
        cached_inputs: inputs that hold results of an earlier call, which the setting ``cache`` is about: position of
            the tensor among those of the arguments -> position among those of the result, or ``None`` if the result
            comes from another model.
        decoder: open settings of the recipe are those of decoders, as they are with cached inputs. For a decoder, or
            layers of one, whose cache is outside of the graph.
    """

    recipe: Recipe = OPEN_RECIPE
    input: Image | Mapping[str, Image] | None = None
    patterns: GivenPatterns = ()
    operators: Iterable[OpDef] = ()
    skip_first: bool = False
    skip_last: bool = False
    annotator: Annotator | None = None
    outputs: str = "float"
    int8_buffers: bool | str | Iterable[str] = ()
    cached_inputs: Mapping[int, int | None] = field(default_factory=dict)
    decoder: bool = False

    def __post_init__(self) -> None:
        if self.outputs not in tuple(OutputType):
            problem = f"outputs = {self.outputs!r}; allowed are 'float' and 'int8'"
            raise SelectorError("quantizer", None, problem, remedy=did_you_mean(self.outputs, OutputType))
        if self.annotator is not None and (self.patterns or self.skip_first or self.skip_last):
            raise SelectorError(
                "quantizer",
                None,
                "an annotator cannot be combined with patterns, skip_first or skip_last",
                remedy="leave these out: the annotator decides what is quantized",
            )
        if isinstance(self.patterns, str):
            object.__setattr__(self, "patterns", (self.patterns,))
        if not isinstance(self.int8_buffers, (bool, str)):
            object.__setattr__(self, "int8_buffers", tuple(self.int8_buffers))
        object.__setattr__(self, "patterns", tuple(flat_patterns(self.patterns)))
        object.__setattr__(self, "operators", checked_records(self.operators))

    @staticmethod
    @check_arguments_except("given")
    def of(given: Quantizer | Annotator | None) -> Quantizer:
        """Return the quantizer that `prepare` was given as a `Quantizer`, an annotator or nothing."""
        if given is None or isinstance(given, Quantizer):
            return given or Quantizer()
        if not hasattr(given, "annotate"):
            raise InputError(
                "quantizer",
                None,
                f"expected a Quantizer or an object with a method annotate(module), got a {type(given).__name__}",
            )
        return Quantizer(annotator=given)

    @property
    def buffers(self) -> tuple[str, ...]:
        """Return the selectors of the buffers that are stored quantized."""
        return ("*",) if self.int8_buffers is True else as_tuple(self.int8_buffers or ())

    @property
    def integers(self) -> bool:
        """Return whether the model returns quantized values."""
        return self.outputs == OutputType.INT8

    @property
    def is_decoder(self) -> bool:
        """Return whether open settings of the recipe are those of decoders."""
        return self.decoder or bool(self.cached_inputs)

    @property
    def has_text(self) -> bool:
        """Return whether `to_toml` represents everything, which it does only for recipe, input and cached inputs."""
        ends = self.skip_first or self.skip_last or self.integers or self.buffers
        return not (self.patterns or self.operators or ends or self.annotator or self.decoder)

    def to_toml(self) -> str:
        """Return the recipe without parameters as TOML, a table ``[input."name"]`` per image, or ``[input.""]``, and a
        table ``[cached_inputs]``, in which ``false`` means ``None``."""
        images = {"": self.input} if isinstance(self.input, Image) else (self.input or {})
        tables = [toml_table(f"{INPUT}.{toml_text(name)}", dataclasses.asdict(i)) for name, i in images.items()]
        cached = {str(at): False if result is None else result for at, result in self.cached_inputs.items()}
        tables += [toml_table(CACHED_INPUTS, cached)] if cached else []
        return "\n".join([self.recipe.with_parameters(None).to_toml(), *tables])

    @staticmethod
    @check_arguments
    def from_toml(text: str) -> Quantizer:
        """Parse the text of `to_toml`.

        Raises:
            SelectorError: the text is not valid TOML or has an unknown key.
        """
        recipe = Recipe.from_toml(OTHER_TABLES.split(text)[0])
        try:
            tables = tomllib.loads(text)
            images = {name: Image(**table) for name, table in tables.get(INPUT, {}).items()}
            cached = {int(at): None if to is False else int(to) for at, to in tables.get(CACHED_INPUTS, {}).items()}
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError) as error:
            problem = f"its images or cached inputs are not valid TOML tables: {error}"
            raise SelectorError("quantizer", None, problem) from error
        return Quantizer(recipe, images.get("", images), cached_inputs=cached)


def flat_patterns(given: GivenPatterns) -> Iterator[QuantizerPattern | str]:
    """Yield patterns and names, also those in lists; raise `SelectorError` for anything else."""
    for entry in given:
        if isinstance(entry, (list, tuple)):
            yield from flat_patterns(entry)
        elif isinstance(entry, (QuantizerPattern, str)):
            yield entry
        else:
            problem = f"{value_text(entry)} is neither a QuantizerPattern nor the name of one"
            raise SelectorError("patterns", None, problem, remedy="pass patterns as builtin(...) returns them")


INPUT = "input"
CACHED_INPUTS = "cached_inputs"
"""TOML tables that do not belong to the recipe: the prefix of those of images, and the name of the other."""
OTHER_TABLES = re.compile(rf"\n\[(?:{INPUT}\.|{CACHED_INPUTS}\])")
"""Beginning of such a table."""


def given_quantizer(
    quantizer: Quantizer | None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    skip: Selectors | None,
    only: Selectors | None,
    images: Image | Mapping[str, Image] | None,
) -> Quantizer:
    """Return the given quantizer, or one made of a recipe and images, with the selection of ``skip`` and ``only``
    applied."""
    if quantizer is None:
        quantizer = Quantizer(Recipe.given(recipe), images or {})
    elif recipe is not None or images is not None:
        problem = "recipe= and input= cannot be combined with quantizer="
        raise InputError("quantize", None, problem, remedy="pass them to the quantizer: Quantizer(recipe, input)")
    return replace(quantizer, recipe=quantizer.recipe.with_selection(skip, only))
