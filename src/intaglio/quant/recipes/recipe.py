"""`Recipe`: what a user wants of which part of a model. Selectors -> settings, in Python or TOML."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intaglio.errors import InputError, SelectorError
from intaglio.ir import Origin
from intaglio.ops import OpDef
from intaglio.ops.dynamic_quant import ROW_MODES
from intaglio.output_paths import write_text
from intaglio.quant.calibrate.range_methods import method_of
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype
from intaglio.quant.recipes.image import Image

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from intaglio.quant.annotate.node_annotations import Annotator
    from intaglio.quant.recipes.user_patterns import QuantizerPattern

PARAMETERS = "parameters"
CORRECTED = "corrected"
"""Name of the tables that are no settings."""
LEVELS = ("op:", "type:", "")
"""Selector prefixes, weakest first: operator type < module type < module name (glob or ``re:``)."""


@dataclass(frozen=True)
class Setting:
    """``None`` leaves a question to the next weaker setting.

    quantize: int8 at all. method: range method of activations, "mse", "minmax", "percentile", "kl", "average" or "ema",
    the third and the last also with a parameter, as in "percentile:99.99" (range_methods.py). weights: "channel" or
    "tensor" scales, or "group:32", where 32 neighbours of a channel have steps of 1..15 times its scale. bits: 8, or 7
    for activations in 0..127. functions: "table" or "precise", how a function such as silu right behind a convolution
    or linear layer is computed. shortcut: bits of what a sum behind one of these adds to it, 8 or 16.
    residual: "int8", or "float": what lies between convolutions, linear layers and products of activations stays in
    float32, sums and norms above all. weights_dtype, activations_dtype: names of `DATATYPES`; without, s8 and what
    ``bits`` says. activations: "static", with parameters from calibration, "float", so that of
    convolutions and linear layers only the weights have fewer bits, as "f16" has, or, of linear and recurrent layers,
    quantized while the model runs, with a scale for every "token" (row of the last axis) or "tensor" (entry of the
    batch). embeddings: tables of embeddings in "float", or in "int8", with a scale and a zero point for every row. For
    `equalize` and `correct`: equalize: share of each channel's deficit that is made up for before calibration, 0 to 1;
    rounding: of weights, "gptq", "adaround" or "nearest"; bias: "none", "weights" (makes up for rounded weights) or
    "outputs" (for all that quantization moved).
    """

    quantize: bool | None = None
    method: str | None = None
    weights: str | None = None
    bits: int | None = None
    functions: str | None = None
    rounding: str | None = None
    bias: str | None = None
    equalize: float | None = None
    weights_dtype: str | None = None
    activations_dtype: str | None = None
    shortcut: int | None = None
    residual: str | None = None
    activations: str | None = None
    embeddings: str | None = None

    def __post_init__(self) -> None:
        allowed = {
            "quantize": (None, True, False),
            "weights": (None, "channel", "tensor", "group:N"),
            "bits": (None, 7, 8),
            "functions": (None, "table", "precise"),
            "rounding": (None, "gptq", "adaround", "nearest"),
            "bias": (None, "none", "weights", "outputs"),
            "weights_dtype": (None, *_names("weight")),
            "activations_dtype": (None, *_names("activation")),
            "shortcut": (None, 8, 16),
            "activations": (None, "static", "float", *ROW_MODES),
            "residual": (None, "int8", "float"),
            "embeddings": (None, "float", "int8"),
        }
        for name, values in allowed.items():
            value = "group:N" if name == "weights" and GROUPS.fullmatch(str(self.weights)) else getattr(self, name)
            if value not in values:
                raise SelectorError("recipe", None, f"{name} = {getattr(self, name)!r}; allowed are {values[1:]}")
        try:
            method_of("mse" if self.method is None else self.method)
        except ValueError as error:
            raise SelectorError("recipe", None, f"method = {self.method!r}; {error}") from error
        if self.equalize is not None and not 0 <= self.equalize <= 1:
            raise SelectorError("recipe", None, f"equalize = {self.equalize}; allowed is 0 to 1")
        if self.bits == 7 and self.activations_dtype not in (None, "u8", "u7"):
            raise SelectorError(
                "recipe",
                None,
                f"bits = 7 and activations_dtype = {self.activations_dtype!r}",
                remedy="leave out one of them",
            )

    @property
    def activation(self) -> Datatype:
        """Of activations; ``bits = 7`` makes u8 u7."""
        name = self.activations_dtype or "u8"
        return DATATYPES["u7" if name == "u8" and self.bits == 7 else name]

    @property
    def weight(self) -> Datatype:
        return DATATYPES[self.weights_dtype or "s8"]

    @property
    def group(self) -> int:
        """Neighbours of a weight that share a multiple of their channel's scale; 0: there are no groups."""
        found = GROUPS.fullmatch(self.weights or "")
        return int(found[1]) if found else 0

    def over(self, weaker: Setting) -> Setting:
        """This setting, its gaps filled from a weaker one."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(weaker)
        both = {key: theirs[key] if mine[key] is None else mine[key] for key in mine}
        if self.bits is not None or self.activations_dtype is not None:  # one question in two keys
            both |= {"bits": self.bits, "activations_dtype": self.activations_dtype}
        return Setting(**both)


GROUPS = re.compile(r"group:([1-9][0-9]*)")
"""Form of ``weights`` that asks for groups."""


def _names(role: str) -> tuple[str, ...]:
    return tuple(name for name, datatype in DATATYPES.items() if role in datatype.roles)


DEFAULT = Setting(
    quantize=True,
    method="mse",
    weights="channel",
    bits=8,
    functions="table",
    rounding="gptq",
    bias="none",
    equalize=0.75,
    shortcut=8,
    residual="int8",
    activations="static",
    embeddings="float",
)
"""Of a model without attention."""
TRANSFORMER = dataclasses.replace(DEFAULT, method="minmax", functions="precise", rounding="nearest", residual="float")
"""Of a model with attention: what sticks out of a token's values is signal, so nothing is clipped and sums are not
rounded; smoothing does for accuracy what rounding of weights does elsewhere (docs/transformers.md)."""
NAMED = {
    "default": Setting(),
    "convolutional": DEFAULT,
    "transformer": TRANSFORMER,
    "accurate": Setting(shortcut=16),
    "int8_dynamic": Setting(activations="token"),
}
"""Name -> default setting. What these leave open is decided by what is in the model."""


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
    default: Setting = Setting()
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
    def of(entries: Mapping[str, Setting | Mapping[str, Any] | None], default: Setting = Setting()) -> Recipe:
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
        skip, only = _tuple(skip), _tuple(only)
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
                    f"selector {selector!r}",
                    None,
                    "matches no operator of the model",
                    remedy=_nearest(selector, origins, classes),
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
        tables = [_table("default", _keys(self.default)), *(_table(_toml(s), _keys(v)) for s, v in merged.items())]
        for name, entry in sorted(self.parameters.entries.items() if self.parameters else ()):
            tables.append(_table(f"{PARAMETERS}.{_toml(name)}", entry.to_dict()))
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

    recipe: Recipe = Recipe()
    input: Image | Mapping[str, Image] | None = None
    patterns: Iterable[QuantizerPattern | str] = ()
    operators: Iterable[OpDef] = ()
    skip_first: bool = False
    skip_last: bool = False
    annotator: Annotator | None = None
    outputs: str = "float"
    int8_buffers: bool | str | Iterable[str] = ()

    def __post_init__(self) -> None:
        if self.outputs not in ("float", "int8"):
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
        return ("*",) if self.int8_buffers is True else _tuple(self.int8_buffers or ())

    @property
    def integers(self) -> bool:
        """Whether results leave as levels."""
        return self.outputs == "int8"

    @property
    def has_text(self) -> bool:
        """Whether `to_toml` holds all of it: patterns, operators, skipped ends, annotators, outputs and buffers have no
        text."""
        ends = self.skip_first or self.skip_last or self.integers or self.buffers
        return not (self.patterns or self.operators or ends or self.annotator)

    def to_toml(self) -> str:
        """Return the recipe as TOML, without parameters, a table ``[input."name"]`` for each image ("": the only)."""
        images = {"": self.input} if isinstance(self.input, Image) else (self.input or {})
        tables = [_table(f"{INPUT}.{_toml(name)}", dataclasses.asdict(i)) for name, i in images.items()]
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
    plain = {_toml(key): value for key, value in entries.items() if not isinstance(value, Mapping)}
    inner = [_table(f"{name}.{_toml(key)}", value) for key, value in entries.items() if isinstance(value, Mapping)]
    return ([_table(name, plain)] if plain else []) + inner


def _table(name: str, values: Mapping[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]) + "\n"


def _toml(value: Any) -> str:
    """TOML writes booleans, numbers, texts and lists of them as JSON does, but for characters that JSON may escape in
    two halves, and one that it may leave as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tuple(selectors: str | Iterable[str]) -> tuple[str, ...]:
    return (selectors,) if isinstance(selectors, str) else tuple(selectors)
