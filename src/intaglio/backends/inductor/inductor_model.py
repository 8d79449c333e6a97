"""TorchInductor as a backend: int8 calls of oneDNN with generated C++ between them.

It runs on machines and operators that the native backend has no code for, and provides a second opinion on results:
oneDNN's kernels differ from the reference if a value is close to the midpoint of two quantized values.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.source import ConstantSource
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from intaglio.backends.channel_zero_points import byte_inputs
from intaglio.backends.inductor.inductor_graph import graph_for_inductor, graph_with_byte_inputs
from intaglio.backends.inductor.inductor_report import InductorReport, report_of
from intaglio.backends.inductor.inductor_sizes import sizes_of_inputs
from intaglio.errors import ArtifactError, BuildError, InputError, UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import operator
from intaglio.ir import Expression, Signature, evaluate, symbol, symbols_of
from intaglio.output_paths import check_file, replace_file_by
from intaglio.quant.annotate.per_token import decompositions
from intaglio.quant.imported_weights.group_operator import group_decompositions
from intaglio.quant.qdq.convert import Reference
from intaglio.signature import bind, dims_of, initial_state, unflatten_result, update_inputs, updated_state
from intaglio.torch_private import FakeTensorMode, pytree

SETTINGS = {
    "freezing": True,
    "pre_grad_custom_pass": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": sizes_of_inputs,
    "post_grad_custom_pre_pass": None,
}
"""Inductor's settings while this backend compiles; the user's settings are neither read nor changed.

