"""`Setting`: the choices for one operator, and the defaults of models with and without attention."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass

from intaglio.errors import SelectorError
from intaglio.quant.calibrate.range_methods import method_of
from intaglio.quant.recipes.choices import (
    ActivationMode,
    BiasCorrection,
    EmbeddingType,
    FunctionForm,
    ResidualType,
    Role,
    Rounding,
    WeightScales,
)
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype


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
        allowed: dict[str, tuple[object, ...]] = {
            "quantize": (None, True, False),
            "weights": (None, *WeightScales, "group:N"),
            "bits": (None, 7, 8),
            "functions": (None, *FunctionForm),
            "rounding": (None, *Rounding),
            "bias": (None, *BiasCorrection),
            "weights_dtype": (None, *_names(Role.WEIGHT)),
            "activations_dtype": (None, *_names(Role.ACTIVATION)),
            "shortcut": (None, 8, 16),
            "activations": (None, *ActivationMode),
            "residual": (None, *ResidualType),
            "embeddings": (None, *EmbeddingType),
        }
        for name, values in allowed.items():
            value = "group:N" if name == "weights" and GROUPS.fullmatch(str(self.weights)) else getattr(self, name)
            if value not in values:
                raise SelectorError(
                    "recipe", None, f"{name} = {getattr(self, name)!r}; allowed are {_plain(values[1:])}"
                )
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


def _plain(values: Iterable[object]) -> tuple[object, ...]:
    """Return choices as users write them."""
    return tuple(str(value) if isinstance(value, str) else value for value in values)


def _names(role: Role) -> tuple[str, ...]:
    return tuple(name for name, datatype in DATATYPES.items() if role in datatype.roles)


UNSET = Setting()
"""Leaves every question open."""
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
    "default": UNSET,
    "convolutional": DEFAULT,
    "transformer": TRANSFORMER,
    "accurate": Setting(shortcut=16),
    "int8_dynamic": Setting(activations="token"),
}
"""Name -> default setting. What these leave open is decided by what is in the model."""
