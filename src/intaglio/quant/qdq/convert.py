"""Prepared graph and ranges -> `Reference`: the runnable Q/DQ model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.fxgraph.graph_passes import Pass, copy_graph, drop_unused_constants
from intaglio.fxgraph.node_info import TAG, info, inherit_info, origin, overlay_info, set_info
from intaglio.fxgraph.nodes import arguments, operands
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ir import About, DType, QParams, Signature, TensorType
from intaglio.ir.names import sanitized
from intaglio.ops.dynamic_quant import row_levels
from intaglio.quant.annotate.embedding_tables import quantize_table
from intaglio.quant.annotate.find_regions import find_shortcuts, reads_shortcut
from intaglio.quant.annotate.find_sites import Names
from intaglio.quant.annotate.int8_buffers import store_levels
from intaglio.quant.annotate.node_annotations import is_apart
from intaglio.quant.annotate.per_token import quantize_at_run_time
from intaglio.quant.annotate.recurrent_sites import quantize_recurrent, recurrent_qparams
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.annotate.weight_only import store_weights
from intaglio.quant.calibrate.custom_observer import write_own
from intaglio.quant.calibrate.prepare import Prepared, whole
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.apply_equalization import equalized
from intaglio.quant.correct.biases import annotated_with_biases
from intaglio.quant.correct.corrections import Corrected, Corrections, Rounded
from intaglio.quant.qdq.attention_reference import PROBABILITIES, written_out
from intaglio.quant.qdq.float8 import float8
from intaglio.quant.qdq.integer_regions import keep_regions
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.qdq.qparams import (
    activation_qparams,
    anchor_sites,
    chosen_by_callbacks,
    each_output,
    given_qparams,
    parameters_of,
    per_output,
    weight_qparams,
)
from intaglio.quant.qdq.weight_grid import weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import FLOAT8
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import quantized_decomposed
from intaglio.tracing.captured import GraphStage, expect, fx_text
from intaglio.tracing.while_loops import with_bodies


@dataclass(frozen=True)
class Reference(GraphStage):
    """The quantized model in float: every quantize and dequantize explicit, weights as integers. Slow; for judging.

    ``qparams``: site name -> parameters. ``parameters``: those of sites that have their own, and all that was
    corrected: `convert` takes them in place of ranges. ``about.notes``: what was adjusted on the way. ``passes``:
    those that rewrote the captured graph. ``bodies``: of loops, by name; their sites are among those of the model.
    """

    module: fx.GraphModule
    signature: Signature
    qparams: Mapping[str, QParams]
    annotations: Annotations
    parameters: Parameters
    about: About = field(default_factory=About)
    passes: tuple[Pass, ...] = ()
    bodies: Mapping[str, Reference] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Reference({len(self.qparams)} sites; a simulation in float, slower than the float model)"


def convert(
    prepared: Prepared, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Ranges (default: what the prepared model has seen) become parameters, weights and biases integers.

    `Parameters` are taken as they are, and no data is needed; only a weight's scale that its bias does not fit grows.
    Those of what the recipe leaves in float are not looked at, so that they may be of a recipe that leaves less.
    ``corrections``: integers and biases that `correct` found better than the nearest ones. Raises `CalibrationError`
    when a site has seen no data, `UnsupportedError` when an accumulator could overflow.
    """
    expect(prepared, Prepared, "convert")
    bodies: dict[str, Reference] = {}
    for name, part in prepared.bodies.items():
        ranges, inner = _apart(ranges, part)
        bodies[name] = convert(part, inner)
    if isinstance(ranges, Parameters):
        prepared = equalized(prepared, ranges.corrected.equalization)
        ranges = ranges.without(*left_in_float(prepared))
        corrections = corrections or given_corrections(prepared, ranges)
    corrections = corrections or Corrections(prepared.annotations)
    annotations = corrections.annotations
    if annotations.sites_text() != prepared.annotations.sites_text():
        raise CalibrationError(
            "corrections",
            None,
            "they belong to another model",
            remedy="convert what they were made for: correct(prepared, ranges, data)",
        )
    given: Mapping[str, QParams] = {}
    if isinstance(ranges, Parameters):
        given = ranges.checked(annotations.sites, annotations.leaders)
        qparams = given_qparams(annotations, given)
    else:
        given = chosen_by_callbacks(annotations, ranges)
        qparams = corrections.activations_for(prepared, ranges) or activation_qparams(prepared, ranges)
    remarks: list[str] = []
    scales = dict(corrections.weight_scales)
    qparams.update(weight_qparams(annotations, qparams, remarks, given, corrections.weights, scales))
    layers = [region.anchor for region in annotations.regions if region.record.recurrent]
    qparams.update(recurrent_qparams(annotations.module, annotations.by_value, layers, given))
    module = copy_graph(annotations.module)
    Rewriter(module, annotations, qparams, corrections).run()
    held = {before: annotations.by_value[before, Role.ACTIVATION].name for before in annotations.buffers}
    signature, computed = store_levels(module, prepared.signature, held, qparams)
    remarks += computed
    write_own(module, annotations.own, prepared.module, prepared.watch.shown)
    dequantize = quantized_decomposed().dequantize_per_channel.default
    if stored := store_weights(module, annotations.alone, dequantize):
        remarks += stored
        module.graph.eliminate_dead_code()
    drop_unused_constants(module)
    with_bodies(module, {name: body.module for name, body in bodies.items()})
    keep_regions(module.graph)
    module.recompile()
    levels = {site: rounded.levels for site, rounded in corrections.weights.items()}
    corrected = Corrected(prepared.equalization, levels, corrections.biases)
    parameters = Parameters.of(annotations.sites, annotations.leaders, qparams, corrected)
    text = fx_text(module.graph)
    for name, body in bodies.items():
        qparams |= body.qparams
        parameters = replace(parameters, entries={**parameters.entries, **body.parameters.entries})
        text += f"body of {name}:\n{body.text()}"
    texts = {"reference": text, "parameters": parameters.without_weights().to_json()}
    if report := prepared.about.texts.get("corrections", "") + "".join(f"{step}\n" for step in corrections.steps):
        texts["corrections"] = report
    about = prepared.about.after(tuple(remarks), **texts)
    signature = _with_levels(signature, prepared, qparams) if prepared.quantizer.integers else signature
    return Reference(module, signature, qparams, prepared.annotations, parameters, about, prepared.passes, bodies)


