"""A quantized model against its float model, operator by operator: which one loses the accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intaglio import eager
from intaglio.calls import bind, dims_of
from intaglio.capture import Captured, capture, run
from intaglio.capture.captured import GraphStage
from intaglio.capture.nodes import is_constant, operator, origin, tensor_type
from intaglio.errors import InputError, IntaglioError
from intaglio.ir import DType, QParams
from intaglio.lower import Lowered, requantize
from intaglio.lower.integer import plain_name
from intaglio.quant import (
    Binder,
    Parameters,
    Prepared,
    Quantizer,
    Reference,
    Shared,
    Site,
    binder_for,
    convert,
    peek,
    prepare,
)
from intaglio.quant.convert import decomposed
from intaglio.quant.float8 import float8
from intaglio.quant.passes import PTQ_PASSES
from intaglio.quant.prepare import copy_graph
from intaglio.runtime import QuantizedModel
from intaglio.tune.comparison import Comparison, Row, Use


def compare(
    exact: nn.Module | Captured | Prepared, quantized: Any, data: Any, *, samples: int | None = None
) -> Comparison:
    """How much of the float model's values is left, over the same batches for both.

    ``quantized``: a `Reference`, a model of the eager door that always runs the same way, or an int8 model, saved or
    not, whose reference is made again from the float model and the parameters it keeps. Where that gives another
    integer graph, as after corrections of weights, and for other stages there are results only, and no row per
    operator. ``data``: an iterable of batches, as for `calibrate`, read once; ``samples`` stops after that many. Raises
    `InputError` when both are not of one model.
    """
    first, items = peek(data)
    stage = exact if isinstance(exact, GraphStage) else _captured(exact, quantized, first)
    binder, total, seen = Binder.of(stage.signature), _Totals(), 0
    reference = _reference(stage, quantized)
    pair = _Pair(_float_graph(stage), reference) if reference is not None else None
    for item in items:
        args, kwargs = binder(item)
        leaves = bind(stage.signature, args, kwargs)
        dims_of(stage.signature, leaves)
        expected, found = stage(*_copied(args), **_copied(kwargs)), quantized(*_copied(args), **_copied(kwargs))
        for index, both in enumerate(zip(_tensors(expected), _tensors(found), strict=True)):
            total.add(f"result {index}", *both)
        if pair is not None:
            pair.add(total, leaves)
        seen += leaves[0].shape[0] if leaves and leaves[0].dim() else 1
        if samples is not None and seen >= samples:
            break
    results = tuple(total.decibels(key) for key in total.signal if key.startswith("result "))
    return Comparison(pair.rows(total) if pair else (), results, seen)


def _captured(model: nn.Module, quantized: Any, item: Any) -> Captured:
    """As the quantized model saw it, or by its first call."""
    if eager.is_session(quantized):
        return eager.captured(quantized, model)
    args, kwargs = binder_for(model)(item)
    return capture(model, args, example_kwargs=kwargs)


def _reference(stage: GraphStage, quantized: Any) -> Reference | None:
    """The reference behind an int8 model, if it can be had."""
    if isinstance(quantized, Reference):
        return quantized
    return eager.rewrite(quantized) if eager.is_session(quantized) else _made_again(stage, quantized)


def _made_again(stage: GraphStage, quantized: Any) -> Reference | None:
    """From the float model and the texts that the int8 model keeps."""
    texts = quantized.about.texts if isinstance(quantized, (Lowered, QuantizedModel)) else {}
    if not isinstance(stage, (Captured, Prepared)) or not {"quantizer", "parameters", "integer"} <= texts.keys():
        return None
    try:
        prepared = stage if isinstance(stage, Prepared) else prepare(stage, Quantizer.from_toml(texts["quantizer"]))
        reference = convert(prepared, Parameters.from_json(texts["parameters"]))
    except IntaglioError:
        return None
    if requantize(reference).text() != texts["integer"]:
        return None
    return _with_integers(reference, quantized.graph.constants)


def _with_integers(reference: Reference, constants: Mapping[str, np.ndarray]) -> Reference:
    """The weights as the int8 model has them: corrections may have rounded them otherwise than to nearest."""
    module = copy_graph(reference.module)
    for name, tensor in module._buffers.items():
        found = constants.get(plain_name(name))
        if tensor is not None and tensor.dtype is torch.int8 and found is not None and found.shape == tensor.shape:
            module._buffers[name] = torch.from_numpy(np.array(found))
    return replace(reference, module=module)


def _float_graph(stage: GraphStage) -> fx.GraphModule:
    """As `prepare` leaves it: its nodes have the names they have in a reference."""
    if isinstance(stage, Prepared):
        return stage.annotations.module
    module = copy_graph(stage.module)
    run(module, PTQ_PASSES)
    return module


EQUALIZED = (torch.ops.aten.addcmul.default,)
"""What equalization makes of a sum, and puts behind an input."""


class _Pair:
    """The float graph and the reference made of it, node by node of the same name.

    Exact values are those of the float graph as equalization left it: the same function, other values inside.
    """

    def __init__(self, module: fx.GraphModule, reference: Reference) -> None:
        self.module, self.reference = reference.annotations.module, reference
        theirs = {node.name: node for node in module.graph.nodes}
        self.nodes = [node for node in reference.module.graph.nodes if _compared(node)]
        self.sites = {site.value: site for site in reference.annotations.sites if site.role == "activation"}
        self.uses = {node.name: _Uses(self._levels(node.name)) for node in self.nodes}
        self.moves = frozenset(
            value for value, site in self.sites.items() if isinstance(site.spec, Shared) and not site.spec.observed
        )
        for node in self.nodes:
            other = theirs.get(node.name)
            if other is None and reference.parameters.corrected.equalization and node.target in EQUALIZED:
                continue
            same = other is not None and (operator(other) == operator(node) or node.target in EQUALIZED)
            if other is None or not same or tensor_type(other) != tensor_type(node):
                kind = "nothing of that name" if other is None else f"{operator(other)} {tensor_type(other)}"
                where = origin(node)
                raise InputError(
                    where.path or node.name, operator(node) or None,
                    f"{tensor_type(node)} in the reference, {kind} in the float model",
                    remedy="compare a reference with the model it was made from", source=where.source or None,
                )  # fmt: skip

    def _levels(self, value: str) -> tuple[Site, QParams] | None:
        site = self.sites.get(value)
        return None if site is None else (site, self.reference.qparams[site.name])

    def add(self, total: _Totals, leaves: list[torch.Tensor]) -> None:
        exact = _Recorder(self.module).values(leaves)
        names = [node.name for node in self.nodes]
        alone = _Rounding(self.reference.module, {name: exact[name] for name in names}, self.moves).values(leaves)
        so_far = _Rounding(self.reference.module).values(leaves)
        for name in names:
            total.add(f"alone {name}", exact[name], alone[name])
            total.add(f"so far {name}", exact[name], so_far[name])
            self.uses[name].add(exact[name])

    def rows(self, total: _Totals) -> tuple[Row, ...]:
        rows, selectors = [], self._selectors()
        for node in self.nodes:
            where = origin(node)
            name = operator(node) or "input"
            decibels, cosine = (
                tuple(measure(f"{key} {node.name}") for key in ("alone", "so far"))
                for measure in (total.decibels, total.cosine)
            )
            site = self.sites[node.name].name if node.name in self.sites else ""
            path = where.path if operator(node) else node.name
            uses = self.uses[node.name]
            rows.append(Row(
                node.name, site, path, name, where.source, decibels[0], decibels[1], cosine[0], cosine[1],
                uses.low, uses.high, uses.use(), selectors.get(node.name, ""),
            ))  # fmt: skip
        return tuple(sorted(rows, key=lambda row: (row.alone, row.so_far)))

    def _selectors(self) -> dict[str, str]:
        """Node -> what skips the region it is in: the path of the region's first operator, if nothing else is inside
        of that module; else the kind of operator."""
        paths = {origin(node).path.partition("@")[0] for node in self.nodes if operator(node)}
        found = {}
        for region in self.reference.annotations.regions:
            where = origin(region.anchor)
            path = ".".join(part.partition("@")[0] for part in where.path.split("."))
            alone = path and not any(other.startswith(f"{path}.") for other in paths)
            found.update({node.name: path if alone else f"op:{where.operator}" for node in region.nodes})
        return found


FLOATING = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _compared(node: fx.Node) -> bool:
    """Inputs and operators of the model whose value is a floating-point tensor."""
    kind = tensor_type(node)
    levels = operator(node).startswith(("quantized_decomposed.", "intaglio."))
    known = node.op == "placeholder" or (node.op == "call_function" and not levels)
    return known and kind is not None and kind.q is None and kind.dtype in FLOATING


class _Recorder(fx.Interpreter):
    """Keeps what every node gives, by name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[str, Any] = {}

    def values(self, leaves: list[torch.Tensor]) -> Mapping[str, Any]:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.run(*_copied(leaves))
        return self.found

    def run_node(self, n: fx.Node) -> Any:
        self.found[n.name] = super().run_node(n)
        return self.found[n.name]


