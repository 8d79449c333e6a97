"""Insertion of quantize and dequantize around annotated regions, and of integer constants for weights and biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.graph_passes import drop_unused_constants
from intaglio.fxgraph.node_info import TAG_KEY, info, inherit_info, known_type, origin, overlay_info, set_info
from intaglio.fxgraph.nodes import arguments, layer_operands
from intaglio.fxgraph.reader_aliases import is_reader_alias
from intaglio.ir import DType, QParams, TensorType
from intaglio.ir.names import sanitized
from intaglio.ops.dynamic_quant import per_token_qparams
from intaglio.quant.annotate.embedding_tables import quantize_table
from intaglio.quant.annotate.find_regions import find_shortcuts, reads_shortcut
from intaglio.quant.annotate.per_token import insert_dynamic_qdq
from intaglio.quant.annotate.recurrent_sites import quantize_recurrent
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.correct.corrections import Corrections
from intaglio.quant.qdq.attention_reference import PROBABILITY_QPARAMS, decompose_attention
from intaglio.quant.qdq.float8 import float8
from intaglio.quant.qdq.qparams import (
    anchor_sites,
    parameters_of,
    scale_per_output,
    weight_outputs_first,
)
from intaglio.quant.qdq.weight_grid import weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import FLOAT8
from intaglio.signature import TORCH_DTYPES
from intaglio.torch_private import quantized_decomposed


def quantizing(q: QParams, dtype: DType) -> tuple[Any, Any]:
    """Return the quantize and dequantize operators for these parameters, per tensor or per channel.

    Float8 types use the operators of `float8`, because PyTorch's round to integers.
    """
    ops = float8() if dtype in FLOAT8 else quantized_decomposed()
    if q.axis is None:
        return ops.quantize_per_tensor.default, ops.dequantize_per_tensor.default
    return ops.quantize_per_channel.default, ops.dequantize_per_channel.default


class Rewriter:
    """Inserts quantize and dequantize around the regions of a graph: one quantize per value, one dequantize per reader.

    Each quantize, and each dequantize of a constant, records the site that its parameters belong to.
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
        """Rewrite the graph in place: first the activations, then the regions and embedding tables."""
        readers = self._readers()
        produced = {region.root.name for region in self.annotations.regions if not region.unrounded}
        for site in self.annotations.sites:
            if site.role == Role.ACTIVATION:
                everyone = site.value in produced or site.value in self.annotations.outputs
                self._activation(site, readers, everyone)
        insert_dynamic_qdq(self.graph, self.annotations)
        for region in self.annotations.regions:
            if region.record.roles.weight is not None:
                self._rewrite_anchor(region)
            elif region.record.recurrent:
                quantize_recurrent(self.nodes[region.anchor.name], self.by_value, self.qparams, self._get)
            elif region.record.is_attention:
                self._attention(self.nodes[region.anchor.name])
        for table in (table for table in self.annotations.tables if table.is_quantized):
            quantize_table(self.nodes[table.node.name], self._get)
        for node in filter(is_reader_alias, list(self.graph.nodes)):
            node.replace_all_uses_with(node.args[0])
        self.graph.eliminate_dead_code()
        drop_unused_constants(self.module)
        self.graph.lint()
        self.module.recompile()

    def dequantized(self, site: str) -> np.ndarray:
        """Return the values of a quantized weight, f32, with one scale or one for each output channel."""
        values, q = getattr(self.module, str(self.integers[site].target)), self.qparams[site]
        scales = torch.tensor(q.scales, dtype=torch.float32)
        if q.axis is not None:
            scales = scales.reshape([-1 if axis == q.axis else 1 for axis in range(values.dim())])
        found: np.ndarray = (values.to(torch.float32) * scales).numpy()
        return found

    def _readers(self) -> dict[str, list[fx.Node]]:
        """Return by value name the nodes that read it quantized: those inside regions and those an annotator chose."""
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

    def _activation(self, site: Site, readers: Mapping[str, list[fx.Node]], for_all_readers: bool) -> None:
        """Quantize the value of a site and dequantize it for its readers.

        Each reader inside a region gets a dequantize of its own. The other readers share one if the flag is set, and
        read the float value otherwise. A shortcut is first quantized to 16 bits, which some of its readers take.
        """
        node, q = self.nodes[site.value], self.qparams[site.name]
        source, own = node, readers.get(site.value, [])
        others = [user for user in node.users if user not in own]
        if (wide := self.by_value.get((site.value, Role.SHORTCUT))) is not None:
            source = self._shortcut(node, wide)
            own = [user for user in own if user in node.users]
        quantize, dequantize = quantizing(q, site.dtype)
        parameters = self._parameters(site.name, q, site.dtype)
        with self.graph.inserting_after(source):
            quantized = self.graph.call_function(quantize, (source, *parameters))
        self._describe(quantized, node, site, q)
        for group in [[user] for user in own] + ([others] if others and for_all_readers else []):
            with self.graph.inserting_before(group[0] if len(group) == 1 else quantized.next):
                real = self.graph.call_function(dequantize, (quantized, *parameters))
            inherit_info(real, group[0] if len(group) == 1 else node, type=info(node).type)
            for user in group:
                user.replace_input_with(node, real)

    def _shortcut(self, node: fx.Node, site: Site) -> fx.Node:
        """Quantize a value to 16 bits, dequantize it for the readers that take 16 bits, and return the float value that
        the u8 quantize reads."""
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
        """Record type, origin and site on the quantize of a node's value."""
        kind = TensorType(known_type(node).shape, site.dtype, q)
        inherit_info(made, node, type=kind, site=site.name)

    def _rewrite_anchor(self, region: Region) -> None:
        """Replace weight and bias of a layer by integers, each with a dequantize for this call alone."""
        anchor, roles = self.nodes[region.anchor.name], region.record.roles
        x_site, w_site, b_site = anchor_sites(self.annotations, region)
        weight, bias = parameters_of(self.annotations.module, region)
        w, kind, chosen = self.qparams[w_site.name], w_site.record, self.chosen.get(w_site.name)
        read = layer_operands(anchor)
        if chosen is not None and not kind.floating:
            quantized = chosen.values
        else:
            grid = weight_grid(weight, np.array(w.scales), kind, w_site.group, roles.outputs)
            if kind.floating:
                self._constant(anchor, read.weight, w_site, grid.clipped(weight), w)
                return
            quantized = grid.as_s8(grid.nearest(weight))
        self._constant(anchor, read.weight, w_site, quantized, w)
        if region.dynamic:  # the bias stays float: the scale of the accumulator is not known yet
            self._prove(region, quantized, np.zeros(len(quantized), np.int32), per_token_qparams(x_site.name))
        if region.dynamic or not x_site.native:
            return
        x, rows = self.qparams[x_site.name], weight_outputs_first(region, quantized)
        steps = np.zeros(len(rows), np.int32)
        if bias is not None:
            steps = _bias_steps(anchor, bias, x, scale_per_output(w.scales, len(rows)))
        self._prove(region, rows, steps, x)
        if b_site is not None:
            self._constant(anchor, read.bias, b_site, steps, self.qparams[b_site.name])

    def _attention(self, node: fx.Node) -> None:
        result = decompose_attention(node, *quantizing(PROBABILITY_QPARAMS, DType.U8))
        overlay_info(result, node, replaces=node.name)
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _prove(self, region: Region, quantized: np.ndarray, steps: np.ndarray, x: QParams) -> None:
        groups = arguments(region.anchor).get("groups", 1)
        bound = numerics.accumulator_bound(quantized, steps, x.qmin, x.qmax, x.zeros, groups).max(initial=0)
        if bound >= 2**31:
            where = origin(region.anchor)
            raise UnsupportedError(
                where.path,
                where.operator,
                f"its int32 accumulator could overflow, as it can reach {bound}",
                remedy=f"leave it in float: skip=[{where.path!r}]",
                source=where.source or None,
            )

    def _constant(self, anchor: fx.Node, old: fx.Node, site: Site, array: np.ndarray, q: QParams) -> None:
        packing = site.record.packing(site.group) if site.role == Role.WEIGHT else None
        source = self._get(site.name, array, TensorType(array.shape, site.dtype, q, packing))
        source.meta |= {TAG_KEY: old.meta[TAG_KEY]} if TAG_KEY in old.meta else {}
        with self.graph.inserting_before(anchor):
            dequantize = quantizing(q, site.dtype)[1]
            real = self.graph.call_function(dequantize, (source, *self._parameters(site.name, q, site.dtype)))
        inherit_info(real, anchor, type=TensorType(array.shape, DType.F32), site=site.name)
        anchor.replace_input_with(old, real)

    def _parameters(self, site: str, q: QParams, dtype: DType) -> tuple[Any, ...]:
        """Return the arguments of quantize and dequantize after the tensor."""
        if q.axis is None:
            return q.step, q.zero, q.qmin, q.qmax, TORCH_DTYPES[dtype]
        shape = (len(q.scales),)
        scales = self._get(f"{site}:scale", np.array(q.scales, np.float32), TensorType(shape, DType.F32))
        zeros = self._get(f"{site}:zero_point", np.array(q.zeros, np.int64), TensorType(shape, DType.I64))
        return scales, zeros, q.axis, q.qmin, q.qmax, TORCH_DTYPES[dtype]

    def _get(self, key: str, array: np.ndarray, kind: TensorType) -> fx.Node:
        """Return the constant of a key, added on first use: a weight that several calls read is stored once."""
        if key not in self.integers:
            tensor = torch.from_numpy(np.ascontiguousarray(array)).to(TORCH_DTYPES[kind.dtype])
            name = add_constant(self.module, sanitized(key), tensor)
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.integers[key] = self.graph.get_attr(name)
            set_info(self.integers[key], type=kind, path=key)
        return self.integers[key]


def _bias_steps(anchor: fx.Node, bias: np.ndarray, x: QParams, scale_w: np.ndarray) -> np.ndarray:
    """Return the bias in steps of the accumulator.

    Raises:
        CalibrationError: A corrected bias does not fit.
    """
    try:
        return numerics.quantize_bias(bias, x.step, scale_w)
    except OverflowError as error:
        where = origin(anchor)
        raise CalibrationError(
            where.path,
            where.operator,
            f"{error}, with the scales {x.step:.3g} of the input and {scale_w.min():.3g} of the weight",
            remedy="calibrate again, without these corrections or parameters",
        ) from error
