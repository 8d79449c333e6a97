"""Measurement of what quantized values lose, with calls of the float model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.nodes import known_operands
from intaglio.fxgraph.padding_masks import (
    PaddedAxes,
    VisibleTokens,
    padded_axes_of,
    visible_groups,
    visible_tokens,
)
from intaglio.fxgraph.uneven_concatenations import Extrema, is_concatenation, is_uneven
from intaglio.quant.annotate.sites import Observed, Site
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.float_run import ChannelsLastRun
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.sums_of_squares import sums_of_squares
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.precision.coarse_values import MeasuredValue, measured_values

LEAST_DECIBELS = 20.0
"""Signal-to-noise ratio that the rounding of a value must leave to what is computed from it in front of the next layers
and products. Less means that noise has more than 1 % of the power; values without outliers have 35 dB and more."""
MEASURED_SAMPLES = 32
"""Number of samples with which rounding is measured."""
NO_VALUES = (math.inf, -math.inf)
"""Extrema of no values."""


class ValueRecorder(ChannelsLastRun):
    """Computes some nodes of a graph with what they depend on, and calls ``see`` with their values."""

    def __init__(self, module: fx.GraphModule, names: Iterable[str], see: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__(module)
        self.names, self.see = frozenset(names), see
        self.needed = set[fx.Node]()
        for node in reversed(module.graph.nodes):
            if node.name in self.names or not self.needed.isdisjoint(node.users):
                self.needed.add(node)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; the value of one that nothing depends on is ``None``."""
        if n not in self.needed and n.op != "placeholder":
            return None
        value = super().run_node(n)
        if n.name in self.names:
            self.see(n.name, value)
        return value


def uneven_concatenations(prepared: Prepared, calls: Calls, group: Group) -> dict[fx.Node, tuple[Extrema, ...]]:
    """Return the quantized concatenations whose joint scale leaves too few quantized values to one operand.

    Args:
        prepared: the prepared model.
        calls: the tensors of each call on this rank.
        group: the ranks.

    Returns:
        Concatenation -> the extrema of its operands in the first samples of all ranks.
    """
    regions = [region for region in prepared.annotations.regions if is_concatenation(region.anchor)]
    operands = {value.name for region in regions for value in region.activations()}
    seen = extrema_of(prepared, operands, first_samples(calls, group), group) if operands else {}
    extrema = {r.root: tuple(seen.get(value.name, NO_VALUES) for value in known_operands(r.root)) for r in regions}
    return {node: ends for node, ends in extrema.items() if is_uneven(ends)}


def extrema_of(prepared: Prepared, names: Collection[str], calls: Calls, group: Group) -> dict[str, Extrema]:
    """Return the smallest and largest finite values of some nodes over the data of all ranks without padding."""
    own: dict[str, Extrema] = {}
    module, signature = prepared.annotations.module, prepared.signature
    padded = padded_axes_of(module, names, signature)

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for leaves in calls:
                visible = visible_tokens(signature, leaves)

                def see(name: str, value: torch.Tensor, visible: VisibleTokens = visible) -> None:
                    for tokens in visible_groups(value, padded[name], visible):
                        own[name] = joined([own.get(name, NO_VALUES), _finite_extrema(tokens)])

                ValueRecorder(module, names, see).run(*leaves)

    group.run_on_all_ranks(run)
    seen = group.gather(own)
    return {name: joined([one.get(name, NO_VALUES) for one in seen]) for name in {key for one in seen for key in one}}


def _finite_extrema(values: torch.Tensor) -> Extrema:
    """Return the smallest and largest finite value of a tensor."""
    if not values.numel():
        return NO_VALUES
    low, high = (end.item() for end in values.aminmax())
    if math.isfinite(low) and math.isfinite(high):  # one NaN would make both NaN
        return low, high
    finite = values[values.isfinite()]
    return (finite.min().item(), finite.max().item()) if finite.numel() else NO_VALUES


def ranges_of(prepared: Prepared, sites: Collection[Site], calls: Calls, group: Group) -> dict[str, Extrema]:
    """Return the extrema over the data of the values at some sites, by site name, with values that share scales."""
    annotations, sharing = prepared.annotations, dict[str, list[str]]()
    for site in annotations.sites:
        sharing.setdefault(annotations.leaders[site.name], []).append(site.value)
    groups = {site.name: sharing[annotations.leaders[site.name]] for site in sites}
    seen = extrema_of(prepared, {name for names in groups.values() for name in names}, calls, group)
    return {site: joined([seen.get(value, NO_VALUES) for value in values]) for site, values in groups.items()}


def joined(extrema: Sequence[Extrema]) -> Extrema:
    """Return the extrema of several sets of values together."""
    return min(low for low, _ in extrema), max(high for _, high in extrema)


@dataclass
class Power:
    """Powers of a signal and of its noise, one number for each call."""

    signal: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)

    def decibels(self) -> float:
        """Return the ratio in decibels: at least 0, and infinite without noise. Sums do not depend on their order."""
        signal, noise = math.fsum(self.signal), math.fsum(self.noise)
        if not signal or not noise:
            return math.inf
        return round(max(10 * math.log10(signal / noise), 0.0), 1) if math.isfinite(noise) else 0.0


