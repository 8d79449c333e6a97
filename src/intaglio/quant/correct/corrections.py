"""Results of corrections and equalization, as values that can be stored in a file."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from intaglio.argument_checks import check_arguments
from intaglio.formatting.html_text import element, html_table, shortened
from intaglio.ir import QParams

if TYPE_CHECKING:
    from intaglio.quant.annotate.regions import (
        Annotations,  # It imports this module through recipes and parameters.
    )

PLURAL_ENDINGS = {"rounded weight": "s", "corrected bias": "es", "step": "s"}


@dataclass(frozen=True)
class PerChannelBytes:
    """Quantization of an input per channel: channel c becomes ``x * gain[c] + shift[c] + zero_points[c]`` as a byte."""

    gain: tuple[float, ...]
    shift: tuple[float, ...]
    zero_points: tuple[int, ...]


class TwoBytes(NamedTuple):
    """The operand of a layer that it reads in two bytes.

    Attributes:
        decibels: signal-to-noise ratio that the operand in one byte would leave in the results of the model.
        low: smallest value of the operand.
        high: largest value of the operand.
    """

    decibels: float
    low: float
    high: float


class LayerBytes(NamedTuple):
    """The bytes of a layer that its setting splits into several layers.

    Attributes:
        operand: number of bytes of its operand, 1 or 2.
        weight: number of bytes of its weight, 1 or 2.
        low: smallest value of the operand.
        high: largest value of the operand.
    """

    operand: int
    weight: int
    low: float
    high: float


@dataclass(frozen=True)
class Equalization:
    """Factors that equalize channels.

    Attributes:
        inputs: input name -> quantization of its channels.
        factors: site -> divisors of the channels of its value.
        concatenations: site of a concatenation in float, whose operands have ranges too different for one scale -> the
            extrema of the operands.
        splits: site of a concatenation whose readers are split for the same reason -> the extrema of the operands.
        coarse: site of a value that stays in float for readers of floats -> the signal-to-noise ratio in decibels that
            its rounding would leave to what is computed from it.
        tables: value of an embedding whose table is int8 by the data -> what that costs in the results, in decibels.
        layers: value of a first layer that stays in float -> the signal-to-noise ratio in decibels that its rounded
            operand would leave in the results.
        two_bytes: value of a layer that reads an input of the model in two bytes -> its operand.
        layer_bytes: value of a layer whose operand or weight has two bytes, as its setting asks -> its bytes.
        rotations: first value of a residual stream, or of the values of attention, that is rotated -> the size of the
            rotation, which determines it.
        hadamards: value that linear layers read -> size of the blocks that are rotated at run time.
    """

    inputs: Mapping[str, PerChannelBytes] = field(default_factory=dict)
    factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    concatenations: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    splits: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    coarse: Mapping[str, float] = field(default_factory=dict)
    tables: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)
    two_bytes: Mapping[str, TwoBytes] = field(default_factory=dict)
    rotations: Mapping[str, int] = field(default_factory=dict)
    layer_bytes: Mapping[str, LayerBytes] = field(default_factory=dict)
    hadamards: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(vars(self).values())


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A quantized weight.

    Attributes:
        qparams: its scales.
        values: its quantized values, in the shape of the weight.
    """

    qparams: QParams
    values: np.ndarray


@dataclass(frozen=True)
class CorrectionStep:
    """One correction, with the signal-to-noise ratio of its subject in decibels before and after it."""

    name: str
    subject: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"{self.name}: {self.subject}, {self.before:.1f} -> {self.after:.1f} dB"


