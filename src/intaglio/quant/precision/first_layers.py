"""First layers that read two bytes or stay in float, because their rounded operand alone would cost too much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.fxgraph.nodes import layer_operands
from intaglio.fxgraph.padding_masks import padded_axes_of, visible_tokens
from intaglio.ir import DType
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Fixed, Site
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.correct.corrections import TwoBytes
from intaglio.quant.precision.changed_run import ChangedRun, Changes
from intaglio.quant.precision.coarse_values import listed_ratios
from intaglio.quant.precision.measure_rounding import (
    Power,
    add_power,
    extrema_of,
    first_samples,
    ranges_of,
    rounded,
    visible_values,
)
from intaglio.quant.precision.two_bytes import takes_two_bytes
from intaglio.quant.recipes.choices import Role

MOST_MACS = 0.05
"""Largest share of the multiply-accumulates of all layers that may be added or stay in float."""


def sensitive_layers(prepared: Prepared, calls: Calls, group: Group) -> tuple[dict[str, float], dict[str, TwoBytes]]:
    """Return the first layers that should stay in float, and those that should read two bytes.

    The operand of each first layer is rounded alone, with the range that it has in some samples. If the results of the
    model then have a lower signal-to-noise ratio than the setting ``two_bytes_below`` of a layer that reads an input,
    the layer reads two bytes. If they have a lower one than ``float_below``, another layer stays in float. The layers
    behind both are first layers too. The noise of the values near the inputs passes through all others, which amplify
    it in some networks, and the first layers have few multiply-accumulates. Layers whose setting asks for two bytes
    are left to `layer_bytes`.

    Args:
        prepared: the prepared model, with its inputs quantized per channel.
        calls: the tensors of each call on this rank.
        group: the ranks.

    Returns:
        Name of a layer's value -> the lowest ratio in the results, in decibels; and the operand of each layer that
        reads two bytes, by the same name.
    """
    annotations = prepared.annotations
    if prepared.quantizer.annotator is not None or prepared.quantizer.patterns:
        return {}, {}
    layers = [region for region in annotations.regions if _multiplies_weight(region)]
    left = MOST_MACS * sum(macs(region.anchor) for region in layers)
    names, floats = ValueNames(annotations.module.graph), dict[str, float]()
    two_bytes = dict[str, TwoBytes]()
    measure = _Measurement(prepared, first_samples(calls, group), group)
    first = _FirstLayers(annotations)
    for region in first:
        if region.setting.asks_for_two_bytes:
            continue
        cost, x = macs(region.anchor), layer_operands(region.anchor).x
        doubles = x not in first.behind and takes_two_bytes(region.anchor)
        in_bytes, in_float = region.setting.two_bytes_below or 0.0, region.setting.float_below or 0.0
        least = max(in_bytes, in_float) if doubles else in_float
        if not least or cost > left or (ratio := measure.decibels(x)) >= least:
            continue
        if doubles and ratio < in_bytes:
            two_bytes[names.of(region.anchor)] = TwoBytes(ratio, *measure.extrema(x, calls))
        else:
            floats[names.of(region.anchor)] = ratio
        first.pass_over(region)
        left -= cost
    return floats, two_bytes


def _multiplies_weight(region: Region) -> bool:
    """Return whether a region is a layer that adds up products with a weight, and reads calibrated values."""
    return region.record.accumulates and region.record.roles.weight is not None and not region.dynamic


class _FirstLayers:
    """Iterates over the layers that read nothing quantized in front of them, in execution order.

    Layers that are passed over meanwhile count as not quantized. ``behind`` are their results and what is computed from
    them.
    """

    def __init__(self, annotations: Annotations) -> None:
        """Start at the float inputs of the model."""
        self.graph = annotations.module.graph
        self.layers = {region.anchor: region for region in annotations.regions if region.record.anchor}
        self.unrounded: set[fx.Node] = set()
        self.behind: set[fx.Node] = set()

    def __iter__(self) -> Iterator[Region]:
        for node in self.graph.nodes:
            if node.op == "placeholder" and (kind := tensor_type(node)) is not None and kind.dtype is DType.F32:
                self.unrounded.add(node)
            values = [value for value in node.all_input_nodes if value.op != "get_attr"]
            if node.op != "call_function" or not values or not self.unrounded.issuperset(values):
                continue
            if node not in self.layers:
                self.unrounded.add(node)
                if not self.behind.isdisjoint(values):
                    self.behind.add(node)
            elif _multiplies_weight(self.layers[node]):
                yield self.layers[node]

    def pass_over(self, region: Region) -> None:
        """Let the layers behind a layer be first layers too."""
        self.unrounded.add(region.anchor)
        self.behind.add(region.anchor)


class _Measurement:
    """Measures what the rounding of single values costs in the results of a model."""

    def __init__(self, prepared: Prepared, calls: Calls, group: Group) -> None:
        self.prepared, self.calls, self.group = prepared, calls, group
        self.module = prepared.annotations.module
        results = self.module.graph.output_node().all_input_nodes
        self.results = [node for node in results if node.op == "call_function"]
        self.padded = padded_axes_of(self.module, {node.name for node in self.results}, prepared.signature)
        self.known = dict[fx.Node, float]()
        self.exact = list[list[Any]]()

    def decibels(self, value: fx.Node) -> float:
        """Return the lowest signal-to-noise ratio of the results with a value rounded; infinite without a site."""
        if value not in self.known:
            site = self.prepared.annotations.by_value.get((value.name, Role.ACTIVATION))
            rounding = None if site is None else self._rounding(site)
            self.known[value] = math.inf if rounding is None else self._measured({value: rounding})
        return self.known[value]

    def extrema(self, value: fx.Node, calls: Calls) -> tuple[float, float]:
        """Return the extrema over all calls of what a layer reads: a value without a scale for each channel."""
        source = value.args[1] if info(value).zero_points is not None else value
        assert isinstance(source, fx.Node)
        return extrema_of(self.prepared, {source.name}, calls, self.group)[source.name]

    def _measured(self, changes: Changes) -> float:
        powers = [Power() for _ in self.results]

        def run() -> None:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                if not self.exact:
                    self.exact = [ChangedRun(self.module, self.results, {}).results(leaves) for leaves in self.calls]
                for leaves, exact in zip(self.calls, self.exact, strict=True):
                    visible = partial(visible_values, self.padded, visible_tokens(self.prepared.signature, leaves))
                    found = ChangedRun(self.module, self.results, changes).results(leaves)
                    for power, node, before, after in zip(powers, self.results, exact, found, strict=True):
                        if isinstance(before, torch.Tensor) and before.is_floating_point():
                            add_power(power, visible(node.name, before), visible(node.name, after))

        self.group.run_on_all_ranks(run)
        gathered = zip(*self.group.gather(powers), strict=True)
        totals = [
            Power([x for p in of_result for x in p.signal], [x for p in of_result for x in p.noise])
            for of_result in gathered
        ]
        return min((total.decibels() for total in totals), default=math.inf)

    def _rounding(self, site: Site) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function that rounds the value of a site; ``None`` if it has no range."""
        if isinstance(site.spec, Fixed):
            return partial(_rounded_with, spec=site.spec, site=site)
        extrema = ranges_of(self.prepared, [site], self.calls, self.group)[site.name]
        return partial(rounded, extrema=extrema, site=site) if extrema[0] < extrema[1] else None


def _rounded_with(value: torch.Tensor, spec: Fixed, site: Site) -> torch.Tensor:
    """Return a value as quantized values with known parameters give it back."""
    zeros = torch.as_tensor(spec.zero_point, dtype=value.dtype)
    if zeros.dim():
        zeros = zeros.reshape(1, -1, *[1] * (value.dim() - 2))
    return (numerics.round_clamp(value / spec.scale, site.qmin, site.qmax, zeros) - zeros) * spec.scale


def notes_on_float_layers(found: Mapping[fx.Node, float]) -> tuple[str, ...]:
    """Return a note on the first layers that stay in float, with the ratios that their rounded operands would leave."""
    if not found:
        return ()
    listed = listed_ratios((origin(node).path or node.name, ratio) for node, ratio in found.items())
    return (
        "first layers in float, because their operands alone, rounded to 256 values, would leave too little signal to "
        f"noise in the results of the model: {listed}",
    )
