"""Calibration callbacks of patterns, which compute quantization parameters from float and quantized values."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from intaglio import numerics
from intaglio.errors import CalibrationError
from intaglio.fxgraph.node_info import fixed_size
from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Fixed, Site
from intaglio.quant.calibrate.batches import Binder, peek
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.layerwise_eval import CACHE, LayerwiseEvaluation
from intaglio.quant.qdq.qparams import activation_qparams, anchor_sites, scale_per_output, weight_qparams
from intaglio.quant.qdq.weight_grid import weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.user_patterns import ParameterChooser, QuantizerPattern
from intaglio.signature import bind
from intaglio.tracing.captured import expect

Given = QParams | tuple[Any, Any]
"""Parameters that a callback returns for a site: `QParams`, (low, high), or (scale, zero point).

A pair is (scale, zero point) if the second entry is an integer and the first one is above 0, because ranges contain 0.
For weights, the entries may be arrays with one element for each channel.
"""


class CalibrationCallback:
    """Base class of callbacks, which choose the parameters of a region's sites from the values at these sites."""

    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return site name -> parameters for the sites that this callback decides.

        All other sites get theirs from the statistics by the method of their setting.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class RegionSites:
    """Names of a region's sites; ``output`` is ``None`` if the region returns float."""

    inputs: tuple[str, ...]
    weight: str | None
    bias: str | None
    output: str | None

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*self.inputs, self.weight, self.bias, self.output) if name is not None)


class CalibrationInfo:
    """Gives a callback access to the values of one region over the cached batches.

    Values are lists of tensors, one for each input or output; ``batch`` counts from 0 to ``batches - 1``. Everything in
    front of the region has its parameters, so `quantized_inputs` contain the error of all earlier quantization.
    """

    def __init__(
        self, evaluation: LayerwiseEvaluation, region: Region, pattern: QuantizerPattern, sites: RegionSites
    ) -> None:
        self.pattern, self.region, self.sites, self._evaluation = pattern, region, sites, evaluation

    @property
    def batches(self) -> int:
        """Return the number of cached batches."""
        return len(self._evaluation.calls)

    @property
    def known_qparams(self) -> Mapping[str, QParams]:
        """Return the sites of the region that already have parameters, which they keep."""
        return {name: self._evaluation.qparams[name] for name in self.sites if name in self._evaluation.qparams}

    def unquantized_inputs(self, batch: int) -> list[torch.Tensor]:
        """Return the inputs of the region in the float model."""
        return self._evaluation.unquantized_inputs(self.region, batch)

    def unquantized_outputs(self, batch: int) -> list[torch.Tensor]:
        """Return the outputs of the region in the float model."""
        return self._evaluation.unquantized_outputs(self.region, batch)

    def quantized_inputs(self, batch: int) -> list[torch.Tensor]:
        """Return the dequantized inputs of the region in the model quantized so far.

        Inputs whose parameters are not known yet are float.
        """
        return self._evaluation.quantized_inputs(self.region, batch)

    def quantized_outputs(self, batch: int) -> list[torch.Tensor]:
        """Return the outputs of the region in the model quantized so far.

        Its own weight and output are quantized once their parameters are known.
        """
        return self._evaluation.quantized_outputs(self.region, batch)

    def weight(self) -> torch.Tensor | None:
        """Return the float weight, or ``None``."""
        if self.region.record.roles.weight is None:
            return None
        constant: torch.Tensor = getattr(self._evaluation.module, layer_operands(self.region.anchor).weight.target)
        return constant

    def weight_axis(self) -> int | None:
        """Return the channel axis of the weight; ``None`` for a single scale."""
        return None if self.sites.weight is None else _axis(self._evaluation.annotations, self.sites.weight)

    def with_parameters(self, given: Mapping[str, Given]) -> CalibrationInfo:
        """Return the region with other parameters, to compare the `quantized_outputs` of several choices."""
        sites = {site.name: site for site in self._evaluation.annotations.sites}
        chosen = {name: parameters(sites[name], value, self.region) for name, value in given.items()}
        return CalibrationInfo(_trial(self._evaluation, self.region, chosen), self.region, self.pattern, self.sites)


