"""Replay a recording: generate Python code that runs it again, and capture that as a canonical graph."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import itertools
import linecache
import operator as python_operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from intaglio.eager.model_copies import runs_global_hooks
from intaglio.eager.recording.events import Event, ModelTensor, RecordedTensor, SizeExpression, leaves, model_tensor
from intaglio.eager.recording.recorder import Recording
from intaglio.eager.recording.torch_functions import initialized, out_of_place, plain_name
from intaglio.errors import CaptureError
from intaglio.fxgraph.node_info import known_type, origin, update_info
from intaglio.fxgraph.passes.element_types.half_precision import UPCAST_NOTE, before_cast
from intaglio.ir import Origin
from intaglio.ir.dims import Shape
from intaglio.ir.names import sanitized
from intaglio.quant.qdq.convert import Reference
from intaglio.torch_private import global_hooks_for, pytree
from intaglio.tracing import CAPTURE_PASSES, Captured, capture, run
from intaglio.tracing.captured import ExampleError


def replay(recording: Recording, model: nn.Module) -> Captured:
    """Return the graph that `capture` makes of a recording, with the module path and source line of each operator.

    The outputs of the graph are the results of the recording followed by all values that its operators make, which
    `map_values` needs.

    Args:
        recording: Operators to replay.
        model: Holds the modules and tensors. Its forward is not called, and the model is not changed.

    Raises:
        CaptureError: The graph cannot be captured.
    """
    text, names = text_of(recording, _parameters(model))
    file = f"<recording {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names)
    replayed = copy.copy(model)
    replayed.__dict__ = dict(model.__dict__)
    replayed.forward = types.MethodType(names["forward"], replayed)
    args, kwargs = example_of(recording)
    try:
        with global_hooks_for(runs_global_hooks):
            captured = capture(replayed, args, example_kwargs=kwargs, free=_free_leaves(recording))
    except ExampleError as error:
        problem = f"its operators cannot be run again: {type(error.__cause__).__name__}: {error.__cause__}"
        raise CaptureError(type(model).__name__, None, problem) from error.__cause__
    finally:
        linecache.cache.pop(file, None)
    _name_origins(captured.module, recording.events, file)
    return captured


def example_of(recording: Recording) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the example arguments of a recording: those of the model's call, and all further inputs."""
    if recording.call is None:
        return tuple(recording.inputs.values()), {}
    call = pytree.tree_map(lambda v: recording.inputs[v.index] if isinstance(v, RecordedTensor) else v, recording.call)
    args, kwargs = call
    return (*args, *[recording.inputs[number] for number in extra_inputs(recording)]), kwargs


def _free_leaves(recording: Recording) -> dict[int, set[int]]:
    """Return the axes that are to be dynamic, by leaf of the example arguments."""
    order = {id(leaf): index for index, leaf in enumerate(pytree.tree_leaves(example_of(recording)))}
    return {order[id(recording.inputs[number])]: axes for number, axes in recording.free.items()}


def extra_inputs(recording: Recording) -> list[int]:
    """Return the inputs that are not arguments of the call."""
    own = {leaf.index for leaf in leaves(recording.call) if isinstance(leaf, RecordedTensor)}
    return [number for number in recording.inputs if number not in own]