def _apart(
    ranges: Ranges | Parameters | None, body: Prepared
) -> tuple[Ranges | Parameters | None, Ranges | Parameters | None]:
    """What was given for a model, and what of it is for the body of a loop."""
    if isinstance(ranges, Parameters):
        return ranges.split(site.name for site in body.annotations.sites)
    if ranges is None or not body.observers.keys() <= ranges.statistics.keys():  # refused when the model looks
        return ranges, None
    return ranges, replace(ranges, statistics={name: ranges.statistics[name] for name in body.observers}, graph="")


def _with_levels(signature: Signature, prepared: Prepared, qparams: Mapping[str, QParams]) -> Signature:
    """Return the signature, its results integers where they have parameters; only u8 by tensor can leave."""
    results = next(n for n in prepared.annotations.module.graph.nodes if n.op == "output").args[0]
    by_value, outputs, index = prepared.annotations.by_value, [], 0
    for output in signature.outputs:
        if output.value is not None:
            name = results[index].name
            site = by_value[name, Role.ACTIVATION] if name in prepared.annotations.outputs else None
            index += 1
            if site is not None and (site.dtype is not DType.U8 or site.axis is not None):
                raise UnsupportedError(site.name, None, f"as a result it would be {site.datatype}; results are u8")
            output = replace(output, levels=None if site is None else qparams[site.name])
        outputs.append(output)
    return replace(signature, outputs=tuple(outputs))