# -- built-in callbacks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GlobalCalibrationCallback(CalibrationCallback):
    """Gives every activation the same scale and zero point, and every weight the scale ``weight`` if there is one."""

    scale: float
    zero_point: int = 0
    weight: float | None = None

    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return the scale and zero point of this callback for every activation, and ``weight`` for the weight."""
        names = [name for name in (*info.sites.inputs, info.sites.output) if name is not None]
        found: dict[str, Given] = dict.fromkeys(names, (self.scale, self.zero_point))
        if self.weight is not None and info.sites.weight is not None:
            found[info.sites.weight] = (self.weight, 0)
        return found


@dataclass(frozen=True)
class AverageMaxCalibrationCallback(CalibrationCallback):
    """Gives activations the mean of each batch's extrema, and weights the largest magnitude of each channel, or of the
    whole weight without ``per_channel``."""

    per_channel: bool = True

    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return the means of the extrema for activations and the absmax scale for the weight."""
        names, extrema = (*info.sites.inputs, info.sites.output), []
        for batch in range(info.batches):
            values = (*info.unquantized_inputs(batch), *info.unquantized_outputs(batch))
            extrema.append([(float(value.min()), float(value.max())) for value in values])
        means = np.mean(extrema, axis=0)
        ends = zip(names, means.tolist(), strict=True)
        found: dict[str, Given] = {name: (low, high) for name, (low, high) in ends if name is not None}
        weight, axis = info.weight(), info.weight_axis()
        if weight is not None and info.sites.weight is not None:
            magnitude = weight.detach().abs()
            if axis is not None and self.per_channel:
                absmax = magnitude.movedim(axis, 0).flatten(1).amax(1).numpy()
            else:
                absmax = magnitude.max().reshape(1).numpy()
            found[info.sites.weight] = numerics.symmetric_scale(absmax, 127), 0
        return found


# -- calibrator -------------------------------------------------------------------------------------------------------


class Calibrator:
    """Runs the callback of each pattern for its regions, in execution order; other sites use their setting's method.

    This is the interface of pattern frameworks to `intaglio.stages.calibrate`, which takes the same arguments.
    """

    def __init__(self, prepared: Prepared, data: Any, *, cache: int = CACHE, **options: Any) -> None:
        expect(prepared, Prepared, "Calibrator")
        self.prepared, self.data, self.cache, self.options = prepared, data, cache, options

    def calibrate(self) -> Ranges:
        """Return statistics of every site, and the parameters that callbacks chose."""
        asked = [region for region in self.prepared.annotations.regions if _callback(region) is not None]
        if not asked:
            return calibrate(self.prepared, self.data, **self.options)
        if callable(self.data) and not isinstance(self.data, torch.Tensor) and not hasattr(self.data, "__iter__"):
            raise CalibrationError(
                "data",
                None,
                "calibration callbacks need batches, but the data is a function",
                remedy="pass an iterable of batches",
            )
        binder = Binder.of(self.prepared.signature)
        batches = list(_batches_until(peek(self.data)[1], binder, self.options.get("samples")))
        ranges = calibrate(self.prepared, batches, **self.options)
        calls = [bind(self.prepared.signature, *binder(batch)) for batch in batches]
        return replace(ranges, parameters=_CallbackRunner(self.prepared, ranges, calls, self.cache).run())


def _batches_until(items: Iterator[Any], binder: Binder, samples: int | None) -> Iterator[Any]:
    """Yield batches until there are this many samples, as `calibrate` does."""
    seen = 0
    for item in items:
        args, kwargs = binder(item)
        yield item
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()]
        seen += tensors[0].shape[0] if tensors else 1
        if samples is not None and seen >= samples:
            return


def _callback(region: Region) -> ParameterChooser | None:
    return region.pattern.calibration if region.pattern is not None else None


