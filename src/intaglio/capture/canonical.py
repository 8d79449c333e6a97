"""Passes over a canonical torch.fx graph, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from intaglio.capture.nodes import arguments, operator, tensor_type
from intaglio.ops.shape import END

Pass = Callable[[fx.GraphModule], int]

COPIES = (
    "aten.clone.default",
    "aten.alias.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
)
CHECKS = ("aten._assert_tensor_metadata.default", "aten._assert_scalar.default", "aten.sym_constrain_range.default")
VIEWS = ("aten.view.default", "aten._unsafe_view.default")
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


def free_views(module: fx.GraphModule) -> int:
    """view -> reshape: once copies are dropped, a view may stand on a tensor that is not contiguous."""
    hits = [node for node in module.graph.nodes if operator(node) in VIEWS]
    for node in hits:
        node.target = torch.ops.aten.reshape.default
    return len(hits)


def drop_identity(module: fx.GraphModule) -> int:
    """Copies, full slices, casts and views that change nothing -> their input. A returned copy of an input stays."""
    hits = [node for node in module.graph.nodes if _is_identity(node) and not _returned_input(node)]
    for node in hits:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    return len(hits)


def _is_identity(node: fx.Node) -> bool:
    name = operator(node)
    if name in COPIES:
        return True
    if name == "aten.dropout.default":
        return arguments(node)["train"] is False or arguments(node)["p"] == 0
    if name == "aten.slice.Tensor":
        given = arguments(node)
        return given["start"] in (None, 0) and (given["end"] is None or _to_end(given)) and given["step"] == 1
    return name in SAME_IF_EQUAL and tensor_type(node) == tensor_type(node.args[0]) is not None


def _to_end(given: dict) -> bool:
    return isinstance(given["end"], int) and given["end"] >= END


def _returned_input(node: fx.Node) -> bool:
    return node.args[0].op == "placeholder" and any(user.op == "output" for user in node.users)


def drop_unused_constants(module: fx.GraphModule) -> int:
    """Tensors no node reads are not kept alive."""
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    unused = [name for name in list(module._buffers) if name not in used]
    for name in unused:
        delattr(module, name)
    return len(unused)


def drop_checks(module: fx.GraphModule) -> int:
    """Assertions on types and sizes that tracing left behind (``x.float()`` makes one): types are ours to check, and
    each would count as a reader of the value it looks at."""
    hits = [node for node in module.graph.nodes if operator(node) in CHECKS and not node.users]
    for node in hits:
        module.graph.erase_node(node)
    return len(hits)


CAPTURE_PASSES = (drop_checks, free_views, drop_identity)
