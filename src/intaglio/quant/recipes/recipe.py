"""Recipes: quantization settings by selector, in Python or TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from intaglio.argument_checks import check_arguments, check_arguments_except, check_fields, value_text
from intaglio.errors import SelectorError, did_you_mean
from intaglio.formatting.html_text import element, folded_text
from intaglio.ir import Origin
from intaglio.output_paths import file_text, unreadable_reason, write_text
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.choices import ActivationMode
from intaglio.quant.recipes.selectors import PREFIXES, matches, nearest, prefix_of
from intaglio.quant.recipes.settings import (
    DECODER,
    DECODER_LINEAR,
    DEFAULT,
    NAMED,
    NAMED_LINEAR,
    TRANSFORMER,
    UNSET,
    Setting,
)

Selectors = str | Iterable[str]
PARAMETERS = "parameters"
CORRECTED = "corrected"
"""Names of the TOML tables that are not settings."""
SHOWN_ENTRIES = 3
"""Number of entries that a `repr` shows."""


@check_fields
@dataclass(frozen=True)
class Recipe:
    """Quantization settings by selector, over a default.

    A selector is a glob over module paths (``layer1.*``, which also covers the submodules), ``re:pattern`` over module
    paths, ``type:Linear`` (class of a module) or ``op:aten.add``. Module names take precedence over module types, types
    over operators, and operators over the default. Among module names the innermost enclosing module wins, then the
    later entry. `prepare` fills the settings that the default leaves open by the kind of model.

    Attributes:
        entries: pairs of selector and setting.
        default: setting of all other operators.
        parameters: quantization parameters of the sites; with them a model is quantized without data.
    """

    entries: tuple[tuple[str, Setting], ...] = ()
    default: Setting = UNSET
    parameters: Parameters | None = None

    @staticmethod
    @check_arguments
    def named(name: str) -> Recipe:
        """Return a built-in recipe.

        Args:
            name: ``"default"``; ``"accurate"``: residual additions into a convolution keep 16 bits, and first layers
                stay in float if their rounded operand alone leaves less than 30 dB; ``"int8_dynamic"``: dynamic
                quantization of linear and recurrent layers only, without calibration; ``"w8a8_dynamic"`` and
                ``"w4a8"``, for decoders: linear layers have scales per token, and weights of 8 or 4 bits, caches and
                embedding tables are int8, residual streams are rotated, and other operators are as by default;
                ``"w8a8_accurate"`` and ``"w4a8_accurate"``: these with rotations at run time, and Qronos for 4 bits;
                ``"convolutional"`` or ``"transformer"``: the defaults of models without or with attention, for any
                model.

        Raises:
            SelectorError: `name` is unknown.
        """
        if name not in NAMED:
            problem = f"no recipe is named {name!r}; names are {', '.join(NAMED)}"
            raise SelectorError("recipe", None, problem, remedy=_nearest_name(name))
        linear = NAMED_LINEAR.get(name)
        return Recipe(() if linear is None else (("type:Linear", linear),), NAMED[name])

    @staticmethod
    @check_arguments_except("entries")
    def of(entries: Mapping[str, Setting | Mapping[str, Any] | None], default: Setting = UNSET) -> Recipe:
        """Build a recipe from a mapping. ``None`` means "leave in float"; a dictionary holds fields of a `Setting`."""
        if not isinstance(entries, Mapping) or not all(isinstance(selector, str) for selector in entries):
            problem = f"it takes settings by selector, got {value_text(entries)}"
            raise SelectorError("Recipe.of", None, problem, remedy="write {'layer1.*': {'bits': 7}, 'head': None}")
        return Recipe(tuple((selector, _setting(selector, value)) for selector, value in entries.items()), default)

    @staticmethod
    @check_arguments
    def given(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
        """Return the recipe that a user gave as nothing, a name, a file, a mapping or a `Recipe`.

        Raises:
            SelectorError: a text is neither the name of a recipe nor an existing file.
        """
        if recipe is None:
            return Recipe()
        if isinstance(recipe, str) and recipe in NAMED:
            return Recipe.named(recipe)
        if isinstance(recipe, str) and not os.path.exists(recipe):
            problem = f"{recipe!r} is neither the name of a recipe nor an existing file; names are {', '.join(NAMED)}"
            raise SelectorError("recipe", None, problem, remedy=_nearest_name(recipe))
        if isinstance(recipe, (str, Path)):
            return Recipe.load(recipe)
        return recipe if isinstance(recipe, Recipe) else Recipe.of(recipe)

    @check_arguments
    def with_selection(self, skip: Selectors | None = (), only: Selectors | None = ()) -> Recipe:
        """Return a copy that quantizes only the selectors `only`, if given, and leaves those of `skip` in float.
        ``None`` is the same as no selectors."""
        skip, only = as_tuple(skip), as_tuple(only)
        default = replace(self.default, quantize=False) if only else self.default
        chosen = [(selector, Setting(quantize=True)) for selector in only]
        left = [(selector, Setting(quantize=False)) for selector in skip]
        return replace(self, entries=(*self.entries, *chosen, *left), default=default)

    @check_arguments
    def with_parameters(self, parameters: Parameters | None) -> Recipe:
        """Return a copy with these quantization parameters."""
        return replace(self, parameters=parameters)

    @property
    def leaves_float(self) -> bool:
        """Return whether any setting leaves operators in float."""
        return any(setting.quantize is False for setting in (self.default, *(s for _, s in self.entries)))

    @property
    def calibrates(self) -> bool:
        """Return whether some setting quantizes with calibrated activations. An entry for "*" replaces the default."""
        base = self.default
        for selector, setting in self.entries:
            base = setting.with_defaults(base) if selector == "*" else base
        every = [base, *(setting.with_defaults(base) for selector, setting in self.entries if selector != "*")]
        return any(one.quantize is not False and one.activations in (None, ActivationMode.STATIC) for one in every)

    def without_skips(self) -> Recipe:
        """Return a copy in which no setting leaves operators in float."""
        entries = tuple((selector, _unskipped(setting)) for selector, setting in self.entries)
        return replace(self, entries=entries, default=_unskipped(self.default))

    @check_arguments
    def with_defaults(self, attention: bool) -> Recipe:
        """Return a copy whose default leaves nothing open, for a model with or without attention."""
        return replace(self, default=self.default.with_defaults(TRANSFORMER if attention else DEFAULT))

    @check_arguments_except("linear")
    def with_decoder_defaults(self, linear: Iterable[str]) -> Recipe:
        """Return a copy whose default leaves nothing open, for a decoder.

        Args:
            linear: operators of its linear layers. These have scales per token, unless the default says how activations
                are quantized.
        """
        entries = [] if self.default.activations else [(f"op:{operator}", DECODER_LINEAR) for operator in linear]
        return replace(self, default=self.default.with_defaults(DECODER), entries=(*entries, *self.entries))

    @check_arguments_except("classes")
    def setting(self, origin: Origin, classes: Mapping[str, str]) -> Setting:
        """Return the setting of one operator.

        Args:
            origin: path and operator.
            classes: module path -> class name.
        """
        result = self.default.with_defaults(DEFAULT)
        for _, setting in self.entries_for(origin, classes):
            result = setting.with_defaults(result)
        return result

    @check_arguments_except("classes")
    def entries_for(self, origin: Origin, classes: Mapping[str, str]) -> list[tuple[str, Setting]]:
        """Return the entries that apply to one operator, the weakest first.

        Args:
            origin: path and operator.
            classes: module path -> class name.
        """
        found = []
        for level in PREFIXES:
            hits = [
                (depth, index, selector, setting)
                for index, (selector, setting) in enumerate(self.entries)
                if prefix_of(selector) == level and (depth := matches(selector, origin, classes)) is not None
            ]
            found += [(selector, setting) for _, _, selector, setting in sorted(hits, key=lambda hit: hit[:2])]
        return found

    @check_arguments_except("classes")
    def check(self, origins: Iterable[Origin], classes: Mapping[str, str]) -> None:
        """Check that every selector matches one of these operators.

        Raises:
            SelectorError: a selector matches none; the message lists the nearest names.
        """
        origins = list(origins)
        for selector, _ in self.entries:
            if not any(matches(selector, origin, classes) is not None for origin in origins):
                raise SelectorError(
                    f"selector {selector!r}",
                    None,
                    "matches no operator of the model",
                    remedy=nearest(selector, origins, classes),
                )

    @check_arguments_except("classes")
    def for_part(self, origins: Iterable[Origin], classes: Mapping[str, str]) -> Recipe:
        """Return a copy without the selectors that match none of these operators, for a part of a model."""
        origins = list(origins)
        entries = [
            (selector, setting)
            for selector, setting in self.entries
            if any(matches(selector, origin, classes) is not None for origin in origins)
        ]
        return replace(self, entries=tuple(entries))

    def __repr__(self) -> str:
        parts = [f"{selector!r}: {setting}" for selector, setting in self.entries[:SHOWN_ENTRIES]]
        parts += [f"{len(self.entries) - SHOWN_ENTRIES} more"] * (len(self.entries) > SHOWN_ENTRIES)
        parts += [f"default: {self.default}"] * (self.default != UNSET)
        if self.parameters is not None:
            parts.append(f"parameters of {len(self.parameters.entries)} sites")
        return f"Recipe({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return the settings for notebooks, and the parameters at a click."""
        settings = element("p", repr(self)) + element("pre", self.with_parameters(None).to_toml())
        return settings + (folded_text("With parameters", self.to_toml()) if self.parameters is not None else "")

    def to_toml(self) -> str:
        """Return TOML text that `from_toml` reads back to an equal recipe."""
        merged: dict[str, Setting] = {}
        for selector, setting in self.entries:  # TOML allows a table once: the later entry wins
            merged[selector] = setting.with_defaults(merged.pop(selector, Setting()))
        tables = [
            toml_table("default", _keys(self.default)),
            *(toml_table(toml_text(s), _keys(v)) for s, v in merged.items()),
        ]
        for name, entry in sorted(self.parameters.entries.items() if self.parameters else ()):
            tables.append(toml_table(f"{PARAMETERS}.{toml_text(name)}", entry.to_dict()))
        for section, entries in (self.parameters.corrected.to_dicts() if self.parameters else {}).items():
            tables += _tables(f"{CORRECTED}.{section}", entries)
        return "\n".join(tables)

    @staticmethod
    @check_arguments
    def from_toml(text: str) -> Recipe:
        """Parse ``[default]``, one table per selector, and ``[parameters."site"]`` tables.

        Raises:
            SelectorError: the text is not valid TOML or has an unknown key.
        """
        try:
            tables = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise SelectorError("recipe", None, f"not valid TOML: {error}") from error
        default = _setting("default", tables.pop("default", {}))
        given = tables.pop(PARAMETERS, None)
        corrected = tables.pop(CORRECTED, {})
        parameters = None if given is None else Parameters.from_dicts(given, corrected)
        return Recipe(tuple((name, _setting(name, table)) for name, table in tables.items()), default, parameters)

    @staticmethod
    @check_arguments
    def load(path: str | Path) -> Recipe:
        """Read a TOML file, as `save` writes it.

        Raises:
            SelectorError: the file cannot be read, is not valid TOML or has an unknown key.
        """
        try:
            text = file_text(path)
        except (OSError, ValueError) as error:
            reason = unreadable_reason(error)
            names = f"names of built-in recipes are {', '.join(NAMED)}"
            problem = f"the file {str(path)!r} cannot be read: {reason}; {names}"
            raise SelectorError("recipe", None, problem, remedy=_file_remedy(Path(path))) from error
        return Recipe.from_toml(text)

    @check_arguments
    def save(self, path: str | Path) -> None:
        """Write the text of `to_toml` to a file."""
        write_text(path, self.to_toml())