class _CallbackRunner:
    """Runs the callbacks during one layerwise evaluation of the model.

    ``given`` holds the chosen parameters by the leading site of each sharing group.
    """

    def __init__(self, prepared: Prepared, ranges: Ranges, calls: Sequence[Sequence[Any]], cache: int) -> None:
        self.prepared, self.ranges, self.annotations = prepared, ranges, prepared.annotations
        self.sites = {site.name: site for site in self.annotations.sites}
        self.given: dict[str, QParams] = {}
        plain = activation_qparams(prepared, ranges)
        open_until: dict[str, int] = {}
        for index, region in enumerate(self.annotations.regions):
            if _callback(region) is not None:
                leaders = {self._leader(name) for name in region_sites(self.annotations, region)}
                loose = [name for name in leaders if not isinstance(self.sites[name].spec, Fixed)]
                open_until.update(dict.fromkeys(loose, index))
        self.plain, self.open_until = plain, open_until
        settled = {name: q for name, q in plain.items() if self._leader(name) not in open_until}
        self.evaluation = LayerwiseEvaluation(self.annotations, calls, settled, cache=cache)

    def run(self) -> dict[str, QParams]:
        """Return the parameters that callbacks chose, by the leading site of each sharing group."""
        for index, region in enumerate(self.evaluation):
            callback, sites = _callback(region), region_sites(self.annotations, region)
            if callback is not None and region.pattern is not None:
                info = CalibrationInfo(self.evaluation, region, region.pattern, sites)
                for name, value in callback.calibrate(info).items():
                    self._store_chosen(name, value, sites, region)
            for leader, last in self.open_until.items():
                if last <= index:
                    self._set_group_qparams(leader, self.given.get(leader, self.plain.get(leader)))
            self._weights(region)
        return dict(self.given)

    def _leader(self, name: str) -> str:
        return self.annotations.leaders[name]

    def _store_chosen(self, name: str, value: Given, sites: RegionSites, region: Region) -> None:
        """Store the parameters that a callback chose for a site; sites that already have parameters keep them."""
        label = region.pattern.name if region.pattern is not None else region.name
        if name not in set(sites) or name == sites.bias:
            what = (
                "a bias, whose scale follows from its input and weight"
                if name == sites.bias
                else "not a site of the region"
            )
            raise CalibrationError(
                f"callback of pattern {label!r}",
                None,
                f"{name!r} is {what}",
                remedy=f"return parameters for {', '.join(one for one in sites if one != sites.bias)}",
            )
        leader = self.sites[self._leader(name)]
        if leader.name in self.given or leader.name in self.evaluation.qparams:
            return
        self.given[leader.name] = parameters(leader, value, region)
        self._set_group_qparams(leader.name, self.given[leader.name])

    def _set_group_qparams(self, leader: str, q: QParams | None) -> None:
        """Set the parameters of all activation sites of a sharing group in the evaluation."""
        if q is None:
            return
        for name in self.annotations.leaders:
            if self._leader(name) == leader and self.sites[name].role == Role.ACTIVATION:
                self.evaluation.set_qparams(name, q)

    def _weights(self, region: Region) -> None:
        quantize_weight(self.evaluation, region, self.given)


def quantize_weight(evaluation: LayerwiseEvaluation, region: Region, given: Mapping[str, QParams]) -> None:
    """Set the region's weight and bias on the quantized track to their dequantized values.

    Nothing changes while the region's input has no parameters.
    """
    roles = region.record.roles
    if roles.weight is None:
        return
    x_site, w_site, b_site = anchor_sites(evaluation.annotations, region)
    if x_site.name not in evaluation.qparams:
        return
    found = weight_qparams(replace(evaluation.annotations, regions=(region,)), evaluation.qparams, [], given, {})
    read, q = layer_operands(region.anchor), found[w_site.name]
    exact = getattr(evaluation.module, read.weight.target).detach().numpy()
    grid = weight_grid(exact, np.array(q.scales), w_site.record, w_site.group, roles.outputs)
    quantized = grid.clipped(exact) if w_site.record.floating else grid.nearest(exact).astype(np.float32)
    evaluation.weights[read.weight.name] = torch.from_numpy(quantized * grid.steps)
    if b_site is not None:
        assert read.bias is not None  # A bias with a site is never absent.
        bias = getattr(evaluation.module, read.bias.target).detach().numpy()
        steps = numerics.quantize_bias(
            bias, evaluation.qparams[x_site.name].step, scale_per_output(q.scales, len(bias))
        )
        unit = np.array(found[b_site.name].scales, np.float32)
        evaluation.biases[region.anchor.name] = torch.from_numpy(steps.astype(np.float32) * unit)


