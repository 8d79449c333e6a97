"""Functions that read and insert torch.fx nodes: operator name, operands, records and constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

from intaglio.errors import CaptureError
from intaglio.fxgraph.node_info import info, inherit_info, known_type, set_info, tensor_type, update_info
from intaglio.ir import Dim, DType, Shape, TensorType, evaluate, substitute, symbols_of
from intaglio.ir.dims import divide, never_decreases
from intaglio.ops import BY_TARGET, Call, OpDef
from intaglio.signature import DTYPES
from intaglio.torch_private import pytree, quantized_decomposed, schema_of, size_expression

if TYPE_CHECKING:
    import sympy  # the import takes a third of a second


def dim_of(size: int | torch.SymInt, sizes: Mapping[sympy.Expr, Dim]) -> Dim:
    """Convert a dimension of a traced tensor to a `Dim`. Symbols with the same size are equal."""
    return size if isinstance(size, int) else dim_of_expression(size_expression(size), sizes)


def dim_of_expression(expression: sympy.Expr, sizes: Mapping[sympy.Expr, Dim]) -> Dim:
    """Convert a symbolic size to a `Dim`.

    Args:
        expression: the expression of torch.export.
        sizes: the size of each symbol, and of expressions of symbols.

    Raises:
        CaptureError: the expression has a form without a counterpart.
    """
    equal: dict[Dim, sympy.Symbol] = {}
    first = {free: equal.setdefault(own, _symbol_of(free)) for free, own in sizes.items()}
    return _dim(expression.xreplace(first).expand(), {free: own for own, free in equal.items()})


def _symbol_of(expression: sympy.Expr) -> sympy.Symbol:
    """Return a symbol that takes the place of an expression; a symbol does so itself."""
    if expression.is_Symbol:
        return expression
    import sympy

    return sympy.Dummy()


def _dim(expression: sympy.Expr, sizes: Mapping[sympy.Symbol, Dim]) -> Dim:
    """Convert a symbolic size to a `Dim`.

    Raises:
        CaptureError: the expression has a form without a counterpart.
    """
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return sizes[expression]
    parts = [_dim(part, sizes) for part in expression.args]
    kind = type(expression).__name__
    if kind == "Add":
        return sum(parts[1:], parts[0])
    if kind == "Mul" and all(isinstance(part, int) or part.terms for part in parts):
        total: Dim = 1
        for part in parts:
            total = total * part
        return total
    if kind == "FloorDiv":
        if isinstance(parts[1], int):
            return parts[0] // parts[1]
        if (quotient := divide(*parts)) is not None:
            return quotient
    if kind in ("Mod", "PythonMod") and isinstance(parts[1], int) and parts[1] > 0:
        return parts[0] - parts[0] // parts[1] * parts[1]
    if kind in ("Max", "Min") and (found := _extreme(parts, kind)) is not None:
        return found
    if kind == "Pow" and isinstance(parts[1], int) and parts[1] > 0:
        total = 1
        for _ in range(parts[1]):
            total = total * parts[0]
        return total
    raise CaptureError(
        "model",
        None,
        f"the dimension {expression} is not supported; sums, products and // by a number are",
        remedy="leave the free size that it is computed from out of dynamic_shapes, so that the size of the example is "
        "fixed, or use whole scale factors",
    )


def _extreme(parts: list[Dim], kind: str) -> Dim | None:
    """Return the part that is the largest ("Max") or smallest ("Min") one for all sizes of 1 and more, or ``None``."""
    sign = 1 if kind == "Max" else -1

    def is_extreme(part: Dim) -> bool:
        differences = [(part - other) * sign for other in parts]
        return all(
            never_decreases(one) and evaluate(one, dict.fromkeys(symbols_of(one), 1)) >= 0 for one in differences
        )

    return next(filter(is_extreme, parts), None)


def operator(node: fx.Node) -> str:
    """Return the overload that a node calls, as in ``aten.conv2d.default``; "" if it calls none."""
    return target_name(node.target) if node.op == "call_function" else ""


def target_name(target: Any) -> str:
    """Return the name of what a node calls: of an overload, or of a function of Python, such as ``getitem``."""
    return target.__name__ if isinstance(target, BuiltinFunctionType) else str(target)


def overload_of(name: str) -> Any:
    """Return the operator with a name such as ``aten.conv2d.default``."""
    library, packet, overload = name.split(".")
    home = quantized_decomposed() if library == "quantized_decomposed" else getattr(torch.ops, library)
    return getattr(getattr(home, packet), overload)


def record_of(node: fx.Node) -> OpDef | None:
    """Return the record of an operator with an integer form, or ``None``.

    A record of the user takes precedence. If one overload has two records, the constant operands decide.
    """
    record = info(node).record or BY_TARGET.get(operator(node))
    if record is None or record.direct or not record.has_integer_form:
        return None
    if record.if_not_constant:
        given = arguments(node)
        others = (other for name, other in record.if_not_constant.items() if not is_constant(given[name]))
        return next(others, record)
    return record


def known_record(node: fx.Node) -> OpDef:
    """Return the record of an operator that must have an integer form."""
    record = record_of(node)
    assert record is not None, f"{node} has no record"
    return record


def is_anchor(node: fx.Node) -> bool:
    """Return whether a node is a convolution, linear layer, product, attention or recurrent layer."""
    record = record_of(node)
    return record is not None and record.anchor


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return every argument by its schema name, defaults included."""
    schema = schema_of(node.target).arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update({a.name: value for a, value in zip(schema, node.args, strict=False)})
    named.update(node.kwargs)
    return named


