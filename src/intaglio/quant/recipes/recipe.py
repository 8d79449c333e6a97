"""`Recipe`: what a user wants of which part of a model. Selectors -> settings, in Python or TOML."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from intaglio.errors import SelectorError
from intaglio.ir import Origin
from intaglio.output_paths import write_text
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.selectors import PREFIXES, matches, nearest, prefix_of
from intaglio.quant.recipes.settings import DEFAULT, NAMED, TRANSFORMER, UNSET, Setting

PARAMETERS = "parameters"
CORRECTED = "corrected"
"""Name of the tables that are no settings."""


@dataclass(frozen=True)
class Recipe:
    """Settings by selector over a default.

    A selector is a module path glob (``layer1.*``; it covers what is inside too), ``re:pattern`` over module paths,
    ``type:Linear`` (class of a module) or ``op:aten.add``. Module names win over module types, these over operators,
    these over the default; among names the nearest enclosing module wins, then the later entry. ``parameters``: what
    the sites have that come of it, for a file that needs no data to quantize by. What the default leaves open `prepare`
    decides by what is in the model.
    """

    entries: tuple[tuple[str, Setting], ...] = ()
    default: Setting = UNSET
    parameters: Parameters | None = None

    @staticmethod
    def named(name: str) -> Recipe:
        """``"default"``; ``"accurate"``: what sums add to a convolution keeps 16 bits; ``"int8_dynamic"``: linear and
        recurrent layers only, whose activations are quantized while the model runs, so that nothing is calibrated;
        ``"convolutional"`` or ``"transformer"``: what the default is for a model without or with attention, whatever is
        in the model."""
        if name not in NAMED:
            raise SelectorError("recipe", None, f"there is none called {name!r}; known are {', '.join(NAMED)}")
        return Recipe(default=NAMED[name])

    @staticmethod
    def of(entries: Mapping[str, Setting | Mapping[str, Any] | None], default: Setting = UNSET) -> Recipe:
        """From a mapping; ``None`` means "leave in float", a dictionary is a `Setting`'s fields."""
        return Recipe(tuple((selector, _setting(selector, value)) for selector, value in entries.items()), default)

    @staticmethod
    def given(recipe: Recipe | Mapping[str, Any] | str | Path | None) -> Recipe:
        """What a user may say: nothing, a name, a file, a mapping, or a recipe."""
        if recipe is None:
            return Recipe()
        if isinstance(recipe, str) and recipe in NAMED:
            return Recipe.named(recipe)
        if isinstance(recipe, (str, Path)):
            return Recipe.load(recipe)
        return recipe if isinstance(recipe, Recipe) else Recipe.of(recipe)

    def with_selection(self, skip: Iterable[str] = (), only: Iterable[str] = ()) -> Recipe:
        """``only``: nothing else is quantized; ``skip``: these are not. Both are selectors."""
        skip, only = as_tuple(skip), as_tuple(only)
        default = replace(self.default, quantize=False) if only else self.default
        chosen = [(selector, Setting(quantize=True)) for selector in only]
        left = [(selector, Setting(quantize=False)) for selector in skip]
        return replace(self, entries=(*self.entries, *chosen, *left), default=default)

    def with_parameters(self, parameters: Parameters | None) -> Recipe:
        """The same settings, and these parameters of their sites."""
        return replace(self, parameters=parameters)

    @property
    def leaves_float(self) -> bool:
        """Whether anything is said to stay in float."""
        return any(setting.quantize is False for setting in (self.default, *(s for _, s in self.entries)))

    def of_everything(self) -> Recipe:
        """The same settings, and nothing said to stay in float."""
        entries = tuple((selector, _unskipped(setting)) for selector, setting in self.entries)
        return replace(self, entries=entries, default=_unskipped(self.default))

    def decided(self, attention: bool) -> Recipe:
        """With a default that leaves nothing open, for a model with or without attention."""
        return replace(self, default=self.default.over(TRANSFORMER if attention else DEFAULT))

    def setting(self, origin: Origin, classes: Mapping[str, str]) -> Setting:
        """What holds for one operator."""
        result = self.default.over(DEFAULT)
        for level in PREFIXES:
            hits = [
                (depth, index, setting)
                for index, (selector, setting) in enumerate(self.entries)
                if prefix_of(selector) == level and (depth := matches(selector, origin, classes)) is not None
            ]
            for _, _, setting in sorted(hits, key=lambda hit: hit[:2]):
                result = setting.over(result)
        return result

    def check(self, origins: Iterable[Origin], classes: Mapping[str, str]) -> None:
        """`SelectorError` for a selector that matches none of these operators, with the nearest names."""
        origins = list(origins)
        for selector, _ in self.entries:
            if not any(matches(selector, origin, classes) is not None for origin in origins):
                raise SelectorError(
                    f"selector {selector!r}",
                    None,
                    "matches no operator of the model",
                    remedy=nearest(selector, origins, classes),
                )

    def within(self, origins: Iterable[Origin], classes: Mapping[str, str]) -> Recipe:
        """Without the selectors that match none of these operators: for a part of a model."""
        origins = list(origins)
        entries = [
            (selector, setting)
            for selector, setting in self.entries
            if any(matches(selector, origin, classes) is not None for origin in origins)
        ]
        return replace(self, entries=tuple(entries))

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back to an equal recipe."""
        merged: dict[str, Setting] = {}
        for selector, setting in self.entries:  # a table may stand once: the later entry wins, at the later place
            merged[selector] = setting.over(merged.pop(selector, Setting()))
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
    def from_toml(text: str) -> Recipe:
        """``[default]``, one table per selector, and ``[parameters."site"]`` tables; unknown keys are errors."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SelectorError("recipe", None, f"not valid TOML: {error}") from error
        default = _setting("default", tables.pop("default", {}))
        given = tables.pop(PARAMETERS, None)
        corrected = tables.pop(CORRECTED, {})
        parameters = None if given is None else Parameters.from_dicts(given, corrected)
        return Recipe(tuple((name, _setting(name, table)) for name, table in tables.items()), default, parameters)

    @staticmethod
    def load(path: str | Path) -> Recipe:
        return Recipe.from_toml(Path(path).read_text(encoding="utf-8"))

    def save(self, path: str | Path) -> None:
        write_text(path, self.to_toml())