Freezing turns weights into constants, which are then packed. The custom passes are reset because other packages set
them: importing torchao's quantizer for x86 sets the first one. `sizes_of_inputs` is the last pass before layers are
matched.
"""
MAX_CACHED_SHAPES = 256
"""Number of call shapes for which the matching program is cached."""
_Type = tuple[torch.dtype, torch.Size]
logger = logging.getLogger("intaglio")


class InductorModel(nn.Module):
    """Runs programs that Inductor compiled from a reference, and is called like the float model.

    The first program is compiled for fixed sizes and is the fastest for them. The first call with other sizes compiles
    a program for all sizes of 2 and more; each size of 0 or 1 gets its own program. Each compilation takes seconds.
    ``report`` describes the implementation of every operator in the latest program.
    """

    def __init__(self, reference: Reference, example: Sequence[torch.Tensor] | None = None) -> None:
        """Compile a reference.

        Args:
            reference: the reference model.
            example: tensors of a call to compile for (default: compile at the first call).
        """
        super().__init__()
        self.signature, self.model_info = reference.signature, reference.model_info
        self._graphs = {frozenset[int](): graph_for_inductor(reference)}  # by the set of inputs that are bytes
        self._byte_inputs = byte_inputs(self._graphs[frozenset()])
        self._programs: list[_CompiledGraph] = []
        self._by_type: dict[tuple[_Type, ...], _CompiledGraph] = {}
        self.report: InductorReport | None = None
        self._example: list[torch.Tensor] = []
        for index, tensor in enumerate(initial_state(self.signature)):
            self.register_buffer(f"state{index}", tensor)
        super().train(False)
        if example is not None:
            self._program([*example, *self._state()])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program for the sizes of the arguments, and compile it first if there is none yet."""
        leaves = bind(self.signature, args, kwargs)
        symbols = dims_of(self.signature, leaves, self._byte_inputs)
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # the graph has explicit element types
            inputs = [leaf.contiguous() for leaf in (*leaves, *self._state())]
            results = self._program(inputs).call(*inputs)
            for index, value in enumerate(updated_state(self.signature, results)):
                setattr(self, f"state{index}", value)
            results = update_inputs(self.signature, leaves, results)
        return unflatten_result(self.signature, results, symbols)

    def _state(self) -> list[torch.Tensor]:
        return [getattr(self, f"state{index}") for index in range(len(self.signature.state))]

    def _program(self, inputs: Sequence[torch.Tensor]) -> _CompiledGraph:
        """Return the program for such inputs, compiled if there is none yet. Only the first program has no dynamic
        sizes."""
        key = tuple((tensor.dtype, tensor.shape) for tensor in inputs)
        if key not in self._by_type:
            found = next((program for program in self._programs if program.accepts(inputs)), None)
            if found is None:
                found = self._compiled(inputs, free=bool(self._programs))
                self._programs.append(found)
            if len(self._by_type) == MAX_CACHED_SHAPES:
                self._by_type.clear()
            self._by_type[key] = found
        return self._by_type[key]

    def _graph(self, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
        """Return the graph in which the inputs that are given as bytes are uint8."""
        key = frozenset(index for index in self._byte_inputs if inputs[index].dtype is torch.uint8)
        if key not in self._graphs:
            self._graphs[key] = graph_with_byte_inputs(self._graphs[frozenset()], key)
        return self._graphs[key]

    def _compiled(self, inputs: Sequence[torch.Tensor], free: bool) -> _CompiledGraph:
        """Compile a program for such inputs, with dynamic sizes if ``free`` is set."""
        graph = self._graph(inputs)
        environment = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        axes = self._free_axes() if free else [()] * len(inputs)
        fakes = [_fake(mode, index, *pair) for index, pair in enumerate(zip(inputs, axes, strict=True))]
        own, table = fx.GraphModule(graph, copy.deepcopy(graph.graph)), {**select_decomp_table(), **_decompositions()}
        for product in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            table.pop(product, None)  # would decompose small layers with one row before patterns match them
        logger.info("%s: TorchInductor compiles for %s", self.model_info.name, [list(fake.shape) for fake in fakes])
        with configured_inductor() as made:
            call: Any = compile_fx(own, fakes, decompositions=table)
        self.report = report_of(graph.graph, made, _notes())
        self._example = self._example or [torch.empty_like(tensor) for tensor in inputs]
        guards = environment.produce_guards_expression(fakes) if free else None
        return _CompiledGraph(call, tuple((fake.dtype, fake.shape) for fake in fakes), environment, guards)

    def _free_axes(self) -> list[tuple[int, ...]]:
        """Return the axes with dynamic sizes for every input of the graph."""
        inputs = [entry.type.shape for entry in self.signature.inputs]
        axes = [tuple(i for i, dim in enumerate(shape) if isinstance(dim, Expression)) for shape in inputs]
        return axes + [()] * len(self.signature.state)

    # -- public methods ------------------------------------------------------------------------------------------

    def save_package(self, path: str | Path) -> InductorReport:
        """Compile ahead of time into a file that needs neither intaglio nor Python. Dynamic sizes stay dynamic.

        ``torch._inductor.aoti_load_package(path)`` in Python, or ``torch::inductor::AOTIModelPackageLoader`` in C++,
        loads the file and returns a callable with this model's signature.

        Args:
            path: the file, whose name must end in ".pt2".

        Returns:
            A report like ``report`` about the program in the file.

        Raises:
            UnsupportedError: the model changes buffers or inputs, or an operator runs in Python.
            InputError: the name does not end in ".pt2", or sizes are dynamic and the model was never called.
        """
        if not str(path).endswith(".pt2"):
            raise InputError(
                "save_package", None, f"the name of a package must end in .pt2, but the path is {str(path)!r}"
            )
        check_file(path)
        self._check_package()
        args, kwargs, axes = self._example_call()
        graph = self._graph(self._example)
        module = _AsModel(graph, self.signature)
        with torch.no_grad():
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=axes)
        with configured_inductor() as made:
            exported = exported.run_decompositions(_decompositions())
            replace_file_by(
                path, lambda draft: torch._inductor.aoti_compile_and_package(exported, package_path=str(draft))
            )
        return report_of(graph.graph, made, _notes())

    def _check_package(self) -> None:
        """Raise an error if the model cannot be compiled ahead of time."""
        if self.signature.state or self.signature.updated_inputs:
            problem = "the model changes buffers or inputs while it runs, which a package does not support"
            raise UnsupportedError(
                "save_package",
                None,
                problem,
                remedy="compile with the native backend and save the model with model.save",
            )
        opaque = [node for node in self._graphs[frozenset()].graph.nodes if operator(node).startswith("intaglio.")]
        for node in (node for node in opaque if node.target not in _decompositions()):
            where = origin(node)
            raise UnsupportedError(
                where.path,
                where.operator,
                "it is computed in Python, and a package runs without Python",
                remedy=f"leave it in float with skip=[{where.path!r}]",
                source=where.source or None,
            )
        if not self._example:
            raise InputError(
                "save_package",
                None,
                "the sizes of dynamic dimensions other than the batch are unknown, because the model was never called",
                remedy="call the model once, or pass example_inputs= to compile",
            )

    def _example_call(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return arguments of a call whose dynamic sizes are at least 2, because export would specialize 0 and 1."""
        entries, axes = self.signature.inputs, torch.export.ShapesCollection()
        sizes = {name: max(size, 2) for name, size in dims_of(self.signature, self._example, self._byte_inputs).items()}
        leaves: list[Any] = [None] * self.signature.in_tree.num_leaves
        for leaf, value in self.signature.fixed.items():
            leaves[leaf] = value
        for entry, example, free in zip(entries, self._example, self._free_axes(), strict=True):
            shape = [evaluate(dim, sizes) for dim in entry.type.shape]
            tensor = torch.zeros(shape, dtype=example.dtype)
            leaves[entry.leaf] = tensor
            if free:
                axes[tensor] = dict.fromkeys(free, torch.export.Dim.AUTO)
        args, kwargs = pytree.tree_unflatten(leaves, self.signature.in_tree)
        return args, kwargs, axes

    def train(self, mode: bool = True) -> InductorModel:
        """Warn that a compiled program cannot be trained, and change nothing."""
        if mode:
            warnings.warn("a compiled int8 model cannot be trained; train() does not change it", stacklevel=2)
        return self

    def __reduce__(self) -> Any:
        raise ArtifactError(
            "InductorModel",
            None,
            "a model that Inductor compiled in this process cannot be copied or pickled",
            remedy="write a file with model.save_package('model.pt2'), or compile the reference again for a copy",
        )

    def __repr__(self) -> str:
        return f"InductorModel({self.model_info.name}: {self.report.summary if self.report else 'not compiled yet'})"


@dataclass(frozen=True)
class _CompiledGraph:
    """A program and the inputs it accepts.

    Attributes:
        call: function of the graph's inputs.
        types: element type and shape of each input; static sizes are numbers.
        environment: symbolic sizes that the guards refer to.
        guards: Inductor's assumptions about dynamic sizes as a Python expression, or ``None``.
    """

    call: Callable[..., Sequence[torch.Tensor]]
    types: tuple[_Type, ...]
    environment: ShapeEnv
    guards: str | None

    def accepts(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Return whether the program accepts these inputs."""
        for (dtype, shape), given in zip(self.types, inputs, strict=True):
            sizes = zip(shape, given.shape, strict=True)
            if dtype is not given.dtype or any(isinstance(own, int) and own != size for own, size in sizes):
                return False
        return not self.guards or bool(self.environment.evaluate_guards_expression(self.guards, list(inputs)))


class _AsModel(nn.Module):
    """Wraps a graph as a module that is called like the float model."""

    def __init__(self, graph: fx.GraphModule, signature: Signature) -> None:
        super().__init__()
        self.model, self.signature = graph, signature

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaves[entry.leaf] for entry in self.signature.inputs]
        with torch.fx.traceback.preserve_node_meta():  # keeps the labels that the report needs
            results = fx.Interpreter(self.model).run(*tensors)
        return unflatten_result(self.signature, tuple(results), _free_sizes(self.signature, tensors))


