"""`CalibrationInfo`: the values and parameters of one region, which calibration callbacks read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from intaglio import numerics
from intaglio.argument_checks import check_arguments, value_text
from intaglio.errors import CalibrationError, InputError
from intaglio.fxgraph.node_info import fixed_size
from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Fixed, Observed, Site
from intaglio.quant.calibrate.dataset_manager import DatasetManager
from intaglio.quant.correct.layerwise_eval import LayerwiseEvaluation
from intaglio.quant.qdq.qparams import anchor_sites, scale_per_output, weight_qparams
from intaglio.quant.qdq.weight_grid import channel_scales, weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.user_patterns import QuantizerPattern
from intaglio.signature import TORCH_DTYPES

Given = QParams | tuple[Any, Any]
"""Parameters that a callback returns for a site: `QParams`, (low, high), or (scale, zero point).

A pair is (scale, zero point) if the second entry is an integer and the first one is above 0. It is (low, high) if the
first entry is at most 0, as every range contains 0. Any other pair is refused, because a zero point that NumPy computed
as a float would look like a range. For weights, the entries may be arrays with one element for each channel.
"""
FORMS = "return (scale, zero point) with an integer zero point, int(zero_point), or (low, high) with low at most 0"


@dataclass(frozen=True)
class RegionSites:
    """Names of a region's sites; ``output`` is ``None`` if the region returns float."""

    inputs: tuple[str, ...]
    weight: str | None
    bias: str | None
    output: str | None

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*self.inputs, self.weight, self.bias, self.output) if name is not None)


@dataclass(frozen=True)
class CalibrationRun:
    """Batches and functions that all regions of a calibration share.

    Attributes:
        items: the batches, as the data gave them.
        leaves: returns the model's input tensors in a batch.
        qparams_by: returns the parameters of all activations that a range method chooses.
    """

    items: Sequence[Any]
    leaves: Callable[[Any], Sequence[Any]]
    qparams_by: Callable[[str], Mapping[str, QParams]]


