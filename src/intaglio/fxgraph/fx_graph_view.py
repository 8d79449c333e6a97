"""Adapter from torch.fx graphs to the matcher (`intaglio.fusion.matcher.GraphView`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import fx

from intaglio.fxgraph.node_info import known_type
from intaglio.fxgraph.nodes import call_of, is_constant, known_record, operands, operator, record_of, tensor_nodes
from intaglio.ir import TensorType


class FxGraphView:
    """Provides names, operands, types and attributes of torch.fx nodes to the matcher."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = {node: index for index, node in enumerate(graph.nodes)}

    def kinds(self, node: fx.Node) -> tuple[str, ...]:
        """Return the name of the record and the overload."""
        record, overload = record_of(node), operator(node)
        return (*([record.name] if record else []), *([overload] if overload else []))

    def operands(self, node: fx.Node) -> tuple[fx.Node | None, ...]:
        """Return the tensor operands; ``None`` for an operand that is left out."""
        return operands(node)

    def readers(self, node: fx.Node) -> int:
        """Return how often operators and outputs read this value; an operator that reads it twice counts twice."""
        return sum(sum(1 for leaf in tensor_nodes((user.args, user.kwargs)) if leaf is node) for user in node.users)

    def constant(self, node: fx.Node) -> bool:
        """Return whether the node is a constant of the module."""
        return is_constant(node)

    def position(self, node: fx.Node) -> int:
        """Return the position in execution order."""
        return self._position[node]

    def type_of(self, node: fx.Node) -> TensorType:
        """Return shape and element type of a tensor."""
        return known_type(node)

    def attributes(self, node: fx.Node) -> Mapping[str, Any]:
        """Return the attributes that the operator's record binds from the call."""
        record = known_record(node)
        return record.bind(call_of(node, record))

    def array(self, node: fx.Node) -> np.ndarray:
        """Return the array of a constant."""
        values: np.ndarray = getattr(node.graph.owning_module, str(node.target)).detach().numpy()
        return values
