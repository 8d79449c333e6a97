"""Conversion of a graph captured in training to evaluation, with marks for batch norm and dropout."""

from __future__ import annotations

import contextlib
import operator as python_operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from intaglio.errors import UnsupportedError
from intaglio.fusion.table import MATMUL_TARGETS
from intaglio.fxgraph.graph_constants import add_constant
from intaglio.fxgraph.graph_passes import copy_graph, run
from intaglio.fxgraph.node_info import copy_info, info, inherit_info, known_type, origin, update_info
from intaglio.fxgraph.nodes import arguments, constant_node, operator, record_of
from intaglio.fxgraph.overloads import SDPA_TARGET
from intaglio.ir import State
from intaglio.torch_private import call_replace_hook
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured

EVALUATED_NORM = torch.ops.aten._native_batch_norm_legit_no_training.default
TRAINED_NORM = "aten._native_batch_norm_legit_functional.default"
EMPTY_TARGETS = ("aten.new_empty.default", "aten.empty.memory_format", "aten.empty_like.default")
BATCH_NORM_COUNTERS = ("running_mean", "running_var", "num_batches_tracked")
"""Names of a batch norm's buffers."""


@dataclass(frozen=True)
class BatchNormMark:
    """Mark of a value that a batch norm computes.

    Attributes:
        path: path of the module that holds the statistics.
        constants: names of the constants for weight, bias, running mean and variance; ``None`` for a missing one.
        momentum: momentum of the running statistics.
        eps: epsilon of the norm.
        number: index of the norm in the graph.
    """

    path: str
    constants: tuple[str | None, ...]
    momentum: float
    eps: float
    number: int


@dataclass(frozen=True)
class DropoutMark:
    """Mark of a value whose readers receive it with dropout.

    Attributes:
        p: probability of a zero.
        broadcast_axes: axes along which the mask is constant, as for channel dropout.
        number: index of the dropout's node in the graph.
        path: path of the dropout's module.
        in_attention: whether dropout applies to the probabilities inside the attention that computes the value.
        readers: names of the readers that receive dropout; empty for all.
    """

    p: float
    broadcast_axes: tuple[int, ...]
    number: int
    path: str
    in_attention: bool = False
    readers: tuple[str, ...] = ()


TRAIN_PARTS = "train the parts of the model before and after it separately"


def to_evaluation(captured: Captured) -> Captured:
    """Return the model in evaluation: batch norms with running statistics and no dropout, both marked on their nodes.

    Raises:
        UnsupportedError: the model changes other buffers or draws other random numbers.
    """
    module, states = copy_graph(captured.module), {state.name: state for state in captured.signature.state}
    output = next(node for node in module.graph.nodes if node.op == "output")
    output.args = (output.args[0][: len(output.args[0]) - len(states)],)
    known = _evaluate_norms(module, states)
    _drop_dropout(module)
    _drop_counters(module, states, known)
    for node in module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and record_of(node) is None:
            raise _unsupported(node, "it draws random numbers, and only dropout may do so in training", TRAIN_PARTS)
    with propagate_marks(module):
        run(module, CAPTURE_PASSES)
    return replace(captured, module=module, signature=replace(captured.signature, state=()))


def _unsupported(node: fx.Node, problem: str, remedy: str) -> UnsupportedError:
    where = origin(node)
    return UnsupportedError(where.path or "model", where.operator, problem, remedy=remedy, source=where.source or None)


def _evaluate_norms(module: fx.GraphModule, states: Mapping[str, State]) -> set[str]:
    """Replace training batch norms by ones that read running statistics, and return the paths of their modules."""
    known: set[str] = set()
    for number, node in enumerate([node for node in module.graph.nodes if operator(node) == TRAINED_NORM]):
        x, weight, bias, mean, variance, _, momentum, eps = node.args
        counted = [states[_before_calls(value).name] for value in (mean, variance)]
        path = counted[0].path.rpartition(".")[0]
        known.add(path)
        first = next((user for user in node.users if user.args[1] == 0), None)
        if first is None:  # the model does not read the result of this norm, which only updates its statistics
            continue
        constants = [_as_constant(module, state) for state in counted]
        with module.graph.inserting_before(node):
            norm = module.graph.call_function(EVALUATED_NORM, (x, weight, bias, *constants, momentum, eps))
            value = module.graph.call_function(python_operator.getitem, (norm, 0))
        inherit_info(norm, node)
        copy_info(value, first)
        names = tuple(None if c is None else str(c.target) for c in (weight, bias, *constants))
        _add_mark(value, BatchNormMark(path, names, float(momentum), float(eps), number))
        first.replace_all_uses_with(value)
    return known


def _before_calls(value: fx.Node) -> fx.Node:
    """Return the input that a buffer had before earlier calls of its norm changed it."""
    while value.op != "placeholder":
        value = value.args[0].args[3 if value.args[1] == 3 else 4]
    return value


