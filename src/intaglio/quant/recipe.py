"""`Recipe`: what a user wants of which part of a model. Selectors -> settings, in Python or TOML."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intaglio.errors import SelectorError
from intaglio.ir import Origin
from intaglio.quant.image import Image

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEVELS = ("op:", "type:", "")
"""Selector prefixes, weakest first: operator type < module type < module name (glob or ``re:``)."""


@dataclass(frozen=True)
class Setting:
    """``None`` leaves a question to the next weaker setting.

    quantize: int8 at all. method: range method of activations ("mse" or "minmax"). weights: "channel" or "tensor"
    scales. bits: 8, or 7 for activations in 0..127. functions: "table" or "precise", how a function such as silu right
    behind a convolution or linear layer is computed (ops/activate.py). shortcut: bits of what a sum behind a
    convolution or linear layer adds to it, 8 or 16. For `correct`: rounding: of weights, "gptq", "adaround" or
    "nearest"; bias: "none", "weights" (makes up for rounded weights) or "outputs" (for all that quantization moved);
    equalize: share of each channel's deficit that is made up for before calibration, 0 to 1.
    """

    quantize: bool | None = None
    method: str | None = None
    weights: str | None = None
    bits: int | None = None
    functions: str | None = None
    rounding: str | None = None
    bias: str | None = None
    equalize: float | None = None
    shortcut: int | None = None

    def __post_init__(self) -> None:
        allowed = {
            "quantize": (None, True, False),
            "method": (None, "mse", "minmax"),
            "weights": (None, "channel", "tensor"),
            "bits": (None, 7, 8),
            "functions": (None, "table", "precise"),
            "rounding": (None, "gptq", "adaround", "nearest"),
            "bias": (None, "none", "weights", "outputs"),
            "shortcut": (None, 8, 16),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise SelectorError("recipe", None, f"{name} = {getattr(self, name)!r}; allowed are {values[1:]}")
        if self.equalize is not None and not 0 <= self.equalize <= 1:
            raise SelectorError("recipe", None, f"equalize = {self.equalize}; allowed is 0 to 1")

    def over(self, weaker: Setting) -> Setting:
        """This setting, its gaps filled from a weaker one."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(weaker)
        return Setting(**{key: theirs[key] if mine[key] is None else mine[key] for key in mine})


DEFAULT = Setting(
    quantize=True, method="mse", weights="channel", bits=8, functions="table", rounding="gptq", bias="none",
    equalize=0.75, shortcut=8,
)  # fmt: skip
NAMED = {"default": DEFAULT, "accurate": dataclasses.replace(DEFAULT, shortcut=16)}


@dataclass(frozen=True)
class Recipe:
    """Settings by selector over a default.

    A selector is a module path glob (``layer1.*``; it covers what is inside too), ``re:pattern`` over module paths,
    ``type:Linear`` (class of a module) or ``op:aten.add``. Module names win over module types, these over operators,
    these over the default; among names the nearest enclosing module wins, then the later entry.
    """

    entries: tuple[tuple[str, Setting], ...] = ()
    default: Setting = DEFAULT

    @staticmethod
    def named(name: str) -> Recipe:
        """``"default"``, or ``"accurate"``: what sums add to a convolution keeps 16 bits."""
        if name not in NAMED:
            raise SelectorError("recipe", None, f"there is none called {name!r}; known are {', '.join(NAMED)}")
        return Recipe(default=NAMED[name])

    @staticmethod
    def of(entries: Mapping[str, Setting | Mapping[str, Any] | None], default: Setting = DEFAULT) -> Recipe:
        """From a mapping; ``None`` means "leave in float", a dictionary is a `Setting`'s fields."""
        return Recipe(tuple((selector, _setting(selector, value)) for selector, value in entries.items()), default)

    def with_selection(self, skip: Iterable[str] = (), only: Iterable[str] = ()) -> Recipe:
        """``only``: nothing else is quantized; ``skip``: these are not. Both are selectors."""
        skip, only = _tuple(skip), _tuple(only)
        default = dataclasses.replace(self.default, quantize=False) if only else self.default
        chosen = [(selector, Setting(quantize=True)) for selector in only]
        left = [(selector, Setting(quantize=False)) for selector in skip]
        return Recipe((*self.entries, *chosen, *left), default)

    def setting(self, origin: Origin, classes: Mapping[str, str]) -> Setting:
        """What holds for one operator."""
        result = self.default.over(DEFAULT)
        for level in LEVELS:
            hits = [
                (depth, index, setting)
                for index, (selector, setting) in enumerate(self.entries)
                if _level(selector) == level and (depth := matches(selector, origin, classes)) is not None
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
                    f"selector {selector!r}", None, "matches no operator of the model",
                    remedy=_nearest(selector, origins, classes),
                )  # fmt: skip

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back to an equal recipe."""
        merged: dict[str, Setting] = {}
        for selector, setting in self.entries:  # a table may stand once: the later entry wins, at the later place
            merged[selector] = setting.over(merged.pop(selector, Setting()))
        return "\n".join([_table("default", self.default), *(_table(json.dumps(s), v) for s, v in merged.items())])

    @staticmethod
    def from_toml(text: str) -> Recipe:
        """``[default]`` and one table per selector; unknown keys are errors."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SelectorError("recipe", None, f"not valid TOML: {error}") from error
        default = _setting("default", tables.pop("default", {})).over(DEFAULT)
        return Recipe(tuple((name, _setting(name, table)) for name, table in tables.items()), default)

    @staticmethod
    def load(path: str | Path) -> Recipe:
        return Recipe.from_toml(Path(path).read_text(encoding="utf-8"))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_toml(), encoding="utf-8")