def coarse_values(prepared: Prepared, calls: Calls, group: Group) -> dict[str, float]:
    """Return the values whose rounding leaves too little of what is computed from them in float.

    Each value is rounded alone, with the range that it has in some calls together with the values that share its scale.

    Args:
        prepared: the prepared model.
        calls: the tensors of each call on this rank.
        group: the ranks.

    Returns:
        Site of a value -> the lowest signal-to-noise ratio behind it, in decibels.
    """
    annotations = prepared.annotations
    measured = [] if prepared.quantizer.annotator is not None else measured_values(annotations)
    if not measured:
        return {}
    some, module, signature = first_samples(calls, group), annotations.module, prepared.signature
    by_site = ranges_of(prepared, [value.site for value in measured], some, group)
    ranges = {value: by_site[value.site.name] for value in measured}
    measured = [value for value in measured if ranges[value][0] < ranges[value][1]]
    powers = {(value, end): Power() for value in measured for end in value.ends}
    padded = padded_axes_of(module, {end.name for _, end in powers}, signature)

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for leaves in some:
                visible = partial(visible_values, padded, visible_tokens(signature, leaves))
                _RoundingRun(module, {value: ranges[value] for value in measured}, powers, visible).run(*leaves)

    group.run_on_all_ranks(run)
    found: dict[str, float] = {}
    for (value, _), parts in zip(powers, zip(*group.gather(list(powers.values())), strict=True), strict=True):
        total = Power([x for part in parts for x in part.signal], [x for part in parts for x in part.noise])
        found[value.site.name] = min(found.get(value.site.name, math.inf), total.decibels())
    return {name: ratio for name, ratio in found.items() if ratio < LEAST_DECIBELS}


def first_samples(calls: Calls, group: Group, most: int = MEASURED_SAMPLES) -> Calls:
    """Return this rank's calls among the first ones of all ranks with ``most`` samples."""
    sizes = [max((len(leaf) for leaf in leaves if leaf.dim()), default=1) for leaves in calls]
    return first_calls(calls, sizes, group, most)


def first_calls(calls: Calls, sizes: Sequence[int], group: Group, most: int) -> Calls:
    """Return this rank's calls among the first ones of all ranks whose sizes add up to ``most``."""
    every = group.gather(list(sizes))
    total, kept = 0, 0
    for place in range(max(map(len, every))):
        for rank, own in enumerate(every):
            if place < len(own) and total < most:
                total += own[place]
                kept += rank == group.rank
    return calls[:kept]


class _RoundingRun(ChannelsLastRun):
    """Runs a graph, and what follows each measured value once more with that value rounded."""

    def __init__(
        self,
        module: fx.GraphModule,
        ranges: Mapping[MeasuredValue, Extrema],
        powers: Mapping[tuple[MeasuredValue, fx.Node], Power],
        visible: Callable[[str, torch.Tensor], list[torch.Tensor]],
    ) -> None:
        super().__init__(module)
        self.ranges, self.powers, self.visible = ranges, powers, visible
        self.starts = {value.node: value for value in ranges}
        self.behind: dict[fx.Node, list[MeasuredValue]] = {}
        for value in ranges:
            for node in value.followers:
                self.behind.setdefault(node, []).append(value)
        self.rounded: dict[fx.Node, dict[MeasuredValue, Any]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, exactly and with each rounded value in front of it."""
        exact = super().run_node(n)
        made = {}
        for value in self.behind.get(n, ()):
            env = {node: self.rounded.get(node, {}).get(value, self.env[node]) for node in n.all_input_nodes}
            args, kwargs = fx.map_arg((n.args, n.kwargs), env.__getitem__)
            made[value] = self.call_function(n.target, args, kwargs)
        if n in self.starts:
            value = self.starts[n]
            made[value] = rounded(exact, self.ranges[value], value.site)
        for value, result in made.items():
            if (value, n) in self.powers:
                add_power(self.powers[value, n], self.visible(n.name, exact), self.visible(n.name, result))
        self.rounded[n] = made
        for node in self.user_to_last_uses.get(n, ()):
            self.rounded.pop(node, None)
        return exact


def visible_values(
    padded: Mapping[str, PaddedAxes | None], visible: VisibleTokens, name: str, value: torch.Tensor
) -> list[torch.Tensor]:
    """Return the values of a node that no padding mask hides, in groups."""
    return visible_groups(value, padded[name], visible)


def rounded(value: torch.Tensor, extrema: Extrema, site: Site) -> torch.Tensor:
    """Return a value as the quantized values of a site over a range give it back."""
    low, high = extrema
    if isinstance(site.spec, Observed) and site.spec.symmetric:
        high = max(high, -low)
        low = -high
    scale, zero = numerics.affine_qparams(low, high, site.qmin, site.qmax)
    return numerics.round_clamp(value / scale, site.qmin - zero, site.qmax - zero) * scale


def add_power(power: Power, exact: Sequence[torch.Tensor], result: Sequence[torch.Tensor]) -> None:
    """Add the signal and the noise of the visible values of one call, where the exact values are finite."""
    sums = [sums_of_squares(a, b) for a, b in zip(exact, result, strict=True)]
    noise = math.fsum(one.noise for one in sums)
    power.signal.append(math.fsum(one.signal for one in sums))
    power.noise.append(math.inf if math.isnan(noise) else noise)