OPEN_RECIPE = Recipe()
"""Recipe that leaves every setting open; `prepare` fills them by the kind of model."""


def _nearest_name(name: str) -> str | None:
    """Return the names of recipes that are similar, as a remedy."""
    close = difflib.get_close_matches(name, NAMED)
    return f"nearest: {', '.join(close)}" if close else None


def _file_remedy(path: Path) -> str:
    """Return what to do about a recipe file that cannot be read: take a file or a recipe of a similar name."""
    parent = path.parent
    files = [str(file) for file in sorted(parent.glob("*.toml"))] if parent.is_dir() else []
    close = difflib.get_close_matches(str(path), files) + difflib.get_close_matches(path.stem, NAMED)
    return f"nearest: {', '.join(close)}" if close else "check the path, or pass the name of a recipe"


def _setting(selector: str, value: Setting | Mapping[str, Any] | None) -> Setting:
    """Return a setting that a user gave as ``None`` (leave in float), a `Setting` or its fields.

    Raises:
        SelectorError: a field is unknown.
    """
    if value is None:
        return Setting(quantize=False)
    if isinstance(value, Setting):
        return value
    if not isinstance(value, Mapping):
        problem = f"its settings are {value_text(value)}; they must be a dictionary or a TOML table"
        raise SelectorError(f"recipe [{selector}]", None, problem, remedy="write settings such as {'bits': 7}")
    known = [field.name for field in dataclasses.fields(Setting)]
    for key in value:
        if key not in known:
            raise SelectorError(
                f"recipe [{selector}]",
                None,
                f"unknown key {key!r}; known are {', '.join(known)}",
                remedy=did_you_mean(key, known),
            )
    return Setting(**value)