def _trial(evaluation: LayerwiseEvaluation, region: Region, chosen: Mapping[str, QParams]) -> LayerwiseEvaluation:
    """Return a copy of the evaluation with other parameters for one region."""
    found, leaders = copy.copy(evaluation), evaluation.annotations.leaders
    named = {leaders[name]: q for name, q in chosen.items()}
    found.qparams = {
        **evaluation.qparams,
        **{name: named[leader] for name, leader in leaders.items() if leader in named},
    }
    found.weights, found.biases = dict(evaluation.weights), dict(evaluation.biases)
    quantize_weight(found, region, chosen)
    return found


def region_sites(annotations: Annotations, region: Region) -> RegionSites:
    """Return the names of a region's sites."""
    by_value = annotations.by_value
    inputs = tuple(by_value[value.name, region.x_role].name for value in region.activations())
    output = by_value.get((region.root.name, Role.ACTIVATION))
    weight = bias = None
    if region.record.roles.weight is not None:
        _, w_site, b_site = anchor_sites(annotations, region)
        weight, bias = w_site.name, b_site.name if b_site else None
    return RegionSites(inputs, weight, bias, output.name if output else None)


def _axis(annotations: Annotations, name: str) -> int | None:
    axis = next(site.axis for site in annotations.sites if site.name == name)
    return axis if isinstance(axis, int) else None


def parameters(site: Site, value: Given, region: Region) -> QParams:
    """Return the complete parameters of a site from those that a callback chose.

    Raises:
        CalibrationError: for parameters that the site cannot have.
    """
    if isinstance(site.spec, Fixed):
        problem = "its parameters are fixed, because it holds bytes of images"
        raise CalibrationError(site.name, site.origin.operator, problem, remedy="return no parameters for it")
    if isinstance(value, QParams):
        found = value
    else:
        first, second = (np.asarray(part).reshape(-1) for part in value)
        try:
            found = _qparams_of_pair(site, first, second)
        except (ValueError, TypeError) as error:
            problem = f"the callback returned {value!r}: {error}"
            raise CalibrationError(site.name, site.origin.operator, problem) from error
    symmetric = site.role != Role.WEIGHT or set(found.zeros) == {0}
    if (found.qmin, found.qmax) != (site.qmin, site.qmax) or not symmetric or (found.axis not in (None, site.axis)):
        raise CalibrationError(
            site.name,
            site.origin.operator,
            f"the callback returned {found} in [{found.qmin}, {found.qmax}], which do not fit the site {site}",
            remedy="return a pair of scale and zero point "
            + ("0" if site.role == Role.WEIGHT else f"in {site.qmin}..{site.qmax}"),
        )
    if site.role == Role.WEIGHT and isinstance(site.axis, int) and len(found.scales) == 1:
        channels = fixed_size(layer_operands(region.anchor).weight, site.axis)
        return replace(found, scale=found.scales * channels, zero_point=(0,) * channels, axis=site.axis)
    return found


def _qparams_of_pair(site: Site, first: np.ndarray, second: np.ndarray) -> QParams:
    """Return the parameters for a pair from a callback; raise ValueError for one that the site cannot have."""
    if first.min() > 0 and np.issubdtype(second.dtype, np.integer):
        scales = tuple(float(np.float32(scale)) for scale in first)
        zeros = tuple(int(zero) for zero in np.broadcast_to(second, first.shape))
    elif site.role == Role.WEIGHT:
        scales = tuple(map(float, numerics.symmetric_scale(np.maximum(np.abs(first), np.abs(second)), site.qmax)))
        zeros = (0,) * len(scales)
    else:
        if first.size != 1 or second.size != 1 or not first[0] <= second[0]:
            raise ValueError("a range must be a low and a high number")
        scale, zero = numerics.affine_qparams(
            min(float(first[0]), 0.0), max(float(second[0]), 0.0), site.qmin, site.qmax
        )
        scales, zeros = (scale,), (zero,)
    if any(not site.qmin <= zero <= site.qmax for zero in zeros):
        raise ValueError(f"a zero point is outside [{site.qmin}, {site.qmax}]")
    return QParams(scales, zeros, site.qmin, site.qmax, site.axis if len(scales) > 1 else None)
