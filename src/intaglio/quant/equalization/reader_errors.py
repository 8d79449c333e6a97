"""Errors in the results of readers that come from a value's channels and from rounded weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.nodes import arguments, known_record, layer_operands
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.equalization.scalable_results import ScalableResult, ScaledReader, factors_at
from intaglio.quant.recipes.choices import Role


@dataclass(frozen=True)
class ReaderWeight:
    """The weight of a reader. An addition has one that is 1 for each channel and not rounded.

    Attributes:
        weight: f32[groups, outputs, inputs, taps].
        channels: channel of the value that each input of each group is, int64[groups * inputs].
        largest: largest quantized value of the weight; 0 if it is not rounded.
    """

    weight: torch.Tensor
    channels: torch.Tensor
    largest: int = 0

    @staticmethod
    def of_addition(channels: int) -> ReaderWeight:
        """Return the weight of a reader that adds each channel to its result."""
        return ReaderWeight(torch.ones(channels, 1, 1, 1), torch.arange(channels))

    def gains(self, channels: int) -> torch.Tensor:
        """Return how much of the square of an error in each channel arrives in the result, float64[channels]."""
        return self._by_channel(self._squares, channels)

    def rounding_gains(self, factors: torch.Tensor) -> torch.Tensor:
        """Return how much of the square of each channel arrives in the result as an error of rounded weights.

        Args:
            factors: divisors of the channels, float64[channels].

        Returns:
            float64[channels].
        """
        if not self.largest:
            return torch.zeros(len(factors), dtype=torch.float64)
        each = factors.float()[self.channels].reshape(len(self.weight), 1, -1, 1)
        scaled = self.weight * each
        steps = torch.from_numpy(numerics.symmetric_scale(scaled.abs().amax((2, 3)).numpy(), self.largest))
        steps = steps.float()[:, :, None, None]
        errors = numerics.round_clamp(scaled / steps, -self.largest, self.largest) * steps - scaled
        return self._by_channel((errors / each).square_().sum((1, 3)), len(factors))

    @cached_property
    def _squares(self) -> torch.Tensor:
        """Return the squares of the weights, summed over outputs and taps, f32[groups, inputs]."""
        return self.weight.square().sum((1, 3))

    def _by_channel(self, squares: torch.Tensor, channels: int) -> torch.Tensor:
        """Return sums for each channel of the value, from those of each input of each group."""
        columns = squares.double().flatten()
        return torch.zeros(channels, dtype=torch.float64).index_add(0, self.channels, columns)


def reader_weights(
    value: ScalableResult, module: fx.GraphModule, annotations: Annotations, channels: int
) -> list[ReaderWeight]:
    """Return the weights of the readers of a value with so many channels."""
    return [_reader_weight(use, module, annotations, channels) for use in value.uses]


def _reader_weight(use: ScaledReader, module: fx.GraphModule, annotations: Annotations, channels: int) -> ReaderWeight:
    numbers = factors_at(use, torch.arange(1, channels + 1, dtype=torch.float64))
    if numbers is None or known_record(use.node).roles.weight is None:
        return ReaderWeight.of_addition(channels)
    node = layer_operands(use.node).weight
    weight, groups = getattr(module, str(node.target)).float(), int(arguments(use.node).get("groups", 1))
    site = annotations.by_value.get((node.name, Role.WEIGHT))
    largest = 0 if site is None or site.record.floating else site.record.qmax
    return ReaderWeight(weight.reshape(groups, len(weight) // groups, weight.shape[1], -1), numbers.long() - 1, largest)
