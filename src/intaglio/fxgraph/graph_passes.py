"""Execution of passes on a torch.fx graph, and copies of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import fx, nn

from intaglio.fxgraph.graph_checker import finish_pass
from intaglio.torch_private import buffers_of

Pass = Callable[[fx.GraphModule], int]


def run(module: fx.GraphModule, passes: Iterable[Pass]) -> dict[str, int]:
    """Run passes in order and check the graph after each one; return the number of rewrites by pass name."""
    counts = {}
    for step in passes:
        counts[step.__name__] = step(module)
        finish_pass(module, step.__name__)
    module.recompile()
    drop_unused_constants(module)
    return counts


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph so that it can be rewritten. The copy shares its tensors with the original."""
    root = nn.Module()
    for name, tensor in buffers_of(module).items():
        root.register_buffer(name, tensor)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(module.graph, mapping)
    if output is not None:
        graph.output(output)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    copied = fx.GraphModule(root, graph)
    copied.meta = dict(module.meta)
    return copied


def drop_unused_constants(module: fx.GraphModule) -> int:
    """Delete tensors that no node reads, and return their number."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    unused = [name for name in list(buffers_of(module)) if name not in used]
    for name in unused:
        delattr(module, name)
    return len(unused)
