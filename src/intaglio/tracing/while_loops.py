"""Loops that run as long as the data says: a condition and a body, each captured as a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from intaglio.errors import CaptureError, UnsupportedError
from intaglio.fxgraph.graph_passes import run
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin, update_info
from intaglio.ir import About, Input, Origin, Output, Signature
from intaglio.signature import repeated
from intaglio.torch_private import pytree, size_expression
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured, module_classes
from intaglio.tracing.export_metadata import constant, describe, module_around, path_of
from intaglio.tracing.unroll_scans import unroll

WHILE = "while_loop"
SCAN_INSTEAD = "write a loop of a fixed count, which is unrolled (scan, or one in Python); or compile it natively"
"""What a backend without such loops says to do."""


@dataclass(frozen=True, eq=False)
class WhileLoop:
    """``while condition(*values): carried = body(*values)``, where the values are what is carried and what stays.

    The target of a node whose arguments are the values, the first ``carried`` of them carried, and whose result is a
    tuple of those. ``name``: of the loop, once in a model. ``run``: what the stage of the model around makes of the
    body; the condition is the float one at every stage.
    """

    name: str
    carried: int
    condition: Captured
    body: Captured
    run: Callable[..., Any]

    __name__, __module__ = WHILE, __name__

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return repeated(self.condition.module, self.run, self.carried, values)

    def __str__(self) -> str:
        return f"loop.{self.name}"


def loops_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes that run a body."""
    return (node for node in module.graph.nodes if isinstance(node.target, WhileLoop))


def parts_of(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Conditions and bodies of its loops."""
    for node in loops_of(module):
        yield from (node.target.condition.module, node.target.body.module)


def refuse_loops(module: fx.GraphModule, problem: str, remedy: str) -> None:
    """`UnsupportedError` for a way on that has no form for them."""
    for node in loops_of(module):
        where = origin(node)
        raise UnsupportedError(
            where.path or "model", where.operator, problem, remedy=remedy, source=where.source or None
        )


def with_bodies(module: fx.GraphModule, bodies: Mapping[str, Callable[..., Any]]) -> None:
    """Loops run these bodies, by name, from now on; the module is one of the caller's own."""
    loops = list(loops_of(module))
    for node in loops:
        node.target = replace(node.target, run=bodies[node.target.name])
    if loops:
        module.recompile()


def everything_in(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes of a captured graph, and of the bodies of its loops."""
    for node in module.graph.nodes:
        yield node
        if isinstance(node.target, WhileLoop):
            yield from everything_in(node.target.body.module)


def while_loop(
    node: fx.Node,
    program: ExportedProgram,
    names: Mapping[Any, str],
    constants: Mapping[fx.Node, str],
    model: nn.Module,
    training: bool,
) -> tuple[WhileLoop, list[fx.Node]]:
    """A loop of torch.export's, and the operands that are none of the model's tensors.

    ``constants``: inputs of the program that are tensors of the model, and their names there.
    """
    condition, body, carried, beside = node.args
    operands = [*carried, *beside]
    if not all(isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.Tensor) for one in operands):
        raise _refused(node, program, "it reads a number that is no tensor")
    held = [None] * len(carried) + [constants.get(one) for one in beside]
    about, classes = About(type(model).__name__), module_classes(model)
    graphs = [getattr(node.graph.owning_module, str(one.target)) for one in (condition, body)]
    first, second = (Captured(*_part(node, graph, held, program, names), classes, about, training) for graph in graphs)
    given = [one for one, path in zip(operands, held, strict=True) if path is None]
    return WhileLoop(node.name, len(carried), first, second, second.module), given


def _part(
    loop: fx.Node,
    source: fx.GraphModule,
    held: Sequence[str | None],
    program: ExportedProgram,
    names: Mapping[Any, str],
) -> tuple[fx.GraphModule, Signature]:
    """A condition or a body as `Captured` has it; the model's tensors that it reads are its own constants."""
    unroll(source)
    graph, root, copies = fx.Graph(), nn.Module(), dict[fx.Node, Any]()
    inputs: list[Input] = []
    paths = iter(held)
    for node in source.graph.nodes:
        if node.op == "placeholder":
            if (path := next(paths)) is not None:
                copies[node] = constant(graph, root, program, path)
                update_info(copies[node], path=f"{path}@{loop.name}")
                continue
            copies[node] = graph.placeholder(f"{loop.name}_{len(inputs)}")
            _describe(copies[node], node, loop, names, program)
            inputs.append(Input(copies[node].name, len(inputs), known_type(copies[node])))
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
            _describe(copies[node], node, loop, names, program)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            if not all(isinstance(one, fx.Node) for one in results):
                raise _refused(loop, program, "a part of it gives a number that is no tensor")
            values = tuple(copies[one] for one in results)
            graph.output(values)
        else:
            raise _refused(loop, program, "its body has a loop or a branch of its own")
    module = fx.GraphModule(root, graph)
    run(module, CAPTURE_PASSES)
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    _, in_tree = pytree.tree_flatten((tuple(inputs), {}))
    outputs, out_tree = tuple(Output(one.name) for one in results), pytree.tree_structure(tuple(results))
    return module, Signature(tuple(inputs), outputs, in_tree, out_tree)


def _describe(
    copied: fx.Node, node: fx.Node, loop: fx.Node, names: Mapping[Any, str], program: ExportedProgram
) -> None:
    """Type and origin; the module is that of a parameter among the operands, else the one around the loop."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    free = [size_expression(size).free_symbols for size in sizes if isinstance(size, torch.SymInt)]
    if set().union(*free) - set(names):
        raise _refused(loop, program, "a size in it depends on data, or changes while it runs")
    describe(copied, node, names, program)
    if copied.op == "call_function":
        own = origin(copied)
        owners = [constant_path(one) for one in copied.all_input_nodes if info(one).trained is not None]
        path = owners[0].partition("@")[0].rpartition(".")[0] if owners else module_around(loop)
        update_info(copied, origin=Origin(f"{path}@{loop.name}{info(node).turn or ''}", own.operator, own.source))


def _refused(loop: fx.Node, program: ExportedProgram, problem: str) -> CaptureError:
    return CaptureError(
        path_of(loop, program) or loop.name,
        f"torch.ops.higher_order.{WHILE}",
        problem,
        remedy="write a loop of a fixed count in Python, which is unrolled; or quantize the modules in the body, "
        "one by one",
    )
