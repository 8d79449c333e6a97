"""Conversion of a prepared graph and its ranges to the Q/DQ reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.fxgraph.graph_passes import Pass, copy_graph, drop_unused_constants
from intaglio.ir import DType, ModelInfo, QParams, Signature
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.int8_buffers import quantize_buffers
from intaglio.quant.annotate.recurrent_sites import recurrent_qparams
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.weight_only import store_weights
from intaglio.quant.calibrate.custom_observer import convert_custom_observers
from intaglio.quant.calibrate.prepare import Prepared, annotate_everything
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.correct.biases import annotated_with_biases
from intaglio.quant.correct.corrections import Corrected, Corrections, RoundedWeight
from intaglio.quant.equalization.apply_equalization import apply_equalization
from intaglio.quant.imported_weights.kept_integers import (
    fitting_integers,
    imported_integers,
    rounded_again,
    rounding_note,
    use_channel_scales,
)
from intaglio.quant.precision.layer_bytes import notes_on_unsplit_layers
from intaglio.quant.qdq.integer_regions import keep_regions
from intaglio.quant.qdq.parameters import OWN_PARAMETERS, Parameters
from intaglio.quant.qdq.qdq_rewriter import Rewriter
from intaglio.quant.qdq.qparams import (
    activation_qparams,
    chosen_by_callbacks,
    given_qparams,
    weight_qparams,
)
from intaglio.quant.qdq.rounding_costs import rounding_costs
from intaglio.quant.recipes.choices import Role
from intaglio.torch_private import quantized_decomposed
from intaglio.tracing.captured import GraphStage, expect, fx_text
from intaglio.tracing.loops.while_loops import replace_loop_bodies


@dataclass(frozen=True)
class Seen:
    """Number and extrema of the values that calibration has seen at a site."""

    count: int
    low: float
    high: float


@dataclass(frozen=True)
class Reference(GraphStage):
    """The quantized model simulated in float, with explicit quantize and dequantize operators and integer weights.

    It is slower than the float model and serves to measure accuracy.

    Attributes:
        module: Q/DQ graph.
        signature: inputs, outputs and state.
        qparams: site name -> parameters, those of loop bodies included.
        annotations: sites and regions of the prepared graph.
        parameters: parameters of the sites that own theirs, and all corrections; `convert` accepts it in place of
            ranges.
        model_info: stage texts, and in `model_info.notes` the adjustments made on the way.
        passes: passes that rewrote the captured graph.
        bodies: references of loop bodies by name.
        observed: site -> number and extrema of the values that calibration has seen, where it took place.
    """

    module: fx.GraphModule
    signature: Signature
    qparams: Mapping[str, QParams]
    annotations: Annotations
    parameters: Parameters
    model_info: ModelInfo = field(default_factory=ModelInfo)
    passes: tuple[Pass, ...] = ()
    bodies: Mapping[str, Reference] = field(default_factory=dict)
    observed: Mapping[str, Seen] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Reference({len(self.qparams)} sites; a simulation in float, slower than the float model)"


def convert(
    prepared: Prepared, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Convert a prepared model and its ranges to a Q/DQ reference model with integer weights and biases.

    Args:
        prepared: model with observers.
        ranges: statistics or parameters; by default what the observers of `prepared` have seen. `Parameters` need no
            data and are taken as they are; only a weight's scale grows if its bias does not fit. Parameters of sites
            that this recipe leaves in float are ignored.
        corrections: weights and biases that `correct` found.

    Raises:
        CalibrationError: a site has seen no data, or ranges or corrections belong to another model.
        UnsupportedError: an int32 accumulator could overflow.
    """
    expect(prepared, Prepared, "convert")
    bodies: dict[str, Reference] = {}
    for name, part in prepared.bodies.items():
        ranges, inner = _split_body(ranges, part)
        bodies[name] = convert(part, inner)
    if isinstance(ranges, Parameters):
        prepared = apply_equalization(prepared, ranges.corrected.equalization)
        ranges = ranges.without(*left_in_float(prepared))
        corrections = corrections or given_corrections(prepared, ranges)
    corrections = corrections or Corrections(prepared.annotations)
    if corrections.annotations.sites_text() != prepared.annotations.sites_text():
        raise CalibrationError(
            "corrections",
            None,
            "they belong to another model",
            remedy="compute them for this model: correct(prepared, ranges, data)",
        )
    return _converted(prepared, ranges, corrections, bodies)


