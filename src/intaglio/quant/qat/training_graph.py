"""Construction of the training graph: the Q/DQ graph with fake quantization in place of quantize and dequantize."""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import info, known_type
from intaglio.fxgraph.nodes import arguments, layer_operands, operator
from intaglio.fxgraph.overloads import SDPA_TARGET
from intaglio.fxgraph.passes.batch_norm_folding import FOLDABLE
from intaglio.ir import QParams, Shape
from intaglio.ir.names import sanitized
from intaglio.quant.annotate.per_token import DEQUANTIZE_ROWS_TARGET, QUANTIZE_ROWS_TARGET
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.sites import Derived, Fixed, Shared, Site
from intaglio.quant.correct.corrections import Corrections
from intaglio.quant.qat.eval_graph import BatchNormMark, DropoutMark, marks_of
from intaglio.quant.qat.fake_quantize import (
    FakeQuantize,
    FakeQuantizeMode,
    FakeQuantizeWeight,
    ModeHolder,
    fake_quantize_bias,
    fake_quantize_fixed,
    fake_quantize_per_token,
    fake_quantize_shortcut,
)
from intaglio.quant.qat.parameter_tree import ParameterTree
from intaglio.quant.qat.train_layers import DropoutMask, attention_with_dropout, normalized
from intaglio.quant.qdq.qdq_rewriter import Rewriter
from intaglio.quant.qdq.qparams import WeightScaleRule, anchor_sites, fixed_qparams, shortcut_qparams, weight_qparams
from intaglio.quant.recipes.choices import Role
from intaglio.torch_private import buffers_of

NORMED = (*FOLDABLE, "aten.addcmul.default")
"""Operators that a batch norm can be folded into."""
QUANTIZE_PREFIX, DEQUANTIZE_PREFIX = "quantized_decomposed.quantize_", "quantized_decomposed.dequantize_"


