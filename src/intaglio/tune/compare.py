"""A quantized model against its float model, operator by operator: which one loses the accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from intaglio.calls import bind, dims_of
from intaglio.capture import Captured, capture, run
from intaglio.capture.captured import GraphStage
from intaglio.capture.nodes import is_constant, operator, origin, tensor_type
from intaglio.errors import InputError
from intaglio.ir import DType
from intaglio.quant import Binder, Prepared, Reference, Shared, binder_for, peek
from intaglio.quant.convert import decomposed
from intaglio.quant.passes import PTQ_PASSES
from intaglio.quant.prepare import copy_graph


@dataclass(frozen=True)
class Row:
    """One operator. ``node`` is its name in the stages' texts, ``site`` that of its result if it has one.

    Signal to quantization noise in decibels: ``alone`` with exact operands, so of its own weights' and result's
    rounding; ``so_far`` with everything before it quantized too. Infinite where nothing is lost.
    """

    node: str
    site: str
    path: str
    operator: str
    source: str
    alone: float
    so_far: float

    def __str__(self) -> str:
        where = f"{self.path or 'model'} ({self.operator})" + (f"  at {self.source}" if self.source else "")
        return f"{_decibels(self.alone)} {_decibels(self.so_far)}  {where}"


@dataclass(frozen=True)
class Comparison:
    """``rows``: operators, the one that alone loses most first. ``results``: decibels of each tensor of the result."""

    rows: tuple[Row, ...]
    results: tuple[float, ...]
    samples: int

    @property
    def worst(self) -> Row:
        """`InputError` when operators were not compared."""
        if not self.rows:
            raise InputError("compare", None, "no operator was compared", remedy=NEEDS_REFERENCE)
        return self.rows[0]

    def __str__(self) -> str:
        """A line for the result, then one an operator, the worst first."""
        heading = f"result: {', '.join(_decibels(r).strip() for r in self.results)} over {self.samples} samples"
        if not self.rows:
            return f"{heading}\noperators: {NEEDS_REFERENCE}"
        return "\n".join([heading, f"{'alone':>10} {'so far':>10}  operator", *map(str, self.rows)])


NEEDS_REFERENCE = "compare(model, reference, data) shows them, for the reference that convert gives"


def _decibels(value: float) -> str:
    return f"{'exact':>10}" if value == math.inf else f"{value:7.1f} dB"


def compare(
    exact: nn.Module | Captured | Prepared, quantized: Any, data: Any, *, samples: int | None = None
) -> Comparison:
    """How much of the float model's values is left, over the same batches for both.

    ``quantized``: a `Reference` gives a row per operator; any other stage, or the int8 model, the results only.
    ``data``: an iterable of batches, as for `calibrate`, read once; ``samples`` stops after that many. Raises
    `InputError` when both are not of one model.
    """
    first, items = peek(data)
    stage = exact if isinstance(exact, GraphStage) else _captured(exact, first)
    binder, total, seen = Binder.of(stage.signature), _Totals(), 0
    pair = _Pair(_float_graph(stage), quantized) if isinstance(quantized, Reference) else None
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


def _captured(model: nn.Module, item: Any) -> Captured:
    args, kwargs = binder_for(model)(item)
    return capture(model, args, example_kwargs=kwargs)


def _float_graph(stage: GraphStage) -> fx.GraphModule:
    """As `prepare` leaves it: its nodes have the names they have in a reference."""
    if isinstance(stage, Prepared):
        return stage.annotations.module
    module = copy_graph(stage.module)
    run(module, PTQ_PASSES)
    return module


class _Pair:
    """The float graph and the reference made of it, node by node of the same name."""

    def __init__(self, module: fx.GraphModule, reference: Reference) -> None:
        self.module, self.reference = module, reference
        theirs = {node.name: node for node in module.graph.nodes}
        self.nodes = [node for node in reference.module.graph.nodes if _compared(node)]
        self.sites = {site.value: site for site in reference.annotations.sites if site.role == "activation"}
        self.moves = frozenset(
            value for value, site in self.sites.items() if isinstance(site.spec, Shared) and not site.spec.observed
        )
        for node in self.nodes:
            other = theirs.get(node.name)
            if other is None or (operator(other), tensor_type(other)) != (operator(node), tensor_type(node)):
                kind = "nothing of that name" if other is None else f"{operator(other)} {tensor_type(other)}"
                where = origin(node)
                raise InputError(
                    where.path or node.name, operator(node) or None,
                    f"{tensor_type(node)} in the reference, {kind} in the float model",
                    remedy="compare a reference with the model it was made from", source=where.source or None,
                )  # fmt: skip

    def add(self, total: _Totals, leaves: list[torch.Tensor]) -> None:
        exact = _Recorder(self.module).values(leaves)
        names = [node.name for node in self.nodes]
        alone = _Rounding(self.reference.module, {name: exact[name] for name in names}, self.moves).values(leaves)
        so_far = _Rounding(self.reference.module).values(leaves)
        for name in names:
            total.add(f"alone {name}", exact[name], alone[name])
            total.add(f"so far {name}", exact[name], so_far[name])

    def rows(self, total: _Totals) -> tuple[Row, ...]:
        rows = []
        for node in self.nodes:
            where = origin(node)
            name = operator(node) or "input"
            alone, so_far = (total.decibels(f"{key} {node.name}") for key in ("alone", "so far"))
            site = self.sites[node.name].name if node.name in self.sites else ""
            path = where.path if operator(node) else node.name
            rows.append(Row(node.name, site, path, name, where.source, alone, so_far))
        return tuple(sorted(rows, key=lambda row: (row.alone, row.so_far)))


FLOATING = (DType.F16, DType.BF16, DType.F32, DType.F64)


def _compared(node: fx.Node) -> bool:
    """Inputs and operators of the model whose value is a floating-point tensor."""
    kind = tensor_type(node)
    known = node.op == "placeholder" or (node.op == "call_function" and "quantized_decomposed" not in operator(node))
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
        named = decomposed()
        self.quantizes = (named.quantize_per_tensor.default, named.quantize_per_channel.default)
        self.dequantizes = (named.dequantize_per_tensor.default, named.dequantize_per_channel.default)

    def run_node(self, n: fx.Node) -> Any:
        if self.exact and n.target in (*self.quantizes, *self.dequantizes) and not is_constant(n.args[0]):
            return self.env[n.args[0]]
        value = fx.Interpreter.run_node(self, n)
        self.found[n.name] = value if n.name in self.moves else self._rounded(n, value)
        return self.exact.get(n.name, value)

    def _rounded(self, node: fx.Node, value: Any) -> Any:
        quantize = next((user for user in node.users if user.target in self.quantizes), None)
        if quantize is None:
            return value
        dequantize = next(iter(quantize.users))
        return self._applied(dequantize, self._applied(quantize, value))

    def _applied(self, node: fx.Node, value: Any) -> Any:
        """The node's operator on another value; its parameters are numbers or constants of the graph."""
        parameters = fx.map_arg(tuple(node.args[1:]), lambda constant: self.fetch_attr(str(constant.target)))
        return node.target(value, *parameters)


class _Totals:
    """Sums of squares by key: of the exact values and of the differences."""

    def __init__(self) -> None:
        self.signal: dict[str, float] = {}
        self.noise: dict[str, float] = {}

    def add(self, key: str, exact: torch.Tensor, found: torch.Tensor) -> None:
        exact, found = exact.detach().double(), found.detach().double()
        self.signal[key] = self.signal.get(key, 0.0) + exact.square().sum().item()
        self.noise[key] = self.noise.get(key, 0.0) + (exact - found).square().sum().item()

    def decibels(self, key: str) -> float:
        signal, noise = self.signal.get(key, 0.0), self.noise.get(key, 0.0)
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal else -math.inf


def _tensors(value: Any) -> list[torch.Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _copied(value: Any) -> Any:
    """The model may write into its inputs; the next one gets its own."""
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