def _converted(
    prepared: Prepared,
    ranges: Ranges | Parameters | None,
    corrections: Corrections,
    bodies: Mapping[str, Reference],
) -> Reference:
    """Return the reference of a model with these corrections, whose loop bodies are converted."""
    remarks, annotations = notes_on_unsplit_layers(prepared), corrections.annotations
    qparams, kept = _chosen_qparams(prepared, ranges, corrections, remarks)
    statistics = _statistics(prepared, ranges)
    remarks += rounding_costs(annotations, qparams, statistics)
    module = copy_graph(annotations.module)
    _rewrite(module, qparams, corrections, kept, remarks)
    held = {before: annotations.by_value[before, Role.ACTIVATION].name for before in annotations.buffers}
    signature, computed = quantize_buffers(module, prepared.signature, held, prepared.quantizer.cached_inputs, qparams)
    remarks += computed
    convert_custom_observers(
        module, annotations.custom_observers, prepared.module, prepared.observer_state.observed_edges
    )
    dequantize = quantized_decomposed().dequantize_per_channel.default
    use_channel_scales(module, dequantize)
    remarks += store_weights(module, annotations.weight_only, dequantize)
    module.graph.eliminate_dead_code()
    drop_unused_constants(module)
    replace_loop_bodies(module, {name: body.module for name, body in bodies.items()})
    keep_regions(module.graph)
    module.recompile()
    parameters = _parameters(prepared, qparams, corrections, bodies)
    text = fx_text(module.graph) + "".join(f"body of {name}:\n{body.text()}" for name, body in bodies.items())
    for body in bodies.values():
        qparams |= body.qparams
    texts = {"reference": text, "parameters": parameters.without_weights().to_json()}
    if report := prepared.model_info.texts.get("corrections", "") + corrections.text():
        texts["corrections"] = report
    model_info = prepared.model_info.with_stage(tuple(remarks), **texts)
    signature = _quantized_outputs(signature, prepared, qparams) if prepared.quantizer.integers else signature
    return Reference(
        module,
        signature,
        qparams,
        prepared.annotations,
        parameters,
        model_info,
        prepared.passes,
        bodies,
        {name: Seen(found.count, found.low, found.high) for name, found in statistics.items() if found.count},
    )


def _rewrite(
    module: fx.GraphModule,
    qparams: Mapping[str, QParams],
    corrections: Corrections,
    kept: Mapping[str, RoundedWeight],
    remarks: list[str],
) -> None:
    """Insert quantize and dequantize operators and integer constants. Weights are the imported integers `kept`, those
    of corrections, or rounded to nearest."""
    chosen = replace(corrections, weights={**corrections.weights, **kept})
    rewriter = Rewriter(module, corrections.annotations, qparams, chosen)
    rewriter.run()
    again = rounded_again(corrections.annotations, kept)
    rounded = {site: rewriter.dequantized(site) for site in again}
    remarks += rounding_note(again, rounded, corrections.imported_noise)


def _chosen_qparams(
    prepared: Prepared, ranges: Ranges | Parameters | None, corrections: Corrections, remarks: list[str]
) -> tuple[dict[str, QParams], dict[str, RoundedWeight]]:
    """Return the parameters of every site, from `ranges`, callbacks or its weight, and the imported integers that are
    kept, by site; append adjustments to `remarks`."""
    annotations, given = corrections.annotations, dict[str, QParams]()
    if isinstance(ranges, Parameters):
        given |= ranges.checked(annotations.sites, annotations.leaders)
        qparams = given_qparams(annotations, given)
    else:
        given |= chosen_by_callbacks(annotations, ranges)
        qparams = corrections.activations_for(prepared, ranges) or activation_qparams(prepared, ranges)
    imported = imported_integers(annotations)
    given |= {site: weight.qparams for site, weight in imported.items()}
    scales = dict(corrections.weight_scales)
    qparams.update(weight_qparams(annotations, qparams, remarks, given, corrections.weights, scales))
    layers = [region.anchor for region in annotations.regions if region.record.recurrent]
    qparams.update(recurrent_qparams(annotations.module, annotations.by_value, layers, given))
    kept = fitting_integers(imported, qparams, remarks)
    return qparams | {site: weight.qparams for site, weight in kept.items()}, kept


def _statistics(prepared: Prepared, ranges: Ranges | Parameters | None) -> Mapping[str, Statistics]:
    """Return the statistics of the sites by name; none if parameters are given, or an annotator chose the sites."""
    if prepared.quantizer.annotator is not None:
        return {}
    if ranges is None:
        return {name: observer.statistics for name, observer in prepared.observers.items()}
    return {} if isinstance(ranges, Parameters) else ranges.statistics


