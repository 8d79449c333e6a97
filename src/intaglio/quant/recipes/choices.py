"""What recipes, sites and options choose between. Each is a string too: users and files write the plain word."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a value is to the operators that read its levels."""

    ACTIVATION = "activation"
    SHORTCUT = "shortcut"
    """The same value in 16 bits, for sums."""
    TOKEN = "token"
    """The same value with a scale for every row of the last axis, made while the model runs."""
    TENSOR = "tensor"
    """The same value with a scale for every entry of the batch, made while the model runs."""
    WEIGHT = "weight"
    BIAS = "bias"


class ActivationMode(StrEnum):
    """Where the scales of an operator's activations come from."""

    STATIC = "static"
    """From calibration."""
    FLOAT = "float"
    """Nowhere: only weights have fewer bits."""
    TOKEN = "token"
    TENSOR = "tensor"


class WeightScales(StrEnum):
    """How many scales a weight has. A group of neighbours, ``group:32``, has a multiple of its channel's."""

    CHANNEL = "channel"
    TENSOR = "tensor"


class FunctionForm(StrEnum):
    """How a function right behind a convolution or linear layer is computed."""

    TABLE = "table"
    PRECISE = "precise"


class Rounding(StrEnum):
    """How `correct` rounds weights."""

    GPTQ = "gptq"
    ADAROUND = "adaround"
    NEAREST = "nearest"


class BiasCorrection(StrEnum):
    """What `correct` changes biases for."""

    NONE = "none"
    WEIGHTS = "weights"
    """For rounded weights."""
    OUTPUTS = "outputs"
    """For all that quantization moved."""


class ResidualType(StrEnum):
    """Element type between convolutions, linear layers and products of activations."""

    INT8 = "int8"
    FLOAT = "float"


class EmbeddingType(StrEnum):
    """Element type of tables of embeddings."""

    FLOAT = "float"
    INT8 = "int8"


class OutputType(StrEnum):
    """What a model gives: floats, or levels with their parameters."""

    FLOAT = "float"
    INT8 = "int8"