@contextmanager
def configured_inductor() -> Iterator[list[fx.Node]]:
    """Set Inductor up for this backend, and yield a list that receives the nodes for which it generates code.

    Errors of Inductor are raised as `BuildError`.
    """
    made: list[fx.Node] = []
    settings = {**SETTINGS, "post_grad_custom_post_pass": lambda graph: made.extend(graph.nodes)}
    try:
        with torch.no_grad(), inductor_config.patch(settings), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "To copy construct from a tensor", UserWarning
            )  # Inductor's own code triggers this
            yield made
    except (BackendCompilerFailed, RuntimeError) as error:
        raise BuildError("inductor", None, str(error).strip().partition("\n")[0]) from error


def _fake(mode: FakeTensorMode, index: int, tensor: torch.Tensor, free: tuple[int, ...]) -> torch.Tensor:
    """Return a fake tensor. Dynamic sizes of 0 and 1 become static, because code for other sizes is incorrect for
    them."""
    is_free = [axis in free and size > 1 for axis, size in enumerate(tensor.shape)]
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC if one else DimDynamic.STATIC for one in is_free])
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(f"input{index}"))


def _free_sizes(signature: Signature, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the dynamic dimensions that are the size of an axis of an input."""
    found: dict[str, Any] = {}
    for entry, tensor in zip(signature.inputs, tensors, strict=True):
        for dim, size in zip(entry.type.shape, tensor.shape, strict=True):
            found.update((name, size) for name in symbols_of(dim) if dim == symbol(name))
    return found


def _decompositions() -> dict[Any, Any]:
    """Return the decompositions of intaglio's own operators."""
    return {**decompositions(), **group_decompositions()}


def _notes() -> tuple[str, ...]:
    """Return notes about the whole program on this CPU."""
    if torch.cpu._is_vnni_supported():
        return ()
    saturates = "this CPU has no VNNI: oneDNN adds pairs of products in 16 bits, which saturate"
    return (f"{saturates}; those of activations of 7 bits do not",)
