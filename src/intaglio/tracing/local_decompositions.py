"""Decompositions of single operators of an exported graph, with the results of torch's own decompositions.

`run_decompositions` traces the whole program again. Most networks need it only for the operators that are replaced
here; then nothing is left for it to do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from intaglio.torch_private import OpOverload, forget_new_symbols, schema_of, size_expression
from intaglio.tracing.strided_views import select_by_strides

aten = torch.ops.aten

CONSTANT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
OUT_OF_PLACE = {
    aten.add_.Tensor: aten.add.Tensor,
    aten.sub_.Tensor: aten.sub.Tensor,
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.div.Tensor,
    aten.relu_.default: aten.relu.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.hardswish_.default: aten.hardswish.default,
    aten.hardsigmoid_.default: aten.hardsigmoid.default,
    aten.silu_.default: aten.silu.default,
    aten.sigmoid_.default: aten.sigmoid.default,
    aten.tanh_.default: aten.tanh.default,
}
"""In-place operators whose decomposition is the operator that returns its result."""
COPYING = (
    aten.contiguous.default,
    aten.dropout.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
)
"""Operators that return their operand, or a copy of it with another element type, in evaluation mode."""


def decompose_single_operators(program: ExportedProgram) -> None:
    """Replace batch norms in evaluation mode, operators that divide or reshape tensors, in-place operators whose write
    nothing else sees, and dropout and casts in programs without other writes.

    Numbers that the model reads from its own float tensors become Python numbers. Other operators stay as they are, for
    `torch_private.decompose_used_composites`.
    """
    graph = program.graph
    fold_numbers(program)
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            if node.target is aten.batch_norm.default:
                found = _evaluated_norm(graph, node)
            elif node.target in RESHAPING:
                found = RESHAPING[node.target](graph, node)
            elif _returns_operand(program, node):
                found = node.args[0]
            elif node.target is aten.lift_fresh_copy.default:
                found = _call(graph, aten.clone.default, node.args)
            elif node.target in OUT_OF_PLACE and _is_unseen_write(node):
                found = _call(graph, OUT_OF_PLACE[node.target], node.args, node.kwargs)
            else:
                continue
        if found is not None:
            _replace(program, node, found)
    if not any(isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable for node in graph.nodes):
        _replace_copies(program)
    program.graph_module.recompile()


def replace_strided_views(program: ExportedProgram) -> None:
    """Replace ``as_strided`` of row-major tensors by operators that select the same elements. Nothing writes into them:
    the program has no operators in place any more.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is not aten.as_strided.default:
            continue
        first, result = node.args[0].meta["val"].shape[:1], node.meta["val"].shape[:1]
        batch = bool(first and result) and _is_same_size(first[0], result[0])
        with graph.inserting_before(node):
            found = select_by_strides(graph, node, _sizes(graph, node.meta["val"]), batch)
        if found is not None:
            _replace(program, node, found)
    program.graph_module.recompile()


def _replace(program: ExportedProgram, node: fx.Node, found: fx.Node) -> None:
    """Replace a node, which may be a result of the program."""
    found.meta = found.meta or dict(node.meta)
    node.replace_all_uses_with(found)
    for spec in program.graph_signature.output_specs:
        spec.arg.name = found.name if spec.arg.name == node.name else spec.arg.name
    program.graph.erase_node(node)


