"""The error that each group of operators alone causes in the results of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.nodes import name_of
from intaglio.mixed_precision.precision_groups import OperatorGroup
from intaglio.quant.calibrate.batches import Binder
from intaglio.quant.calibrate.sums_of_squares import sums_of_squares
from intaglio.quant.qdq.convert import Reference
from intaglio.signature import bind
from intaglio.torch_private import pytree
from intaglio.tracing import Captured
from intaglio.tune.schedule_search import leading_samples, unflatten_call

ERROR_SAMPLES, CALL_SAMPLES = 16, 8
"""Number of samples on which errors are measured, and the largest number in one call."""


class UnknownValueError(Exception):
    """Raised where a reference does not have a value that the float graph has."""


class ResultErrors:
    """Sums of squares of results and of their differences, by result."""

    def __init__(self) -> None:
        self.signal: dict[int, float] = {}
        self.noise: dict[int, float] = {}

    def add(self, exact: Any, found: Any) -> None:
        """Add the results of a call of the float model and of another one."""
        pairs = zip(pytree.tree_leaves(exact), pytree.tree_leaves(found), strict=False)
        for place, (one, other) in enumerate(pairs):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and isinstance(other, torch.Tensor):
                sums = sums_of_squares(one, other)
                self.signal[place] = self.signal.get(place, 0.0) + sums.signal
                self.noise[place] = self.noise.get(place, 0.0) + sums.noise

    @property
    def relative(self) -> float:
        """Return the sum over all results of their squared error, divided by their squares."""
        return sum(self.noise[place] / signal for place, signal in self.signal.items() if signal)


def sample_calls(captured: Captured, batches: Sequence[Any]) -> list[list[torch.Tensor]]:
    """Return the tensors of calls with the first samples of the batches."""
    signature, binder, calls = captured.signature, Binder.of(captured.signature), list[list[torch.Tensor]]()
    for item in batches[: -(-ERROR_SAMPLES // CALL_SAMPLES)]:
        args, kwargs = binder(item)
        calls.append(leading_samples(signature, bind(signature, args, kwargs), (), CALL_SAMPLES))
    return calls


def model_error(captured: Captured, model: Any, calls: Sequence[Sequence[torch.Tensor]]) -> float:
    """Return the relative squared error of a model's results.

    Args:
        captured: the float model.
        model: the quantized model, which is called like it.
        calls: tensors of calls, as `sample_calls` returns them.
    """
    errors = ResultErrors()
    for tensors in calls:
        args, kwargs = unflatten_call(captured.signature, [tensor.clone() for tensor in tensors])
        with torch.no_grad():
            errors.add(captured(*args, **kwargs), model(*args, **kwargs))
    return errors.relative


class ExactRun:
    """All values of the float graph in one call, from which runs with one quantized group are made.

    The float graph is that of the reference after equalization, which computes the same function.
    """

    def __init__(self, base: Reference, captured: Captured, tensors: Sequence[torch.Tensor]) -> None:
        self.module = base.annotations.module
        self.graph = fx.Interpreter(self.module, garbage_collect_values=False)
        given = iter([*tensors, *captured.state])
        self.values: dict[str, Any] = {}
        self.result: Any = None
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                if node.op == "placeholder":
                    self.values[node.name] = next(given).clone()
                elif node.op == "output":
                    self.result = fx.map_arg(node.args[0], lambda source: self.values[source.name])
                else:
                    self.values[node.name] = _run(self.graph, node, lambda source: self.values[source.name])

    def result_with(self, group: OperatorGroup, reference: Reference) -> Any:
        """Return the results if only one group is quantized, as in a reference.

        Raises:
            UnknownValueError: the reference computes the group in another way, for which values are missing.
        """
        part, changed = _QuantizedPart(self, group, reference), dict[str, Any]()

        def value(source: fx.Node) -> Any:
            return changed.get(source.name, self.values.get(source.name))

        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for node in self.module.graph.nodes:
                if node.op == "output":
                    return fx.map_arg(node.args[0], value)
                if node.name in group.nodes:
                    changed[node.name] = part.value(node.name, changed)
                elif any(source.name in changed for source in node.all_input_nodes):
                    changed[node.name] = _run(self.graph, node, value)
        return None


class _QuantizedPart:
    """Computes the operators of one group as a reference does, from values of the float graph."""

    def __init__(self, exact: ExactRun, group: OperatorGroup, reference: Reference) -> None:
        self.exact, self.group = exact, group
        self.graph = fx.Interpreter(reference.module, garbage_collect_values=False)
        self.nodes = {name_of(node): node for node in reference.module.graph.nodes if node.op != "get_attr"}
        self.found: dict[fx.Node, Any] = {}

    def value(self, name: str, changed: Mapping[str, Any]) -> Any:
        """Return the value of an operator of the group.

        Args:
            name: its name in the float graph.
            changed: values that were computed before.
        """
        node = self.nodes.get(name)
        if node is None:
            raise UnknownValueError(name)
        return self._computed(node, changed)

    def _computed(self, node: fx.Node, changed: Mapping[str, Any]) -> Any:
        if node not in self.found:
            for source in self._operands(node):
                self._computed(source, changed)
            self.found[node] = _run(self.graph, node, lambda source: self._read(source, changed))
        return self.found[node]

    def _operands(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the operands that are not values of the float graph outside of the group."""
        for source in node.all_input_nodes:
            if not self._is_outside(source):
                if source.op == "placeholder":
                    raise UnknownValueError(source.name)
                yield source

    def _is_outside(self, node: fx.Node) -> bool:
        name = name_of(node)
        return node.op != "get_attr" and name in self.exact.values and name not in self.group.nodes

    def _read(self, source: fx.Node, changed: Mapping[str, Any]) -> Any:
        if self._is_outside(source):
            name = name_of(source)
            return changed.get(name, self.exact.values[name])
        return self.found[source]


def _run(graph: fx.Interpreter, node: fx.Node, value: Any) -> Any:
    """Return the result of one node, whose operands a function returns."""
    return getattr(graph, node.op)(node.target, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value))
