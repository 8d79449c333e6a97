"""The canonical graph of a float model, and the base class of all stages that are graphs."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx, nn

from intaglio.argument_checks import value_text
from intaglio.errors import ArtifactError, CaptureError, InputError
from intaglio.formatting.html_text import definition_list, element, folded_text
from intaglio.fxgraph.node_info import origin, tensor_type
from intaglio.fxgraph.nodes import operator
from intaglio.ir import ModelInfo, Signature
from intaglio.signature import bind, dims_of, initial_state, unflatten_result, update_inputs, updated_state
from intaglio.torch_private import is_traced, without_global_hooks


class ExampleError(CaptureError):
    """The model itself fails on its example, with the error that is the cause."""


class GraphStage:
    """A stage with a torch.fx graph, which can be called like the model and printed."""

    module: fx.GraphModule
    signature: Signature
    model_info: ModelInfo
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # subclasses are dataclasses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph in PyTorch with the arguments of the original model, and update the model's state.

        Arguments that the model updates in place are updated.

        Raises:
            InputError: the arguments do not match the graph.
        """
        leaves = bind(self.signature, args, kwargs)
        symbols = dims_of(self.signature, leaves)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graph contains explicit casts
            with without_global_hooks():
                results = self.module(*leaves, *self.state)
            self.state[:] = updated_state(self.signature, results)
            results = update_inputs(self.signature, leaves, results)
        return unflatten_result(self.signature, results, symbols)

    def as_module(self) -> nn.Module:
        """Return the stage as a module for a float model, visible to `torch.export` and `stages.capture`.

        Raises:
            InputError: the model has state.
        """
        if self.signature.state:
            problem = "the model changes its buffers, so the stage cannot be wrapped in a module"
            raise InputError("as_module", None, problem, remedy="call the stage itself")
        return _StageModule(self)

    @functools.cached_property
    def state(self) -> list[torch.Tensor]:
        """Return the values of buffers that the model changes, updated by each call.

        Copies of a stage and later stages start with the captured values.
        """
        return initial_state(self.signature)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the decisions and adjustments made so far, one line each."""
        return self.model_info.notes

    def text(self) -> str:
        """Return the graph as text with one line per node: name, operator, operands, type and module path."""
        return fx_text(self.module.graph)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model_info.name}: {self._contents()})"

    def _contents(self) -> str:
        """Return the content of the stage in a few words."""
        operators = sum(node.op == "call_function" for node in self.module.graph.nodes)
        return f"{operators} operators, inputs {', '.join(entry.name for entry in self.signature.inputs) or 'none'}"

    def _repr_html_(self) -> str:
        """Return the stage for notebooks: inputs, notes, and the texts at a click."""
        inputs = [(f"Input {entry.name}", str(entry.type)) for entry in self.signature.inputs]
        facts = definition_list([*inputs, *(("Note", note) for note in self.notes)])
        texts = {"Graph": self.text(), **self._other_texts()}
        return element("p", repr(self)) + facts + "".join(folded_text(name, text) for name, text in texts.items())

    def _other_texts(self) -> Mapping[str, str]:
        """Return texts for notebooks beside that of the graph, by name."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return type(self)(**{name: copy.deepcopy(value, memo) for name, value in fields.items()})

    def __reduce__(self) -> Any:
        """Raise an `ArtifactError`: torch.fx pickles graphs as code, which loses types, origins and sites."""
        raise ArtifactError(
            type(self).__name__,
            None,
            "an intermediate stage cannot be pickled",
            remedy="call recipe.save(path) and ranges.save(path); the int8 model can be pickled",
        )


class _StageModule(nn.Module):
    """Runs a stage as an nn.Module with the float model's signature, without gradients."""

    def __init__(self, stage: GraphStage) -> None:
        super().__init__()
        self.operators, self.signature = stage.module, stage.signature  # torch.export reserves the name "graph"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = bind(self.signature, args, kwargs)
        traced = torch.compiler.is_compiling() or torch.compiler.is_exporting() or is_traced()
        symbols = {} if traced else dims_of(self.signature, leaves)
        with torch.no_grad():
            results = self.operators(*leaves)
            results = update_inputs(self.signature, leaves, results)
            return unflatten_result(self.signature, results, symbols)


@dataclass(frozen=True, repr=False)
class Captured(GraphStage):
    """A functional ATen graph with dynamic dimensions that computes what the captured model does.

    Attributes:
        module: graph from the tensor leaves of a call to those of the result; its nodes have a `NodeInfo`.
        signature: inputs, outputs, state and ranges of dynamic dimensions.
        classes: module path -> class name.
        model_info: model name, size, and notes, such as which dimensions stayed fixed and why.
        training: whether the model was captured in training mode.
    """

    module: fx.GraphModule
    signature: Signature
    classes: Mapping[str, str]
    model_info: ModelInfo = field(default_factory=ModelInfo)
    training: bool = False


MADE_BY = {
    "Captured": "capture(model, example_inputs)",
    "Prepared": "prepare(captured)",
    "Reference": "convert(prepared, ranges)",
    "Lowered": "requantize(reference)",
}
"""The call that returns each stage."""


EAGER_CALLS = {
    "calibrate": "call the prepared model with each batch: it collects its statistics itself",
    "convert": "call eager.convert(prepared)",
}
"""Remedy for a model of `intaglio.eager` that is given to a function of the same name as one of its own."""
REWRITE = "convert the model if it is only prepared, and take its graph: {}(eager.rewrite(converted))"


def expect(stage: Any, wanted: type, verb: str) -> None:
    """Check the type of a stage.

    Raises:
        InputError: the stage is not a `wanted`; the message names the call that returns one.
    """
    if isinstance(stage, wanted):
        return
    name, got = wanted.__name__, value_text(stage)
    remedy = f"call {MADE_BY[name]}, which returns one"
    if isinstance(stage, nn.Module) and hasattr(stage, "_auto_quant_state"):
        got, remedy = "a model of intaglio.eager", EAGER_CALLS.get(verb) or REWRITE.format(verb)
    raise InputError(verb, None, f"takes a {name}, got {got}", remedy=remedy)


def fx_text(graph: fx.Graph) -> str:
    """Return a captured, prepared or reference graph as deterministic text."""
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_plain(node.args[0])}")
            continue
        kind = tensor_type(node)
        suffix = f": {kind.dtype}[{', '.join(map(str, kind.shape))}]" if kind else ""
        if node.op in ("placeholder", "get_attr"):
            lines.append(f"{'input' if node.op == 'placeholder' else 'const'} %{node.name}{suffix}")
            continue
        call = operator(node) or f"{node.op} {node.target}"
        arguments = [_plain(a) for a in node.args] + [f"{k}={_plain(v)}" for k, v in node.kwargs.items()]
        path = origin(node).path
        lines.append(f"%{node.name} = {call}({', '.join(arguments)}){suffix}" + (f"  # {path}" if path else ""))
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_plain, value)) + "]"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def module_classes(model: nn.Module) -> dict[str, str]:
    """Return the class name of every module by path, for selectors by type."""
    return {name: type(module).__name__ for name, module in model.named_modules()}
