"""`correct`: round weights so that the outputs of their operators change least, and correct biases for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx

from intaglio.argument_checks import check_arguments_except
from intaglio.fxgraph.graph_constants import in_file
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import layer_operands
from intaglio.fxgraph.padding_masks import visible_tokens
from intaglio.ir import SIGN_OFFSET, DType, QParams
from intaglio.progress import report_progress
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.kept_memory import kept_memory, returned_memory
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.biases import annotated_with_biases, output_errors, with_needed_biases
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, cached_calls
from intaglio.quant.correct.corrections import Corrections, CorrectionStep, RoundedWeight
from intaglio.quant.correct.effort import (
    first_only,
    is_corrected,
    is_measured,
    reads_float_model,
    sampled_gain,
    sampled_rows,
    takes_much_memory,
    takes_too_long,
    takes_too_much_memory,
    with_simpler_rounding,
)
from intaglio.quant.correct.operand_columns import OperandReader, position_count
from intaglio.quant.correct.rounding_fit import round_weight
from intaglio.quant.correct.second_moments import Moments, moments, shift_of, sum_over_ranks
from intaglio.quant.correct.validation_split import SplitMoments, ValidationSplit, mean_generalizes, project
from intaglio.quant.correct.weight_blocks import WeightRows, by_group, steps_by_group
from intaglio.quant.evaluation.layerwise_eval import CACHE, LayerwiseEvaluation
from intaglio.quant.imported_weights.kept_integers import kept_weight
from intaglio.quant.qdq.qparams import activation_qparams, anchor_sites, parameters_of, weight_qparams
from intaglio.quant.qdq.weight_grid import weight_grid
from intaglio.quant.recipes.choices import BiasCorrection, Role, Rounding
from intaglio.tracing.captured import expect

Found = TypeVar("Found")


@check_arguments_except("prepared")
@kept_memory()
def correct(
    prepared: Prepared,
    ranges: Ranges,
    data: Any,
    *,
    samples: int = CACHED_SAMPLES,
    cache: int = CACHE,
    group: Group | None = None,
) -> Corrections:
    """Round weights and correct biases more precisely than nearest rounding does, as each region's `Setting` says.

    Operators are corrected in execution order, each with the input that it gets from the model quantized so far.

    Args:
        prepared: the prepared model.
        ranges: its calibrated ranges.
        data: as for `calibrate`; whole batches are used until there are ``samples``.
        samples: number of samples to use.
        cache: bytes of activations that are kept in memory.
        group: as for `calibrate`; ranks with batches of their own get the same bits as one process.

    Returns:
        The corrections, for `convert`.

    Examples:
        >>> corrections = stages.correct(prepared, ranges, batches)
        >>> reference = stages.convert(prepared, ranges, corrections)
    """
    expect(prepared, Prepared, "correct")
    group = group or Group.current()
    calls = group.run_on_all_ranks(lambda: cached_calls(prepared.signature, data, samples, group))
    annotations = with_needed_biases(prepared.annotations)
    qparams = activation_qparams(prepared, ranges)
    scales: dict[tuple[str, int], np.ndarray] = {}
    units = weight_qparams(annotations, qparams, [], ranges.parameters or {}, {}, scales)
    compared = any(reads_float_model(region.setting) for region in annotations.regions)
    evaluation = LayerwiseEvaluation(annotations, calls, qparams, float_track=compared, cache=cache, stops=_has_weight)
    visible = tuple(visible_tokens(prepared.signature, leaves) for leaves in calls)
    operands = OperandReader(evaluation, prepared.signature, visible, group)
    corrector = _WeightCorrector(evaluation, operands, units, group)
    corrected = any(
        is_corrected(annotations, region) or is_measured(annotations, region) for region in annotations.regions
    )
    count = sum(map(_has_weight, annotations.regions))
    done = 0
    with closing(iter(evaluation)) as regions:  # an error leaves the modes of PyTorch as they were
        while corrected and (region := group.run_on_all_ranks(lambda: next(regions, None))) is not None:
            report_progress("correct", done, count, origin(region.anchor).path)
            with returned_memory() if takes_much_memory(region) else nullcontext():
                corrector.correct_region(region)
            done += 1
            if done == count:  # Nothing reads the results of the last layer, maybe logits of a large vocabulary.
                break
    final = annotated_with_biases(annotations, evaluation.biases)
    biases = {name: values.numpy() for name, values in evaluation.biases.items()}
    return Corrections(
        final,
        corrector.weights,
        biases,
        tuple(corrector.steps()),
        (prepared, ranges),
        qparams,
        scales,
        corrector.imported_noise,
        tuple(corrector.lines_of_left_out()),
    )


def _has_weight(region: Region) -> bool:
    return region.record.roles.weight is not None


@dataclass
class _WeightCorrector:
    """The corrections found so far.

    Attributes:
        evaluation: the evaluation of the model, layer by layer.
        operands: reads the operands of layers from the evaluation.
        units: parameters of weights and biases before correction, by site.
        group: the processes that take part.
        weights: weight site -> rounded weight.
        quantized_weights: site of a weight of several operators -> quantized values, in steps of its grid.
        noise_ratios: name of a correction -> ratios of noise to signal before and after it, for each operator.
        imported_noise: weight site -> ratio of noise to signal in the results of an imported weight rounded again.
        left_out: regions whose weights are rounded in a simpler way than their settings say -> how, and why: it takes
            too much memory or time.
        used_weights: region -> node of its weight, for the last regions, whose weights the evaluation uses.
        shared: what linear layers that read the same operand have in common, by the operand and a name.
    """

    evaluation: LayerwiseEvaluation
    operands: OperandReader
    units: Mapping[str, QParams]
    group: Group
    weights: dict[str, RoundedWeight] = field(default_factory=dict)
    quantized_weights: dict[str, np.ndarray] = field(default_factory=dict)
    noise_ratios: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    imported_noise: dict[str, float] = field(default_factory=dict)
    left_out: dict[Region, str] = field(default_factory=dict)
    used_weights: dict[Region, fx.Node] = field(default_factory=dict)
    shared: dict[tuple[fx.Node, str], Any] = field(default_factory=dict)

    def correct_region(self, region: Region) -> None:
        """Round the weight of a region and correct its bias, as its setting says."""
        annotations, record, setting = self.evaluation.annotations, region.record, region.setting
        x, weight_node, _ = layer_operands(region.anchor)
        site = annotations.by_value[weight_node.name, Role.WEIGHT]
        weight, _ = parameters_of(annotations.module, region)
        q = self.units[site.name]
        if site.name in self.weights:
            q = self.weights[site.name].qparams
        grid = weight_grid(weight, np.array(q.scales), site.record, site.group, record.roles.outputs)
        if site.record.floating or kept_weight(region, weight_node) is not None:
            return
        rows = WeightRows(weight, grid, grid.nearest(weight))
        self._set_weight(region, weight_node, rows, q)
        corrects, measures = is_corrected(annotations, region), is_measured(annotations, region)
        if not corrects and not measures:
            return
        split, validating, positions = self._shared(region, x, "split", lambda: self._split(region, x))
        found = self._affordable(region, x, rows, validating, positions)
        if found is None:
            return
        region, setting = found, found.setting
        if not corrects:
            self._measure_imported(region, site, rows, self._moments(region, x))
            return
        parts = self._shared(
            region, x, f"moments, {setting.rounding}", lambda: self._split_moments(region, x, split, validating)
        )
        signal_and_noise: tuple[float, float] | None = None
        if site.name not in self.weights and setting.rounding != Rounding.NEAREST:
            fitted = round_weight(region, rows, site, q, parts)
            signal_and_noise = fitted.signal, fitted.error
            self._record_noise(str(setting.rounding), fitted.signal, fitted.nearest_error, fitted.error)
            q, rows = fitted.qparams, fitted.rows
            values = in_file(torch.from_numpy(rows.grid.as_s8(rows.quantized))).numpy()
            self.weights[site.name] = RoundedWeight(q, values)
            if len(weight_node.users) > 1:  # The other operators read it.
                self.quantized_weights[site.name] = rows.quantized
        rows = replace(rows, quantized=self.quantized_weights.get(site.name, rows.quantized))
        self._set_weight(region, weight_node, rows, q)
        if measures:
            self._measure_imported(region, site, rows, parts.whole)
        if setting.bias != BiasCorrection.NONE and not region.dynamic:
            signal_and_noise = signal_and_noise or rows.signal_and_noise(region, parts.errors)
            self._correct_bias(region, rows, signal_and_noise, parts, split)

    def _affordable(
        self,
        region: Region,
        x: fx.Node,
        rows: WeightRows,
        validating: list[torch.Tensor],
        positions: int,
    ) -> Region | None:
        """Return the region, with a simpler rounding method if its own takes too much memory or time; ``None`` if every
        method does."""
        heavy = takes_too_much_memory(region, positions)
        if (reason := heavy or takes_too_long(region, positions)) is None:
            return region
        simpler = with_simpler_rounding(region, positions)
        gain = "" if heavy or simpler else self._gain_of_sample(region, x, rows, validating)
        self.left_out[region] = f"{'by GPTQ' if simpler else 'to nearest'}, because {reason}{gain}"
        return simpler

    def _set_weight(self, region: Region, node: fx.Node, rows: WeightRows, q: QParams) -> None:
        """Let the evaluation use the quantized weight from now on, and drop those of regions that have run.

        A weight that several operators read stays.
        """
        for other, read in list(self.used_weights.items()):
            if self.evaluation.is_done(other):
                self.evaluation.drop_weight(read)
                del self.used_weights[other]
        if len(node.users) == 1:
            self.used_weights[region] = node
        self.evaluation.set_weight(region, node, rows.grid, rows.quantized, q)

    def _split(self, region: Region, x: fx.Node) -> tuple[ValidationSplit, list[torch.Tensor], int]:
        """Return the division of the samples of an operand over all ranks, this rank's samples that validate, and the
        number of positions on all ranks.
        """
        own = self.group.run_on_all_ranks(
            lambda: [(project(b), b[:1].numel(), position_count(region, b)) for b in self.operands.batches(region, x)],
        )
        parts = [part for of_rank in self.group.gather(own) for part in of_rank]
        projections = torch.cat([torch.zeros(0, dtype=torch.int64), *(part for part, _, _ in parts)])
        split = ValidationSplit.of(projections, max((size for _, size, _ in parts), default=0))
        return split, [split.selects(part) for part, _, _ in own], sum(count for _, _, count in parts)

    def _shared(self, region: Region, x: fx.Node, name: str, compute: Callable[[], Found]) -> Found:
        """Return the result of ``compute``, which linear layers with the same operand share, such as query and key."""
        if not region.record.is_linear_layer or len(x.users) < 2:
            self.shared.clear()
            return compute()
        if any(operand is not x for operand, _ in self.shared):
            self.shared.clear()
        if (x, name) not in self.shared:
            self.shared[x, name] = compute()
        found: Found = self.shared[x, name]
        return found

    def _split_moments(
        self, region: Region, x: fx.Node, split: ValidationSplit, validating: list[torch.Tensor]
    ) -> SplitMoments:
        """Return the moments of the samples to fit to, and of those that validate."""
        fitted = self._moments(region, x, [~mask for mask in validating])
        return SplitMoments(fitted, self._moments(region, x, validating), split.crossed)

    def _moments(self, region: Region, x: fx.Node, selected: list[torch.Tensor] | None = None) -> Moments:
        """Return the second moments of a region's quantized input over all ranks.

        Args:
            region: the region.
            x: its input.
            selected: bool[samples] for each batch, true for the samples to take (default: all).
        """
        q, site = self.operands.parameters(x), self.evaluation.sites.get(x.name)
        signed = site is not None and site.dtype is DType.S8  # moments are of uint8 values
        read = q.with_offset(SIGN_OFFSET) if signed else q

        def chosen(batches: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
            if selected is None:
                return batches
            return (batch[here] for batch, here in zip(batches, selected, strict=True) if here.any())

        def quantized() -> Iterator[torch.Tensor]:
            batches = chosen(self.operands.batches(region, x))
            return ((b.to(torch.int16) + SIGN_OFFSET).to(torch.uint8) for b in batches) if signed else batches

        def compute() -> Moments:
            found = moments(region, quantized(), read)
            if region.setting.rounding != Rounding.QRONOS or len(q.scales) > 1:
                return found
            differences = chosen(self.operands.differences(region, x))
            return replace(found, shift=shift_of(region, quantized(), differences, read))

        return sum_over_ranks(self.group.run_on_all_ranks(compute), self.group)

    def _gain_of_sample(self, region: Region, x: fx.Node, given: WeightRows, validating: list[torch.Tensor]) -> str:
        """Return what fitting a weight to one sample gains for another one, as the end of a sentence; "" if the weight
        is rounded to nearest anyway, or the samples do not show it."""
        if region.setting.rounding == Rounding.NEAREST:
            return ""
        fitted, other = (
            self._moments(region, x, first_only(masks)) for masks in ([~mask for mask in validating], validating)
        )
        some, grid = sampled_rows(region), given.grid
        rows = by_group(region, given.weight, some)
        gain = sampled_gain(rows, steps_by_group(region, grid, given.weight.shape, some), grid, fitted, other)
        return "" if gain is None else f"; {gain}"

    def _measure_imported(self, region: Region, site: Site, rows: WeightRows, found: Moments) -> None:
        """Store the ratio of noise to signal in the results of an imported weight that is rounded again."""
        signal, noise = rows.signal_and_noise(region, lambda some: found.errors(some).sum().item())
        if signal > 0:
            self.imported_noise[site.name] = noise / signal

    def _record_noise(self, name: str, signal: float, before: float, after: float) -> None:
        """Store the ratios of noise to signal in the results before and after a correction."""
        if signal > 0:
            self.noise_ratios.setdefault(name, []).append((before / signal, after / signal))

    def _correct_bias(
        self,
        region: Region,
        rows: WeightRows,
        signal_and_noise: tuple[float, float],
        parts: SplitMoments,
        split: ValidationSplit,
    ) -> None:
        """Add to the bias the mean error of each output channel.

        By default that is the mean error due to rounded weights, whose ratio of noise to signal is reported. With
        `BiasCorrection.OUTPUTS` it is the mean error of all quantization so far. That is not reported, because it
        concerns more than the weights, and may even increase their error. The bias stays as it is if the error has
        another mean in the samples that validate. ``rows`` are the rounded weight, and ``signal_and_noise`` the sums of
        squares of the results and of their errors.
        """
        _, bias = parameters_of(self.evaluation.module, region)
        if region.setting.bias == BiasCorrection.OUTPUTS:
            step = self.units[anchor_sites(self.evaluation.annotations, region)[1].name]
            sums, counts = output_errors(self.operands, region, split, step)
            if not mean_generalizes(sums, counts, split.crossed):
                return
            moved = sum(sums) / max(sum(counts), 1)
        else:
            x = layer_operands(region.anchor).x
            count = sum(part.count for part in parts.both)
            mean = (parts.fitted.sums + parts.validating.sums).double() / max(count, 1)
            *each, lost = rows.lost_results(region, [*(part.sums.double() for part in parts.both), mean])
            if not mean_generalizes(tuple(each), tuple(part.count for part in parts.both), split.crossed):
                return
            moved = lost.reshape(-1) * self.evaluation.qparams[self.evaluation.sites[x.name].name].step
            signal, before = signal_and_noise
            self._record_noise("bias of weights", signal, before, before - count * lost.square().sum().item())
        self.evaluation.biases[region.anchor.name] = (torch.from_numpy(bias).double() + moved).float()

    def steps(self) -> Iterator[CorrectionStep]:
        """Yield the mean signal-to-noise ratios before and after each correction."""
        for name, pairs in self.noise_ratios.items():
            means = (sum(part) / len(pairs) for part in zip(*pairs, strict=True))
            before, after = (-10 * math.log10(max(mean, 1e-30)) for mean in means)
            yield CorrectionStep(name, f"{len(pairs)} weights, mean over operators", before, after)

    def lines_of_left_out(self) -> Iterator[str]:
        """Yield a line for each weight that is rounded in a simpler way than its setting says."""
        for region, reason in self.left_out.items():
            yield f"{origin(region.anchor).path or region.anchor.name}: rounded {reason}"