class CalibrationInfo:
    """Gives a callback access to the values of one region over the cached batches.

    Values are lists of tensors, one for each input or output; ``batch`` counts from 0 to ``batches - 1``. With
    ``weights=True`` the weight follows the inputs. Everything in front of the region has its parameters, so
    `quantized_inputs` contain the error of all earlier quantization.
    """

    def __init__(
        self,
        evaluation: LayerwiseEvaluation,
        region: Region,
        pattern: QuantizerPattern,
        sites: RegionSites,
        run: CalibrationRun,
    ) -> None:
        self.pattern, self.region, self.sites, self._evaluation, self._run = pattern, region, sites, evaluation, run

    @property
    def batches(self) -> int:
        """Return the number of cached batches."""
        return len(self._evaluation.calls)

    @property
    def known_qparams(self) -> Mapping[str, QParams]:
        """Return the sites of the region that already have parameters, which they keep."""
        return {name: self._evaluation.qparams[name] for name in self.sites if name in self._evaluation.qparams}

    @property
    def dataset_manager(self) -> DatasetManager:
        """Return the batches of the calibration, with all that they hold besides inputs, such as labels."""
        return DatasetManager(list(self._run.items))

    @check_arguments
    def values_for(self, batch: Any) -> CalibrationInfo:
        """Return the region with the values for one batch that the callback brings; it is batch 0 of the result."""
        before, call = self._evaluation, self._run.leaves(batch)
        evaluation = LayerwiseEvaluation(before.annotations, [call], before.qparams)
        for name in ("weights", "integer_weights", "biases"):
            setattr(evaluation, name, dict(getattr(before, name)))
        next(region for region in evaluation if region is self.region)
        return CalibrationInfo(evaluation, self.region, self.pattern, self.sites, self._run)

    @check_arguments
    def qparams_by(self, method: str) -> dict[str, QParams]:
        """Return the parameters of the region's activations that a range method chooses, such as "kl"."""
        found = self._run.qparams_by(method)
        return {name: found[name] for name in (*self.sites.inputs, self.sites.output) if name is not None}

    @check_arguments
    def unquantized_inputs(self, batch: int = 0, *, weights: bool = False) -> list[torch.Tensor]:
        """Return the inputs of the region in the float model.

        Raises:
            InputError: no batch has this number; all functions with a batch raise it.
        """
        self._check_batch(batch)
        found = self._evaluation.unquantized_inputs(self.region, batch)
        return found + [weight for weight in [self.weight()] if weights and weight is not None]

    @check_arguments
    def unquantized_outputs(self, batch: int = 0) -> list[torch.Tensor]:
        """Return the outputs of the region in the float model."""
        self._check_batch(batch)
        return self._evaluation.unquantized_outputs(self.region, batch)

    @check_arguments
    def quantized_inputs(self, batch: int = 0, *, weights: bool = False) -> list[torch.Tensor]:
        """Return the dequantized inputs of the region in the model quantized so far.

        Inputs whose parameters are not known yet are float.
        """
        self._check_batch(batch)
        found, weight = self._evaluation.quantized_inputs(self.region, batch), self.weight()
        if weights and weight is not None:
            name = layer_operands(self.region.anchor).weight.name
            found = [*found, self._evaluation.weights.get(name, weight)]
        return found

    @check_arguments
    def integer_inputs(self, batch: int = 0, *, weights: bool = False) -> list[torch.Tensor]:
        """Return the inputs of the region as integers.

        Raises:
            CalibrationError: the parameters of an input are not known yet.
        """
        self._check_batch(batch)
        for name in self.sites.inputs:
            if name not in self._evaluation.qparams:
                problem = "it has no parameters yet, so its integers are not known"
                remedy = "choose them first: info.with_parameters({name: (scale, zero_point)}).integer_inputs()"
                raise CalibrationError(name, None, problem, remedy=remedy)
        found = [self._evaluation.quantized_values(value, batch) for value in self.region.activations()]
        return found + [weight for weight in [self.integer_weight()] if weights and weight is not None]

    def integer_weight(self) -> torch.Tensor | None:
        """Return the weight as integers; ``None`` without a weight, or before the input has parameters."""
        if self.region.record.roles.weight is None:
            return None
        return self._evaluation.integer_weights.get(layer_operands(self.region.anchor).weight.name)

    @check_arguments
    def quantized_outputs(self, batch: int = 0) -> list[torch.Tensor]:
        """Return the outputs of the region in the model quantized so far.

        Its own weight and output are quantized once their parameters are known.
        """
        self._check_batch(batch)
        return self._evaluation.quantized_outputs(self.region, batch)

    def _check_batch(self, batch: int) -> None:
        """Raise `InputError` if no batch has this number."""
        if not 0 <= batch < self.batches:
            problem = f"there is no batch {batch}; {self.batches} are cached"
            remedy = "pass a number from range(info.batches)" if self.batches else "calibrate with a batch or more"
            raise InputError("CalibrationInfo", None, problem, remedy=remedy)

    def weight(self) -> torch.Tensor | None:
        """Return the float weight, or ``None``."""
        if self.region.record.roles.weight is None:
            return None
        constant: torch.Tensor = getattr(self._evaluation.module, layer_operands(self.region.anchor).weight.target)
        return constant

    def weight_axis(self) -> int | None:
        """Return the channel axis of the weight; ``None`` for a single scale."""
        return None if self.sites.weight is None else _axis(self._evaluation.annotations, self.sites.weight)

    @check_arguments
    def weight_scales(self, per_channel: bool = True) -> np.ndarray | None:
        """Return the scales of the weight that its datatype gives without a callback, before they are fitted to a bias.

        The largest magnitude maps to the last quantized value; with fewer than 8 bits, and in groups, scales have the
        least squared error.

        Args:
            per_channel: whether to return f32[channels] if the recipe gives the weight a scale for each channel.

        Returns:
            The scales, one if ``per_channel`` is false; ``None`` without a weight.
        """
        weight, axis = self.weight(), self.weight_axis()
        if weight is None or self.sites.weight is None:
            return None
        site = next(site for site in self._evaluation.annotations.sites if site.name == self.sites.weight)
        values = weight.detach().numpy()
        split = axis is not None and per_channel
        rows = np.moveaxis(values, axis or 0, 0).reshape(values.shape[axis or 0] if split else 1, -1)
        return channel_scales(rows, site.record, site.group)

    @check_arguments
    def with_parameters(self, given: Mapping[str, Given]) -> CalibrationInfo:
        """Return the region with other parameters, to compare the `quantized_outputs` of several choices."""
        sites = {site.name: site for site in self._evaluation.annotations.sites}
        by_site = parameters_by_site(given, self.pattern.name, self.sites)
        chosen = {name: given_parameters(sites[name], value, self.region) for name, value in by_site.items()}
        trial = _trial(self._evaluation, self.region, chosen)
        return CalibrationInfo(trial, self.region, self.pattern, self.sites, self._run)


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
    stored = torch.from_numpy(np.ascontiguousarray(quantized)).to(TORCH_DTYPES[w_site.dtype])
    evaluation.integer_weights[read.weight.name] = stored
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
    found.integer_weights = dict(evaluation.integer_weights)
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


def parameters_by_site(given: Any, pattern: str, sites: RegionSites) -> Mapping[str, Given]:
    """Return what a callback returned.

    Args:
        given: the result of the callback.
        pattern: name of the pattern that the callback belongs to.
        sites: the sites of the region. A callback may choose the parameters of all but the bias.

    Raises:
        CalibrationError: it is not a mapping, or has a name that is not one of these sites.
    """
    where, free = f"callback of pattern {pattern!r}", [name for name in sites if name != sites.bias]
    if not isinstance(given, Mapping):
        problem = f"it returned {value_text(given)}; it must return a dictionary from site name to parameters"
        remedy = f"return {{}} to choose nothing, or parameters by name for {', '.join(free)}"
        raise CalibrationError(where, None, problem, remedy=remedy)
    for name in given:
        if name not in free:
            bias = "a bias, whose scale follows from its input and weight"
            what = bias if name == sites.bias else "not a site of the region"
            remedy = f"return parameters for {', '.join(free)}"
            raise CalibrationError(where, None, f"{name!r} is {what}", remedy=remedy)
    return given


