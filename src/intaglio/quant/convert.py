"""Prepared graph and ranges -> `Reference`: the runnable Q/DQ model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.calls import TORCH_DTYPES
from intaglio.capture.canonical import drop_unused_constants
from intaglio.capture.captured import GraphStage, expect, fx_text
from intaglio.capture.nodes import arguments, call_of, operands, origin
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.ir import About, DType, QParams, Signature, TensorType
from intaglio.ops.conv import outputs_first
from intaglio.quant.annotate import Annotations, Chain, Region, find_shortcuts, reads_shortcut
from intaglio.quant.correct.biases import with_biases
from intaglio.quant.correct.scaling import equalized
from intaglio.quant.corrections import Corrected, Corrections, Rounded
from intaglio.quant.datatypes import FLOAT8
from intaglio.quant.float8 import float8
from intaglio.quant.lint import softmax_operands
from intaglio.quant.methods import channel_ranges, method_of, without_mask
from intaglio.quant.parameters import Parameters
from intaglio.quant.prepare import Prepared, annotated, copy_graph
from intaglio.quant.ranges import Ranges
from intaglio.quant.sites import Derived, Fixed, Observed, Site
from intaglio.quant.statistics import Range, Statistics
from intaglio.quant.weights import channel_scales, weight_grid

INT32 = (-(2**31), 2**31 - 1)


def decomposed() -> Any:
    """torch's own quantize and dequantize operators; the import that registers them waits until they are needed."""
    from torch.ao.quantization.fx import _decomposed  # noqa: F401

    return torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Reference(GraphStage):
    """The quantized model in float: every quantize and dequantize explicit, weights as integers. Slow; for judging.

    ``qparams``: site name -> parameters. ``parameters``: those of sites that have their own, and all that was
    corrected: `convert` takes them in place of ranges. ``about.notes``: what was adjusted on the way.
    """

    module: fx.GraphModule
    signature: Signature
    qparams: Mapping[str, QParams]
    annotations: Annotations
    parameters: Parameters
    about: About = field(default_factory=About)

    def __repr__(self) -> str:
        return f"Reference({len(self.qparams)} sites; a simulation in float, slower than the float model)"