class _Rounding(_Recorder):
    """Keeps values as a reference rounds them, at once where they are made.

    Nodes named in ``exact`` hand on the exact value given there instead of their own, and nothing rounds it again.
    Those in ``moves`` select or clamp values that were rounded before, and lose nothing themselves.
    """

    def __init__(
        self, module: fx.GraphModule, exact: Mapping[str, torch.Tensor] | None = None, moves: Set[str] = frozenset()
    ) -> None:
        super().__init__(module)
        self.exact, self.moves = exact or {}, moves
        homes, kinds = (decomposed(), float8()), ("per_tensor", "per_channel")
        self.quantizes = [getattr(home, f"quantize_{kind}").default for home in homes for kind in kinds]
        self.dequantizes = [getattr(home, f"dequantize_{kind}").default for home in homes for kind in kinds]

    def run_node(self, n: fx.Node) -> Any:
        if self.exact and n.target in (*self.quantizes, *self.dequantizes) and not is_constant(n.args[0]):
            return self.env[n.args[0]]
        value = fx.Interpreter.run_node(self, n)
        self.found[n.name] = value if n.name in self.moves else self._rounded(n, value)
        return self.exact.get(n.name, value)

    def _rounded(self, node: fx.Node, value: Any) -> Any:
        quantize = next((user for user in node.users if user.target in self.quantizes and user.args[0] is node), None)
        if quantize is None:
            return value
        dequantize = next(iter(quantize.users))
        return self._applied(dequantize, self._applied(quantize, value))

    def _applied(self, node: fx.Node, value: Any) -> Any:
        """The node's operator on another value; its parameters are numbers or constants of the graph."""
        parameters = fx.map_arg(tuple(node.args[1:]), lambda constant: self.fetch_attr(str(constant.target)))
        return node.target(value, *parameters)


