"""Free sizes in the graph that Inductor makes, read from what a call brings."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis


def sizes_of_inputs(graph: fx.Graph) -> None:
    """A size of a value that is computed -> the same number, computed from sizes of inputs.

    Tracing reads a size off the value where it is first needed, which is often a layer's result. Inductor's patterns
    take that for a second reader of the result, and leave what stands behind the layer to loops of its own.
    """
    inputs = _input_sizes(graph)
    for node in list(graph.nodes):
        size = node.meta.get("val")
        if not isinstance(size, torch.SymInt) or not any(_is_tensor(source) for source in node.all_input_nodes):
            continue
        needed = size.node.expr.free_symbols
        if needed and needed <= inputs.keys():  # else it is a constant, or depends on values
            with graph.inserting_before(node):
                node.replace_all_uses_with(sympy_interp(PythonReferenceAnalysis, inputs, size.node.expr).node)
    graph.eliminate_dead_code()


def _input_sizes(graph: fx.Graph) -> dict[Any, fx.Proxy]:
    """Symbol -> a node that reads it off an input."""
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