def _as_constant(module: fx.GraphModule, state: State) -> fx.Node:
    """Return the buffer of a state as a constant with its initial value."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and info(node).path == state.path:
            return node
    name = add_constant(module, state.path.replace(".", "_"), torch.from_numpy(state.initial.copy()))
    return constant_node(module, name, state.path)


def _drop_counters(module: fx.GraphModule, states: Mapping[str, State], norms: set[str]) -> None:
    """Remove the inputs for state.

    Raises:
        UnsupportedError: a state is not a buffer of a batch norm.
    """
    module.graph.eliminate_dead_code()
    for node in [node for node in module.graph.nodes if node.op == "placeholder" and node.name in states]:
        state = states[node.name]
        owner, _, name = state.path.rpartition(".")
        if node.users or owner not in norms or name not in BATCH_NORM_COUNTERS:
            raise UnsupportedError(
                state.path,
                None,
                "the model changes this buffer while it runs; in training only the buffers of batch norms may change",
                remedy=TRAIN_PARTS,
            )
        module.graph.erase_node(node)


def _drop_dropout(module: fx.GraphModule) -> None:
    """Remove dropout of values, of feature maps and inside attention, and mark the values."""
    for number, node in enumerate(list(module.graph.nodes)):
        name = operator(node)
        if name == "aten.native_dropout.default" or name == "aten.dropout.default":
            (value,) = [u for u in node.users if u.args[1] == 0] if "native" in name else [node]
            _bypass_dropout(value, node.args[0], float(node.args[1]), (), number)
        elif name == "aten.mul.Tensor" and (found := _map_dropout(node)) is not None:
            _bypass_dropout(node, *found, number)
        elif name == SDPA_TARGET and (p := float(arguments(node)["dropout_p"])):
            node.args = tuple(0.0 if i == 4 else a for i, a in enumerate(node.args))
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "dropout_p"}
            _add_mark(node, DropoutMark(p, (), number, origin(node).path, in_attention=True))


def _map_dropout(node: fx.Node) -> tuple[fx.Node, float, tuple[int, ...]] | None:
    """Match ``x * (bernoulli(keep) / keep)`` and return x, ``1 - keep`` and the axes where the mask has size 1."""
    x, mask = node.args
    if not isinstance(mask, fx.Node):
        return None
    if operator(mask) in ("aten.div.Scalar", "aten.div.Tensor") and operator(mask.args[0]) == "aten.bernoulli.p":
        shape = known_type(mask).shape
        if operator(mask.args[0].args[0]) in EMPTY_TARGETS and len(shape) == len(known_type(x).shape):
            keep = float(mask.args[0].args[1])
            broadcast_axes = tuple(axis for axis, size in enumerate(shape) if size != known_type(x).shape[axis])
            return x, 1 - keep, broadcast_axes
    return None


def _bypass_dropout(value: fx.Node, source: fx.Node, p: float, broadcast_axes: tuple[int, ...], number: int) -> None:
    """Let the readers of a dropout's result read its input, which gets the mark."""
    call = value.args[0] if value.target is python_operator.getitem else value
    alone = source.users.keys() <= {call, *_shape_readers(source)}
    readers = () if alone else tuple(user.name for user in value.users)
    where = origin(call).path
    value.replace_all_uses_with(source)
    _erase(value)
    _add_mark(source, DropoutMark(p, broadcast_axes, number, where, readers=readers))


def _erase(node: fx.Node) -> None:
    """Erase a node and the inputs that only it reads. Dead code elimination keeps random operators."""
    unread = [user for user in node.users if user.target is python_operator.getitem and not user.users]
    if node.op == "call_function" and len(unread) == len(node.users):
        sources = node.all_input_nodes
        for dead in (*unread, node):
            node.graph.erase_node(dead)
        for source in sources:
            _erase(source)


def _shape_readers(source: fx.Node) -> list[fx.Node]:
    return [user for user in source.users if operator(user) in EMPTY_TARGETS or info(user).dim is not None]


def _add_mark(node: fx.Node, mark: BatchNormMark | DropoutMark) -> None:
    update_info(node, marks=(*info(node).marks, mark))


def marks_of(module: fx.GraphModule) -> list[tuple[fx.Node, BatchNormMark | DropoutMark]]:
    """Return all marks with their nodes, in graph order."""
    return [(node, mark) for node in module.graph.nodes for mark in info(node).marks]


def keep_first_marks(module: fx.GraphModule) -> None:
    """Keep each mark only on the first node that carries it along any path."""
    above: dict[fx.Node, set[tuple[type, int]]] = {}
    for node in module.graph.nodes:
        inherited = set[tuple[type, int]]().union(*(above[source] for source in node.all_input_nodes))
        marks = info(node).marks
        if marks:
            update_info(node, marks=tuple(mark for mark in marks if (type(mark), mark.number) not in inherited))
        above[node] = inherited | {(type(mark), mark.number) for mark in marks}


@contextlib.contextmanager
def propagate_marks(module: fx.GraphModule) -> Iterator[None]:
    """Copy marks to replacement nodes while passes run inside this context.

    When matmuls are fused into attention, the dropout of the probabilities moves inside it.
    """

    def follow(old: fx.Node, new: str, user: fx.Node) -> None:
        found = next(node for node in module.graph.nodes if node.name == new)
        marks = info(old).marks
        if operator(found) == SDPA_TARGET and operator(old) in MATMUL_TARGETS and isinstance(old.args[0], fx.Node):
            marks += tuple(replace(m, in_attention=True) for m in info(old.args[0]).marks if isinstance(m, DropoutMark))
        own = info(found).marks
        if added := tuple(mark for mark in marks if mark not in own):
            update_info(found, marks=(*own, *added))

    with call_replace_hook(module, follow):
        yield