OPEN_RECIPE = Recipe()
"""Says nothing: every setting is decided by what is in the model."""


def _setting(selector: str, value: Setting | Mapping[str, Any] | None) -> Setting:
    if value is None:
        return Setting(quantize=False)
    if isinstance(value, Setting):
        return value
    known = [field.name for field in dataclasses.fields(Setting)]
    for key in value:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise SelectorError(
                f"recipe [{selector}]",
                None,
                f"unknown key {key!r}; known are {', '.join(known)}",
                remedy=f"did you mean {close[0]!r}?" if close else None,
            )
    return Setting(**value)


def _unskipped(setting: Setting) -> Setting:
    return replace(setting, quantize=setting.quantize or None)


def _keys(setting: Setting) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(setting).items() if value is not None}


def _tables(name: str, entries: Mapping[str, Any]) -> list[str]:
    """One table of what are no tables themselves, and one for each that is."""
    plain = {toml_text(key): value for key, value in entries.items() if not isinstance(value, Mapping)}
    inner = [
        toml_table(f"{name}.{toml_text(key)}", value) for key, value in entries.items() if isinstance(value, Mapping)
    ]
    return ([toml_table(name, plain)] if plain else []) + inner


def toml_table(name: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {toml_text(value)}" for key, value in values.items())]) + "\n"


def toml_text(value: Any) -> str:
    """TOML writes booleans, numbers, texts and lists of them as JSON does, but for characters that JSON may escape in
    two halves, and one that it may leave as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_tuple(selectors: str | Iterable[str]) -> tuple[str, ...]:
    return (selectors,) if isinstance(selectors, str) else tuple(selectors)