def _replace_copies(program: ExportedProgram) -> None:
    """Remove operators that return their operand as it is, replace dropout and casts by copies, and remove checks of
    element types that hold. Nothing writes into the operands. An operand that is an input does not become a result.
    """
    graph, results = program.graph, {spec.arg.name for spec in program.graph_signature.output_specs}
    for node in list(graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        if node.target not in COPYING or (node.target is aten.dropout.default and node.args[2]):
            continue
        x, value = node.args[0], node.meta["val"]
        copied: tuple[Any, dict[str, Any]] | None = None
        if node.target is aten.dropout.default:
            copied = aten.clone.default, {}
        elif value.dtype is not x.meta["val"].dtype:
            copied = aten._to_copy.default, {"dtype": value.dtype}
        elif node.target is aten.contiguous.default and not _is_row_major(x.meta["val"]):
            copied = aten.clone.default, {"memory_format": node.kwargs.get("memory_format", torch.contiguous_format)}
        if copied is not None:
            with graph.inserting_before(node):
                _replace(program, node, _call(graph, copied[0], (x,), copied[1]))
        elif x.op != "placeholder" or node.name not in results:
            _replace(program, node, x)


def _is_row_major(value: torch.Tensor) -> bool:
    """Return whether a tensor is known to have no gaps between its rows, without adding a guard."""
    return all(isinstance(size, int) for size in value.shape) and value.is_contiguous()


def fold_numbers(program: ExportedProgram) -> None:
    """Replace ``tensor.item()`` by its value for elements of float tensors of the model that calls do not change."""
    signature = program.graph_signature
    inputs = {spec.arg.name: spec.target for spec in signature.input_specs if spec.kind in CONSTANT_KINDS}
    changed = {spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION}
    for node in list(program.graph.nodes):
        if node.target is not aten.item.default:
            continue
        selections: list[fx.Node] = []
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target is aten.select.int:
            selections.append(source)
            source = source.args[0]
        target = inputs.get(getattr(source, "name", ""))
        if target is None or target in changed or not source.meta["val"].is_floating_point() or _is_written(source):
            continue
        value = program.state_dict.get(target, program.constants.get(target))
        for selection in reversed(selections):
            value = value.select(*selection.args[1:])
        forget_new_symbols(node.meta["val"])
        node.replace_all_uses_with(value.item())
        for unused in (node, *selections):
            if not unused.users:
                program.graph.erase_node(unused)


def _is_written(source: fx.Node) -> bool:
    """Return whether an in-place operator may write to a tensor."""
    return any(schema_of(user.target).is_mutable for user in source.users if isinstance(user.target, OpOverload))


def _evaluated_norm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert a batch norm with stored statistics; return `None` where the batch's own are used."""
    x, weight, bias, mean, variance, training, momentum, epsilon, _ = node.args
    if training or mean is None:
        return None
    arguments = (x, weight, bias, mean, variance, momentum, epsilon)
    norm = _call(graph, aten._native_batch_norm_legit_no_training.default, arguments)
    empty = node.meta["val"].new_empty((0,))
    norm.meta = {**node.meta, "val": (node.meta["val"], empty, empty)}
    return graph.call_function(operator.getitem, (norm, 0))


def _flattened(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert a view for the flattening of a contiguous tensor of which only the batch is symbolic, and a reshape for
    that of any other. Return `None` if its size is unknown where the program begins."""
    x, start = node.args[0], node.args[1] if len(node.args) > 1 else 0
    before, after = x.meta["val"], node.meta["val"]
    start, joined = start % max(before.dim(), 1), before.dim() - after.dim() + 1
    sizes = _sizes(graph, before)
    if before.dim() == 1 and x.op != "placeholder":
        return x
    if sizes is None or joined < 2:
        return None
    size = sizes[start]
    for other in sizes[start + 1 : start + joined]:
        size = _product(graph, size, other)
    fixed = all(isinstance(size, int) for size in before.shape[1:]) and before.is_contiguous()
    shape = [*sizes[:start], size, *sizes[start + joined :]]
    return _call(graph, aten.view.default if fixed else aten.reshape.default, (x, shape))


def _unflattened(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert a view for the division of an axis of a known size, or return `None`."""
    x, after = node.args[0], node.meta["val"]
    axis, sizes = node.args[1] % x.meta["val"].dim(), _sizes(graph, x.meta["val"])
    parts = after.shape[axis : axis + len(node.args[2])]
    if sizes is None or not all(isinstance(part, int) for part in parts):
        return None
    return _call(graph, aten.view.default, (x, [*sizes[:axis], *parts, *sizes[axis + 1 :]]))


def _expanded(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert an expansion to the sizes of another tensor, or return `None` if these are unknown where the program
    begins."""
    sizes = _sizes(graph, node.meta["val"])
    return None if sizes is None else _call(graph, aten.expand.default, (node.args[0], sizes))


def _chunks(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Insert a split into the chunks of an axis of a known size, or return `None`."""
    x, count, axis = (*node.args, 0)[:3]
    size = x.meta["val"].shape[axis]
    if not isinstance(size, int) or not size:
        return None
    return _call(graph, aten.split.Tensor, (x, -(-size // count), axis))


RESHAPING = {
    aten.chunk.default: _chunks,
    aten.expand_as.default: _expanded,
    aten.flatten.using_ints: _flattened,
    aten.unflatten.int: _unflattened,
}
"""Operators that divide or reshape tensors -> functions that insert their decomposition."""


def _returns_operand(program: ExportedProgram, node: fx.Node) -> bool:
    """Return whether an in-place operator changes nothing: dropout in evaluation mode, or the end of the gradient of a
    copy of a constant. An operand that is an input does not become a result."""
    if node.target is aten.detach_.default:
        source = node.args[0].args[0] if node.args[0].target is aten.clone.default else None
        kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
        return source is not None and kinds.get(source.name) is InputKind.CONSTANT_TENSOR
    if node.target is not aten.dropout_.default or node.args[2]:
        return False
    results = {spec.arg.name for spec in program.graph_signature.output_specs}
    return node.args[0].op != "placeholder" or node.name not in results


def _sizes(graph: fx.Graph, value: torch.Tensor) -> list[int | fx.Node] | None:
    """Return the sizes of a tensor, as nodes where they are symbolic; `None` if no input has one of them."""
    sizes = [size if isinstance(size, int) else _size_of_input(graph, size) for size in value.shape]
    return None if None in sizes else [size for size in sizes if size is not None]


def _product(graph: fx.Graph, a: int | fx.Node, b: int | fx.Node) -> int | fx.Node:
    """Return the product of two sizes, for which a node is inserted unless both are known."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    product = graph.call_function(operator.mul, (a, b))
    product.meta = {"val": operator.mul(*(size if isinstance(size, int) else size.meta["val"] for size in (a, b)))}
    return product


def _size_of_input(graph: fx.Graph, size: torch.SymInt) -> fx.Node | None:
    """Return a node behind the inputs with this size, which is inserted if needed; `None` if no input has it.

    Tracing puts the sizes of inputs at the same place.
    """
    for node in graph.nodes:
        if node.target is aten.sym_size.int and _is_same_size(node.meta["val"], size):
            return node
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for node in inputs:
        shape = getattr(node.meta.get("val"), "shape", ())
        axis = next((axis for axis, other in enumerate(shape) if _is_same_size(other, size)), None)
        if axis is not None:
            with graph.inserting_after(inputs[-1]):
                found = _call(graph, aten.sym_size.int, (node, axis))
            found.meta = {"val": size}
            return found
    return None


def _is_same_size(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Return whether two free sizes are the same expression, without adding a guard."""
    if isinstance(size, int) or isinstance(other, int):
        return False
    return bool(size_expression(size) == size_expression(other))


def _is_unseen_write(node: fx.Node) -> bool:
    """Return whether an in-place operator writes memory that only it reads from here on.

    Its tensor must be new, that is not a view of another, and all other readers must come first and return no views.
    The result of the operator out of place must have the same element type.
    """
    written = node.args[0]
    source = written.args[0] if written.target is operator.getitem else written
    readers = [user for user in written.users if user is not node]
    if not _returns_new(source) or any(user > node or not _returns_new(user) for user in readers):
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    value = OUT_OF_PLACE[node.target](*args, **kwargs)
    return bool(value.dtype == written.meta["val"].dtype)


def _returns_new(node: fx.Node) -> bool:
    """Return whether the results of an operator are memory of their own."""
    if not isinstance(node.target, OpOverload) or torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return False
    return all(result.alias_info is None for result in schema_of(node.target).returns)


def _call(graph: fx.Graph, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """Insert a call that has the name of its operator, as in a traced graph."""
    return graph.create_node("call_function", target, args, kwargs, name=target.overloadpacket.__name__)