@dataclass(frozen=True)
class Corrections:
    """Changed parameters, for `convert`.

    Attributes:
        annotations: annotations of the graph with corrected biases.
        weights: weight site -> quantized weight.
        biases: name of an anchor's node -> float32 bias.
        steps: the gain of each correction.
        source: the prepared model and the ranges that were corrected.
        activations: parameters of the activation sites, computed from ``source``.
        weight_scales: weight site and groups -> scales computed from its values, before they are fitted to a bias.
        imported_noise: weight site -> ratio of noise to signal in the results of its layer, for imported weights that
            are rounded again.
        left_out: a line for each weight that is rounded in a simpler way than its setting says, which takes too much
            memory or time.
    """

    annotations: Annotations
    weights: Mapping[str, RoundedWeight] = field(default_factory=dict)
    biases: Mapping[str, np.ndarray] = field(default_factory=dict)
    steps: tuple[CorrectionStep, ...] = ()
    source: tuple[Any, Any] | None = field(default=None, repr=False, compare=False)
    activations: Mapping[str, QParams] = field(default_factory=dict, repr=False)
    weight_scales: Mapping[tuple[str, int], np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    imported_noise: Mapping[str, float] = field(default_factory=dict, repr=False)
    left_out: tuple[str, ...] = ()

    @check_arguments
    def activations_for(self, prepared: Any, ranges: Any) -> dict[str, QParams] | None:
        """Return the parameters of activations if they were computed from these two objects, and ``None`` otherwise."""
        if self.source is None or self.source[0] is not prepared or self.source[1] is not ranges:
            return None
        return dict(self.activations)

    def text(self) -> str:
        """Return a line for each correction and for each weight that was left out."""
        return "".join(f"{line}\n" for line in (*self.steps, *self.left_out))

    def __str__(self) -> str:
        return self.text().rstrip("\n")

    def __repr__(self) -> str:
        counts = {"rounded weight": len(self.weights), "corrected bias": len(self.biases), "step": len(self.steps)}
        found = [f"{number} {name}{PLURAL_ENDINGS[name] * (number != 1)}" for name, number in counts.items()]
        return f"Corrections({', '.join(found)})"

    def _repr_html_(self) -> str:
        """Return the gain of each correction, and the weights that were left out, for notebooks."""
        rows = [(step.name, step.subject, f"{step.before:.1f}", f"{step.after:.1f}") for step in self.steps]
        shown, more = shortened(rows, "steps")
        table = html_table(("correction", "of", "dB before", "dB after"), shown, more, text=2)
        return element("p", repr(self)) + table + "".join(element("p", line) for line in self.left_out)


@dataclass(frozen=True, eq=False)
class Corrected:
    """All corrections without the graph, as `Parameters` store them.

    Attributes:
        equalization: factors that equalize channels.
        quantized_weights: weight site -> quantized values, int8.
        biases: name of an anchor's node -> float32 bias.
    """

    equalization: Equalization = field(default_factory=Equalization)
    quantized_weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    biases: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.equalization or self.quantized_weights or self.biases)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Corrected) and self.to_dicts() == other.to_dicts()

    __hash__ = None  # type: ignore[assignment]  # the way of Python's data model

    def to_dicts(self) -> dict[str, dict[str, Any]]:
        """Return section -> entries of strings, numbers and lists.

        Floats are hexadecimal; integers are compressed, in base 64.
        """
        inputs: dict[str, Any] = {
            name: {"gain": _hexadecimal(c.gain), "shift": _hexadecimal(c.shift), "zero_point": list(c.zero_points)}
            for name, c in self.equalization.inputs.items()
        }
        sections: dict[str, dict[str, Any]] = {
            "inputs": inputs,
            "factors": {name: _hexadecimal(values) for name, values in self.equalization.factors.items()},
            "concatenations": _ranges_to_text(self.equalization.concatenations),
            "splits": _ranges_to_text(self.equalization.splits),
            "coarse": {name: _hexadecimal([ratio])[0] for name, ratio in self.equalization.coarse.items()},
            "tables": {name: _hexadecimal([cost])[0] for name, cost in self.equalization.tables.items()},
            "layers": {name: _hexadecimal([ratio])[0] for name, ratio in self.equalization.layers.items()},
            "two_bytes": {name: _hexadecimal(found) for name, found in self.equalization.two_bytes.items()},
            "layer_bytes": {name: _hexadecimal(found) for name, found in self.equalization.layer_bytes.items()},
            "rotations": dict(self.equalization.rotations),
            "hadamards": dict(self.equalization.hadamards),
            "levels": {name: _packed(values) for name, values in self.quantized_weights.items()},
            "biases": {name: _hexadecimal(values.tolist()) for name, values in self.biases.items()},
        }
        return {name: dict(sorted(entries.items())) for name, entries in sections.items() if entries}

    @staticmethod
    def from_dicts(sections: Mapping[str, Mapping[str, Any]]) -> Corrected:
        """Return the inverse of `to_dicts`; raise ValueError, TypeError or KeyError for other content."""
        if odd := sorted(set(sections) - set(SECTIONS)):
            raise ValueError(f"unknown sections {', '.join(odd)}; known are {', '.join(SECTIONS)}")
        inputs = {
            name: PerChannelBytes(_floats(entry["gain"]), _floats(entry["shift"]), tuple(map(int, entry["zero_point"])))
            for name, entry in sections.get("inputs", {}).items()
        }
        factors = {name: _floats(values) for name, values in sections.get("factors", {}).items()}
        joined, splits = (_ranges_of_text(sections.get(key, {})) for key in ("concatenations", "splits"))
        coarse, tables, layers = (
            {name: _floats([decibels])[0] for name, decibels in sections.get(key, {}).items()}
            for key in ("coarse", "tables", "layers")
        )
        two_bytes = {name: TwoBytes(*_floats(found)) for name, found in sections.get("two_bytes", {}).items()}
        quantized = {name: _unpacked(text) for name, text in sections.get("levels", {}).items()}
        biases = {n: np.array(_floats(values), np.float32) for n, values in sections.get("biases", {}).items()}
        rotations, blocks = (
            {name: int(size) for name, size in sections.get(key, {}).items()} for key in ("rotations", "hadamards")
        )
        of_layers = {name: _layer_bytes(_floats(found)) for name, found in sections.get("layer_bytes", {}).items()}
        found = Equalization(
            inputs, factors, joined, splits, coarse, tables, layers, two_bytes, rotations, of_layers, blocks
        )
        return Corrected(found, quantized, biases)


