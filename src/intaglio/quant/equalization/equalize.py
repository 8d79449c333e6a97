"""`equalize`: equalize channels before quantization by factors that are folded into weights.

With one scale for the whole tensor, channels with small values get few quantized values. Each channel is divided by a
factor where it is computed (rows of a weight, its bias), and multiplied by the factor where it is read (columns of a
weight, the factor of an addition), so the float model computes the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from intaglio import numerics
from intaglio.argument_checks import check_arguments_except
from intaglio.fxgraph.node_info import fixed_size
from intaglio.fxgraph.nodes import layer_operands
from intaglio.fxgraph.padding_masks import (
    VisibleTokens,
    padded_axes_of,
    visible_channels,
    visible_groups,
    visible_tokens,
)
from intaglio.ir import Signature
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared, annotate_everything
from intaglio.quant.equalization.apply_equalization import (
    apply_equalization,
    has_single_factors,
    is_affine_layer_norm,
    scalable_results,
    with_input_equalization,
)
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, Calls, cached_calls
from intaglio.quant.correct.corrections import CorrectionStep
from intaglio.quant.correct.layerwise_eval import decibels
from intaglio.quant.equalization.per_channel_inputs import quantize_inputs_per_channel
from intaglio.quant.equalization.smooth_factors import SampledRows, Smoothing, smoothing
from intaglio.quant.equalization.smoothquant import smoothable
from intaglio.quant.precision.decide_by_data import decide_by_data
from intaglio.quant.precision.measure_rounding import ValueRecorder
from intaglio.tracing.captured import expect

FLOOR = 0.1
"""Smallest factor, unless the median of all channels is smaller: no channel grows more than tenfold or more than most
channels, because a short calibration may underestimate quiet channels."""


@check_arguments_except("prepared")
def equalize(prepared: Prepared, data: Any, *, samples: int = CACHED_SAMPLES, group: Group | None = None) -> Prepared:
    """Return a prepared model of the same function with less quantization error, and with new observers.

    Inputs that only convolutions read get a scale and an offset for each channel, which are folded into weights and
    biases. Results of layer norms that linear layers read get SmoothQuant factors if they reduce the error
    (`smooth_factors.smoothing`). For other values between weights, the factor of each channel is its largest magnitude
    relative to that of all channels, to the power of the setting's ``equalize`` (Nagel et al. 2019, extended to
    additions). Concatenations that only readers of floats follow stay in float if their joint scale would leave fewer
    than 16 quantized values to one operand, as it does to scores beside boxes in pixels. So do values whose rounding
    would leave less than 20 dB of what readers of floats compute from them, such as the logarithm of a rounded score.

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
    prepared, decided = decide_by_data(prepared, calls, group)
    inputs, notes = quantize_inputs_per_channel(prepared, calls, group)
    found = replace(decided, inputs=inputs)
    current = with_input_equalization(prepared, found)
    module = current.annotations.module
    every, here = annotate_everything(current), {site.name for site in current.annotations.sites}
    rows = {value.name: value for value in smoothable(every) if value.site in here}
    values = [v for v in scalable_results(every) if v.site in here and v.region.setting.equalize and v.name not in rows]
    sites = {value.name: value.site for value in values} | {name: value.site for name, value in rows.items()}
    readers: dict[str, list[torch.Tensor]] = {name: value.weights for name, value in rows.items()}
    for value in values:
        if is_affine_layer_norm(value.region):
            readers[value.name] = [getattr(module, str(layer_operands(use.node).weight.target)) for use in value.uses]
    axes = dict.fromkeys(rows, -1) | {value.name: value.axis for value in values}
    largest = _largest(module, prepared.signature, axes, calls, group)
    chosen: dict[str, torch.Tensor] = {}
    smooth = _smoothings(readers, module, prepared.signature, calls, largest, group)
    for value in values:
        if is_affine_layer_norm(value.region):
            if value.name in smooth:
                chosen[value.name] = smooth[value.name].factors
            continue
        factors = _factors(largest[value.name], float(value.region.setting.equalize or 0))
        if factors.isfinite().all() and has_single_factors(value, factors):
            chosen[value.name] = factors
    chosen |= {name: one.factors for name, one in smooth.items() if name in rows}
    by_site = {site: tuple(chosen[name].tolist()) for name, site in sites.items() if name in chosen}
    plain = {name: factors for name, factors in chosen.items() if name not in smooth}
    steps = _snr_before_and_after(module, plain, axes, calls[0]) if plain and calls else ()
    if smooth:
        sums = [sum(getattr(one, key) / one.signal for one in smooth.values()) for key in ("before", "after")]
        ends = (decibels(len(smooth), each) for each in sums)
        steps += (CorrectionStep("smooth", f"{len(smooth)} values, results of their readers, mean", *ends),)
    report = "".join(f"{line}\n" for line in (*notes, *steps))
    return apply_equalization(prepared, replace(found, factors=by_site), report, (current, every))


