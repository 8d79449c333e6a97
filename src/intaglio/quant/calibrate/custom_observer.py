"""Observers that write their own quantize and dequantize nodes, which `convert` keeps as they are.

If they quantize a constant, everything up to its integers is folded, and dequantize stays in the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from intaglio.errors import CalibrationError, InputError, UnsupportedError
from intaglio.fxgraph.node_info import info, origin, set_info, update_info
from intaglio.fxgraph.nodes import is_constant, operator, tensor_nodes
from intaglio.ir import DType, TensorType
from intaglio.signature import DTYPES

Edge = tuple[str, str | None]
"""Name of a value and of its reader, or ``None`` for all its readers."""


def insert_custom_observers(module: fx.GraphModule, factories: Mapping[Edge, Any], observed_edges: set[Edge]) -> None:
    """Insert a call of each observer on its edge.

    Args:
        module: the graph to observe, which is changed in place.
        factories: edge -> factory of the observer.
        observed_edges: set that each edge is added to when its observer is called.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for index, (edge, make) in enumerate(factories.items()):
        observer = make()
        if not isinstance(observer, nn.Module):
            raise InputError(
                edge[0],
                None,
                f"an observer that writes its own quantize nodes must be an nn.Module, not a {type(observer).__name__}",
            )
        observer.register_forward_hook(partial(_note, observed_edges, edge))
        _insert(module, nodes, edge, f"own_{index}", observer)


def _note(observed_edges: set[Edge], edge: Edge, *call: Any) -> None:
    observed_edges.add(edge)


def activation_edges(module: fx.GraphModule, factories: Iterable[Edge]) -> list[Edge]:
    """Return the edges whose values depend on data, that is those that are not constants."""
    nodes = {node.name: node for node in module.graph.nodes}
    return [edge for edge in factories if not is_constant(nodes[edge[0]])]


def _insert(
    module: fx.GraphModule, nodes: Mapping[str, fx.Node], edge: Edge, name: str, observer: nn.Module
) -> fx.Node:
    """Insert a call of an observer on an edge and return its node."""
    value, reader = nodes[edge[0]], None if edge[1] is None else nodes[edge[1]]
    readers = list(value.users) if reader is None else [reader]
    source = value if reader is None else _read_as(reader, value)
    module.add_submodule(name, observer)
    with module.graph.inserting_before(value.next if reader is None else reader):
        call = module.graph.call_module(name, (source,))
    set_info(call, type=info(value).type, origin=origin(reader or value), observer=edge)
    for user in readers:
        user.replace_input_with(source, call)
    return call


def _read_as(reader: fx.Node, value: fx.Node) -> fx.Node:
    """Return the node through which a reader reads a value: the value, or an observer or a Q/DQ pair after it."""
    for read in reader.all_input_nodes:
        source = read
        while source is not value and (source.op == "call_module" or operator(source).startswith("quantized_decom")):
            source = source.args[0]
        if source is value:
            return read
    raise UnsupportedError(
        reader.name,
        operator(reader),
        f"the operator no longer reads {value.name}, for which its annotation has an observer",
    )


def convert_custom_observers(
    module: fx.GraphModule, factories: Iterable[Edge], observed: fx.GraphModule, observed_edges: Collection[Edge]
) -> None:
    """Replace each observer call by the nodes that the observer's ``convert(module, node)`` writes.

    Args:
        module: the graph to convert, which is changed in place.
        factories: edges with observers.
        observed: the graph that contains the observers.
        observed_edges: edges whose observers have been called.

    Raises:
        CalibrationError: if the observer of an activation has never been called.
    """
    calls = {info(node).observer: node for node in observed.graph.nodes if info(node).observer is not None}
    for edge in factories:
        name, nodes = str(calls[edge].target), {node.name: node for node in module.graph.nodes}
        if edge not in observed_edges and not is_constant(nodes[edge[0]]):
            where, kind = origin(calls[edge]), type(observed.get_submodule(name)).__name__
            raise CalibrationError(
                where.path or edge[0],
                where.operator or None,
                f"the observer {kind} has seen no data",
                remedy="run prepared(batch) or calibrate first; files of ranges or parameters do not contain its state",
            )
        call = _insert(module, nodes, edge, name, observed.get_submodule(name))
        written = _convert(module, call)
        module.delete_submodule(name)
        _register_constants(module, written)
        _fold_constants(module, written)
    module.graph.eliminate_dead_code()
    module.graph.lint()


def _convert(module: fx.GraphModule, call: fx.Node) -> list[fx.Node]:
    """Return the nodes that an observer writes in place of its call.

    Those that are read by other nodes get the type of the value. Nodes in between have no type and run in PyTorch.
    """
    observer, source = module.get_submodule(str(call.target)), call.args[0]
    kind, where, known = info(call).type, origin(call), set(module.graph.nodes)
    if is_constant(source):
        with torch.no_grad():
            observer(getattr(module, str(source.target)))
    observer.convert(module, call)
    if call in set(module.graph.nodes):
        raise UnsupportedError(
            where.path or str(source),
            where.operator,
            f"{type(observer).__name__}.convert did not remove its node from the graph",
            remedy="call node.replace_all_uses_with(...), then module.graph.erase_node(node)",
        )
    inserted = [node for node in module.graph.nodes if node not in known]
    for node in inserted:
        update_info(node, observer=True, origin=where)
        if any(user not in inserted for user in node.users):
            update_info(node, type=kind)
    return inserted


def _register_constants(module: fx.GraphModule, written: Iterable[fx.Node]) -> None:
    """Register the tensors that the observer added as buffers, like all constants of a graph."""
    for node in written:
        if node.op == "get_attr":
            tensor = getattr(module, str(node.target)).detach()
            delattr(module, str(node.target))
            module.register_buffer(str(node.target), tensor)
            update_info(node, type=_type_of(tensor), path=str(node.target))


def _fold_constants(module: fx.GraphModule, written: Iterable[fx.Node]) -> None:
    """Fold the integers computed from constants; keep operators that turn integers into floats, and all after them."""
    values: dict[fx.Node, Any] = {n: getattr(module, str(n.target)) for n in module.graph.nodes if is_constant(n)}
    made: list[fx.Node] = []
    for node in written:
        read = list(tensor_nodes((node.args, node.kwargs)))
        if is_constant(node) or not read or any(leaf not in values for leaf in read):
            continue
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        with torch.no_grad():
            result = node.target(*args, **kwargs)
        if not (_is_float(result) and not _is_float(values[read[0]])):
            values[node] = result
            made.append(node)
    for node in made:
        if isinstance(values[node], torch.Tensor) and any(user not in values for user in node.users):
            name = f"{node.name}_held"
            module.register_buffer(name, values[node])
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(name)
            set_info(constant, type=_type_of(values[node]), path=name)
            node.replace_all_uses_with(constant)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _type_of(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), DTYPES.get(tensor.dtype, DType.OTHER))