@dataclass(frozen=True)
class Quantizer:
    """Decides what is quantized and how: a recipe over the fusion rows and operator records.

    ``input``: what the bytes of the only input stand for, or of several by name.
    """

    recipe: Recipe = Recipe()
    input: Image | Mapping[str, Image] | None = None


def matches(selector: str, origin: Origin, classes: Mapping[str, str]) -> int | None:
    """Depth of the enclosing module a selector hits (0 for ``op:``), or ``None``."""
    if selector.startswith("op:"):
        name = selector[3:]
        forms = (origin.operator, origin.operator.rpartition(".")[0])
        return 0 if any(fnmatch.fnmatchcase(form, name) for form in forms) else None
    parts = [part.partition("@")[0] for part in origin.path.split(".")] if origin.path else []
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    for path in paths:
        if _covers(selector, path, classes):
            return path.count(".") + 1 if path else 0
    return None


def _covers(selector: str, path: str, classes: Mapping[str, str]) -> bool:
    if selector.startswith("type:"):
        return fnmatch.fnmatchcase(classes.get(path, ""), selector[5:])
    if selector.startswith("re:"):
        return re.fullmatch(_pattern(selector), path) is not None
    return fnmatch.fnmatchcase(path, selector)


def _pattern(selector: str) -> re.Pattern[str]:
    try:
        return re.compile(selector[3:])
    except re.error as error:
        raise SelectorError(f"selector {selector!r}", None, f"not a regular expression: {error}") from error


def _level(selector: str) -> str:
    return next(level for level in LEVELS if selector.startswith(level))


def _nearest(selector: str, origins: list[Origin], classes: Mapping[str, str]) -> str:
    prefix = _level(selector)
    if prefix == "op:":
        names = {f"op:{origin.operator.rpartition('.')[0]}" for origin in origins}
    elif prefix == "type:":
        names = {f"type:{name}" for name in classes.values()}
    else:
        names = {name for name in classes if name}
        if any(sign in selector for sign in "*?["):
            names |= {NUMBER.sub("*", name) for name in names}
    close = difflib.get_close_matches(selector, sorted(names), n=3, cutoff=0.3) or sorted(names)[:3]
    anywhere = f"*.{selector}"
    if prefix == "" and any(matches(anywhere, origin, classes) is not None for origin in origins):
        close = [anywhere, *close][:3]
    return "nearest: " + ", ".join(close)


NUMBER = re.compile(r"\b\d+\b")
"""The index of a layer in a module path."""


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
                f"recipe [{selector}]", None, f"unknown key {key!r}; known are {', '.join(known)}",
                remedy=f"did you mean {close[0]!r}?" if close else None,
            )  # fmt: skip
    return Setting(**value)


def _table(name: str, setting: Setting) -> str:
    lines = [f"[{name}]"]
    for key, value in dataclasses.asdict(setting).items():
        if value is not None:
            lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else _toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _tuple(selectors: str | Iterable[str]) -> tuple[str, ...]:
    return (selectors,) if isinstance(selectors, str) else tuple(selectors)
