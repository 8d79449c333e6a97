"""`GraphComparison`: comparison of a float graph and its reference node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import fx

from intaglio.errors import InputError
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.fxgraph.nodes import name_of, operator
from intaglio.ir import QParams
from intaglio.quant.annotate.sites import Shared, Site
from intaglio.quant.calibrate.sums_of_squares import sums_of_squares
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.float8 import float8
from intaglio.quant.qdq.operator_names import EQUALIZED, OperatorNames
from intaglio.torch_private import quantized_decomposed
from intaglio.tune.comparison import RangeUse, Row

NodeValues = Mapping[str, torch.Tensor]
"""Values by node name."""


class GraphComparison:
    """A float graph and the reference made from it, compared by nodes of the same name.

    Exact values are those of the float graph after equalization, which computes the same function with other
    intermediate values.
    """

    def __init__(
        self, module: fx.GraphModule, reference: Reference, recording: int = 0, statistics: bool = False
    ) -> None:
        """Match the nodes of both graphs by name.

        Args:
            module: the float graph.
            reference: the reference made from it.
            recording: number of the recording in eager mode.
            statistics: whether to count the exact values of every node in `statistics`.

        Raises:
            InputError: a node differs, so the reference belongs to another model.
        """
        self.module, self.reference, self.recording = reference.annotations.module, reference, recording
        self.total = ErrorSums()
        theirs = {node.name: node for node in module.graph.nodes}
        self.names = OperatorNames(reference)
        self.nodes, self.sites = self.names.nodes, self.names.sites
        self.uses = {name: _RangeObserver(self._quantization(name)) for name in self.nodes}
        self.statistics = {name: Statistics() for name in self.nodes} if statistics else {}
        self.data_movement = frozenset(
            value for value, site in self.sites.items() if isinstance(site.spec, Shared) and not site.spec.observed
        )
        found = reference.parameters.corrected.equalization
        for name, node in self.nodes.items():
            other = theirs.get(name)
            split = found.splits or found.two_bytes or found.layer_bytes
            if other is None and (split or (found and node.target in EQUALIZED)):
                continue
            replaced = node.target in EQUALIZED or name != node.name or info(node).part is not None
            same = other is not None and (operator(other) == operator(node) or replaced)
            if other is None or not same or tensor_type(other) != tensor_type(node):
                kind = "no operator of this name" if other is None else f"{operator(other)} {tensor_type(other)}"
                where = origin(node)
                raise InputError(
                    where.path or node.name,
                    operator(node) or None,
                    f"the reference has a result of type {tensor_type(node)} here, the float model has {kind}",
                    remedy="compare the reference with the float model that it was made from",
                    source=where.source or None,
                )

    def _quantization(self, value: str) -> tuple[Site, QParams] | None:
        site = self.sites.get(value)
        return None if site is None else (site, self.reference.qparams[site.name])

    def add(self, exact_inputs: NodeValues, quantized_inputs: NodeValues, ran: range | None = None) -> None:
        """Add one run of both graphs. Operators whose operands are not available are left out.

        Args:
            exact_inputs: values given to the float graph, by node name.
            quantized_inputs: values given to the reference, by node name.
            ran: events that ran, for a part of an eager-mode graph (default: the whole graph).
        """
        exact = _Recomputation(self.module, exact_inputs).values()
        known = {name: exact[name] for name in self.nodes if name in exact}
        names = [name for name in known if _has_run(self.nodes[name], ran, exact_inputs)]
        given = {**exact_inputs, **_int8_caches(exact_inputs, quantized_inputs)}
        alone = _Rounding(self.reference.module, given, known, self.data_movement).values()
        so_far = _Rounding(self.reference.module, quantized_inputs).values()
        for name in names:
            if name in so_far and so_far[name].shape == exact[name].shape:
                self.total.add(f"alone {name}", exact[name], alone[name])
                self.total.add(f"so far {name}", exact[name], so_far[name])
                self.uses[name].add(exact[name])
                if name in self.statistics:
                    self.statistics[name].update(exact[name].detach().float().numpy(), torch.get_num_threads())

    def rows(self) -> list[Row]:
        """Return one row for every operator that ran."""
        rows, names, total = [], self.names, self.total
        for name, node in self.nodes.items():
            if f"alone {name}" not in total.signal:
                continue
            if names.is_replaced(name):
                continue
            path, kind, detail = names.owner(name)
            decibels, cosine = (
                tuple(measure(f"{key} {name}") for key in ("alone", "so far"))
                for measure in (total.decibels, total.cosine)
            )
            site = self.sites[name].name if name in self.sites else ""
            uses = self.uses[name]
            rows.append(
                Row(
                    name,
                    site,
                    path,
                    kind,
                    origin(node).source,
                    decibels[0],
                    decibels[1],
                    cosine[0],
                    cosine[1],
                    uses.low,
                    uses.high,
                    uses.range_use(),
                    names.selectors.get(name, ""),
                    self.recording,
                    names.folded(name),
                    detail,
                )
            )
        return rows


def _int8_caches(exact: NodeValues, quantized: NodeValues) -> NodeValues:
    """Return the inputs that the reference takes as uint8 and the float graph as floats."""
    common = exact.keys() & quantized.keys()
    return {name: quantized[name] for name in common if _dtype(exact[name]) is not _dtype(quantized[name])}


def _dtype(value: Any) -> torch.dtype | None:
    """Return the data type of a tensor, ``None`` for other values."""
    return value.dtype if isinstance(value, torch.Tensor) else None


def _has_run(node: fx.Node, ran: range | None, given: NodeValues) -> bool:
    """Return whether an operator is one of those that ran and not one whose result was given."""
    if ran is None or node.op == "placeholder":
        return True
    event = info(node).event
    return name_of(node) not in given and (event is None or event in ran)


NOT_COMPUTED = object()
"""Value of a node whose operands are not available."""


class _Recomputation(fx.Interpreter):
    """Computes what follows from the values of some nodes, and stores it by name."""

    def __init__(self, module: fx.GraphModule, given: NodeValues) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.given, self.found = given, dict[str, Any]()

    def values(self) -> Mapping[str, Any]:
        """Run the graph and return every computed value by node name."""
        given = {n: self.given[name_of(n)] for n in self.module.graph.nodes if name_of(n) in self.given}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                if node in given:
                    self.env[node] = self.store(node, given[node].clone())
                elif node.op == "placeholder" or any(
                    self.env[source] is NOT_COMPUTED for source in node.all_input_nodes
                ):
                    self.env[node] = NOT_COMPUTED
                elif node.op != "output":
                    self.env[node] = self.run_node(node)
        return self.found

    def store(self, node: fx.Node, value: Any) -> Any:
        """Store the value of a node and return the value that its consumers read."""
        self.found[name_of(node)] = value
        return value

    def run_node(self, n: fx.Node) -> Any:
        return self.store(n, super().run_node(n))


class _Rounding(_Recomputation):
    """Stores values rounded as the reference rounds them, immediately where they are computed.

    For nodes in ``exact``, consumers get the exact value instead of the computed one, and only operators on quantized
    values, such as recurrent ones, round it again. Nodes in ``data_movement`` select or clamp values that are rounded
    already, and have no error of their own.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        given: NodeValues,
        exact: NodeValues | None = None,
        data_movement: Set[str] = frozenset(),
    ) -> None:
        super().__init__(module, given)
        self.exact, self.data_movement = exact or {}, data_movement
        homes, kinds = (quantized_decomposed(), float8()), ("per_tensor", "per_channel")
        self.quantizes = [getattr(home, f"quantize_{kind}").default for home in homes for kind in kinds]
        self.dequantizes = [getattr(home, f"dequantize_{kind}").default for home in homes for kind in kinds]

    def run_node(self, n: fx.Node) -> Any:
        source = n.args[0] if n.target in self.dequantizes else None
        if self.exact and isinstance(source, fx.Node) and source.target in self.quantizes:
            return self.store(n, self.env[source.args[0]])
        return super().run_node(n)

    def store(self, node: fx.Node, value: Any) -> Any:
        name = name_of(node)
        self.found[name] = value if name in self.data_movement else self._rounded(node, value)
        return self.exact.get(name, value)

    def _rounded(self, node: fx.Node, value: Any) -> Any:
        """Return the value after the quantize and dequantize that follow its node, or unchanged if there are none."""
        quantize = next((user for user in node.users if user.target in self.quantizes and user.args[0] is node), None)
        if quantize is None:
            return value
        dequantize = self.dequantizes[self.quantizes.index(quantize.target)]
        parameters = fx.map_arg(tuple(quantize.args[1:]), lambda constant: self.fetch_attr(str(constant.target)))
        return dequantize(quantize.target(value, *parameters), *parameters)


