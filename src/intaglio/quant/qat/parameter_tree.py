"""Parameters and buffers of the float model under their own names, and the graph that computes constants from them."""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx, nn

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_constants import unique_name
from intaglio.fxgraph.node_info import info
from intaglio.ir import DType
from intaglio.quant.qat.constant_tape import Tape
from intaglio.quant.qat.eval_graph import BATCH_NORM_COUNTERS, BatchNormMark, marks_of
from intaglio.quant.qat.fake_quantize import FakeQuantizeMode
from intaglio.quant.qat.train_layers import StatisticsNorm, folded_norm
from intaglio.tracing.captured import Captured

FIXED = "fixed"


class ParameterTree:
    """Places parameters, buffers and submodules on `root`, the module that is trained.

    Attributes:
        paths: constant of the evaluated graph -> path of its parameter or buffer.
        norms: module path -> batch norm.
        counters: module path of a batch norm -> path of its `num_batches_tracked`.
    """

    def __init__(self, root: nn.Module, captured: Captured, evaluation: Captured, mode: FakeQuantizeMode) -> None:
        self.root, self.module, self.paths = root, evaluation.module, dict[str, str]()
        marks = [mark for _, mark in marks_of(evaluation.module)]
        self.norms = {mark.path: mark for mark in marks if isinstance(mark, BatchNormMark)}
        self.counters: dict[str, str] = {}
        constants = [node for node in evaluation.module.graph.nodes if node.op == "get_attr"]
        leaves = {info(node).path or str(node.target) for node in constants}
        for path in self.norms:
            if not path:
                raise UnsupportedError(
                    "model",
                    None,
                    "a batch norm uses buffers of the model itself as statistics",
                    remedy="use an nn.BatchNorm module",
                )
        for path in dict.fromkeys([*captured.classes, *self.norms]):  # keeps the order of the float model
            if path in self.norms:
                norm = self.norms[path]
                self.register(path, StatisticsNorm(mode, norm.momentum, norm.eps))
            elif path and any(known.startswith(f"{path}.") for known in leaves):
                self.register(path, nn.Module())
        for node in constants:
            self._leaf(node, getattr(evaluation.module, str(node.target)))
        for state in captured.signature.state:
            owner, _, name = state.path.rpartition(".")
            if state.type.dtype is DType.I64 and name == BATCH_NORM_COUNTERS[2]:
                self.counters[owner] = state.path
                self.register(state.path, torch.from_numpy(state.initial.copy()))

        self.quantizers = self.unused_name("quantizers")

    def _leaf(self, node: fx.Node, tensor: torch.Tensor) -> None:
        path, requires_grad = info(node).path or str(node.target), info(node).requires_grad
        self.paths[str(node.target)] = path
        self.register(
            path, tensor.clone() if requires_grad is None else nn.Parameter(tensor.clone(), requires_grad=requires_grad)
        )

    def register(self, path: str, value: nn.Module | torch.Tensor, persistent: bool = True) -> None:
        """Register a module, parameter or buffer at a dotted path, and add the containers on the way."""
        owner, _, name = path.rpartition(".")
        module = self.root
        for step in owner.split(".") if owner else ():
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        if isinstance(value, nn.Module):
            module.add_module(name, value)
        elif isinstance(value, nn.Parameter):
            module.register_parameter(name, value)
        else:
            module.register_buffer(name, value, persistent)

    def place_quantizer(self, name: str, module: nn.Module) -> str:
        """Register a fake-quantize module under a unique name, and return its path."""
        if (placed := getattr(self.root, self.quantizers, None)) is not None:
            name = unique_name(placed, name)
        self.register(f"{self.quantizers}.{name}", module)
        return f"{self.quantizers}.{name}"

    def unused_name(self, name: str) -> str:
        """Return a name that the model does not use, derived from `name`."""
        return unique_name(self.root, name)

    def constants(self, module: fx.GraphModule, names: list[str], tape: Tape) -> fx.Graph:
        """Return a graph that computes constants from parameters and buffers.

        Its outputs are the constants `names`, then the folding factor of every batch norm.

        Args:
            module: graph module after the passes; it owns the constants.
            names: names of the constants to compute.
            tape: recording of how the passes computed them.
        """
        graph, known, number = fx.Graph(), dict[int, fx.Node](), 0
        leaves = {name: graph.get_attr(path) for name, path in self.paths.items()}

        def fixed(tensor: torch.Tensor) -> fx.Node:
            nonlocal number
            name, number = self.unused_name(f"{FIXED}{number}"), number + 1
            self.register(name, tensor.clone(), persistent=False)
            return graph.get_attr(name)

        known.update({id(getattr(self.module, name)): leaf for name, leaf in leaves.items()})
        factors = []
        for path, norm in self.norms.items():
            arguments = [None if name is None else leaves[name] for name in norm.constants]
            folded = graph.call_function(folded_norm, (graph.get_attr(path), *arguments))
            for place, name in enumerate(norm.constants):
                if name is not None:
                    known[id(getattr(self.module, name))] = graph.call_function(getitem, (folded, place))
            factors.append(graph.call_function(getitem, (folded, 4)))
        made = []
        for name in names:
            tensor = getattr(module, name)
            made.append(tape.write(graph, tensor, known, fixed) or fixed(tensor))
        graph.output((*made, *factors))
        for node in reversed(list(graph.nodes)):
            if node.op != "output" and not node.users:
                graph.erase_node(node)
        return graph