def given_parameters(site: Site, value: Given, region: Region) -> QParams:
    """Return the complete parameters of a site from those that a callback chose.

    Raises:
        CalibrationError: for parameters that the site cannot have.
    """
    if isinstance(site.spec, Fixed):
        problem = "its parameters are fixed, because it holds bytes of images"
        raise CalibrationError(site.name, site.origin.operator, problem, remedy="return no parameters for it")
    try:
        found = _whole(value) if isinstance(value, QParams) else _qparams_of_pair(site, *_pair(value))
    except (ValueError, TypeError, RuntimeError) as error:  # of NumPy, or of a tensor that has no array
        problem = f"the callback returned {value_text(value)}: {error}"
        raise CalibrationError(site.name, site.origin.operator, problem, remedy=FORMS) from error
    zero = _only_zero_point(site)
    fits = (found.qmin, found.qmax) == (site.qmin, site.qmax) and found.axis in (None, site.axis)
    if not fits or (zero is not None and set(found.zeros) != {zero}):
        raise CalibrationError(
            site.name,
            site.origin.operator,
            f"the callback returned {found} in [{found.qmin}, {found.qmax}], which do not fit the site {site}",
            remedy="return a pair of scale and zero point "
            + (f"in {site.qmin}..{site.qmax}" if zero is None else f"{zero}, or a range"),
        )
    if site.role == Role.WEIGHT and isinstance(site.axis, int):
        return _for_each_channel(found, site, fixed_size(layer_operands(region.anchor).weight, site.axis))
    return found


def _only_zero_point(site: Site) -> int | None:
    """Return the zero point that a weight or a symmetric activation must have; ``None`` if it may have any."""
    if site.role == Role.WEIGHT:
        return 0
    symmetric = isinstance(site.spec, Observed) and site.spec.symmetric
    return (site.qmin + site.qmax) // 2 if symmetric else None


def _for_each_channel(found: QParams, site: Site, channels: int) -> QParams:
    """Return the parameters of a weight with one scale for each of its channels."""
    if len(found.scales) not in (1, channels):
        problem = f"the callback returned {len(found.scales)} scales, but the weight has {channels} channels"
        raise CalibrationError(
            site.name, site.origin.operator, problem, remedy="return one scale, or one for each channel"
        )
    if len(found.scales) == 1:
        return replace(found, scale=found.scales * channels, zero_point=(0,) * channels, axis=site.axis)
    return found


def _whole(found: QParams) -> QParams:
    """Return parameters whose zero points are integers; raise ValueError for others."""
    if all(isinstance(zero, int) for zero in found.zeros):
        return found
    raise ValueError("a zero point must be an integer")


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a pair as two arrays of finite numbers; raise ValueError for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError("the parameters of a site are a pair of numbers")
    first, second = (np.asarray(part).reshape(-1) for part in value)
    if not all(part.size and part.dtype.kind in "iuf" and np.isfinite(part).all() for part in (first, second)):
        raise ValueError("its entries must be finite numbers")
    return first, second


def _is_scale_and_zero_point(site: Site, first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether a pair looks like a float scale and an integer zero point of the site, and not like a range."""
    if not (np.issubdtype(first.dtype, np.floating) and np.issubdtype(second.dtype, np.integer)):
        return False
    return site.role == Role.WEIGHT or bool(second.any() and ((site.qmin <= second) & (second <= site.qmax)).all())


def _qparams_of_pair(site: Site, first: np.ndarray, second: np.ndarray) -> QParams:
    """Return the parameters for a pair from a callback; raise ValueError for one that the site cannot have."""
    if first.min() <= 0 and _is_scale_and_zero_point(site, first, second):
        raise ValueError("a scale must be above 0, and the ends of a range are two floats or two integers")
    if first.min() > 0:
        if not np.issubdtype(second.dtype, np.integer):
            raise ValueError("a zero point must be an integer, and the low end of a range is at most 0")
        scales = tuple(float(np.float32(scale)) for scale in first)
        zeros = tuple(int(zero) for zero in np.broadcast_to(second, first.shape))
    elif site.role == Role.WEIGHT:
        scales = tuple(map(float, numerics.symmetric_scale(np.maximum(np.abs(first), np.abs(second)), site.qmax)))
        zeros = (0,) * len(scales)
    else:
        if first.size != 1 or second.size != 1 or not first[0] <= second[0]:
            raise ValueError("a range must be a low and a high number")
        low, high = float(first[0]), max(float(second[0]), 0.0)
        if _only_zero_point(site) is not None:
            low, high = -max(-low, high), max(-low, high)
        scale, zero = numerics.affine_qparams(low, high, site.qmin, site.qmax)
        scales, zeros = (scale,), (zero,)
    if any(not site.qmin <= zero <= site.qmax for zero in zeros):
        raise ValueError(f"a zero point is outside [{site.qmin}, {site.qmax}]")
    return QParams(scales, zeros, site.qmin, site.qmax, site.axis if len(scales) > 1 else None)
