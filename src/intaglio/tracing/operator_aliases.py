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
from intaglio.torch_private import OpOverload, TorchDispatchMode, decomposition_of, pytree, schema_of


def resolve_aliases(program: ExportedProgram) -> None:
    """Replace calls whose only work is one call of an operator that has a record.

    An operator without an integer form is replaced by one that has it; one without a record by one that has a record.
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
        found = _canonical_call(node)
        if found is not None:
            target, args, kwargs = found
            with graph.inserting_before(node):
                call = graph.create_node("call_function", target, args, kwargs, name=target.overloadpacket.__name__)
            call.meta = dict(node.meta)
            node.replace_all_uses_with(call)
            renamed[node.name] = call.name
            graph.erase_node(node)
    return renamed


def _canonical_call(node: fx.Node) -> tuple[OpOverload, Any, Any] | None:
    """Return operator, operands and keywords of the only call that computes a node; ``None`` for others."""
    if not isinstance(node.target, OpOverload) or _rank(node.target) == 2 or not _returns_one_tensor(node.target):
        return None
    kernel = decomposition_of(node.target)
    operands = [operand for operand in node.all_input_nodes if isinstance(operand.meta.get("val"), torch.Tensor)]
    if kernel is None or len(operands) < len(node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    modes = [mode for operand in operands if (mode := getattr(operand.meta["val"], "fake_mode", None)) is not None]
    with modes[0] if modes else nullcontext(), CallLog() as log:  # a kernel that creates a tensor may get free sizes
        kernel(*args, **kwargs)
    if len(log.calls) != 1 or _rank(log.calls[0][0]) <= _rank(node.target):
        return None
    nodes = {id(operand.meta["val"]): operand for operand in operands}
    target, *given = log.calls[0]
    leaves, tree = pytree.tree_flatten(given)
    known = [nodes.get(id(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    used = {leaf for leaf in known if isinstance(leaf, fx.Node)}
    computed = any(isinstance(leaf, torch.SymInt) for leaf in leaves) or len(used) < len(operands)
    in_front = isinstance(pytree.tree_leaves(given[0])[0], torch.Tensor)  # records take no number there
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
