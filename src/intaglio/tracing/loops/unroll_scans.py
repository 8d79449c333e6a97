"""Unrolling of scan and map loops, whose number of iterations torch.export fixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from intaglio.errors import CaptureError
from intaglio.fxgraph.node_info import LoopIteration, info, update_info

SCAN, MAP = "scan", "map_impl"
MAX_UNROLLED_OPERATORS = 2048
"""Maximum number of operators in all unrolled loops of a model, because each is a step of the compiled program."""


def unroll_loops(module: fx.GraphModule) -> None:
    """Replace `scan` and `map` by one copy of the body per iteration, and stack the results of all iterations.

    All iterations read the same parameters. The record of each node contains its iteration and its operator in the
    body, so that one site serves all iterations. Nested loops are unrolled as well.

    Raises:
        CaptureError: the result would exceed `MAX_UNROLLED_OPERATORS`.
    """
    if (count := _unrolled_operators(module)) > MAX_UNROLLED_OPERATORS:
        longest = max(
            filter(_is_loop, module.graph.nodes), key=lambda node: _iteration_count(node) * _operators(_body(node))
        )
        raise CaptureError(
            longest.name,
            f"torch.ops.higher_order.{longest.target}",
            f"with all iterations unrolled ({_iteration_count(longest)} of this loop) the model has {count} operators; "
            f"the limit is {MAX_UNROLLED_OPERATORS}",
            remedy="scan over fewer steps per call and pass the state on; or quantize the modules in the body "
            "one by one",
        )
    while (loop := next(filter(_is_loop, module.graph.nodes), None)) is not None:
        _unroll(loop)
    module.graph.eliminate_dead_code()


def _is_loop(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target) in (SCAN, MAP)


def _body(loop: fx.Node) -> fx.GraphModule:
    return getattr(loop.graph.owning_module, str(loop.args[0].target))


def _operands(loop: fx.Node) -> tuple[Sequence[fx.Node], Sequence[fx.Node], Sequence[Any]]:
    """Return the carried operands, those with one entry per iteration, and those shared by all iterations."""
    _, *given = loop.args
    return (given[0], given[1], given[2]) if str(loop.target) == SCAN else ((), given[0], given[1])


def _iteration_count(loop: fx.Node) -> int:
    return int(_operands(loop)[1][0].meta["val"].shape[0])


def _operators(module: fx.GraphModule) -> int:
    """Return the number of operators in a body with its nested loops unrolled."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    return sum(_iteration_count(node) * _operators(_body(node)) if _is_loop(node) else 1 for node in calls)


def _unrolled_operators(module: fx.GraphModule) -> int:
    return sum(_iteration_count(node) * _operators(_body(node)) for node in module.graph.nodes if _is_loop(node))


def _unroll(loop: fx.Node) -> None:
    """Replace one loop by its iterations."""
    graph, body = loop.graph, _body(loop)
    carry, each, shared = _operands(loop)
    carry, stacks = list(carry), list[list[fx.Node]]()
    count = _iteration_count(loop)
    with graph.inserting_before(loop):
        for index in range(count):
            rows = [_entry_of_iteration(loop, node, index, count) for node in each]
            results = _iteration(loop, body, index, [*carry, *rows, *shared])
            stacks.append(results[len(carry) :])
            carry = results[: len(carry)]
        for user in list(loop.users):
            index = user.args[1] - len(carry)
            if index < 0:
                user.replace_all_uses_with(carry[user.args[1]])
            else:
                _stack(loop, user, [results[index] for results in stacks])
            graph.erase_node(user)
    graph.erase_node(loop)


def _entry_of_iteration(loop: fx.Node, node: fx.Node, index: int, count: int) -> fx.Node:
    """Return the entry of one iteration.

    A flipped operand marks a backward loop; its source is read from the end instead.
    """
    if _is_flipped(node):
        node, index = node.args[0], count - 1 - index
    return _call(loop, torch.ops.aten.select.int, node, 0, index)


def _stack(loop: fx.Node, taken: fx.Node, parts: list[fx.Node]) -> None:
    """Replace a stacked result of a loop, and flips of it, by a stack of the iterations' results."""
    for flip in filter(_is_flipped, list(taken.users)):
        flip.replace_all_uses_with(_call(loop, torch.ops.aten.stack.default, parts[::-1]))
        loop.graph.erase_node(flip)
    if taken.users:
        taken.replace_all_uses_with(_call(loop, torch.ops.aten.stack.default, parts))


def _is_flipped(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.flip.default and list(node.args[1]) == [0]


def _iteration(loop: fx.Node, body: fx.GraphModule, index: int, given: Sequence[Any]) -> list[Any]:
    """Copy the operators of the body in front of the loop, and return their results."""
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    copies = dict(zip(inputs, given, strict=True))
    outer = info(loop).iteration or LoopIteration()
    for node in body.graph.nodes:
        if node.op == "output":
            return [copies.get(value, value) for value in node.args[0]]
        if node.op == "placeholder":
            continue
        copies[node] = copied = loop.graph.node_copy(node, copies.__getitem__)
        copied.meta = dict(node.meta)
        if node.op == "get_attr":  # the body of a nested loop
            copied.target = _register_body(loop.graph.owning_module, body.get_submodule(str(node.target)))
            continue
        copied.meta["nn_module_stack"] = loop.meta.get("nn_module_stack", {})
        update_info(copied, iteration=LoopIteration((*outer.loops, (outer.operator or loop.name, index)), node.name))
    raise AssertionError(f"{loop} has a body without results")


def _call(loop: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a call with the metadata of the loop, for operands and results of iterations."""
    node = loop.graph.call_function(target, args)
    value = target(*fx.map_arg(args, lambda operand: operand.meta["val"]))
    node.meta = {**loop.meta, "val": value}
    return node


def _register_body(module: fx.GraphModule, body: torch.nn.Module) -> str:
    """Add the body of a nested loop to the module if needed, and return its name."""
    known = {child: name for name, child in module.named_children()}
    if body not in known:
        number = len(known)
        while hasattr(module, f"body{number}"):
            number += 1
        module.add_submodule(f"body{number}", body)
        return f"body{number}"
    return known[body]
