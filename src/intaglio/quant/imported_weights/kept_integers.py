"""Integers of imported weights that int8 products take as they are, and the cost of weights that are rounded again."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, info, inherit_info, known_type
from intaglio.fxgraph.nodes import constant_node, layer_operands, replace_node
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.correct.corrections import RoundedWeight
from intaglio.quant.imported_weights.group_operator import grouped_weight
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight, int8_refusal
from intaglio.quant.recipes.choices import Role, WeightScales


def imported_integers(annotations: Annotations) -> dict[str, RoundedWeight]:
    """Return the integers and scales of imported weights that int8 products take as they are, by weight site."""
    found = {}
    for region, constant in _imported(annotations):
        if (weight := kept_weight(region, constant)) is not None:
            found[annotations.by_value[constant.name, Role.WEIGHT].name] = _rounded(weight)
    return found


def kept_weight(region: Region, constant: fx.Node) -> QuantizedWeight | None:
    """Return the imported weight whose integers a region takes as they are, or ``None``.

    It has one scale for each output channel, the recipe asks for int8 weights, and no pass has changed it.
    """
    weight: QuantizedWeight | None = info(constant).imported
    setting = region.setting
    if weight is None or weight.int8_refusal or region.record.roles.outputs:
        return None
    if setting.weight.name != "s8" or setting.weights != WeightScales.CHANNEL:
        return None
    held = getattr(constant.graph.owning_module, str(constant.target)).detach()
    return weight if torch.equal(held, weight.dequantized()) else None


def _imported(annotations: Annotations) -> Iterator[tuple[Region, fx.Node]]:
    """Yield the regions with an imported weight and the constants that hold it."""
    for region in annotations.regions:
        if region.record.roles.weight is not None:
            constant = layer_operands(region.anchor).weight
            if info(constant).imported is not None:
                yield region, constant


def _rounded(weight: QuantizedWeight) -> RoundedWeight:
    scales, values = tuple(weight.steps[0, :, 0].tolist()), weight.quantized.numpy()
    low = min(int(values.min(initial=0)), -127)
    return RoundedWeight(QParams(scales, (0,) * len(scales), low, 127, 0), values)


def fitting_integers(
    imported: Mapping[str, RoundedWeight], qparams: Mapping[str, QParams], remarks: list[str]
) -> dict[str, RoundedWeight]:
    """Return the imported integers whose scales are those of `qparams`.

    Scales of channels whose weights are all zero may differ. If a scale was enlarged for a bias, the weight is rounded
    again, and a remark is added.
    """
    found = {}
    for site, rounded in imported.items():
        own, chosen = rounded.qparams, qparams[site]
        zero = ~rounded.values.reshape(len(rounded.values), -1).any(1)
        if (zero | (np.array(chosen.scales) == np.array(own.scales))).all():
            q = QParams(chosen.scales, own.zeros, own.qmin, own.qmax, own.axis)
            found[site] = RoundedWeight(q, rounded.values)
        else:
            remarks.append(f"{site}: its imported integers are rounded again, because its bias needs larger scales")
    return found


def rounded_again(annotations: Annotations, kept: Collection[str]) -> dict[str, np.ndarray]:
    """Return the float values of imported weights whose integers are not kept, by weight site."""
    found = {}
    for _, constant in _imported(annotations):
        site = annotations.by_value[constant.name, Role.WEIGHT].name
        if site not in kept:
            found[site] = getattr(annotations.module, str(constant.target)).detach().numpy()
    return found


def rounding_note(
    weights: Mapping[str, np.ndarray], rounded: Mapping[str, np.ndarray], results: Mapping[str, float]
) -> tuple[str, ...]:
    """Return a note on what it costs to round imported weights again.

    Args:
        weights: weight site -> values before.
        rounded: weight site -> values after.
        results: weight site -> ratio of noise to signal in the results of its layer, where data measured it.
    """
    if not weights:
        return ()
    ratios = [_noise_ratio(values, rounded[site]) for site, values in weights.items()]
    layers = f"{len(weights)} layer{'s' * (len(weights) != 1)}"
    text = f"imported weights rounded again: {layers}, signal to noise of weights {_span(ratios)}"
    measured = [results[site] for site in weights if site in results]
    return (text + (f", of results {_span(measured)}" if measured else ""),)


def _noise_ratio(values: np.ndarray, rounded: np.ndarray) -> float:
    signal, noise = (float(np.square(part, dtype=np.float64).sum()) for part in (values, values - rounded))
    return noise / signal if signal else 0.0


def _span(ratios: Collection[float]) -> str:
    """Return ratios of noise to signal in decibels, one number or the lowest and the highest."""
    low, high = (-10 * math.log10(max(ratio, 1e-30)) for ratio in (max(ratios), min(ratios)))
    return f"{low:.1f} dB" if len(ratios) == 1 else f"{low:.1f} to {high:.1f} dB"


def use_channel_scales(module: fx.GraphModule, dequantize: Any) -> None:
    """Replace dequantize operators of groups by torch's operator where a group is a whole output channel."""
    for node in list(module.graph.nodes):
        if (grouped := grouped_weight(node)) is None:
            continue
        quantized, steps = grouped[:2]
        values = getattr(module, str(steps.target))
        if int8_refusal(values) is not None:
            continue
        parameters = []
        for label, tensor in (("scale", values[0, :, 0].clone()), ("zero_point", torch.zeros(len(values[0])).long())):
            name = f"{quantized.target}_{label}"
            if not hasattr(module, name):
                module.register_buffer(name, tensor)
            parameters.append(constant_node(module, name, f"{constant_path(quantized)}.{label}"))
        with module.graph.inserting_before(node):
            real = module.graph.call_function(dequantize, (quantized, *parameters, 0, -128, 127, torch.int8))
        inherit_info(real, node, type=known_type(node))
        replace_node(node, real)