class _Totals:
    """Sums of squares by key: of the exact values, of the quantized ones and of the differences."""

    def __init__(self) -> None:
        self.signal: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.found: dict[str, float] = {}

    def add(self, key: str, exact: torch.Tensor, found: torch.Tensor) -> None:
        exact, found = exact.detach().double(), found.detach().double()
        self.signal[key] = self.signal.get(key, 0.0) + exact.square().sum().item()
        self.noise[key] = self.noise.get(key, 0.0) + (exact - found).square().sum().item()
        self.found[key] = self.found.get(key, 0.0) + found.square().sum().item()

    def cosine(self, key: str) -> float:
        """From the three sums, as in a triangle; 1 where both are zero."""
        signal, found, noise = self.signal.get(key, 0.0), self.found.get(key, 0.0), self.noise.get(key, 0.0)
        both = 2 * math.sqrt(signal) * math.sqrt(found)
        return (signal + found - noise) / both if both else float(signal == found)

    def decibels(self, key: str) -> float:
        signal, noise = self.signal.get(key, 0.0), self.noise.get(key, 0.0)
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal else -math.inf


class _Uses:
    """Extent of the float model's values in one place and, where it is a site, what they use of its levels."""

    def __init__(self, levels: tuple[Site, QParams] | None) -> None:
        self.levels, self.low, self.high = levels, math.inf, -math.inf
        self.below = self.above = self.count = 0
        size = 0 if levels is None or levels[0].record.floating else levels[1].qmax - levels[1].qmin + 1
        self.seen = torch.zeros(size, dtype=torch.bool)

    def add(self, exact: torch.Tensor) -> None:
        if not exact.numel():
            return
        exact = exact.detach().float()
        self.low, self.high = min(self.low, exact.min().item()), max(self.high, exact.max().item())
        if self.levels is None:
            return
        q = self.levels[1]
        zeros = torch.tensor(q.zeros).reshape([-1 if q.axis == axis else 1 for axis in range(exact.dim())])
        steps = exact * (1.0 / q.step) if len(self.seen) == 0 else (exact * (1.0 / q.step)).round() + zeros
        self.below += int((steps < q.qmin).sum())
        self.above += int((steps > q.qmax).sum())
        self.count += exact.numel()
        if len(self.seen):
            self.seen[steps.nan_to_num().clamp(q.qmin, q.qmax).long().flatten() - q.qmin] = True

    def use(self) -> Use | None:
        if self.levels is None or not self.count:
            return None
        levels = self.seen.sum().item() / len(self.seen) if len(self.seen) else None
        return Use(self.below / self.count, self.above / self.count, levels)


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _copied(value: Any) -> Any:
    """The model may write into its inputs; the next one gets its own."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