class ErrorSums:
    """Sums of squares by key: of exact values, of quantized values and of their differences."""

    def __init__(self) -> None:
        self.signal: dict[str, float] = {}
        self.noise: dict[str, float] = {}
        self.found: dict[str, float] = {}

    def add(self, key: str, exact: torch.Tensor, found: torch.Tensor) -> None:
        """Add the sums of squares of two tensors and of their difference to those of a key."""
        sums = sums_of_squares(exact, found)  # a mask of -inf is equal in both models, and has no error
        self.signal[key] = self.signal.get(key, 0.0) + sums.signal
        self.noise[key] = self.noise.get(key, 0.0) + sums.noise
        self.found[key] = self.found.get(key, 0.0) + sums.found

    def cosine(self, key: str) -> float:
        """Return the cosine similarity, computed from the three sums by the law of cosines. It is 1 if both tensors are
        zero."""
        signal, found, noise = self.signal.get(key, 0.0), self.found.get(key, 0.0), self.noise.get(key, 0.0)
        both = 2 * math.sqrt(signal) * math.sqrt(found)
        return (signal + found - noise) / both if both else float(signal == found)

    def decibels(self, key: str) -> float:
        """Return the signal-to-quantization-noise ratio in decibels."""
        signal, noise = self.signal.get(key, 0.0), self.noise.get(key, 0.0)
        if noise == 0:
            return math.inf
        return 10 * math.log10(signal / noise) if signal else -math.inf


