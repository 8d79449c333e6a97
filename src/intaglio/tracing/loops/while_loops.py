"""Loops with a data-dependent number of iterations, whose condition and body are captured as graphs of their own."""

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
from intaglio.ir import Dim, Input, ModelInfo, Origin, Output, Signature
from intaglio.signature import run_while_loop
from intaglio.torch_private import pytree, size_expression
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured, module_classes
from intaglio.tracing.export_metadata import constant, describe, module_around, path_of
from intaglio.tracing.loops.unroll_scans import unroll_loops

WHILE = "while_loop"
SCAN_INSTEAD = "write a loop with a fixed number of iterations (scan, or a Python loop); or use the backend 'native'"
"""Remedy in errors of backends without support for such loops."""


@dataclass(frozen=True, eq=False)
class WhileLoop:
    """Call target of a loop ``while condition(*values): carried = body(*values)``.

    The arguments of the node are the values: first those that are carried, then those that do not change. Its result is
    the tuple of carried values.

    Attributes:
        name: name of the loop, unique in a model.
        carried: number of carried values.
        condition: float graph of the condition, the same at every stage.
        body: float graph of the body.
        run: body of the current stage.
    """

    name: str
    carried: int
    condition: Captured
    body: Captured
    run: Callable[..., Any]

    __name__, __module__ = WHILE, __name__

    def __call__(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the loop on its carried values, followed by the values that it only reads."""
        return run_while_loop(self.condition.module, self.run, self.carried, values)

    def __str__(self) -> str:
        return f"loop.{self.name}"


def loops_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Return the nodes of loops in a graph."""
    return (node for node in module.graph.nodes if isinstance(node.target, WhileLoop))


def loop_subgraphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the conditions and bodies of the loops in a graph."""
    for node in loops_of(module):
        yield from (node.target.condition.module, node.target.body.module)


def refuse_loops(module: fx.GraphModule, problem: str, remedy: str) -> None:
    """Raise an `UnsupportedError` if the graph contains a loop, with this problem and remedy."""
    for node in loops_of(module):
        where = origin(node)
        raise UnsupportedError(
            where.path or "model", where.operator, problem, remedy=remedy, source=where.source or None
        )


def replace_loop_bodies(module: fx.GraphModule, bodies: Mapping[str, Callable[..., Any]]) -> None:
    """Replace the bodies that the loops of a graph run, by loop name. The module is changed in place."""
    loops = list(loops_of(module))
    for node in loops:
        node.target = replace(node.target, run=bodies[node.target.name])
    if loops:
        module.recompile()


def nodes_with_loop_bodies(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes of a graph and of the bodies of its loops."""
    for node in module.graph.nodes:
        yield node
        if isinstance(node.target, WhileLoop):
            yield from nodes_with_loop_bodies(node.target.body.module)


def while_loop(
    node: fx.Node,
    program: ExportedProgram,
    sizes: Mapping[Any, Dim],
    constants: Mapping[fx.Node, str],
    model: nn.Module,
    training: bool,
) -> tuple[WhileLoop, list[fx.Node]]:
    """Convert a loop of torch.export, and return it with the operands that are not tensors of the model.

    Args:
        node: node of the loop.
        program: exported program.
        sizes: the sizes that symbols of torch.export stand for.
        constants: placeholder -> name of the tensor of the model that it represents.
        model: float model.
        training: whether the model is captured in training mode.

    Raises:
        CaptureError: the loop contains something that is not supported.
    """
    condition, body, carried, beside = node.args
    operands = [*carried, *beside]
    if not all(isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.Tensor) for one in operands):
        raise _capture_error(node, program, "it reads a number that is not a tensor")
    tensor_paths = [None] * len(carried) + [constants.get(one) for one in beside]
    model_info, classes = ModelInfo(type(model).__name__), module_classes(model)
    graphs = [getattr(node.graph.owning_module, str(one.target)) for one in (condition, body)]
    first, second = (
        Captured(*_part(node, graph, tensor_paths, program, sizes), classes, model_info, training) for graph in graphs
    )
    given = [one for one, path in zip(operands, tensor_paths, strict=True) if path is None]
    return WhileLoop(node.name, len(carried), first, second, second.module), given


def _part(
    loop: fx.Node,
    source: fx.GraphModule,
    tensor_paths: Sequence[str | None],
    program: ExportedProgram,
    sizes: Mapping[Any, Dim],
) -> tuple[fx.GraphModule, Signature]:
    """Return a condition or body as graph and signature; tensors of the model become constants."""
    unroll_loops(source)
    graph, root, copies = fx.Graph(), nn.Module(), dict[fx.Node, Any]()
    inputs: list[Input] = []
    paths = iter(tensor_paths)
    for node in source.graph.nodes:
        if node.op == "placeholder":
            if (path := next(paths)) is not None:
                copies[node] = constant(graph, root, program, path)
                update_info(copies[node], path=f"{path}@{loop.name}")
                continue
            copies[node] = graph.placeholder(f"{loop.name}_{len(inputs)}")
            _describe(copies[node], node, loop, sizes, program)
            inputs.append(Input(copies[node].name, len(inputs), known_type(copies[node])))
        elif node.op == "call_function":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
            _describe(copies[node], node, loop, sizes, program)
        elif node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            if not all(isinstance(one, fx.Node) for one in results):
                raise _capture_error(loop, program, "its condition or body returns a number that is not a tensor")
            values = tuple(copies[one] for one in results)
            graph.output(values)
        else:
            raise _capture_error(loop, program, "its condition or body contains a loop or a branch")
    module = fx.GraphModule(root, graph)
    run(module, CAPTURE_PASSES)
    results = next(node for node in module.graph.nodes if node.op == "output").args[0]
    _, in_tree = pytree.tree_flatten((tuple(inputs), {}))
    outputs, out_tree = tuple(Output(one.name) for one in results), pytree.tree_structure(tuple(results))
    return module, Signature(tuple(inputs), outputs, in_tree, out_tree)


def _describe(
    copied: fx.Node, node: fx.Node, loop: fx.Node, sizes: Mapping[Any, Dim], program: ExportedProgram
) -> None:
    """Record type and origin; the module is that of a parameter among the operands, or the one around the loop."""
    value = node.meta.get("val")
    shape = value.shape if isinstance(value, torch.Tensor) else (value,)
    free = [size_expression(size).free_symbols for size in shape if isinstance(size, torch.SymInt)]
    if set().union(*free) - set(sizes):
        raise _capture_error(
            loop, program, "the size of a tensor in it depends on data, or changes from one iteration to the next"
        )
    describe(copied, node, sizes, program)
    if copied.op == "call_function":
        own = origin(copied)
        owners = [constant_path(one) for one in copied.all_input_nodes if info(one).requires_grad is not None]
        path = owners[0].partition("@")[0].rpartition(".")[0] if owners else module_around(loop)
        update_info(copied, origin=Origin(f"{path}@{loop.name}{info(node).iteration or ''}", own.operator, own.source))


def _capture_error(loop: fx.Node, program: ExportedProgram, problem: str) -> CaptureError:
    return CaptureError(
        path_of(loop, program) or loop.name,
        f"torch.ops.higher_order.{WHILE}",
        problem,
        remedy="write a Python loop with a fixed number of iterations; or quantize the modules in the body one by one",
    )