class TrainingGraph:
    """Copies the Q/DQ graph of the annotations with fake-quantize modules, which it places in the tree.

    The inputs of ``graph`` are those of the model, then the constants ``names``, then the folding factor of every batch
    norm.
    """

    def __init__(self, annotations: Annotations, tree: ParameterTree, mode: FakeQuantizeMode) -> None:
        self.annotations, self.tree, self.mode = annotations, tree, mode
        self.sites = {site.name: site for site in annotations.sites}
        self.anchors = {r.anchor.name: r for r in annotations.regions if r.record.roles.weight is not None}
        self.source = _quantized(annotations)
        self.quantizers = self._modules()
        self.names = self._constants()
        self.graph = fx.Graph()
        placeholders = [node for node in self.source.graph.nodes if node.op == "placeholder"]
        self.env: dict[fx.Node, Any] = {node: self.graph.placeholder(node.name) for node in placeholders}
        self.constants = {name: self.graph.placeholder(f"constant_{name}") for name in self.names}
        self.factors = {path: self.graph.placeholder(f"factor{i}") for i, path in enumerate(tree.norms)}
        self.forms = {node.name: [new] for node, new in self.env.items()}
        self.in_attention = self._dropouts_inside()
        self.switch: str | None = None
        self.dropouts: dict[tuple[str, float, tuple[int, ...]], str] = {}

    def write(self) -> fx.Graph:
        """Build the graph and return it."""
        for node in self.source.graph.nodes:
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.env.__getitem__))
            elif node.op == "get_attr":
                self.env[node] = self.constants.get(str(node.target))
            elif node.op == "call_function":
                self.env[node] = self._call(node)
                self.forms.setdefault(node.name, []).insert(0, self.env[node])
        for node, mark in marks_of(self.source):
            if isinstance(mark, DropoutMark) and not mark.in_attention:
                self._drop(node, mark)
        self.graph.lint()
        return self.graph

    def _modules(self) -> dict[str, str]:
        """Place fake-quantize modules for weights and for activations with parameters; return their paths by site."""
        calls, found = {node.name: node for node in self.annotations.module.graph.nodes}, dict[str, str]()
        for site in self.annotations.sites:
            if site.role == Role.ACTIVATION and self.annotations.leaders[site.name] == site.name:
                shape = known_type(calls[site.value]).shape
                channels = _channels(shape, site)
                found[site.name] = self._place(FakeQuantize(site, channels, len(shape), self.mode))
        for region in self.anchors.values():
            site = anchor_sites(self.annotations, region)[1]
            if site.name not in found:
                name, own = str(layer_operands(region.anchor).weight.target), WeightScaleRule.of(region, site)
                weight = getattr(self.annotations.module, name)
                found[site.name] = self._place(FakeQuantizeWeight(site, name, weight, own, self.mode))
        return found

    def _place(self, module: FakeQuantize | FakeQuantizeWeight) -> str:
        return self.tree.place_quantizer(sanitized(module.site.name), module)

    def _constants(self) -> list[str]:
        """Return the names of the constants that the graph reads, rounded or not."""
        names = [str(node.target) for node in self.source.graph.nodes if node.op == "get_attr"]
        names = [name for name in names if name in buffers_of(self.annotations.module)]
        for region in self.anchors.values():
            _, weight, bias = layer_operands(region.anchor)
            names += [str(constant.target) for constant in (weight, bias) if constant is not None]
        return list(dict.fromkeys(names))

    def _dropouts_inside(self) -> dict[str, DropoutMark]:
        """Return dropout marks by the name of the product that reads the dropped probabilities.

        Only quantized attention is decomposed, in graph order; float attention applies its dropout itself.
        """
        left = {node.name for node in self.source.graph.nodes}
        written = [n for n in self.annotations.module.graph.nodes if operator(n) == SDPA_TARGET and n.name not in left]
        products: dict[int, str] = {}
        for node in self.source.graph.nodes:
            if operator(node) != "aten.matmul.default" or info(node).composite is None:
                continue
            reads = node.args[0]
            dequantized = isinstance(reads, fx.Node) and operator(reads).startswith(DEQUANTIZE_PREFIX)
            if dequantized and info(reads.args[0]).site is None:
                products[id(info(node).composite)] = node.name
        found = dict[str, DropoutMark]()
        for attention, product in zip(written, products.values(), strict=True):
            for mark in info(attention).marks:
                if isinstance(mark, DropoutMark) and mark.in_attention:
                    found[product] = mark
        return found

    def _call(self, node: fx.Node) -> Any:
        """Copy one operator with its batch norm and dropout, or replace it by fake quantization."""
        name, source = operator(node), node.args[0] if node.args else None
        if name.startswith(QUANTIZE_PREFIX):
            return self._rounded(node, self.env[source])
        if name.startswith(DEQUANTIZE_PREFIX):
            site = info(node).site
            return self.env[source] if site is None else self._constant(node, self.sites[site])
        if name == QUANTIZE_ROWS_TARGET:
            made = self.graph.call_function(fake_quantize_per_token, (self._switch(), self.env[source], node.args[1]))
            self.forms[node.args[0].name].append(made)
            return made
        if name == DEQUANTIZE_ROWS_TARGET or (node.target is getitem and operator(source) == QUANTIZE_ROWS_TARGET):
            return self.env[source]
        inside = [m for m in info(node).marks if isinstance(m, DropoutMark) and m.in_attention]
        if name == SDPA_TARGET and inside:
            given = arguments(node)
            mask = self._module(DropoutMask(inside[0].p, ()), inside[0])
            values = [fx.map_arg(given[key], self.env.__getitem__) for key in ("query", "key", "value", "attn_mask")]
            rest = (given["is_causal"], given["scale"], given["enable_gqa"])
            return self.graph.call_function(attention_with_dropout, (self.graph.get_attr(mask), *values, *rest))
        made = self.graph.node_copy(node, self.env.__getitem__)
        made.meta = {}
        if node.name in self.in_attention:
            mark = self.in_attention[node.name]
            with self.graph.inserting_before(made):
                dropped = self.graph.call_module(
                    self._module(DropoutMask(mark.p, mark.broadcast_axes), mark), (made.args[0],)
                )
                made.args = (self.graph.call_function(getitem, (dropped, 0)), *made.args[1:])
        for mark in info(node).marks:
            made = self._normalized(node, made, mark) if isinstance(mark, BatchNormMark) else made
        return made

    def _normalized(self, node: fx.Node, made: fx.Node, mark: BatchNormMark) -> fx.Node:
        assert operator(node) in NORMED, f"{node}: every batch norm is folded, or has an operator of its own"
        paths = [None if name is None else self.tree.paths[name] for name in mark.constants]
        paths.append(self.tree.counters.get(mark.path))
        values = [None if path is None else self.graph.get_attr(path) for path in paths]
        norm = self.graph.get_attr(mark.path)
        return self.graph.call_function(normalized, (norm, made, self.factors[mark.path], *values))

    def _rounded(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """Insert fake quantization for a quantize, and record the result as another form of the site's value."""
        name = info(node).site
        if name is None:
            return self.graph.call_function(fake_quantize_fixed, (self._switch(), x, *node.args[1:5]))
        site = self.sites[name]
        if isinstance(site.spec, Derived):
            of = self.sites[site.spec.sources[0]]
            module = self.graph.get_attr(self.quantizers[self.annotations.leaders[of.name]])
            made = self.graph.call_function(fake_quantize_shortcut, (x, module, site.qmin, site.qmax))
        else:
            counts = not isinstance(site.spec, Shared) or site.spec.observed
            path = self.quantizers[self.annotations.leaders[site.name]]
            made = self.graph.call_module(path, (x, counts))
        self.forms.setdefault(site.value, []).append(made)
        return made

    def _constant(self, node: fx.Node, site: Site) -> fx.Node:
        """Insert fake quantization of a weight or bias."""
        if site.role == Role.WEIGHT:
            name = str(self.tree.root.get_submodule(self.quantizers[site.name]).constant)
            return self.graph.call_module(self.quantizers[site.name], (self.constants[name],))
        region = self.anchors[site.value]
        x_site, w_site, _ = anchor_sites(self.annotations, region)
        modules = [self.quantizers[self.annotations.leaders[x_site.name]], self.quantizers[w_site.name]]
        bias = layer_operands(region.anchor).bias
        assert bias is not None  # a bias site exists only for a bias
        return self.graph.call_function(
            fake_quantize_bias, (self.constants[str(bias.target)], *map(self.graph.get_attr, modules))
        )

    def _switch(self) -> fx.Node:
        if self.switch is None:
            self.switch = self.tree.place_quantizer("switch", ModeHolder(self.mode))
        return self.graph.get_attr(self.switch)

    def _module(self, module: DropoutMask, mark: DropoutMark) -> str:
        """Return the path of a dropout's module; all calls of one module in the float model share it."""
        path = mark.path.partition("@")[0]
        key = path, mark.p, mark.broadcast_axes
        if key not in self.dropouts:
            path = f"{path}.dropout".lstrip(".") if not path or _taken(self.tree.root, path) else path
            while _taken(self.tree.root, path):
                path += "_"
            self.tree.register(path, module)
            self.dropouts[key] = path
        return self.dropouts[key]

    def _drop(self, node: fx.Node, mark: DropoutMark) -> None:
        """Let the readers of a value, in all its forms, read it with dropout."""
        forms = list(dict.fromkeys(self.forms[node.name]))
        users = [user for form in forms for user in form.users if user not in forms]
        if mark.readers:
            allowed = {self.env[n] for n in self.source.graph.nodes if n.name in mark.readers and n in self.env}
            if len(allowed) != len(mark.readers):
                problem = (
                    "a value is read with and without this dropout, and one of the operators that read it was replaced"
                )
                raise UnsupportedError(mark.path, None, problem, remedy="capture the model without this dropout")
            users = [user for user in users if user in allowed]
        users = [user for user in users if user.target is not torch.ops.aten.sym_size.int]
        read = [form for form in forms if any(user in form.users for user in users)]
        with self.graph.inserting_after(forms[-1]):
            call = self.graph.call_module(self._module(DropoutMask(mark.p, mark.broadcast_axes), mark), tuple(read))
        for place, form in enumerate(read):
            with self.graph.inserting_after(call):
                value = self.graph.call_function(getitem, (call, place))
            for user in [user for user in users if user in form.users]:
                user.replace_input_with(form, value)


def _taken(root: nn.Module, path: str) -> bool:
    """Return whether the root already has an attribute at a dotted path."""
    module: Any = root
    for step in path.split("."):
        if not hasattr(module, step):
            return False
        module = getattr(module, step)
    return True


def _channels(shape: Shape, site: Site) -> int:
    """Return the number of scales of an activation site: one, or one per channel. The number of channels is static."""
    size = shape[site.axis] if isinstance(site.axis, int) else 1
    assert isinstance(size, int)
    return size


def _quantized(annotations: Annotations) -> fx.GraphModule:
    """Return the Q/DQ graph with placeholder parameters; only the positions of its operators are used."""
    by_name, qparams = {site.name: site for site in annotations.sites}, dict[str, QParams]()
    nodes = {node.name: node for node in annotations.module.graph.nodes}
    for site in annotations.sites:
        if site.role == Role.ACTIVATION:
            leader = by_name[annotations.leaders[site.name]]
            channels = _channels(known_type(nodes[site.value]).shape, site)
            zero = min(max(0, site.qmin), site.qmax)
            plain = QParams((1.0,) * channels, (zero,) * channels, site.qmin, site.qmax, site.axis)
            qparams[site.name] = fixed_qparams(leader, leader.spec) if isinstance(leader.spec, Fixed) else plain
    qparams.update(
        {site.name: shortcut_qparams(site, qparams) for site in annotations.sites if site.role == Role.SHORTCUT}
    )
    qparams.update(weight_qparams(annotations, qparams, [], {}, {}))
    module = copy_graph(annotations.module)
    Rewriter(module, annotations, qparams, Corrections(annotations)).run()
    return module
