"""`CalibrationInfo`: the values and parameters of one region, which calibration callbacks read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from intaglio import numerics
from intaglio.argument_checks import check_arguments
from intaglio.errors import CalibrationError, InputError
from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.calibrate.callbacks.given_parameters import Given, RegionSites, given_parameters, parameters_by_site
from intaglio.quant.calibrate.dataset_manager import DatasetManager
from intaglio.quant.evaluation.layerwise_eval import LayerwiseEvaluation
from intaglio.quant.qdq.qparams import anchor_sites, scale_per_output, weight_qparams
from intaglio.quant.qdq.weight_grid import channel_scales, weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.user_patterns import QuantizerPattern
from intaglio.signature import TORCH_DTYPES


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
    def dataset_manager(self) -> DatasetManager | None:
        """Return the batches of the calibration, with all that they hold besides inputs, such as labels; ``None`` for a
        calibration without data."""
        return DatasetManager(list(self._run.items)) if self._run.items else None

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
    evaluation.weights[read.weight.name] = torch.from_numpy(grid.values(quantized))
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
