"""Constant folding."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import fx

from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.node_info import constant_path, info, set_info, tensor_type
from intaglio.fxgraph.nodes import is_constant, operator, record_of
from intaglio.fxgraph.overloads import DEQUANTIZE_GROUPS_TARGET
from intaglio.signature import TORCH_DTYPES

PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\..*")
"""Matches paths of parametrizations: ``conv.parametrizations.weight.original0`` belongs to ``conv.weight``."""

DEQUANTIZE_TARGETS = ("quantized_decomposed.dequantize", DEQUANTIZE_GROUPS_TARGET)
"""Beginnings of the names of operators that dequantize."""


FILLED_WITH = {
    f"aten.{name}.default": number
    for number, names in (
        (0, ("zeros", "zeros_like", "new_zeros", "empty_like", "new_empty")),
        (1, ("ones", "ones_like", "new_ones")),
    )
    for name in names
} | {"aten.empty.memory_format": 0}
"""Number that an operator fills its result with; memory that PyTorch leaves as it is gets zeros."""
FILLED_WITH_ARGUMENT = {f"aten.{name}": 1 for name in ("full.default", "full_like.default", "fill.Scalar")} | {
    "aten.new_full.default": 2
}
"""Position of the number that an operator fills its result with."""
CREATED = (
    "aten.arange.default",
    "aten.arange.start",
    "aten.arange.start_step",
    "aten.eye.default",
    "aten.eye.m",
    "aten.linspace.default",
    "aten.scalar_tensor.default",
    "aten.tril_indices.default",
    "aten.triu_indices.default",
)
"""Operators without tensor operands."""
LARGEST_CREATED = 1 << 24
"""Largest number of elements of a tensor that becomes a constant although no operand is one."""


def fold_constants(module: fx.GraphModule) -> int:
    """Replace operators whose result does not depend on inputs by their result.

    These are operators that read only constants, such as weight norm or a cast of a weight, and those that create
    tensors of a fixed shape, such as ``x.new_zeros(7, 7)``.

    Capture does not run this pass, because weights are not constant in training.
    """
    values: dict[fx.Node, Any] = {}
    paths: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if is_constant(node):
            values[node], paths[node] = getattr(module, str(node.target)), constant_path(node)
        elif (created := _created(node)) is not None:
            values[node], paths[node] = created, node.name
        elif _folds(node) and all(source in values for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            with torch.no_grad():
                values[node], paths[node] = node.target(*args, **kwargs), paths[node.all_input_nodes[0]]
    hits = [n for n, value in values.items() if not is_constant(n) and isinstance(value, torch.Tensor)]
    hits = [node for node in hits if any(user not in values for user in node.users) and not is_recurrent_state(node)]
    for index, node in enumerate(hits):
        name = add_constant(module, f"constant{index}", values[node])
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        set_info(constant, type=tensor_type(node), path=PARAMETRIZED.sub(r".\1", paths[node]))
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    return len(hits)


def _created(node: fx.Node) -> torch.Tensor | None:
    """Return the result of an operator that creates a tensor of a fixed shape, whatever its operands, or ``None``."""
    name, kind = operator(node), tensor_type(node)
    shape = [size for size in kind.shape if isinstance(size, int)] if kind is not None else []
    if kind is None or len(shape) < len(kind.shape) or math.prod(shape) > LARGEST_CREATED:
        return None
    if kind.dtype not in TORCH_DTYPES:
        return None
    number = fill_value(node)
    if number is not None:
        return torch.full(shape, number, dtype=TORCH_DTYPES[kind.dtype])
    if name not in CREATED or node.all_input_nodes:
        return None
    options = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
    return node.target(*node.args, **options).to(TORCH_DTYPES[kind.dtype])


def fill_value(node: fx.Node) -> float | None:
    """Return the number that an operator fills its result with; ``None`` for other operators and computed numbers."""
    name = operator(node)
    number = node.args[FILLED_WITH_ARGUMENT[name]] if name in FILLED_WITH_ARGUMENT else FILLED_WITH.get(name)
    return number if isinstance(number, (bool, int, float)) else None


def is_recurrent_state(node: fx.Node) -> bool:
    """Return whether a recurrent layer reads a node as its initial state, which its kernel takes as an activation."""
    return any((record := record_of(user)) is not None and record.recurrent for user in node.users)


def _folds(node: fx.Node) -> bool:
    """Return whether a node with constant operands has a constant value: it has operands and is not random."""
    if node.op != "call_function" or not node.all_input_nodes or info(node).dim is not None:
        return False
    if operator(node).startswith(DEQUANTIZE_TARGETS):  # weights of parts that are already quantized stay integers
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())
