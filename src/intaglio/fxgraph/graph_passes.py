"""Passes over a canonical torch.fx graph, and how they are run."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from intaglio.fxgraph.attention_masks import resolve_masks
from intaglio.fxgraph.half_precision import widen_halves
from intaglio.fxgraph.node_info import constant_path, info, set_info, tensor_type
from intaglio.fxgraph.nodes import arguments, is_constant, operator
from intaglio.fxgraph.unique_names import add_constant
from intaglio.ops.movement.shape import END
from intaglio.torch_private import buffers_of

Pass = Callable[[fx.GraphModule], int]

COPIES = (
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
)
ASSERTIONS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default")
VIEW_TARGETS = ("aten.view.default", "aten._unsafe_view.default")
SAME_IF_EQUAL = ("aten._to_copy.default", "aten.expand.default", "aten.reshape.default", "aten.to.dtype")


def run(module: fx.GraphModule, passes: Iterable[Pass]) -> dict[str, int]:
    """Each pass in turn, lint after every one; pass name -> rewrites it made."""
    counts = {}
    for step in passes:
        counts[step.__name__] = step(module)
        module.graph.eliminate_dead_code()
        module.graph.lint()
    module.recompile()
    drop_unused_constants(module)
    return counts


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that can be rewritten freely; tensors are shared with the original, never written."""
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
    copied.meta = copy.deepcopy(module.meta)
    return copied


def free_views(module: fx.GraphModule) -> int:
    """view -> reshape: once copies are dropped, a view may stand on a tensor that is not contiguous."""
    hits = [node for node in module.graph.nodes if operator(node) in VIEW_TARGETS]
    for node in hits:
        node.target = torch.ops.aten.reshape.default
    return len(hits)


def drop_identity(module: fx.GraphModule) -> int:
    """Copies, full slices, casts and views that change nothing -> their input. A returned copy of an input stays."""
    hits = [node for node in module.graph.nodes if _is_identity(node) and not _returned_input(node)]
    for node in hits:
        node.replace_all_uses_with(_only_operand(node))
        module.graph.erase_node(node)
    return len(hits)


def _only_operand(node: fx.Node) -> fx.Node:
    return node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]


def _is_identity(node: fx.Node) -> bool:
    name = operator(node)
    if name in COPIES:
        return True
    if name == "aten.cat.default":
        return len(node.args[0]) == 1
    if name == "aten.dropout.default":
        return arguments(node)["train"] is False or arguments(node)["p"] == 0
    if name == "aten.slice.Tensor":
        given = arguments(node)
        return given["start"] in (None, 0) and (given["end"] is None or _to_end(given)) and given["step"] == 1
    return name in SAME_IF_EQUAL and tensor_type(node) == tensor_type(node.args[0]) is not None


def _to_end(given: dict) -> bool:
    return isinstance(given["end"], int) and given["end"] >= END


def _returned_input(node: fx.Node) -> bool:
    return _only_operand(node).op == "placeholder" and any(user.op == "output" for user in node.users)


def fold_constants(module: fx.GraphModule) -> int:
    """What reads constants only (weight norm, a weight that is standardized or cast) -> the constant it computes.

    Not a pass of capture: while a model is trained its weights are no constants.
    """
    values: dict[fx.Node, Any] = {}
    paths: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if is_constant(node):
            values[node], paths[node] = getattr(module, str(node.target)), constant_path(node)
        elif _folds(node) and all(source in values for source in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            with torch.no_grad():
                values[node], paths[node] = node.target(*args, **kwargs), paths[node.all_input_nodes[0]]
    hits = [n for n, value in values.items() if not is_constant(n) and isinstance(value, torch.Tensor)]
    hits = [node for node in hits if any(user not in values for user in node.users)]
    for index, node in enumerate(hits):
        name = add_constant(module, f"constant{index}", values[node])
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        set_info(constant, type=tensor_type(node), path=PARAMETRIZED.sub(r".\1", paths[node]))
        node.replace_all_uses_with(constant)
        module.graph.erase_node(node)
    return len(hits)


PARAMETRIZED = re.compile(r"\.parametrizations\.(\w+)\..*")
"""``conv.parametrizations.weight.original0`` is what ``conv.weight`` is made of."""


DEQUANTIZE_TARGETS = "quantized_decomposed.dequantize"


def _folds(node: fx.Node) -> bool:
    """Whether a node with constant operands has one value: it has operands, and draws no random numbers."""
    if node.op != "call_function" or not node.all_input_nodes or info(node).dim is not None:
        return False
    if operator(node).startswith(DEQUANTIZE_TARGETS):  # of a part that is quantized already: its weights stay integers
        return False
    return torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ())


def drop_unused_constants(module: fx.GraphModule) -> int:
    """Tensors no node reads are not kept alive."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    unused = [name for name in list(buffers_of(module)) if name not in used]
    for name in unused:
        delattr(module, name)
    return len(unused)


def drop_checks(module: fx.GraphModule) -> int:
    """Assertions on types and sizes that tracing left behind (``x.float()`` makes one): types are ours to check, and
    each would count as a reader of the value it looks at."""
    hits = [node for node in module.graph.nodes if operator(node) in ASSERTIONS and not node.users]
    for node in hits:
        module.graph.erase_node(node)
    return len(hits)


CAPTURE_PASSES = (drop_checks, free_views, widen_halves, drop_identity, resolve_masks)
