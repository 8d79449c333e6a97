"""An Inductor pass that computes dynamic sizes from the sizes of the inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def sizes_of_inputs(graph: fx.Graph) -> None:
    """Compute sizes of intermediate values from sizes of inputs.

    Tracing reads a size from the value that first needs it, which is often the result of a layer. Inductor's patterns
    count this as a second consumer of the result, and then compile the operators after the layer as separate loops.
    """
    inputs = _input_sizes(graph)
    for node in list(graph.nodes):
        size = node.meta.get("val")
        if not isinstance(size, torch.SymInt) or not any(_is_tensor(source) for source in node.all_input_nodes):
            continue
        needed = size.node.expr.free_symbols
        if needed and needed <= inputs.keys():  # otherwise the size is a constant or depends on data
            with graph.inserting_before(node):
                node.replace_all_uses_with(sympy_interp(PythonReferenceAnalysis, inputs, size.node.expr).node)
    graph.eliminate_dead_code()


def _input_sizes(graph: fx.Graph) -> dict[Any, fx.Proxy]:
    """Return a node for every symbol that is the size of an input's axis."""
    tracer, found = fx.proxy.GraphAppendingTracer(graph), dict[Any, fx.Proxy]()
    inputs = graph.find_nodes(op="placeholder")
    for node in filter(_is_tensor, inputs):
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in found:
                with graph.inserting_after(inputs[-1]):
                    read = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                found[size.node.expr] = fx.Proxy(read, tracer)
    return found


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