def _parameters(
    prepared: Prepared, qparams: Mapping[str, QParams], corrections: Corrections, bodies: Mapping[str, Reference]
) -> Parameters:
    """Return the parameters and corrections of the model and of its loop bodies."""
    annotations = corrections.annotations
    quantized = {site: rounded.values for site, rounded in corrections.weights.items()}
    corrected = Corrected(prepared.equalization, quantized, corrections.biases)
    parameters = Parameters.of(annotations.sites, annotations.leaders, qparams, corrected)
    for body in bodies.values():
        parameters = replace(parameters, entries={**parameters.entries, **body.parameters.entries})
    return parameters


def _split_body(
    ranges: Ranges | Parameters | None, body: Prepared
) -> tuple[Ranges | Parameters | None, Ranges | Parameters | None]:
    """Split ranges or parameters into those of the model and those of a loop body."""
    if isinstance(ranges, Parameters):
        return ranges.split(site.name for site in body.annotations.sites)
    # If statistics are missing, the check of the whole model raises the error.
    if ranges is None or not body.observers.keys() <= ranges.statistics.keys():
        return ranges, None
    return ranges, replace(ranges, statistics={name: ranges.statistics[name] for name in body.observers}, graph="")


def _quantized_outputs(signature: Signature, prepared: Prepared, qparams: Mapping[str, QParams]) -> Signature:
    """Return the signature with quantized outputs where they have a site.

    Raises:
        UnsupportedError: an output is not u8 per tensor.
    """
    results = next(n for n in prepared.annotations.module.graph.nodes if n.op == "output").args[0]
    by_value, outputs, index = prepared.annotations.by_value, [], 0
    for output in signature.outputs:
        if output.value is not None:
            name = results[index].name
            site = by_value[name, Role.ACTIVATION] if name in prepared.annotations.outputs else None
            index += 1
            if site is not None and (site.dtype is not DType.U8 or site.axis is not None):
                problem = f"this result would be returned as {site.datatype}; int8 results must be u8 with one scale"
                raise UnsupportedError(site.name, None, problem, remedy="leave out outputs='int8'")
            output = replace(output, qparams=None if site is None else qparams[site.name])
        outputs.append(output)
    return replace(signature, outputs=tuple(outputs))


def left_in_float(prepared: Prepared) -> tuple[set[str], set[str]]:
    """Return the names of sites and anchor nodes that `annotate_everything(prepared)` has and `prepared` does not."""
    every, actual = annotate_everything(prepared), prepared.annotations
    names = ValueNames(every.module.graph)
    values = {value for region in every.regions for value in (*region.nodes, *region.activations())}
    sites = {*map(names.of, values), *(site.name for site in every.sites)} if every is not actual else set()
    anchors = {region.anchor.name for region in every.regions}
    return sites - {site.name for site in actual.sites}, anchors - {region.anchor.name for region in actual.regions}


def given_corrections(prepared: Prepared, given: Parameters) -> Corrections:
    """Return the corrections that the parameters contain.

    Raises:
        CalibrationError: they belong to another model.
    """
    corrected, entries = given.corrected, given.entries
    anchors = {region.anchor.name for region in prepared.annotations.regions}
    sites = {site.name: site for site in prepared.annotations.sites if site.role == Role.WEIGHT}
    unknown = sorted((set(corrected.quantized_weights) - set(sites)) | (set(corrected.biases) - anchors))
    if unknown:
        problem = f"they correct weights or biases that this model does not have: {', '.join(unknown[:5])}"
        raise CalibrationError("parameters", None, problem, remedy=OWN_PARAMETERS)
    nodes = {node.name: node for node in prepared.annotations.module.graph.nodes}
    weights: dict[str, RoundedWeight] = {}
    for name, quantized in corrected.quantized_weights.items():
        site, shape = sites[name], tuple(getattr(prepared.annotations.module, nodes[sites[name].value].target).shape)
        if quantized.size != math.prod(shape) or name not in entries:
            problem = f"the correction has {quantized.size} values, but the shape of the weight is {shape}"
            raise CalibrationError(f"parameters of {name}", None, problem, remedy=OWN_PARAMETERS)
        q = QParams(entries[name].scale, entries[name].zero_point, site.qmin, site.qmax, site.axis)
        weights[name] = RoundedWeight(q, quantized.reshape(shape))
    if not corrected.biases:
        return Corrections(prepared.annotations, weights)
    biases = {name: torch.from_numpy(values) for name, values in corrected.biases.items()}
    return Corrections(annotated_with_biases(prepared.annotations, biases), weights, corrected.biases)
