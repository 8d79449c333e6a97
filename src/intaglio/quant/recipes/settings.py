"""Settings of one operator, and the defaults of models without attention, with it, and of decoders."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from intaglio.argument_checks import check_arguments, check_fields
from intaglio.errors import SelectorError, did_you_mean
from intaglio.quant.calibrate.range_methods import method_of
from intaglio.quant.recipes.choices import (
    ActivationMode,
    BiasCorrection,
    CacheType,
    Effort,
    EmbeddingType,
    FloatResults,
    FunctionForm,
    ResidualType,
    Role,
    Rounding,
    WeightScales,
)
from intaglio.quant.recipes.datatypes import Datatype, datatype_names, datatype_of


@check_fields
@dataclass(frozen=True)
class Setting:
    """Quantization settings of one operator. A field that is ``None`` is filled from the next weaker setting.

    Attributes:
        quantize: whether the operator is quantized at all.
        method: range method of activations: "mse", "minmax", "percentile", "kl", "average" or "ema"; "percentile" and
            "ema" take a parameter, as in "percentile:99.99".
        weights: scales of weights: "channel", "tensor", or "group:32", where 32 neighbours of a channel share a step of
            1 to 15 times the channel's scale.
        bits: 8, or 7 for activations in 0..127.
        functions: how an activation function such as silu is computed behind a convolution or linear layer: "table" or
            "precise".
        rounding: how `correct` rounds weights: "gptq", "qronos", "adaround" or "nearest".
        bias: what `correct` compensates in biases: "none", "weights" (rounded weights) or "outputs" (all quantization
            error).
        effort: how long fitting one weight to data may take, predicted from its shape: "fast", "default" or "best".
        equalize: strength of `equalize`, the exponent alpha of its per-channel factors, 0 to 1.
        rotate: whether `equalize` rotates the values that a linear layer computes and reads, if all layers of these
            values have it: residual streams that norms read, and the values of attention. "online" also rotates what
            its other layers read, at run time.
        weights_dtype: name in `DATATYPES`; default s8.
        activations_dtype: name in `DATATYPES`; default u8, or u7 with ``bits=7``.
        shortcut: bits of the other operand of a residual addition fused into the operator, 8 or 16.
        residual: "int8", or "float" to keep values between convolutions, linear layers and products of activations in
            float32, mainly sums and norms.
        results: "float" to compute activation functions, clamps, sums and data movement that only readers of floats
            follow, such as results of the model, in float32, or "int8" to round them to 256 quantized values.
        activations: "static" (calibrated), "float" (weight-only quantization of convolutions and linear layers), or,
            for linear and recurrent layers, quantized at run time per "token" (row of the last axis) or per "tensor"
            (batch entry).
        embeddings: embedding tables in "float", in "int8" with a scale and a zero point per row, or "auto" for those in
            int8 that cost little in the results, by the calibration data.
        cache: keys and values that attention keeps between calls: in "float", in "int8" with the calibrated scale of
            each layer, or "auto" for int8 where the values are computed once, as those of cross-attention are, and in
            float otherwise.
        two_bytes_below: signal-to-noise ratio of the results in decibels below which a layer reads an input of the
            model in two bytes, if the rounding of this operand alone to one byte leaves less, by the calibration data;
            0 never asks for two bytes.
        float_below: the same ratio, below which a layer behind such layers stays in float; 0 never leaves it in float.
        operand_bytes: bytes in which a layer with a constant weight reads its calibrated operand, 1 or 2.
        weight_bytes: bytes in which it reads its int8 weight, 1 or 2.
    """

    quantize: bool | None = None
    method: str | None = None
    weights: str | None = None
    bits: int | None = None
    functions: str | None = None
    rounding: str | None = None
    bias: str | None = None
    effort: str | None = None
    equalize: float | None = None
    rotate: bool | str | None = None
    weights_dtype: str | None = None
    activations_dtype: str | None = None
    shortcut: int | None = None
    residual: str | None = None
    results: str | None = None
    activations: str | None = None
    embeddings: str | None = None
    cache: str | None = None
    two_bytes_below: float | None = None
    float_below: float | None = None
    operand_bytes: int | None = None
    weight_bytes: int | None = None

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[object, ...]] = {
            "quantize": (None, True, False),
            "rotate": (None, True, False, "online"),
            "weights": (None, *WeightScales, "group:N"),
            "bits": (None, 7, 8),
            "functions": (None, *FunctionForm),
            "rounding": (None, *Rounding),
            "bias": (None, *BiasCorrection),
            "effort": (None, *Effort),
            "weights_dtype": (None, *datatype_names(Role.WEIGHT)),
            "activations_dtype": (None, *datatype_names(Role.ACTIVATION)),
            "shortcut": (None, 8, 16),
            "activations": (None, *ActivationMode),
            "residual": (None, *ResidualType),
            "results": (None, *FloatResults),
            "embeddings": (None, *EmbeddingType),
            "cache": (None, *CacheType),
            "operand_bytes": (None, 1, 2),
            "weight_bytes": (None, 1, 2),
        }
        for name, values in allowed.items():
            value = "group:N" if name == "weights" and GROUPS.fullmatch(str(self.weights)) else getattr(self, name)
            if value not in values:
                problem = f"{name} = {getattr(self, name)!r}; allowed are {_plain(values[1:])}"
                raise SelectorError("recipe", None, problem, remedy=did_you_mean(value, values[1:]))
        try:
            method_of("mse" if self.method is None else self.method)
        except ValueError as error:
            raise SelectorError("recipe", None, f"method = {self.method!r}; {error}") from error
        if self.equalize is not None and not 0 <= self.equalize <= 1:
            raise SelectorError("recipe", None, f"equalize = {self.equalize}; it must be between 0 and 1")
        for name in ("two_bytes_below", "float_below"):
            ratio = getattr(self, name)
            if ratio is not None and not 0 <= ratio < math.inf:
                raise SelectorError("recipe", None, f"{name} = {ratio}; it must be finite and at least 0")
        if self.bits == 7 and self.activations_dtype not in (None, "u8", "u7"):
            raise SelectorError(
                "recipe",
                None,
                f"bits = 7 cannot be combined with activations_dtype = {self.activations_dtype!r}",
                remedy="leave one of them out",
            )

    def __repr__(self) -> str:
        given = {key: str(value) if isinstance(value, str) else value for key, value in vars(self).items()}
        return f"Setting({', '.join(f'{key}={value!r}' for key, value in given.items() if value is not None)})"

    @property
    def activation(self) -> Datatype:
        """Return the datatype of activations; with ``bits=7`` u8 becomes u7."""
        name = self.activations_dtype or "u8"
        return datatype_of("u7" if name == "u8" and self.bits == 7 else name, Role.ACTIVATION)

    @property
    def weight(self) -> Datatype:
        """Return the datatype of weights."""
        return datatype_of(self.weights_dtype or "s8", Role.WEIGHT)

    @property
    def group(self) -> int:
        """Return the size of weight groups, or 0 without groups."""
        found = GROUPS.fullmatch(self.weights or "")
        return int(found[1]) if found else 0

    @property
    def asks_for_two_bytes(self) -> bool:
        """Return whether the layer should read two bytes of its operand or of its weight."""
        return 2 in (self.operand_bytes, self.weight_bytes)

    @check_arguments
    def with_defaults(self, other: Setting) -> Setting:
        """Return this setting with its open fields filled from a weaker one."""
        both = {key: vars(other)[key] if value is None else value for key, value in vars(self).items()}
        if self.bits is not None or self.activations_dtype is not None:  # the two keys answer one question
            both |= {"bits": self.bits, "activations_dtype": self.activations_dtype}
        return Setting(**both)


GROUPS = re.compile(r"group:([1-9][0-9]*)")
"""Form of a `weights` setting with groups."""


def _plain(values: Iterable[object]) -> tuple[object, ...]:
    """Return choices as users write them."""
    return tuple(str(value) if isinstance(value, str) else value for value in values)


UNSET = Setting()
"""Setting that leaves every field open."""
DEFAULT = Setting(
    quantize=True,
    method="mse",
    weights="channel",
    bits=8,
    functions="table",
    rounding="gptq",
    bias="none",
    effort="default",
    equalize=0.75,
    rotate=False,
    shortcut=8,
    residual="int8",
    results="float",
    activations="static",
    embeddings="auto",
    cache="auto",
    two_bytes_below=25.0,
    float_below=0.0,
    operand_bytes=1,
    weight_bytes=1,
)
"""Default of models without attention."""
TRANSFORMER = dataclasses.replace(DEFAULT, method="minmax", functions="precise", residual="float")
"""Default of models with attention. Outliers of a token carry signal, so ranges are not clipped and sums stay in float.
SmoothQuant is added to the corrections (docs/transformers.md)."""
DECODER = dataclasses.replace(TRANSFORMER, rotate=True)
"""Default of decoders."""
DECODER_LINEAR = Setting(activations="token")
"""Default of their linear layers. Pretrained decoders have channels and tokens far larger than all others, which take
the precision of every value that shares a calibrated scale with them (docs/generation.md)."""
NAMED = {
    "default": UNSET,
    "convolutional": DEFAULT,
    "transformer": TRANSFORMER,
    "accurate": Setting(shortcut=16, two_bytes_below=30.0, float_below=30.0),
    "int8_dynamic": Setting(activations="token"),
    "w8a8_dynamic": Setting(cache="int8", embeddings="int8", rotate=True),
    "w4a8": Setting(cache="int8", embeddings="int8", rotate=True),
    "w8a8_accurate": Setting(cache="int8", embeddings="int8", rotate="online"),
    "w4a8_accurate": Setting(cache="int8", embeddings="int8", rotate="online"),
}
"""Default settings by recipe name. `prepare` fills the fields they leave open by the kind of model."""
NAMED_LINEAR = {
    "w8a8_dynamic": Setting(activations="token", rotate=True),
    "w4a8": Setting(activations="token", weights_dtype="s4", weights="group:32", rotate=True),
    "w8a8_accurate": Setting(activations="token", rotate="online"),
    "w4a8_accurate": Setting(
        activations="token", weights_dtype="s4", weights="group:32", rotate="online", rounding="qronos"
    ),
}
"""Settings of linear layers by recipe name, of recipes in which they differ from the default settings."""
