"""Operators that PyTorch computes by one other operator, as `torch.multiply` by `torch.mul`.

PyTorch keeps no table of its aliases that Python can read, but its kernels are the same information: the kernel of an
alias calls the other operator. So the kernel runs once, on the tensors without data of the exported graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from intaglio.ops import BY_TARGET
from intaglio.torch_private import (
    OpOverload,
    TorchDispatchMode,
    decomposition_of,
    is_composite,
    pytree,
    schema_of,
)


def resolve_aliases(program: ExportedProgram) -> None:
    """Replace calls whose only work is one call of another operator.

    An operator without an integer form is replaced by one that has it; one without a record by one that has a record,
    or by the one that is implemented instead of it.
    """
    for part in program.graph_module.modules():
        renamed = _resolve(part.graph) if isinstance(part, fx.GraphModule) else {}
        if part is program.graph_module:
            for spec in program.graph_signature.output_specs:
                spec.arg.name = renamed.get(spec.arg.name, spec.arg.name)
    program.graph_module.recompile()


def _resolve(graph: fx.Graph) -> dict[str, str]:
    """Replace aliases in one graph, and return old and new names of the calls."""
    renamed = {}
    for node in list(graph.nodes):
        first = node.name
        while (found := _canonical_call(node)) is not None:  # an alias may be one of another alias
            target, args, kwargs = found
            with graph.inserting_before(node):
                call = graph.create_node("call_function", target, args, kwargs, name=target.overloadpacket.__name__)
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            graph.erase_node(node)
            renamed[first], node = call.name, call
    return renamed


def _canonical_call(node: fx.Node) -> tuple[OpOverload, Any, Any] | None:
    """Return operator, operands and keywords of the call that a node is an alias of; ``None`` for others."""
    if not isinstance(node.target, OpOverload) or _rank(node.target) == 2 or not _returns_one_tensor(node.target):
        return None
    if node.target is torch.ops.aten.round.decimals and not node.kwargs.get("decimals"):
        return torch.ops.aten.round.default, node.args, {}
    operands = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]
    if decomposition_of(node.target) is None or len(operands) < len(node.all_input_nodes):
        return None
    calls = _calls_of(node.target, node)
    if len(calls) == 1 and _is_preferred(*calls[0], node):
        return _with_nodes(*calls[0], operands)
    plain = _operator_of_plain_name(node.target)
    return (plain, node.args, node.kwargs) if plain is not None and _are_same(calls, _calls_of(plain, node)) else None


Call = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]


def _calls_of(target: OpOverload, node: fx.Node) -> list[Call]:
    """Return the calls by which an operator computes what a node computes, on the tensors of the exported graph."""
    kernel = decomposition_of(target)
    if kernel is None:
        return []
    args, kwargs = _with_values(node)
    leaves = pytree.tree_leaves((args, kwargs))
    modes = [mode for leaf in leaves if (mode := getattr(leaf, "fake_mode", None)) is not None]
    with modes[0] if modes else nullcontext(), CallLog() as log:  # a kernel that creates a tensor may get free sizes
        kernel(*args, **kwargs)
    return log.calls


def _with_values(node: fx.Node) -> tuple[Any, Any]:
    """Return the arguments and keywords of a node with the tensors of the exported graph."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    return args, kwargs


def _is_preferred(target: OpOverload, args: Any, kwargs: Any, node: fx.Node) -> bool:
    """Return whether an operator replaces the one that calls it: it has more of a record, or neither has a record and
    the operator of the node is implemented by this call with the same arguments."""
    if _rank(target) != _rank(node.target):
        return _rank(target) > _rank(node.target)
    same = _rank(target) == 0 and _returns_one_tensor(target)
    return same and is_composite(node.target) and _are_identical((args, kwargs), _with_values(node))


def _operator_of_plain_name(target: OpOverload) -> OpOverload | None:
    """Return the operator of the same name without ``special_`` in front, if it takes the same arguments and has more
    of a record. Both are composite, so that the kernel of one does not call the other."""
    name = target.overloadpacket.__name__.removeprefix("special_")
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    wanted = _arguments(target)
    return next((one for one in overloads if _arguments(one) == wanted and _rank(one) > _rank(target)), None)


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in schema_of(target).arguments]


def _are_same(calls: list[Call], others: list[Call]) -> bool:
    """Return whether two operators call the same operators. Values that they compute in between are not compared."""
    return bool(calls) and [call[0] for call in calls] == [call[0] for call in others]


def _are_identical(given: Any, others: Any) -> bool:
    """Return whether two calls have the same tensors and numbers; torch.fx has classes of its own for containers."""
    leaves, other_leaves = pytree.tree_leaves(given), pytree.tree_leaves(others)
    pairs = zip(leaves, other_leaves, strict=False)
    same = all(a is b or (not isinstance(a, torch.Tensor) and a == b) for a, b in pairs)
    return same and len(leaves) == len(other_leaves)


def _with_nodes(
    target: OpOverload, args: Any, kwargs: Any, operands: list[fx.Node]
) -> tuple[OpOverload, Any, Any] | None:
    """Return a call with nodes for tensors; ``None`` if it reads other values, or not all operands."""
    nodes = {id(operand.meta["val"]): operand for operand in operands}
    leaves, tree = pytree.tree_flatten((args, kwargs))
    known = [nodes.get(id(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    used = {leaf for leaf in known if isinstance(leaf, fx.Node)}
    computed = any(isinstance(leaf, torch.SymInt) for leaf in leaves) or len(used) < len(operands)
    in_front = isinstance(pytree.tree_leaves(args)[0], torch.Tensor)  # records take no number there
    if computed or not in_front or any(a is None and b is not None for a, b in zip(known, leaves, strict=True)):
        return None
    new_args, new_kwargs = pytree.tree_unflatten(known, tree)
    return target, new_args, new_kwargs


def _returns_one_tensor(target: OpOverload) -> bool:
    return [str(result.type) for result in schema_of(target).returns] == ["Tensor"]


def _rank(target: OpOverload) -> int:
    """Return 2 for an operator with an integer form, 1 for one with another record, 0 for one without a record."""
    record = BY_TARGET.get(str(target))
    return 0 if record is None else 2 if record.has_integer_form else 1


class CallLog(TorchDispatchMode):
    """Record of the operators that PyTorch runs, without those that are computed by others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        self.calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