SECTIONS = (
    *("inputs", "factors", "concatenations", "splits", "coarse", "tables", "layers", "two_bytes"),
    *("layer_bytes", "rotations", "hadamards", "levels", "biases"),
)


def _layer_bytes(values: tuple[float, ...]) -> LayerBytes:
    operand, weight, low, high = values
    if not {operand, weight} <= {1.0, 2.0}:
        problem = f"a layer has {operand:g} bytes of its operand and {weight:g} of its weight; allowed are 1 and 2"
        raise ValueError(problem)
    return LayerBytes(int(operand), int(weight), low, high)


def _ranges_to_text(found: Mapping[str, tuple[tuple[float, float], ...]]) -> dict[str, list[list[str]]]:
    return {name: [_hexadecimal(ends) for ends in operands] for name, operands in found.items()}


def _ranges_of_text(entries: Mapping[str, Any]) -> dict[str, tuple[tuple[float, float], ...]]:
    return {name: tuple((low, high) for low, high in map(_floats, operands)) for name, operands in entries.items()}


def _hexadecimal(values: Any) -> list[str]:
    return [float(value).hex() for value in values]


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float.fromhex(value) if isinstance(value, str) else float(value) for value in values)


def _packed(quantized: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(np.ascontiguousarray(quantized, np.int8).tobytes(), 9)).decode()


def _unpacked(text: str) -> np.ndarray:
    """Return the quantized values as a flat array, to be reshaped like the weight."""
    try:
        return np.frombuffer(bytearray(zlib.decompress(base64.b64decode(text, validate=True))), np.int8)
    except zlib.error as error:
        raise ValueError(str(error)) from error