def convert(
    prepared: Prepared, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Ranges (default: what the prepared model has seen) become parameters, weights and biases integers.

    `Parameters` are taken as they are, and no data is needed; only a weight's scale that its bias does not fit grows.
    ``corrections``: integers and biases that `correct` found better than the nearest ones. Raises `CalibrationError`
    when a site has seen no data, `UnsupportedError` when an accumulator could overflow.
    """
    expect(prepared, Prepared, "convert")
    if isinstance(ranges, Parameters):
        prepared = equalized(prepared, ranges.corrected.equalization)
        corrections = corrections or given_corrections(prepared, ranges)
    corrections = corrections or Corrections(prepared.annotations)
    annotations = corrections.annotations
    if annotations.sites_text() != prepared.annotations.sites_text():
        raise CalibrationError("corrections", None, "they belong to another model",
                               remedy="convert what they were made for: correct(prepared, ranges, data)")  # fmt: skip
    given: Mapping[str, QParams] = {}
    if isinstance(ranges, Parameters):
        given = ranges.checked(annotations.sites, annotations.leaders)
        qparams = _given_qparams(annotations, given)
    else:
        given = _chosen(annotations, ranges)
        qparams = activation_qparams(prepared, ranges)
    remarks: list[str] = []
    qparams.update(weight_qparams(annotations, qparams, remarks, given, corrections.weights))
    module = copy_graph(annotations.module)
    _Rewriter(module, annotations, qparams, corrections).run()
    levels = {site: rounded.levels for site, rounded in corrections.weights.items()}
    corrected = Corrected(prepared.equalization, levels, corrections.biases)
    parameters = Parameters.of(annotations.sites, annotations.leaders, qparams, corrected)
    texts = {"reference": fx_text(module.graph), "parameters": parameters.without_weights().to_json()}
    if report := prepared.about.texts.get("corrections", "") + "".join(f"{step}\n" for step in corrections.steps):
        texts["corrections"] = report
    about = prepared.about.after(tuple(remarks), **texts)
    return Reference(module, prepared.signature, qparams, prepared.annotations, parameters, about)


def given_corrections(prepared: Prepared, given: Parameters) -> Corrections:
    """Biases and integers as a file has them. `CalibrationError` where they are not this model's."""
    corrected, entries = given.corrected, given.entries
    anchors = {region.anchor.name for region in prepared.annotations.regions}
    sites = {site.name: site for site in prepared.annotations.sites if site.role == "weight"}
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
    module = with_biases(prepared.annotations.module, biases)
    annotations = annotated(prepared, module)
    return Corrections(annotations, weights, corrected.biases)


def _chosen(annotations: Annotations, ranges: Ranges | None) -> Mapping[str, QParams]:
    """What calibration callbacks chose; `CalibrationError` if there are some and nobody asked them."""
    asked = {region.pattern.name for region in annotations.regions if region.pattern and region.pattern.calibration}
    if asked and (ranges is None or ranges.parameters is None):
        raise CalibrationError(
            f"pattern {min(asked)!r}", None, "its calibration callback was not asked",
            remedy="ranges = intaglio.Calibrator(prepared, data).calibrate()",
        )  # fmt: skip
    return (ranges.parameters if ranges else None) or {}


def activation_qparams(prepared: Prepared, ranges: Ranges | None) -> dict[str, QParams]:
    """Parameters of every activation site, shared ones included."""
    found = ranges.statistics if ranges else {name: o.statistics for name, o in prepared.observers.items()}
    if set(found) != set(prepared.observers):
        odd = sorted(set(found) ^ set(prepared.observers))
        raise CalibrationError("ranges", None, f"they belong to another model: {', '.join(odd[:5])} on one side only")
    if ranges and ranges.graph not in ("", prepared.fingerprint):
        raise CalibrationError("ranges", None, "they belong to another model, with other operators between these sites")
    fixed = (ranges.parameters if ranges else None) or {}
    unseen = [name for name in prepared.observers if not found[name].count and name not in fixed]
    if unseen:
        raise CalibrationError(
            ", ".join(unseen[:5]), None, f"{len(unseen)} of {len(found)} sites have seen no data",
            remedy="calibrate first: calibrate(prepared, data), or run prepared(batch); skip what no data reaches",
        )  # fmt: skip
    by_name = {site.name: site for site in prepared.annotations.sites}
    chosen = activation_ranges(prepared, found)
    result = {}
    for site in by_name.values():
        if site.role == "activation":
            leader = by_name[prepared.annotations.leaders[site.name]]
            if leader.name not in result:
                result[leader.name] = fixed.get(leader.name) or _activation(leader, chosen)
            result[site.name] = result[leader.name]
    levels = {site.name: result[site.name] for site in by_name.values() if site.role == "activation"}
    return levels | {site.name: _widened(site, levels) for site in by_name.values() if site.role == "shortcut"}


def _widened(site: Site, qparams: Mapping[str, QParams]) -> QParams:
    """Parameters of 16 bits, from those of the levels."""
    assert isinstance(site.spec, Derived)
    levels = qparams[site.spec.sources[0]]
    scale, zero_point = numerics.widen(levels.step, levels.zero)
    return QParams((scale,), (zero_point,), site.qmin, site.qmax)


def _given_qparams(annotations: Annotations, given: Mapping[str, QParams]) -> dict[str, QParams]:
    """Parameters of every activation site, shared and fixed ones included."""
    by_name = {site.name: site for site in annotations.sites}
    result = {}
    for site in annotations.sites:
        if site.role == "activation":
            leader = by_name[annotations.leaders[site.name]]
            spec = leader.spec
            result[site.name] = _fixed(leader, spec) if isinstance(spec, Fixed) else given[leader.name]
    return result | {site.name: _widened(site, result) for site in annotations.sites if site.role == "shortcut"}


def _fixed(site: Site, spec: Fixed) -> QParams:
    zeros = spec.zero_point if isinstance(spec.zero_point, tuple) else (spec.zero_point,)
    return QParams((spec.scale,) * len(zeros), zeros, site.qmin, site.qmax, site.axis)


def activation_ranges(prepared: Prepared, found: Mapping[str, Statistics]) -> dict[str, list[Range]]:
    """What the method of each site makes of its statistics: one range, or one per channel."""
    logits, result = softmax_operands(prepared.annotations.module), {}
    for site in prepared.annotations.sites:
        if site.name in found and isinstance(site.spec, Observed):
            method, statistics = method_of(site.spec.method), found[site.name]
            if site.value in logits:
                method = without_mask(method)
            if site.axis is None:
                result[site.name] = [method(statistics, site.qmin, site.qmax)]
            else:
                result[site.name] = channel_ranges(statistics, method, site.qmin, site.qmax)
    return result


def _activation(site: Site, chosen: Mapping[str, list[Range]]) -> QParams:
    if isinstance(site.spec, Fixed):
        return _fixed(site, site.spec)
    if isinstance(site.spec, Observed):
        try:
            symmetric = site.spec.symmetric
            ends = [(min(a, -b), max(b, -a)) if symmetric else (a, b) for a, b in chosen[site.name]]
            affines = [numerics.affine(low, high, site.qmin, site.qmax) for low, high in ends]
        except ValueError as error:
            raise CalibrationError(site.name, site.origin.operator, str(error)) from error
    else:
        raise UnsupportedError(site.name, site.origin.operator, f"an activation cannot be {site.spec}")
    scales, zeros = zip(*affines, strict=True)
    return QParams(scales, zeros, site.qmin, site.qmax, site.axis)


def weight_qparams(
    annotations: Annotations,
    qparams: Mapping[str, QParams],
    remarks: list[str],
    given: Mapping[str, QParams],
    chosen: Mapping[str, Rounded],
) -> dict[str, QParams]:
    """Scales of every weight, ``given`` or its own, made fit for the biases of all its call sites; then the biases'.

    ``chosen``: weights that are integers already.
    """
    result: dict[str, QParams] = {}
    for region in annotations.regions:
        if region.record.roles.weight is None:
            continue
        x_site, w_site, b_site = anchor_sites(annotations, region)
        weight, bias = parameters_of(annotations.module, region)
        step_x = qparams[x_site.name].step if b_site else 1.0
        own = given[w_site.name].scales if w_site.name in given else None
        plain, fitted = _fitted_scales(region, weight, bias if b_site else None, w_site, step_x, own)
        if (enlarged := fitted > plain).any():
            remarks.append(f"{w_site.name}: scales of {int(enlarged.sum())} channels enlarged to fit the bias")
        if w_site.name in result:
            fitted = np.maximum(fitted, np.array(result[w_site.name].scales, np.float32))
        if not np.isfinite(fitted).all():
            raise UnsupportedError(w_site.name, region.anchor.name, "weights or biases that are not finite",
                                   remedy=f"skip=[{region.anchor.meta['origin'].path!r}]")  # fmt: skip
        scales = tuple(map(float, fitted))
        result[w_site.name] = QParams(scales, (0,) * len(scales), w_site.qmin, w_site.qmax, w_site.axis)
    result.update({site: rounded.qparams for site, rounded in chosen.items()})
    for region in annotations.regions:
        if region.record.roles.weight is not None:
            x_site, w_site, b_site = anchor_sites(annotations, region)
            if b_site is not None:
                outputs = len(parameters_of(annotations.module, region)[1])
                result[b_site.name] = _bias_qparams(qparams[x_site.name], result[w_site.name], outputs)
    return result


def _fitted_scales(
    region: Region,
    weight: np.ndarray,
    bias: np.ndarray | None,
    site: Site,
    scale_x: float,
    given: tuple[float, ...] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Scales of a weight as its values ask for them, and as the bias does: one, or one per channel of its own axis.

    A transposed convolution's axis holds the outputs of one group, so its groups share scales. Channels of zeros do
    not count as enlarged.
    """
    rows = per_output(region, weight)
    absmax = np.abs(rows.reshape(len(rows), -1)).max(1)
    count = weight.shape[site.axis] if isinstance(site.axis, int) else 1
    sharing = rows.reshape(len(rows) // count, count, -1).swapaxes(0, 1).reshape(count, -1)
    plain = channel_scales(sharing, site.record, site.group) if given is None else np.array(given, np.float32)
    if len(plain) != count:
        raise CalibrationError(f"parameters of {site.name}", None, f"{len(plain)} scales; the weight has {count}")
    fitted = numerics.fit_weight_scale(each_output(plain, len(rows)), absmax, bias, scale_x)
    fitted = fitted.reshape(-1, count).max(0)
    return np.where(np.abs(sharing).max(1, initial=0) == 0, fitted, plain), fitted


def per_output(region: Chain, weight: np.ndarray) -> np.ndarray:
    """A weight with all its output channels first, group after group."""
    if not region.record.roles.outputs:
        return weight
    return outputs_first(weight, int(call_of(region.anchor, region.record).arguments.get("groups", 1)))


def each_output(scales: Sequence[float] | np.ndarray, outputs: int) -> np.ndarray:
    """One scale per output channel: of one for all, or of those every group shares."""
    return np.tile(np.asarray(scales, np.float32), outputs // len(scales))


def _bias_qparams(x: QParams, w: QParams, outputs: int) -> QParams:
    """One for all, or one per output."""
    units = w.scales if w.axis is None else each_output(w.scales, outputs)
    scales = tuple(map(float, numerics.accumulator_scale(x.step, units)))
    return QParams(scales, (0,) * len(scales), *INT32, None if w.axis is None else 0)


def anchor_sites(annotations: Annotations, region: Region) -> tuple[Site, Site, Site | None]:
    """Sites of an anchor's activation, weight and bias."""
    record, values = region.record, operands(region.anchor)
    x, weight = values[record.roles.x[0]], values[record.roles.weight]
    by_value = annotations.by_value
    return by_value[x.name, "activation"], by_value[weight.name, "weight"], by_value.get((region.anchor.name, "bias"))


def parameters_of(module: fx.GraphModule, region: Region) -> tuple[np.ndarray, np.ndarray | None]:
    roles, values = region.record.roles, operands(region.anchor)
    weight, bias = values[roles.weight], values[roles.bias]
    arrays = [None if node is None else getattr(module, node.target).detach().numpy() for node in (weight, bias)]
    return arrays[0], arrays[1]


def quantizing(q: QParams, dtype: DType) -> tuple[Any, Any]:
    """Quantize and dequantize, per tensor or per channel; torch's own round to integers only."""
    ops = float8() if dtype in FLOAT8 else decomposed()
    if q.axis is None:
        return ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default
    return ops.quantize_per_channel.default, ops.dequantize_per_channel.default


class _Rewriter:
    """Puts quantize and dequantize around the regions of a graph: one quantize a value, one dequantize a reader."""

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
            if site.role == "activation":
                self._activation(site, readers, site.value in produced)
        for region in self.annotations.regions:
            if region.record.roles.weight is not None:
                self._anchor(region)
        self.graph.eliminate_dead_code()
        drop_unused_constants(self.module)
        self.graph.lint()
        self.module.recompile()

    def _readers(self) -> dict[str, list[fx.Node]]:
        """Value name -> nodes inside regions that read it as levels."""
        readers: dict[str, list[fx.Node]] = {}
        for region in self.annotations.regions:
            read = region.activations()
            for node in region.nodes:
                for value in (value for value in node.all_input_nodes if value in read):
                    readers.setdefault(value.name, []).append(self.nodes[node.name])
        return readers

    def _activation(self, site: Site, readers: Mapping[str, list[fx.Node]], produced: bool) -> None:
        """Readers inside regions get a dequantize each; the rest one together, or the float value if there is one. A
        shortcut is quantized to 16 bits first, which some of its readers take."""
        node, q = self.nodes[site.value], self.qparams[site.name]
        source, own = node, readers.get(site.value, [])
        others = [user for user in node.users if user not in own]
        if (wide := self.by_value.get((site.value, "shortcut"))) is not None:
            source = self._shortcut(node, wide)
            own = [user for user in own if user in node.users]
        quantize, dequantize = quantizing(q, site.dtype)
        parameters = self._parameters(site.name, q, site.dtype)
        with self.graph.inserting_after(source):
            levels = self.graph.call_function(quantize, (source, *parameters))
        levels.meta = self._meta(node, site.dtype, q)
        for group in [[user] for user in own] + ([others] if others and produced else []):
            with self.graph.inserting_before(group[0] if len(group) == 1 else levels.next):
                real = self.graph.call_function(dequantize, (levels, *parameters))
            real.meta = {"type": node.meta["type"], "origin": origin(group[0] if len(group) == 1 else node)}
            for user in group:
                user.replace_input_with(node, real)

    def _shortcut(self, node: fx.Node, site: Site) -> fx.Node:
        """16 bits of a value, in front of the readers that take them; returned as the float that levels are made of."""
        q = self.qparams[site.name]
        quantize, dequantize = quantizing(q, site.dtype)
        parameters = self._parameters(site.name, q, site.dtype)
        with self.graph.inserting_after(node):
            wide = self.graph.call_function(quantize, (node, *parameters))
        wide.meta = self._meta(node, site.dtype, q)
        for user in self._wide_readers(node):
            with self.graph.inserting_before(user):
                real = self.graph.call_function(dequantize, (wide, *parameters))
            real.meta = {"type": node.meta["type"], "origin": origin(user)}
            user.replace_input_with(node, real)
        with self.graph.inserting_after(wide):
            source = self.graph.call_function(dequantize, (wide, *parameters))
        source.meta = {"type": node.meta["type"], "origin": origin(node)}
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

    def _meta(self, node: fx.Node, dtype: DType, q: QParams) -> dict[str, Any]:
        return {"type": TensorType(node.meta["type"].shape, dtype, q), "origin": origin(node)}

    def _anchor(self, region: Region) -> None:
        """Integer weight and bias, each behind a dequantize of this call's own."""
        anchor, roles = self.nodes[region.anchor.name], region.record.roles
        x_site, w_site, b_site = anchor_sites(self.annotations, region)
        weight, bias = parameters_of(self.annotations.module, region)
        w, x, kind = self.qparams[w_site.name], self.qparams[x_site.name], w_site.record
        grid = weight_grid(weight, np.array(w.scales), kind, w_site.group, roles.outputs)
        names = [operands(anchor)[i] for i in (roles.weight, roles.bias)]
        if kind.floating:
            self._constant(anchor, names[0], w_site, grid.clipped(weight), w)
            return
        chosen = self.chosen.get(w_site.name)
        levels = grid.stored(grid.nearest(weight)) if chosen is None else chosen.levels
        self._constant(anchor, names[0], w_site, levels, w)
        if not x_site.native:
            return
        rows = per_output(region, levels)
        steps = np.zeros(len(rows), np.int32)
        if bias is not None:
            steps = numerics.bias_steps(bias, x.step, each_output(w.scales, len(rows)))
        self._prove(region, rows, steps, x)
        if b_site is not None:
            self._constant(anchor, names[1], b_site, steps, self.qparams[b_site.name])

    def _prove(self, region: Region, levels: np.ndarray, steps: np.ndarray, x: QParams) -> None:
        groups = arguments(region.anchor).get("groups", 1)
        bound = numerics.accumulator_bound(levels, steps, x.qmin, x.qmax, x.zeros, groups).max(initial=0)
        if bound >= 2**31:
            where = origin(region.anchor)
            raise UnsupportedError(
                where.path, where.operator, f"an int32 accumulator could reach {bound}",
                remedy=f"leave it in float: skip=[{where.path!r}]", source=where.source or None,
            )  # fmt: skip

    def _constant(self, anchor: fx.Node, old: fx.Node, site: Site, array: np.ndarray, q: QParams) -> None:
        packing = site.record.packing(site.group) if site.role == "weight" else None
        source = self._get(site.name, array, TensorType(array.shape, site.dtype, q, packing))
        with self.graph.inserting_before(anchor):
            dequantize = quantizing(q, site.dtype)[1]
            real = self.graph.call_function(dequantize, (source, *self._parameters(site.name, q, site.dtype)))
        real.meta = {"type": TensorType(array.shape, DType.F32), "origin": origin(anchor)}
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
            name = "".join(c if c.isalnum() else "_" for c in key)
            while hasattr(self.module, name):
                name += "_"
            tensor = torch.from_numpy(np.ascontiguousarray(array)).to(TORCH_DTYPES[kind.dtype])
            self.module.register_buffer(name, tensor)
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.integers[key] = self.graph.get_attr(name)
            self.integers[key].meta = {"type": kind, "path": key}
        return self.integers[key]