def operands(node: fx.Node, record: OpDef | None = None) -> tuple[fx.Node | None, ...]:
    """Return the tensor operands in the order of the record; ``None`` for a number or a missing operand."""
    record = record or record_of(node)
    if record is None:
        return tuple(node.all_input_nodes)
    given = arguments(node)
    values = given[record.operands[0]] if record.variadic else (given.get(name) for name in record.operands)
    return tuple(value if isinstance(value, fx.Node) and tensor_type(value) else None for value in values)


def known_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands of an operator that must have all of them."""
    found = operands(node)
    given = tuple(value for value in found if value is not None)
    assert len(given) == len(found), f"{node} leaves an operand out"
    return given


class LayerOperands(NamedTuple):
    """Operands of a layer with a constant weight, such as a convolution."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def layer_operands(node: fx.Node) -> LayerOperands:
    """Return the operands of a layer by the roles of its record."""
    roles, values = known_record(node).roles, operands(node)
    assert roles.weight is not None, f"{node} has no weight"
    assert roles.bias is not None, f"{node} has no bias"
    x, weight, bias = (values[place] for place in (roles.x[0], roles.weight, roles.bias))
    assert x is not None, f"{node} has no input"
    assert weight is not None, f"{node} leaves its weight out"
    return LayerOperands(x, weight, bias)


def activations(node: fx.Node) -> list[fx.Node | None]:
    """Return the operands that are activations."""
    record, values = known_record(node), operands(node)
    return list(values) if record.variadic else [values[i] for i in record.roles.x]


def call_before(old: fx.Node, kind: TensorType, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call in front of `old` with the type `kind` and the origin of `old`."""
    with old.graph.inserting_before(old):
        node = old.graph.call_function(target, args, kwargs)
    inherit_info(node, old, type=kind)
    return node


def reshape_before(old: fx.Node, value: fx.Node, shape: Shape) -> fx.Node:
    """Insert a reshape to a shape in front of `old`; at most one size may be neither a number nor that of an input."""
    sizes = [size_of(old, dim) for dim in shape]
    kind = TensorType(shape, known_type(value).dtype)
    given = [-1 if size is None else size for size in sizes]
    return call_before(old, kind, torch.ops.aten.reshape.default, value, given)


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Replace all uses of the old node by the new one, and erase the old one."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def size_of(before: fx.Node, dim: Dim) -> int | fx.Node | None:
    """Return a dimension as an argument: a number, or a node with that size, which is inserted if needed.

    Returns:
        ``None`` if no input has an axis of exactly this size.
    """
    if isinstance(dim, int):
        return dim
    for node in before.graph.nodes:
        if node is before:
            break
        if info(node).dim == dim:
            return node
    for node in before.graph.nodes:
        kind = tensor_type(node)
        if node.op == "placeholder" and kind is not None and dim in kind.shape:
            with before.graph.inserting_before(before):
                asked = before.graph.call_function(torch.ops.aten.sym_size.int, (node, kind.shape.index(dim)))
            inherit_info(asked, before, dim=dim)
            return asked
    return None


def size_along(before: fx.Node, value: fx.Node, axis: int) -> int | fx.Node:
    """Return the size of an axis: a number, or a node in front of `before` that computes it."""
    dim = known_type(value).shape[axis]
    if isinstance(dim, int):
        return dim
    with before.graph.inserting_before(before):
        size = before.graph.call_function(torch.ops.aten.sym_size.int, (value, axis))
    inherit_info(size, before, dim=dim)
    return size


def replace_symbols(module: fx.GraphModule, sizes: Mapping[str, Dim]) -> None:
    """Replace symbols in the types and sizes of all nodes by dimensions that they are known to be."""
    for node in module.graph.nodes:
        kind, own = tensor_type(node), info(node).dim
        if kind is not None:
            update_info(node, type=replace(kind, shape=tuple(substitute(dim, sizes) for dim in kind.shape)))
        if own is not None:
            update_info(node, dim=substitute(own, sizes))


def is_constant(node: fx.Node) -> bool:
    """Return whether a node is a constant of the module."""
    return node.op == "get_attr"


def resolve_dims(value: Any) -> Any:
    """Replace nodes with symbolic integers in nested arguments by the dimensions they represent."""
    return pytree.tree_map(lambda v: _dim_or_self(v) if isinstance(v, fx.Node) else v, value)


def _dim_or_self(node: fx.Node) -> Any:
    dim = info(node).dim
    return node if dim is None else dim


def call_of(node: fx.Node, record: OpDef) -> Call:
    """Return a node as the `Call` that the functions of a record take."""
    found = operands(node, record)
    types = [tensor_type(value) if value is not None else None for value in found]
    return Call(
        target=operator(node),
        arguments={k: resolve_dims(v) for k, v in arguments(node).items() if k not in record.operands},
        shapes=tuple(kind.shape if kind else None for kind in types),
        floating=tuple(kind.dtype is DType.F32 if kind else None for kind in types),
        constant=tuple(is_constant(value) if value is not None else None for value in found),
        result=kind.shape if (kind := tensor_type(node)) else (),
    )


def tensor_nodes(value: Any) -> Iterator[fx.Node]:
    """Yield every node in nested arguments, in order, repetitions included."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, fx.Node):
            yield leaf


def constant_node(module: fx.GraphModule, name: str, path: str) -> fx.Node:
    """Return the node of a constant, added on first use, so that all readers of a tensor share one node."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target == name:
            return node
    first = next(iter(module.graph.nodes))
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(name)
    tensor = getattr(module, name)
    set_info(node, type=TensorType(tuple(tensor.shape), DTYPES[tensor.dtype]), path=path)
    return node


def name_of(node: fx.Node) -> str:
    """Return the name that a node had before conversion, if it replaced one, or its own name."""
    name: str = info(node).replaces or node.name
    return name