def _unskipped(setting: Setting) -> Setting:
    return replace(setting, quantize=setting.quantize or None)


def _keys(setting: Setting) -> dict[str, Any]:
    return {key: value for key, value in vars(setting).items() if value is not None}


def _tables(name: str, entries: Mapping[str, Any]) -> list[str]:
    """Return one TOML table of the plain values, and one for each nested mapping."""
    plain = {toml_text(key): value for key, value in entries.items() if not isinstance(value, Mapping)}
    inner = [
        toml_table(f"{name}.{toml_text(key)}", value) for key, value in entries.items() if isinstance(value, Mapping)
    ]
    return ([toml_table(name, plain)] if plain else []) + inner


def toml_table(name: str, values: Mapping[str, Any]) -> str:
    """Return a TOML table with its header."""
    return "\n".join([f"[{name}]", *(f"{key} = {toml_text(value)}" for key, value in values.items())]) + "\n"


def toml_text(value: Any) -> str:
    """Return a value as TOML.

    TOML writes booleans, numbers, strings and lists like JSON, except that it has no surrogate escapes and must escape
    the delete character.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_tuple(selectors: Selectors | None) -> tuple[str, ...]:
    """Return one selector, several or none as a tuple.

    Raises:
        SelectorError: one of them is not a string.
    """
    found = (selectors,) if isinstance(selectors, str) else tuple(() if selectors is None else selectors)
    for selector in found:
        if not isinstance(selector, str):
            problem = f"{value_text(selector)} is not a selector, which is a string"
            raise SelectorError("selectors", None, problem, remedy="pass strings such as 'layer1.*' or 'type:Linear'")
    return found