def _largest(
    module: fx.GraphModule,
    signature: Signature,
    axes: Mapping[str, int],
    calls: Sequence[Sequence[Any]],
    group: Group,
) -> dict[str, torch.Tensor]:
    """Return for each value the largest magnitude of every channel, over the batches of all ranks without padding.

    ``axes``: value -> its channel axis.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    found = {name: torch.zeros(fixed_size(nodes[name], axis)) for name, axis in axes.items()}
    padded = padded_axes_of(module, axes, signature)

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for leaves in calls:
                visible = visible_tokens(signature, leaves)

                def see(name: str, value: torch.Tensor, visible: VisibleTokens = visible) -> None:
                    channels = visible_channels(value.abs(), axes[name], padded[name], visible)
                    found[name] = torch.maximum(found[name], channels.amax(1))

                ValueRecorder(module, axes, see).run(*leaves)

    group.run_on_all_ranks(run)
    if group.size == 1 or not found:
        return found
    flat = torch.from_numpy(group.highest(torch.cat(list(found.values())).numpy()))
    return dict(zip(found, flat.split([len(values) for values in found.values()]), strict=True))


def _smoothings(
    readers: Mapping[str, Sequence[torch.Tensor]],
    module: fx.GraphModule,
    signature: Signature,
    calls: Calls,
    largest: Mapping[str, torch.Tensor],
    group: Group,
) -> dict[str, Smoothing]:
    """Return the smoothing of each value for which it helps, from sampled tokens of all ranks in the order of batches.

    Padding is left out.

    ``readers``: value -> weights of the linear layers that read it.
    """
    if not readers:
        return {}
    own: dict[str, list[SampledRows]] = {}
    sizes = [max((len(leaf) for leaf in leaves if leaf.dim()), default=1) for leaves in calls]
    padded = padded_axes_of(module, readers, signature)
    each = max(group.gather(max(sizes, default=1)))  # Samples are numbered in steps of the largest batch.

    def run() -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for place, leaves in enumerate(calls):
                first = (place * group.size + group.rank) * each
                visible = visible_tokens(signature, leaves)

                def see(name: str, value: torch.Tensor, first: int = first, visible: VisibleTokens = visible) -> None:
                    for tokens in visible_groups(value, padded[name], visible):
                        own.setdefault(name, []).append(SampledRows.of(tokens, first))
                        first += len(tokens)

                ValueRecorder(module, readers, see).run(*leaves)

    group.run_on_all_ranks(run)
    found = {}
    for name, weights in readers.items():
        gathered = [part for parts in group.gather(own.get(name, [])) for part in parts]
        gathered.sort(key=lambda part: int(part.samples[0]))
        result = smoothing(SampledRows.joined(gathered), weights, largest[name]) if gathered else None
        if result is not None:
            found[name] = result
    return found


def _snr_before_and_after(
    module: fx.GraphModule, factors: Mapping[str, torch.Tensor], axes: Mapping[str, int], leaves: Sequence[Any]
) -> tuple[CorrectionStep, ...]:
    """Return the signal-to-noise ratios of the values in 8 bits with min-max ranges, before and after equalization."""
    signal, before, after = [], [], []

    def see(name: str, value: torch.Tensor) -> None:
        shape = [1] * value.dim()
        shape[axes[name]] = -1
        divisor = factors[name].float().reshape(shape)
        if not (value / divisor).isfinite().all():  # calibration reports it, with the site
            return
        signal.append(value.square().sum().item())
        before.append((_rounded(value) - value).square().sum().item())
        after.append((_rounded(value / divisor) * divisor - value).square().sum().item())

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        ValueRecorder(module, factors, see).run(*leaves)
    shares = [[n / s for n, s in zip(noise, signal, strict=True) if s > 0] for noise in (before, after)]
    means = [decibels(len(share), sum(share)) for share in shares]
    return (CorrectionStep("equalize", f"{len(factors)} values, mean over them", *means),)


def _rounded(value: torch.Tensor) -> torch.Tensor:
    """Return a value quantized to 8 bits over its min-max range, and dequantized."""
    low, high = min(value.min().item(), 0.0), max(value.max().item(), 0.0)
    scale, zero = numerics.affine_qparams(low, high, 0, 255)
    return numerics.round_clamp(value / scale, -zero, 255 - zero) * scale


def _factors(largest: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the factors of channels; 1 for channels that are always zero."""
    top = largest.max()
    relative = (largest.double() / top.double().clamp_min(1e-300)) ** alpha
    used = relative[largest > 0]
    floor = min(FLOOR, used.median().item()) if len(used) else FLOOR
    return torch.where(largest > 0, relative.clamp_min(floor), torch.ones_like(relative))
