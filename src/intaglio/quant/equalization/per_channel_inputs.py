"""Inputs quantized per channel: scales are folded into the weights of the readers, and offsets into their biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.ir import DType
from intaglio.quant.annotate.image_inputs import image_refusal
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.corrections import PerChannelBytes

BYTE_LEVELS = 256
SPACING_TOLERANCE = 1e-3
"""Largest distance from a multiple of the step, in steps, of values that count as equally spaced."""
SPACED_VALUES = 8
"""Number of distinct values that are not equally spaced by chance."""
ELEMENTS_PER_VALUE = 16
"""Number of elements per distinct value from which fewer values count as all there are. Two samples of any data have
two values, which are always equally spaced."""


@dataclass(frozen=True)
class ChannelStatistics:
    """Statistics of one input channel.

    Attributes:
        low: smallest value.
        high: largest value.
        values: sorted distinct values, float64, or ``None`` if there are more than 256.
        count: number of elements.
    """

    low: float
    high: float
    values: np.ndarray | None
    count: int

    def merge(self, other: ChannelStatistics) -> ChannelStatistics:
        """Return the statistics of both parts of a channel."""
        distinct = None
        if self.values is not None and other.values is not None:
            distinct = _distinct_values(np.concatenate([self.values, other.values]))
        count = self.count + other.count
        return ChannelStatistics(min(self.low, other.low), max(self.high, other.high), distinct, count)


def quantize_inputs_per_channel(
    prepared: Prepared, calls: Sequence[Sequence[Any]], group: Group
) -> tuple[dict[str, PerChannelBytes], tuple[str, ...]]:
    """Return by name how to quantize the inputs that convolutions can read per channel, and a note for each.

    A single sample does not show how channels differ. It gives scales per channel only to inputs that it shows to have
    at most 256 equally spaced values in every channel, such as normalized bytes.
    """
    inputs, notes = {}, []
    placeholders = [node for node in prepared.annotations.module.graph.nodes if node.op == "placeholder"]
    for place, (node, entry) in enumerate(zip(placeholders, prepared.signature.inputs, strict=False)):
        kind = tensor_type(node)
        plain = kind is not None and kind.dtype is DType.F32 and len(kind.shape) == 4 and isinstance(kind.shape[1], int)
        if not plain or entry.leaf in prepared.signature.updated_inputs or not _wanted(node, prepared):
            continue
        if image_refusal(node, prepared.quantizer, prepared.classes) is not None:
            continue
        own = [_channels(leaves[place]) for leaves in calls]
        found = [channels for theirs in group.gather(own) for channels in theirs]
        channels = [_merge(column) for column in zip(*found, strict=True)]
        if not channels or not all(np.isfinite([c.low, c.high]).all() and c.low < c.high for c in channels):
            continue
        quantized, exact = _quantize_channels(channels)
        samples = sum(group.gather(sum(len(leaves[place]) for leaves in calls)))
        if samples == 1 and exact < len(channels):
            continue
        inputs[entry.name] = quantized
        kept = f", {exact} of {len(channels)} without loss: they have at most 256 values" if exact else ""
        notes.append(f"input '{entry.name}': a scale per channel{kept}")
    return inputs, tuple(notes)


def _wanted(node: fx.Node, prepared: Prepared) -> bool:
    """Return whether all readers of an input are to be equalized and have 8-bit activations."""
    recipe, classes = prepared.quantizer.recipe, prepared.classes
    users = [user for user in node.users if info(user).dim is None]
    settings = [recipe.setting(origin(user), classes) for user in users]
    return all(setting.equalize and setting.bits == 8 for setting in settings)


def _channels(images: torch.Tensor) -> list[ChannelStatistics]:
    """Return the channels of images [n, c, h, w]."""
    found = []
    for channel in images.detach().transpose(0, 1).flatten(1).float().numpy():
        values = _distinct_values(channel.astype(np.float64))
        found.append(ChannelStatistics(float(channel.min()), float(channel.max()), values, channel.size))
    return found


def _merge(channels: Sequence[ChannelStatistics]) -> ChannelStatistics:
    total = channels[0]
    for channel in channels[1:]:
        total = total.merge(channel)
    return total


def _distinct_values(values: np.ndarray) -> np.ndarray | None:
    """Return the sorted distinct values if there are at most 256, and ``None`` otherwise.

    A look at the first few thousand values avoids sorting channels with many distinct values.
    """
    if np.unique(values[: 16 * BYTE_LEVELS]).size > BYTE_LEVELS:
        return None
    distinct = np.unique(values)
    return distinct if distinct.size <= BYTE_LEVELS else None


def _quantize_channels(channels: Sequence[ChannelStatistics]) -> tuple[PerChannelBytes, int]:
    """Return the quantization of channels, and the number of channels that it represents exactly."""
    fitted = [_fit_equally_spaced(channel) for channel in channels]
    ways = [_fit_range(channel) if way is None else way for channel, way in zip(channels, fitted, strict=True)]
    gains = np.array([gain for gain, _ in ways])
    zeros = np.array([zero for _, zero in ways])
    nearest = numerics.round_clamp(zeros, 0, BYTE_LEVELS - 1)
    gain, shift = (tuple(map(float, part.astype(np.float32))) for part in (gains, zeros - nearest))
    return PerChannelBytes(gain, shift, tuple(map(int, nearest))), sum(way is not None for way in fitted)


def _fit_range(channel: ChannelStatistics) -> tuple[float, float]:
    """Return the gain and zero point of a min-max range; zero is exact, because padding needs it."""
    scale, zero = numerics.affine_qparams(min(channel.low, 0.0), max(channel.high, 0.0), 0, BYTE_LEVELS - 1)
    return 1 / scale, zero


def _fit_equally_spaced(channel: ChannelStatistics) -> tuple[float, float] | None:
    """Return the gain and zero point that represent equally spaced values exactly, such as those of normalized bytes.

    Unused quantized values are divided between both ends. The result is ``None`` for other values, for few elements,
    and if padding with zeros would lose more than one step of the scale that `_fit_range` gives.
    """
    values = channel.values
    if values is None or values.size < 2 or not np.isfinite(values).all():
        return None
    if values.size < SPACED_VALUES and channel.count < ELEMENTS_PER_VALUE * values.size:
        return None
    step = np.diff(values).min()
    places = (values - values[0]) / step
    count = round(float(places[-1]))
    if count > BYTE_LEVELS - 1 or count < 1:
        return None
    step = (values[-1] - values[0]) / count
    places = (values - values[0]) / step
    if np.abs(places - np.rint(places)).max() > SPACING_TOLERANCE:
        return None
    zero = -values[0] / step + (BYTE_LEVELS - 1 - count) // 2
    lost = abs(zero - np.rint(zero)) * step
    exact = -0.5 <= zero <= BYTE_LEVELS - 0.5 and lost <= 1 / _fit_range(channel)[0]
    return (float(1 / step), float(zero)) if exact else None