def left_in_float(prepared: Prepared) -> tuple[set[str], set[str]]:
    """Names of sites, and of anchors' nodes, that the `whole` model could have and this one has not."""
    every, here = whole(prepared), prepared.annotations
    names = Names(every.module.graph)
    values = {value for region in every.regions for value in (*region.nodes, *region.activations())}
    sites = {*map(names.of, values), *(site.name for site in every.sites)} if every is not here else set()
    anchors = {region.anchor.name for region in every.regions}
    return sites - {site.name for site in here.sites}, anchors - {region.anchor.name for region in here.regions}


def given_corrections(prepared: Prepared, given: Parameters) -> Corrections:
    """Biases and integers as a file has them. `CalibrationError` where they are not this model's."""
    corrected, entries = given.corrected, given.entries
    anchors = {region.anchor.name for region in prepared.annotations.regions}
    sites = {site.name: site for site in prepared.annotations.sites if site.role == Role.WEIGHT}
    unknown = sorted((set(corrected.levels) - set(sites)) | (set(corrected.biases) - anchors))
    if unknown:
        raise CalibrationError("parameters", None, f"corrections of what is not there: {', '.join(unknown[:5])}")
    nodes = {node.name: node for node in prepared.annotations.module.graph.nodes}
    weights: dict[str, Rounded] = {}
    for name, levels in corrected.levels.items():
        site, shape = sites[name], tuple(getattr(prepared.annotations.module, nodes[sites[name].value].target).shape)
        if levels.size != math.prod(shape) or name not in entries:
            raise CalibrationError(f"parameters of {name}", None, f"{levels.size} levels; its shape is {shape}")
        q = QParams(entries[name].scale, entries[name].zero_point, site.qmin, site.qmax, site.axis)
        weights[name] = Rounded(q, levels.reshape(shape))
    if not corrected.biases:
        return Corrections(prepared.annotations, weights)
    biases = {name: torch.from_numpy(values) for name, values in corrected.biases.items()}
    return Corrections(annotated_with_biases(prepared.annotations, biases), weights, corrected.biases)


def quantizing(q: QParams, dtype: DType) -> tuple[Any, Any]:
    """Quantize and dequantize, per tensor or per channel; torch's own round to integers only."""
    ops = float8() if dtype in FLOAT8 else quantized_decomposed()
    if q.axis is None:
        return ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default
    return ops.quantize_per_channel.default, ops.dequantize_per_channel.default


