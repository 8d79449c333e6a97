"""`equalize`: equalize channels before quantization by factors that are folded into weights.

With one scale for the whole tensor, channels with small values get few quantized values. Each channel is divided by a
factor where it is computed (rows of a weight, its bias), and multiplied by the factor where it is read (columns of a
weight, the factor of an addition), so the float model computes the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from intaglio.argument_checks import check_arguments_except
from intaglio.fxgraph.nodes import layer_operands
from intaglio.progress import report_progress
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.kept_memory import kept_memory, return_freed
from intaglio.quant.calibrate.prepare import Prepared, annotate_everything
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, Calls, cached_calls
from intaglio.quant.correct.corrections import CorrectionStep
from intaglio.quant.equalization.apply_equalization import apply_equalization, with_input_equalization
from intaglio.quant.equalization.channel_records import ChannelFactors, record_channels
from intaglio.quant.equalization.equalization_factors import equalized_value
from intaglio.quant.equalization.per_channel_inputs import quantize_inputs_per_channel
from intaglio.quant.equalization.reader_errors import reader_weights
from intaglio.quant.equalization.scalable_results import (
    has_single_factors,
    is_affine_layer_norm,
    scalable_results,
)
from intaglio.quant.equalization.smooth_factors import STATIC_INT8, smoothing
from intaglio.quant.equalization.smoothquant import smoothable
from intaglio.quant.evaluation.layerwise_eval import decibels
from intaglio.quant.precision.apply_decisions import with_data_floats, with_int8_tables, with_two_bytes
from intaglio.quant.precision.decide_by_data import decide_by_data
from intaglio.quant.precision.first_layers import sensitive_layers
from intaglio.quant.precision.int8_tables import int8_tables
from intaglio.quant.precision.layer_bytes import with_asked_bytes
from intaglio.quant.recipes.choices import Rounding
from intaglio.quant.rotation.rotate import rotate
from intaglio.tracing.captured import expect


@check_arguments_except("prepared")
@kept_memory()
def equalize(prepared: Prepared, data: Any, *, samples: int = CACHED_SAMPLES, group: Group | None = None) -> Prepared:
    """Return a prepared model of the same function with less quantization error, and with new observers.

    Inputs that only convolutions read get a scale and an offset for each channel, which are folded into weights and
    biases. Results of layer norms that linear layers read get SmoothQuant factors if they reduce the error
    (`smooth_factors.smoothing`). For other values between weights, the factor of each channel is its largest magnitude
    relative to that of all channels, to the power of the setting's ``equalize`` (Nagel et al. 2019, extended to
    additions). Concatenations that only readers of floats follow stay in float if their joint scale would leave fewer
    than 16 quantized values to one operand, as it does to scores beside boxes in pixels. So do values whose rounding
    would leave less than 20 dB of what readers of floats compute from them, such as the logarithm of a rounded score.
    Layers read an input of the model in two bytes if one byte alone would leave less of the results than their setting
    ``two_bytes_below``, and layers behind them stay in float below ``float_below``. Where the setting ``rotate`` asks
    for it, residual streams and the values of attention are multiplied by rotations first, which are folded into
    weights.

    Args:
        prepared: the prepared model.
        data: as for `calibrate`.
        samples: number of samples to use.
        group: as for `calibrate`; ranks with batches of their own get the same bits as one process.

    Returns:
        The prepared model to calibrate instead of ``prepared``, which is not changed.

    Examples:
        >>> prepared = stages.equalize(prepared, batches)
    """
    expect(prepared, Prepared, "equalize")
    group = group or Group.current()
    calls = group.run_on_all_ranks(lambda: cached_calls(prepared.signature, data, samples, group))
    report_progress("equalize")
    prepared, turned, rotated = rotate(prepared)  # first: all other decisions are about the rotated values
    return_freed()  # rows in float64
    prepared, decided = decide_by_data(prepared, calls, group)
    decided = replace(decided, rotations=turned.rotations, hadamards=turned.hadamards)
    inputs, notes = quantize_inputs_per_channel(prepared, calls, group)
    found = replace(decided, inputs=inputs)
    current = with_input_equalization(prepared, found)
    layers, two_bytes = sensitive_layers(current, calls, group)
    if layers or two_bytes:
        prepared = with_two_bytes(with_data_floats(prepared, {}, {}, layers), two_bytes)
        inputs, notes = quantize_inputs_per_channel(prepared, calls, group)
        found = replace(decided, inputs=inputs, layers=layers, two_bytes=two_bytes)
        current = with_input_equalization(prepared, found)
    every = annotate_everything(current)
    factors, lines = _factors(current, every, calls, group)
    report = "".join(f"{line}\n" for line in (*rotated, *notes, *lines))
    found = replace(found, factors=factors)
    equalized = with_asked_bytes(apply_equalization(prepared, found, report, (current, every)), calls, group)
    if not (tables := int8_tables(equalized, calls, group)):
        return equalized
    return replace(with_int8_tables(equalized, tables), equalization=replace(equalized.equalization, tables=tables))


def equalize_without_data(prepared: Prepared) -> Prepared:
    """Return the model with the part of `equalize` that needs no data: the rotations that its recipe asks for."""
    _, found, lines = rotate(prepared)
    return apply_equalization(prepared, found, "".join(f"{line}\n" for line in lines))


def _factors(
    current: Prepared, every: Annotations, calls: Calls, group: Group
) -> tuple[dict[str, tuple[float, ...]], list[str]]:
    """Return the factors of the values that gain by them, by site, and the lines of the report.

    Args:
        current: the model with its inputs equalized.
        every: its annotations without float layers.
        calls: the tensors of each call on this rank.
        group: the ranks.
    """
    module, sites = current.annotations.module, {site.name: site for site in current.annotations.sites}
    smoothed = [value for value in smoothable(every) if value.site in sites]
    scaled = [v for v in scalable_results(every) if v.site in sites and v.region.setting.equalize]
    readers = {value.name: value.weights for value in smoothed}
    for value in scaled:
        if is_affine_layer_norm(value.region):
            readers[value.name] = [getattr(module, str(layer_operands(use.node).weight.target)) for use in value.uses]
    others = [value for value in scaled if value.name not in readers]
    axes = {value.name: value.axis for value in others} | dict.fromkeys(readers, -1)
    records = record_channels(module, current.signature, axes, calls, group)
    roundings = {region.anchor: region.setting.rounding for region in every.regions}
    equalized, smooth, layer_roundings = {}, {}, {value.name: value.rounding for value in smoothed}
    for value in others:
        kind = sites[value.site].record
        absorbing = reader_weights(value, module, every, records[value.name].extrema.low.shape[1])
        power = float(value.region.setting.equalize or 0)
        fitted = Rounding.NEAREST not in {roundings[use.node] for use in value.uses if use.node in roundings}
        found = equalized_value(records[value.name], absorbing, power, kind.qmax - kind.qmin, fitted=fitted)
        if found is not None and has_single_factors(value, found.factors):
            equalized[value.name] = found
    for name, weights in readers.items():
        found = smoothing(*records[name], weights, layer_roundings.get(name, STATIC_INT8))
        if found is not None:
            smooth[name] = found
    lines = [
        *_lines("equalize", "results of their readers, mean", equalized),
        *_lines("smooth", "results of their readers, mean", smooth),
    ]
    if others and not equalized:
        alone = all(records[value.name].rows.sample_count < 2 for value in others)
        reason = "one sample leaves none to validate the factors" if alone else "no gain on samples left out"
        lines.append(f"equalize: no values, {reason}")
    chosen, by_name = {**equalized, **smooth}, {value.name: value.site for value in scaled}
    by_name |= {value.name: value.site for value in smoothed}
    return {site: tuple(chosen[name].factors.tolist()) for name, site in by_name.items() if name in chosen}, lines


def _lines(name: str, subject: str, found: Mapping[str, ChannelFactors]) -> list[str]:
    """Return a line with the mean gain of a kind of factors over the values that have them, if there are any."""
    if not found:
        return []
    before, after = (sum(getattr(one, key) / one.signal for one in found.values()) for key in ("before", "after"))
    ends = (decibels(len(found), sum_of_shares) for sum_of_shares in (before, after))
    return [str(CorrectionStep(name, f"{len(found)} values, {subject}", *ends))]