def _parameters(model: nn.Module) -> list[str]:
    """Return the names of the positional arguments of the model's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(type(model).forward).parameters.values()
    return [p.name for p in found if p.kind in kinds][1:]


def text_of(recording: Recording, parameters: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """Return Python code with one line per operator after the signature, and the namespace that it runs in."""
    writer = _Writer(recording)
    lines = [writer.signature(parameters), *[writer.line(event) for event in recording.events], writer.results()]
    return "\n".join(lines) + "\n", writer.names


class _Writer:
    """Writes the code of a recording, and names functions and constants that have no literal form."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.names: dict[str, Any] = {"torch": torch, "held": model_tensor}

    def signature(self, parameters: Sequence[str]) -> str:
        """Return two lines: the signature, and assignments of the tensors in its arguments to value names."""
        recording = self.recording
        if recording.call is None:
            return f"def forward(self, {', '.join(f'v{number}' for number in recording.inputs)}):\n    pass"
        args, kwargs = recording.call
        places = [*parameters[: len(args)], *(f"a{index}" for index in range(len(parameters), len(args)))]
        unpacked: list[str] = []
        for place, spec in (*zip(places, args, strict=True), *kwargs.items()):
            self._unpack(spec, place, unpacked)
        names = [*places, *(f"v{number}" for number in extra_inputs(recording)), *kwargs]
        return f"def forward({', '.join(['self', *names])}):\n    {'; '.join(unpacked) or 'pass'}"

    def _unpack(self, spec: Any, place: str, lines: list[str]) -> None:
        if isinstance(spec, RecordedTensor):
            lines.append(f"v{spec.index} = {place}")
        elif isinstance(spec, dict):
            for key, entry in spec.items():
                self._unpack(entry, f"{place}[{key!r}]", lines)
        elif isinstance(spec, (tuple, list)):
            for index, entry in enumerate(spec):
                self._unpack(entry, f"{place}[{index}]", lines)

    def line(self, event: Event) -> str:
        """Return the line that runs an operator. In-place operators are replaced by out-of-place ones, or run on a
        copy.
        """
        args, options, function = [self._text(entry) for entry in event.args], event.kwargs, event.function
        target = self._pattern(event.result)
        if event.changed is not None:
            target = f"v{event.changed}"
            if options.get("inplace") is True:
                options = {**options, "inplace": False}
            elif function is not None and (function := out_of_place(function)) is None:
                changed = self._call(event, event.function, [target, *args[1:]], options)
                return f"    {target} = {args[0]}.clone(); {changed}"
        return f"    {target} = {self._call(event, function, args, options)}"

    def _call(self, event: Event, function: Any, args: list[str], options: Mapping[str, Any]) -> str:
        given = ", ".join([*args, *[f"{key}={self._text(entry)}" for key, entry in options.items()]])
        if function is not None and event.args and isinstance(event.args[0], (int, float, SizeExpression)):
            function = getattr(python_operator, plain_name(function), function)  # ``2 * x`` calls x's method on (2, x)
        called = f"self.get_submodule({event.path!r})" if function is None else self._function(function)
        return f"{called}({given})"

    def _pattern(self, spec: Any) -> str:
        if isinstance(spec, (tuple, list)):
            return "(" + "".join(f"{self._pattern(entry)}, " for entry in spec) + ")"
        return str(spec) if isinstance(spec, RecordedTensor) else "_"

    def _function(self, function: Callable[..., Any]) -> str:
        stem = sanitized(plain_name(function)).strip("_") or "function"
        return self._unique_name(stem, initialized(function))

    def _unique_name(self, stem: str, thing: Any) -> str:
        for index in itertools.count():
            name = f"{stem}_{index}" if index else stem + ("_" if stem in RESERVED_NAMES else "")
            if self.names.setdefault(name, thing) is thing:
                return name
        raise AssertionError

    def _text(self, spec: Any) -> str:
        if (
            isinstance(spec, (RecordedTensor, ModelTensor, SizeExpression, bool, int, str, torch.dtype))
            or spec is None
            or spec is ...
        ):
            return "..." if spec is ... else repr(spec) if isinstance(spec, str) else str(spec)
        if isinstance(spec, float) and spec == spec and abs(spec) != float("inf"):
            return repr(spec)
        if isinstance(spec, slice):
            return f"slice({self._text(spec.start)}, {self._text(spec.stop)}, {self._text(spec.step)})"
        if type(spec) is tuple:
            return "(" + "".join(f"{self._text(entry)}, " for entry in spec) + ")"
        if type(spec) is list:
            return "[" + ", ".join(map(self._text, spec)) + "]"
        if type(spec) is dict:
            return "{" + ", ".join(f"{key!r}: {self._text(entry)}" for key, entry in spec.items()) + "}"
        return self._unique_name("constant", spec)

    def results(self) -> str:
        """Return the line that returns the results of the recording, followed by all values that its operators make."""
        made = [RecordedTensor(number) for event in self.recording.events for number in event.outputs]
        structure = self._structure()
        return f"    return {structure}, ({''.join(f'{value}, ' for value in made)})"

    def _structure(self) -> str:
        """Return the expression of the recording's result, rebuilt as a pytree with its container classes."""
        tree, entries = self.recording.results
        if tree.is_leaf():
            return self._text(entries[0])
        self.names["unflatten"] = pytree.tree_unflatten
        return f"unflatten([{', '.join(map(self._text, entries))}], {self._unique_name('structure', tree)})"