class Rewriter:
    """Puts quantize and dequantize around the regions of a graph: one quantize a value, one dequantize a reader.

    A quantize, and the dequantize of a constant, says in ``meta["site"]`` whose parameters it has.
    """

    def __init__(
        self, module: fx.GraphModule, annotations: Annotations, qparams: Mapping[str, QParams], corrections: Corrections
    ) -> None:
        self.module, self.graph, self.annotations, self.qparams = module, module.graph, annotations, qparams
        self.chosen = corrections.weights
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.inside = {node.name for region in annotations.regions for node in region.nodes}
        self.shortcuts = find_shortcuts(annotations.regions)
        self.by_value = annotations.by_value
        self.integers: dict[str, fx.Node] = {}

    def run(self) -> None:
        readers = self._readers()
        produced = {region.root.name for region in self.annotations.regions}
        for site in self.annotations.sites:
            if site.role == Role.ACTIVATION:
                everyone = site.value in produced or site.value in self.annotations.outputs
                self._activation(site, readers, everyone)
        quantize_at_run_time(self.graph, self.annotations)
        for region in self.annotations.regions:
            if region.record.roles.weight is not None:
                self._anchor(region)
            elif region.record.recurrent:
                quantize_recurrent(self.nodes[region.anchor.name], self.by_value, self.qparams, self._get)
            elif region.record.attends:
                self._attention(self.nodes[region.anchor.name])
        for table in (table for table in self.annotations.tables if table.reason is None):
            quantize_table(self.nodes[table.node.name], self._get)
        for node in filter(is_apart, list(self.graph.nodes)):
            node.replace_all_uses_with(node.args[0])
        self.graph.eliminate_dead_code()
        drop_unused_constants(self.module)
        self.graph.lint()
        self.module.recompile()

    def _readers(self) -> dict[str, list[fx.Node]]:
        """Value name -> nodes that read it as levels: inside regions, and where an annotator wants them to."""
        readers: dict[str, list[fx.Node]] = {}
        for value, reader in sorted(self.annotations.edges):
            if reader not in self.inside:
                readers.setdefault(value, []).append(self.nodes[reader])
        for region in (region for region in self.annotations.regions if not region.dynamic):
            read = region.activations()
            for node in region.nodes:
                for value in (value for value in node.all_input_nodes if value in read):
                    readers.setdefault(value.name, []).append(self.nodes[node.name])
        return readers

    def _activation(self, site: Site, readers: Mapping[str, list[fx.Node]], everyone: bool) -> None:
        """Readers inside regions get a dequantize each; the rest one together, or the float value if there is one. A
        shortcut is quantized to 16 bits first, which some of its readers take."""
        node, q = self.nodes[site.value], self.qparams[site.name]
        source, own = node, readers.get(site.value, [])
        others = [user for user in node.users if user not in own]
        if (wide := self.by_value.get((site.value, Role.SHORTCUT))) is not None:
            source = self._shortcut(node, wide)
            own = [user for user in own if user in node.users]
        quantize, dequantize = quantizing(q, site.dtype)
        parameters = self._parameters(site.name, q, site.dtype)
        with self.graph.inserting_after(source):
            levels = self.graph.call_function(quantize, (source, *parameters))
        self._describe(levels, node, site, q)
        for group in [[user] for user in own] + ([others] if others and everyone else []):
            with self.graph.inserting_before(group[0] if len(group) == 1 else levels.next):
                real = self.graph.call_function(dequantize, (levels, *parameters))
            inherit_info(real, group[0] if len(group) == 1 else node, type=info(node).type)
            for user in group:
                user.replace_input_with(node, real)

    def _shortcut(self, node: fx.Node, site: Site) -> fx.Node:
        """16 bits of a value, in front of the readers that take them; returned as the float that levels are made of."""
        q = self.qparams[site.name]
        quantize, dequantize = quantizing(q, site.dtype)
        parameters = self._parameters(site.name, q, site.dtype)
        with self.graph.inserting_after(node):
            wide = self.graph.call_function(quantize, (node, *parameters))
        self._describe(wide, node, site, q)
        for user in self._wide_readers(node):
            with self.graph.inserting_before(user):
                real = self.graph.call_function(dequantize, (wide, *parameters))
            inherit_info(real, user, type=info(node).type)
            user.replace_input_with(node, real)
        with self.graph.inserting_after(wide):
            source = self.graph.call_function(dequantize, (wide, *parameters))
        inherit_info(source, node, type=info(node).type)
        return source

    def _wide_readers(self, node: fx.Node) -> list[fx.Node]:
        found = []
        for region in self.annotations.regions:
            values = [value for value in region.activations() if value.name == node.name]
            for own in region.nodes:
                read = [value for value in own.all_input_nodes if value in values]
                if any(reads_shortcut(region, own, value, self.shortcuts) for value in read):
                    found.append(self.nodes[own.name])
        return found

    def _describe(self, made: fx.Node, node: fx.Node, site: Site, q: QParams) -> None:
        """Record type, origin and site of the quantize of a node's value."""
        kind = TensorType(info(node).type.shape, site.dtype, q)
        inherit_info(made, node, type=kind, site=site.name)

    def _anchor(self, region: Region) -> None:
        """Integer weight and bias, each behind a dequantize of this call's own."""
        anchor, roles = self.nodes[region.anchor.name], region.record.roles
        x_site, w_site, b_site = anchor_sites(self.annotations, region)
        weight, bias = parameters_of(self.annotations.module, region)
        w, kind = self.qparams[w_site.name], w_site.record
        grid = weight_grid(weight, np.array(w.scales), kind, w_site.group, roles.outputs)
        names = [operands(anchor)[i] for i in (roles.weight, roles.bias)]
        if kind.floating:
            self._constant(anchor, names[0], w_site, grid.clipped(weight), w)
            return
        chosen = self.chosen.get(w_site.name)
        levels = grid.stored(grid.nearest(weight)) if chosen is None else chosen.levels
        self._constant(anchor, names[0], w_site, levels, w)
        if region.dynamic:  # its bias stays float: there is no unit to count it in
            self._prove(region, levels, np.zeros(len(levels), np.int32), row_levels(x_site.name))
        if region.dynamic or not x_site.native:
            return
        x, rows = self.qparams[x_site.name], per_output(region, levels)
        steps = np.zeros(len(rows), np.int32)
        if bias is not None:
            steps = numerics.bias_steps(bias, x.step, each_output(w.scales, len(rows)))
        self._prove(region, rows, steps, x)
        if b_site is not None:
            self._constant(anchor, names[1], b_site, steps, self.qparams[b_site.name])

    def _attention(self, node: fx.Node) -> None:
        result = written_out(node, *quantizing(PROBABILITIES, DType.U8))
        overlay_info(result, node, replaces=node.name)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _prove(self, region: Region, levels: np.ndarray, steps: np.ndarray, x: QParams) -> None:
        groups = arguments(region.anchor).get("groups", 1)
        bound = numerics.accumulator_bound(levels, steps, x.qmin, x.qmax, x.zeros, groups).max(initial=0)
        if bound >= 2**31:
            where = origin(region.anchor)
            raise UnsupportedError(
                where.path,
                where.operator,
                f"an int32 accumulator could reach {bound}",
                remedy=f"leave it in float: skip=[{where.path!r}]",
                source=where.source or None,
            )

    def _constant(self, anchor: fx.Node, old: fx.Node, site: Site, array: np.ndarray, q: QParams) -> None:
        packing = site.record.packing(site.group) if site.role == Role.WEIGHT else None
        source = self._get(site.name, array, TensorType(array.shape, site.dtype, q, packing))
        source.meta |= {TAG: old.meta[TAG]} if TAG in old.meta else {}
        with self.graph.inserting_before(anchor):
            dequantize = quantizing(q, site.dtype)[1]
            real = self.graph.call_function(dequantize, (source, *self._parameters(site.name, q, site.dtype)))
        inherit_info(real, anchor, type=TensorType(array.shape, DType.F32), site=site.name)
        anchor.replace_input_with(old, real)

    def _parameters(self, site: str, q: QParams, dtype: DType) -> tuple[Any, ...]:
        """What quantize and dequantize take behind the value."""
        if q.axis is None:
            return q.step, q.zero, q.qmin, q.qmax, TORCH_DTYPES[dtype]
        shape = (len(q.scales),)
        scales = self._get(f"{site}:scale", np.array(q.scales, np.float32), TensorType(shape, DType.F32))
        zeros = self._get(f"{site}:zero_point", np.array(q.zeros, np.int64), TensorType(shape, DType.I64))
        return scales, zeros, q.axis, q.qmin, q.qmax, TORCH_DTYPES[dtype]

    def _get(self, key: str, array: np.ndarray, kind: TensorType) -> fx.Node:
        """One constant per key: a weight of several calls is stored once."""
        if key not in self.integers:
            tensor = torch.from_numpy(np.ascontiguousarray(array)).to(TORCH_DTYPES[kind.dtype])
            name = add_constant(self.module, sanitized(key), tensor)
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.integers[key] = self.graph.get_attr(name)
            set_info(self.integers[key], type=kind, path=key)
        return self.integers[key]