class _RangeObserver:
    """Range of the float model's values at one node and, if it is a site, how they use its quantized values."""

    def __init__(self, quantization: tuple[Site, QParams] | None) -> None:
        self.quantization, self.low, self.high = quantization, math.inf, -math.inf
        self.below = self.above = self.count = 0
        site, q = quantization or (None, None)
        size = 0 if site is None or q is None or site.record.floating else q.qmax - q.qmin + 1
        self.seen = torch.zeros(size, dtype=torch.bool)

    def add(self, exact: torch.Tensor) -> None:
        """Add values of the float model: extend the range, and count clipped and distinct quantized values."""
        if not exact.numel():
            return
        exact = exact.detach().float()
        self.low, self.high = min(self.low, exact.min().item()), max(self.high, exact.max().item())
        if self.quantization is None:
            return
        q = self.quantization[1]
        zeros = torch.tensor(q.zeros).reshape([-1 if q.axis == axis else 1 for axis in range(exact.dim())])
        steps = exact * (1.0 / q.step) if len(self.seen) == 0 else (exact * (1.0 / q.step)).round() + zeros
        self.below += int((steps < q.qmin).sum())
        self.above += int((steps > q.qmax).sum())
        self.count += exact.numel()
        if len(self.seen):
            self.seen[steps.nan_to_num().clamp(q.qmin, q.qmax).long().flatten() - q.qmin] = True

    def range_use(self) -> RangeUse | None:
        if self.quantization is None or not self.count:
            return None
        in_use = self.seen.sum().item() / len(self.seen) if len(self.seen) else None
        return RangeUse(self.below / self.count, self.above / self.count, in_use)