RESERVED_NAMES = ("and", "or", "not", "self", "run", "torch", "held", "structure", "unflatten", "constant")
"""Names that generated functions and constants must not take."""


def _name_origins(module: fx.GraphModule, events: list[Event], file: str) -> None:
    """Give each node the module path and source line that its operator has in the model."""
    for node in module.graph.nodes:
        event = event_of(node, events, file)
        if event is None:
            continue
        found = origin(node)
        path = found.path
        if event.function is not None and event.path:
            path = f"{event.path}@{event.call}" if event.call else event.path
        update_info(node, origin=Origin(path, found.operator, event.source), event=event.index)


def event_of(node: fx.Node, events: list[Event], file: str) -> Event | None:
    """Return the operator whose line of generated code made the node, or None."""
    if node.op != "call_function" or not origin(node).source.startswith(f"{file}:"):
        return None
    line = int(origin(node).source.removeprefix(f"{file}:").partition(",")[0])
    return (
        events[line - FIRST_OPERATOR_LINE] if FIRST_OPERATOR_LINE <= line < FIRST_OPERATOR_LINE + len(events) else None
    )


FIRST_OPERATOR_LINE = 3
"""Line number of the first operator in the generated code; lines are counted from 1."""


def without_recorded_outputs(
    captured: Captured, recording: Recording
) -> tuple[Captured, dict[int, str], dict[int, Shape]]:
    """Remove the recorded values from the outputs of a replayed graph, and clean up.

    Returns:
        The graph, the name of the node that holds each value (values that clean-up removed are missing), and the shape
        of each value.
    """
    module, signature = captured.module, captured.signature
    made = [number for event in recording.events for number in event.outputs]
    (output,) = [node for node in module.graph.nodes if node.op == "output"]
    own = signature.outputs[: len(signature.outputs) - len(made)]
    extra = signature.outputs[len(own) :]
    first, results = sum(entry.value is not None for entry in own), list(output.args[0])
    name_by_number = {number: entry.value for number, entry in zip(made, extra, strict=True) if entry.value is not None}
    nodes = dict(zip(name_by_number, results[first : first + len(name_by_number)], strict=True))
    if UPCAST_NOTE in captured.notes:  # the casts to the recorded types disappear with these outputs
        nodes = {number: before_cast(node) for number, node in nodes.items()}
    output.args = ((*results[:first], *results[first + len(name_by_number) :]),)
    nodes.update(_placeholders(captured, recording))
    shapes = {number: known_type(node).shape for number, node in nodes.items()}
    run(module, CAPTURE_PASSES)
    left = set(module.graph.nodes)
    signature = dataclasses.replace(signature, outputs=own, out_tree=signature.out_tree.children()[0])
    names = {number: node.name for number, node in nodes.items() if node in left}
    return dataclasses.replace(captured, signature=signature), names, shapes


def without_extra_results(reference: Reference) -> Reference:
    """Return a reference that returns the result of the model only, of the pair that its recording has as results."""
    signature, module = reference.signature, reference.module
    tree = signature.out_tree.children()[0]
    own, extra = signature.outputs[: tree.num_leaves], signature.outputs[tree.num_leaves :]
    first, last = (sum(entry.value is not None for entry in entries) for entries in (own, extra))
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    graph.output((*results[:first], *results[first + last :]))
    graph.eliminate_dead_code()
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return dataclasses.replace(
        reference, module=made, signature=dataclasses.replace(signature, outputs=own, out_tree=tree)
    )


def _placeholders(captured: Captured, recording: Recording) -> dict[int, fx.Node]:
    nodes = [
        node for node in captured.module.graph.nodes if node.op == "placeholder"
    ]  # placeholders of parameters and buffers come last
    by_leaf = {entry.leaf: node for entry, node in zip(captured.signature.inputs, nodes, strict=False)}
    order = {id(leaf): index for index, leaf in enumerate(pytree.tree_leaves(example_of(recording)))}
    found = {number: by_leaf.get(order[id(tensor)]) for number, tensor in recording.inputs.items()}
    return {number: node for number, node in found.items() if node is not None}
