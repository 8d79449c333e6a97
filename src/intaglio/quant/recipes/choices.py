"""Options of recipes, sites and models as string enums; users and files write the plain strings."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Roles of a quantized value for the operators that read it."""

    ACTIVATION = "activation"
    SHORTCUT = "shortcut"
    """The value in 16 bits, for residual additions."""
    TOKEN = "token"
    """The value with a scale per token (row of the last axis), computed at run time."""
    TENSOR = "tensor"
    """The value with a scale per batch entry, computed at run time."""
    WEIGHT = "weight"
    BIAS = "bias"


class ActivationMode(StrEnum):
    """Sources of the scales of an operator's activations."""

    STATIC = "static"
    """Calibration."""
    FLOAT = "float"
    """No scales: weight-only quantization."""
    TOKEN = "token"
    TENSOR = "tensor"


class WeightScales(StrEnum):
    """Granularities of weight scales. With ``group:32`` each group of 32 has a multiple of its channel's scale."""

    CHANNEL = "channel"
    TENSOR = "tensor"


class FunctionForm(StrEnum):
    """Implementations of an activation function fused into a convolution or linear layer."""

    TABLE = "table"
    PRECISE = "precise"


class Rounding(StrEnum):
    """Methods by which `correct` rounds weights."""

    GPTQ = "gptq"
    QRONOS = "qronos"
    """GPTQ, for the results that the layer has in the float model."""
    ADAROUND = "adaround"
    NEAREST = "nearest"


class BiasCorrection(StrEnum):
    """Errors that `correct` compensates in biases."""

    NONE = "none"
    WEIGHTS = "weights"
    """The error of rounded weights."""
    OUTPUTS = "outputs"
    """The error of the layer's output from all quantization before it."""


class Effort(StrEnum):
    """Bounds of the predicted time in which one weight is fitted to data."""

    FAST = "fast"
    """A tenth of a second: small layers only."""
    DEFAULT = "default"
    """A minute, which layers of common networks do not need."""
    BEST = "best"
    """Any time."""


class ResidualType(StrEnum):
    """Datatypes of values between convolutions, linear layers and products of activations."""

    INT8 = "int8"
    FLOAT = "float"


class FloatResults(StrEnum):
    """Forms of values that are only read as floats, and are computed behind a convolution, linear layer or product."""

    FLOAT = "float"
    """Not rounded: computed in float32 from the accumulator."""
    INT8 = "int8"
    """Rounded to 256 quantized values, like the values that other kernels read."""


class EmbeddingType(StrEnum):
    """Datatypes of embedding tables."""

    AUTO = "auto"
    FLOAT = "float"
    INT8 = "int8"


class CacheType(StrEnum):
    """Datatypes of values that a call returns and a later one receives, such as keys and values."""

    AUTO = "auto"
    FLOAT = "float"
    INT8 = "int8"


class OutputType(StrEnum):
    """Datatypes of model outputs: floats, or integers with scale and zero point."""

    FLOAT = "float"
    INT8 = "int8"
