"""Dead code elimination and invariant checks after a pass."""

from __future__ import annotations

import operator as python_operator
from dataclasses import dataclass

import torch
from torch import fx

from intaglio.fxgraph.node_info import EMPTY_INFO, INFO_KEY, NodeInfo
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType, TensorType, VerifyError
from intaglio.signature import DTYPES
from intaglio.torch_private import buffers_of


@dataclass(frozen=True)
class GraphInvariants:
    """Invariants that `finish_pass` checks for a stage, in addition to the form of a torch.fx graph.

    Attributes:
        types: every tensor has a type and every symbolic size a dimension in its record.
        origins: every operator has an origin, and every constant the path of what it was computed from.
        single_constants: all readers of a constant read the same node.
    """

    types: bool
    origins: bool
    single_constants: bool


CANONICAL_GRAPH = GraphInvariants(types=True, origins=True, single_constants=True)
"""Captured graphs and all later graphs up to the reference model."""
BACKEND_GRAPH = GraphInvariants(types=False, origins=False, single_constants=False)
"""Graphs for other engines, whose passes insert operators and constants without annotations."""


def finish_pass(module: fx.GraphModule, after: str, invariants: GraphInvariants = CANONICAL_GRAPH) -> None:
    """Remove dead code and check the graph.

    A graph has one output, which is its last node. Names are unique, every node comes after its operands, and operands
    and users agree. Constants exist in the module, with the types of their tensors; other types agree with the example
    value in ``meta["val"]`` if there is one.

    Args:
        module: the graph after the pass.
        after: name of the pass, for the error.
        invariants: further invariants of the stage.

    Raises:
        VerifyError: an invariant does not hold; the error names pass and node.
    """
    _check_users(module.graph, after)
    if list(module.graph.find_nodes(op="output")) != [next(reversed(module.graph.nodes), None)]:
        raise VerifyError(f"after {after}: the graph must have one output node, as its last node")
    try:
        module.graph.lint()
        # Most passes leave no dead code, and finding that out here takes a fraction of the time.
        if any(not node.users and not node.is_impure() for node in module.graph.nodes):
            module.graph.eliminate_dead_code()
    except (RuntimeError, ValueError) as error:
        raise VerifyError(f"after {after}: {str(error).splitlines()[0]}") from error
    _check_records(module, after, invariants)


def _broken(after: str, node: fx.Node, problem: str) -> VerifyError:
    return VerifyError(f"after {after}: %{node.name} ({operator(node) or node.op}) {problem}")


def _check_users(graph: fx.Graph, after: str) -> None:
    """Check that operands and users agree. The offending node is only searched for if their counts differ."""
    reads = users = 0
    for node in graph.nodes:
        users += len(node.users)
        for value in node.all_input_nodes:
            reads += 1
            if node not in value.users:
                raise _broken(after, node, f"reads %{value.name}, but is not among its users")
    if reads == users:
        return
    for node in graph.nodes:
        for user in node.users:
            if node not in user.all_input_nodes:
                raise _broken(after, node, f"has the user %{user.name}, which does not read it")
    raise VerifyError(f"after {after}: a node that was removed from the graph still reads one of its nodes")


def _check_records(module: fx.GraphModule, after: str, invariants: GraphInvariants) -> None:
    """Check the records of all nodes against the promises, and their types against tensors and example values."""
    tensors, first = buffers_of(module), dict[str, fx.Node]()
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        known: NodeInfo = node.meta.get(INFO_KEY, EMPTY_INFO)
        kind, value = known.type, node.meta.get("val")
        if kind is None and known.dim is None and invariants.types and not _is_tuple(node):
            raise _broken(after, node, "has no record of its type")
        if node.op == "get_attr":
            value = tensors[node.target]
            if known.path is None and invariants.origins:
                raise _broken(after, node, "has no record of its path in the model")
            if invariants.single_constants and first.setdefault(node.target, node) is not node:
                raise _broken(
                    after, node, f"reads the same constant as %{first[node.target].name}; a constant must have one node"
                )
        elif known.origin is None and invariants.origins and node.op == "call_function":
            raise _broken(after, node, "has no record of its origin in the model")
        if kind is not None and isinstance(value, torch.Tensor) and (problem := _wrong_type(value, kind)) is not None:
            raise _broken(after, node, problem)


def _is_tuple(node: fx.Node) -> bool:
    return bool(node.users) and all(user.target is python_operator.getitem for user in node.users)


def _wrong_type(tensor: torch.Tensor, kind: TensorType) -> str | None:
    if DTYPES.get(tensor.dtype, DType.OTHER) is not kind.dtype:
        return f"is {tensor.dtype}, but its record has {kind.dtype}"
    shape = tensor.shape
    if shape == kind.shape:
        return None
    free = len(shape) == len(kind.shape) and all(
        size == known or not (isinstance(size, int) and isinstance(known, int))
        for size, known in zip(shape, kind.shape, strict=True)
    )
    return None if free else f"has shape {list(shape)}, but its record has {list(kind.shape)}"
