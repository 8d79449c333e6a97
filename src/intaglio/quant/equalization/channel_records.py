"""Records of values for the choice of their factors: extrema of the channels, and some of the positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from intaglio.fxgraph.node_info import fixed_size, known_type
from intaglio.fxgraph.padding_masks import PaddedAxes, VisibleTokens, padded_axes_of, visible_groups, visible_tokens
from intaglio.ir import Signature, evaluate, symbols_of
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.equalization.sampled_rows import FOLDS, ROW_COUNT, SampledRows
from intaglio.quant.precision.measure_rounding import ValueRecorder, first_calls
from intaglio.signature import dims_of

MOST_POSITIONS = 1 << 15
"""Number of positions of every value after which no more batches run: 64 texts of 512 tokens have so many."""
MOST_ROWS_PER_SAMPLE = 64
"""Largest number of positions that are recorded of one sample."""


@dataclass(frozen=True)
class FoldExtrema:
    """The smallest and the largest value of each channel in each fold of the samples.

    Attributes:
        low: f32[folds, channels], at most 0.
        high: f32[folds, channels], at least 0.
    """

    low: torch.Tensor
    high: torch.Tensor

    @property
    def magnitudes(self) -> torch.Tensor:
        """Return the largest magnitude of each channel over all folds."""
        return torch.maximum(-self.low, self.high).amax(0)

    @property
    def finite(self) -> bool:
        """Return whether all values are finite."""
        return bool(self.low.isfinite().all() and self.high.isfinite().all())

    def without(self, fold: int) -> FoldExtrema:
        """Return the extrema of all other folds."""
        others = torch.arange(len(self.low)) != fold
        return FoldExtrema(self.low[others], self.high[others])

    def range(self, factors: torch.Tensor) -> tuple[float, float]:
        """Return the smallest and the largest value after division by factors."""
        return (self.low.amin(0) / factors).min().item(), (self.high.amax(0) / factors).max().item()

    def widen(self, value: torch.Tensor, first: int, axis: int) -> None:
        """Include a batch [n, ...] whose first sample has this number; a vector is one sample."""
        value = torch.atleast_2d(value).movedim(axis, 1)
        inner = list(range(2, value.dim()))
        low, high = (value.amin(inner), value.amax(inner)) if inner else (value, value)
        folds = torch.arange(first, first + len(value)) % FOLDS
        for fold in folds.unique().tolist():
            here = folds == fold
            self.low[fold] = torch.minimum(self.low[fold], low[here].amin(0))
            self.high[fold] = torch.maximum(self.high[fold], high[here].amax(0))


class ChannelRecord(NamedTuple):
    """Extrema over all positions of all samples, and some positions of each sample."""

    extrema: FoldExtrema
    rows: SampledRows


@dataclass(frozen=True)
class ChannelFactors:
    """Factors for the channels of a value, and what they gain on samples that they were not computed from.

    Attributes:
        factors: divisors of the channels, float64.
        signal: sum of squares of the results of its readers.
        before: sum of squares of their errors without factors.
        after: sum of squares of their errors with factors.
    """

    factors: torch.Tensor
    signal: float
    before: float
    after: float


def record_channels(
    module: fx.GraphModule, signature: Signature, axes: Mapping[str, int], calls: Calls, group: Group
) -> dict[str, ChannelRecord]:
    """Run the first batches with `MOST_POSITIONS` and return the record of each value, without padding.

    Args:
        module: the graph.
        signature: signature of the model.
        axes: value -> its channel axis.
        calls: the tensors of each call on this rank.
        group: the ranks.
    """
    if not axes:
        return {}
    nodes = {node.name: node for node in module.graph.nodes}
    positions = [_position_count([nodes[name] for name in axes], axes, signature, leaves) for leaves in calls]
    calls = first_calls(calls, positions, group, MOST_POSITIONS)
    sizes = [max((len(leaf) for leaf in leaves if leaf.dim()), default=1) for leaves in calls]
    every = [size for sizes_of_rank in group.gather(sizes) for size in sizes_of_rank]
    step = max(every, default=1)  # Samples are numbered in steps of the largest batch.
    count = min(MOST_ROWS_PER_SAMPLE, -(-ROW_COUNT // max(sum(every), 1)))
    extrema = {}
    for name, axis in axes.items():
        shape = FOLDS, fixed_size(nodes[name], axis)
        extrema[name] = FoldExtrema(torch.zeros(shape), torch.zeros(shape))
    parts: dict[str, list[SampledRows]] = {name: [] for name in axes}
    padded = padded_axes_of(module, axes, signature)

    def run() -> None:
        for place, (leaves, size) in enumerate(zip(calls, sizes, strict=True)):
            start, visible = (place * group.size + group.rank) * step, visible_tokens(signature, leaves)

            def see(
                name: str, value: torch.Tensor, start: int = start, size: int = size, visible: VisibleTokens = visible
            ) -> None:
                for values, axis in _by_sample(value, axes[name], size, padded[name], visible):
                    extrema[name].widen(values, start, axis)
                    parts[name].append(SampledRows.of(values, start, axis, count))
                    start += len(values)

            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                ValueRecorder(module, axes, see).run(*leaves)

    group.run_on_all_ranks(run)
    found = {}
    for name, extremum in _over_ranks(extrema, group).items():
        rows = [part for of_rank in group.gather(parts[name]) for part in of_rank]
        found[name] = ChannelRecord(extremum, SampledRows.joined(rows, extremum.low.shape[1]))
    return found


def _position_count(
    nodes: Sequence[fx.Node], axes: Mapping[str, int], signature: Signature, leaves: Sequence[torch.Tensor]
) -> int:
    """Return the number of positions that each of the values has at least in a call. Sizes that depend on data are at
    least 1.
    """
    known = dims_of(signature, leaves[: len(signature.inputs)])
    sizes = {node: known_type(node).shape for node in nodes}
    symbols = dict.fromkeys((name for shape in sizes.values() for dim in shape for name in symbols_of(dim)), 1) | known
    shapes = {node: [evaluate(dim, symbols) for dim in shape] for node, shape in sizes.items()}
    return min(math.prod(shape) // max(1, shape[axes[node.name]]) for node, shape in shapes.items())


def _by_sample(
    value: torch.Tensor, channels: int, samples: int, padded: PaddedAxes | None, visible: VisibleTokens
) -> list[tuple[torch.Tensor, int]]:
    """Return the visible values in batches whose first axis is that of the samples, each with its axis of channels.

    The first axis of a value may hold all tokens or windows of each sample; a vector is one sample.
    """
    value = torch.atleast_2d(value)
    axis = channels % value.dim()
    if padded is not None and padded.tokens == axis:
        padded = None  # there are as many channels as tokens
    groups = visible_groups(value, padded, visible)
    if padded is not None and (len(groups) != 1 or groups[0] is not value):
        return [(group, padded.moved(axis)) for group in groups]
    if axis and len(value) > samples and len(value) % samples == 0:
        return [(value.unflatten(0, (samples, -1)), axis + 1)]
    return [(value, axis)]


def _over_ranks(extrema: Mapping[str, FoldExtrema], group: Group) -> dict[str, FoldExtrema]:
    """Return the extrema over all ranks."""
    if group.size == 1:
        return dict(extrema)
    sizes = [one.low.numel() for one in extrema.values()]
    low, high = (
        torch.from_numpy(combine(torch.cat([getattr(one, end).flatten() for one in extrema.values()]).numpy()))
        for combine, end in ((group.lowest, "low"), (group.highest, "high"))
    )
    parts = zip(extrema, low.split(sizes), high.split(sizes), strict=True)
    return {name: FoldExtrema(lows.view(FOLDS, -1), highs.view(FOLDS, -1)) for name, lows, highs in parts}
