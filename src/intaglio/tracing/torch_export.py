"""Export of an nn.Module with torch.export, and conversion of the program to the canonical graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.nn.utils.rnn import PackedSequence

from intaglio.errors import CaptureError
from intaglio.fxgraph.graph_passes import run
from intaglio.fxgraph.node_info import known_type, update_graph_info, update_info
from intaglio.fxgraph.nodes import dim_of
from intaglio.fxgraph.passes.element_types.half_precision import UPCAST_NOTE
from intaglio.fxgraph.passes.identities import drop_assertions
from intaglio.ir import DType, Input, ModelInfo, Origin, Output, Signature, State
from intaglio.torch_private import (
    buffers_of,
    decompose_used_composites,
    forget_compiled_loops,
    parameters_of,
    pytree,
    uncompared_masks,
)
from intaglio.tracing.capture_passes import CAPTURE_PASSES
from intaglio.tracing.captured import Captured, module_classes
from intaglio.tracing.during_export.earlier_results import without_size_caches
from intaglio.tracing.during_export.lengths_of_tensors import dynamic_lengths
from intaglio.tracing.during_export.substitute_operators import (
    SubstituteOperators,
    restore_torch_operators,
    without_needless_values,
)
from intaglio.tracing.export_metadata import (
    constant,
    control_flow_error,
    describe,
    module_around,
    number_of_data_error,
    source_of,
    tensor_of,
)
from intaglio.tracing.local_decompositions import (
    CONSTANT_KINDS,
    decompose_single_operators,
    replace_strided_views,
)
from intaglio.tracing.loops.unroll_scans import unroll_loops
from intaglio.tracing.loops.while_loops import WHILE, loop_subgraphs, loops_of, while_loop
from intaglio.tracing.operator_aliases import resolve_aliases
from intaglio.tracing.sizes.free_dimensions import Sizes, example_sizes, free_sizes, input_type, ranges_of
from intaglio.tracing.sizes.size_conditions import conditions_of

ADVICE = ("For more", "For extended", "For C++", "If you suspect", "The error above", "Caused by", "consider using")


def export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> ExportedProgram:
    """Run torch.export and its default decompositions without their log output.

    Raises:
        CaptureError: torch.export fails; the message contains its reason.
    """
    try:
        with warnings.catch_warnings(), _quiet(), torch.no_grad(), uncompared_masks():
            warnings.simplefilter("ignore")
            forget_compiled_loops()
            with (
                SubstituteOperators(),
                without_needless_values(),
                without_size_caches(model, args, kwargs),
                dynamic_lengths(model),
            ):
                program = torch.export.export(model, args, dict(kwargs), dynamic_shapes=shapes)
            decompose_single_operators(program)  # first: no kernels of batch norms run to find aliases
            resolve_aliases(program)
            program = restore_torch_operators(decompose_used_composites(program))
            replace_strided_views(program)
            return program
    except Exception as error:
        if ALIASED in str(error) and (shared := _shared_memory(model)):
            raise CaptureError(
                shared[0],
                None,
                f"forward changes this tensor, which shares memory with {', '.join(shared[1:])}",
                remedy="give each of them memory of its own: register_buffer(name, tensor.clone())",
            ) from error
        raise CaptureError(
            type(model).__name__,
            None,
            f"torch.export cannot trace the model: {_first_lines(error)}",
            remedy=_remedy(error, shapes),
        ) from error


ALIASED = "expected compiled_fn to be GraphModule"
"""Error of torch.export about writes into one of several tensors that share memory."""


def _shared_memory(model: nn.Module) -> list[str]:
    """Return the names of the first tensors of the model that share memory, or an empty list."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {**buffers_of(module), **parameters_of(module), **vars(module)}
        for name, tensor in own.items():
            if isinstance(tensor, torch.Tensor):
                memory = tensor.untyped_storage().data_ptr()
                found.setdefault(memory, []).append(f"{path}.{name}" if path else name)
    return next((names for names in found.values() if len(names) > 1), [])


def _remedy(error: Exception, shapes: Any) -> str:
    if "register" in (said := str(error)):
        of_cache = "leave out use_cache, or pass use_cache=False with the inputs"
        return of_cache if "cache_utils" in said else "call torch.export.register_dataclass(YourClass) once before"
    if shapes is not None and ("dynamic_shapes" in said or "Constraints violated" in said):
        return "pass dynamic_shapes that fit the model"
    return "quantize the submodules that do not depend on data one by one, or use intaglio.eager"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Redirect standard error and silence torch's logger; its exceptions contain the same information."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _first_lines(error: BaseException, lines: int = 10) -> str:
    """Return the first lines of a message without torch's advice to developers."""
    said = [line for line in str(error).strip().splitlines() if line.strip()]
    return "\n    ".join([line for line in said if not line.strip().startswith(ADVICE)][:lines])


def to_captured(
    program: ExportedProgram, model: nn.Module, notes: Sequence[str], training: bool, one_batch: bool = False
) -> Captured:
    """Convert an exported program to a graph with parameters as attributes and a `NodeInfo` on every node.

    With ``one_batch``, all inputs have the same batch, also where torch.export does not find out that they have.
    """
    _simplify(program.graph_module)
    graph, root = fx.Graph(), nn.Module()
    sizes = free_sizes(program, one_batch)
    copies, state = dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    inputs, fixed, leaf = list[Input](), dict[int, Any](), 0
    changed = set(program.graph_signature.buffers_to_mutate.values())
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.target in changed:
                state[spec.target] = node
            elif spec.kind in CONSTANT_KINDS:
                if node.users:
                    copies[node] = constant(graph, root, program, spec.target)
            elif spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    fixed[leaf] = spec.arg.value
                else:
                    copies[node] = graph.placeholder(node.name)
                    copies[node].target = copies[node].name  # a buffer may already have the name
                    describe(copies[node], node, sizes, program)
                    inputs.append(Input(node.name, leaf, input_type(copies[node])))
                leaf += 1
            else:
                raise CaptureError(node.name, None, f"inputs of the kind {spec.kind.name} are not supported")
            if node.next.op != "placeholder":
                copies.update(_copied_state(state, graph, sizes, program))  # state follows the inputs of a call
        elif node.op == "call_function" and str(node.target) == WHILE:
            held = {own: specs[own.name].target for own in copies if copies[own].op == "get_attr"}
            loop, operands = while_loop(node, program, sizes, held, model, training)
            copies[node] = graph.call_function(loop, tuple(copies[operand] for operand in operands))
            update_info(copies[node], origin=Origin(module_around(node), str(loop), source_of(node)))
        elif node.op == "call_function":
            if isinstance(node.meta.get("val"), torch.SymFloat):
                raise number_of_data_error(node, program)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = {}
            describe(copies[node], node, sizes, program)
        elif node.op == "output":
            signature = _outputs(program, node, copies, graph, inputs, fixed, state, sizes)
        elif any(str(user.target) != WHILE for user in node.users):
            raise control_flow_error(next(iter(node.users)), program)
    signature = _with_names_and_limits(signature, model, program, sizes)
    module = fx.GraphModule(root, graph)
    return _after_passes(module, signature, example_sizes(program, sizes, inputs), model, notes, training)


def _simplify(module: fx.GraphModule) -> None:
    """Unroll loops, and drop assertions with what only they read, which may have no counterpart."""
    unroll_loops(module)
    drop_assertions(module)
    module.graph.eliminate_dead_code()


def _copied_state(
    state: Mapping[str, fx.Node], graph: fx.Graph, sizes: Sizes, program: ExportedProgram
) -> dict[fx.Node, fx.Node]:
    """Return placeholders for buffers that calls change."""
    copies: dict[fx.Node, fx.Node] = {}
    for path, kept in state.items():
        copies[kept] = graph.placeholder(kept.name)
        copies[kept].target = copies[kept].name
        describe(copies[kept], kept, sizes, program)
        update_info(copies[kept], buffer=path)
    return copies


def _after_passes(
    module: fx.GraphModule,
    signature: Signature,
    sizes: Mapping[str, int],
    model: nn.Module,
    notes: Sequence[str],
    training: bool,
) -> Captured:
    """Run the capture passes, and return the result with its description."""
    types = {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()}
    for part in (module, *(node.target.body.module for node in loops_of(module))):
        update_graph_info(part, sizes=sizes, module_types=types)
    upcast = run(module, CAPTURE_PASSES)["upcast_half_precision"]
    tensors = {id(one): one for part in (module, *loop_subgraphs(module)) for one in part.buffers()}.values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    model_info = ModelInfo(type(model).__name__, size, (*notes, *[UPCAST_NOTE] * bool(upcast)))
    return Captured(module, signature, module_classes(model), model_info, training)


def _outputs(
    program: ExportedProgram,
    node: fx.Node,
    copies: dict[fx.Node, fx.Node],
    graph: fx.Graph,
    inputs: list[Input],
    fixed: dict[int, Any],
    state: dict[str, fx.Node],
    sizes: Sizes,
) -> Signature:
    """Add the output node with results, written inputs and new state, and return the signature.

    Raises:
        CaptureError: the model returns or changes something else.
    """
    results: list[fx.Node] = []
    outputs: list[Output] = []
    written: dict[int, fx.Node] = {}
    kept: dict[str, fx.Node] = {}
    leaf_of = {entry.name: entry.leaf for entry in inputs}
    for spec, value in zip(program.graph_signature.output_specs, node.args[0], strict=True):
        if spec.kind is OutputKind.USER_INPUT_MUTATION:
            written[leaf_of[spec.target]] = copies[value]
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            kept[spec.target] = copies[value]
        elif spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                str(spec.target),
                None,
                f"results of the kind {spec.kind.name} are not supported; models return tensors and change buffers",
                remedy="capture a part of the model without it",
            )
        elif isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymInt):
            outputs.append(Output(None, dim_of(value.meta["val"], sizes)))
        elif isinstance(value, fx.Node):
            results.append(copies[value])
            outputs.append(Output(copies[value].name))
        else:
            outputs.append(Output(None, value))
    graph.output((*results, *written.values(), *[kept[path] for path in state]))
    return Signature(
        tuple(inputs),
        tuple(outputs),
        program.call_spec.in_spec,
        program.call_spec.out_spec,
        fixed,
        {leaf: value.name for leaf, value in written.items()},
        state=tuple(_state(program, path, copies[node], kept[path]) for path, node in state.items()),
    )


def _state(program: ExportedProgram, path: str, node: fx.Node, value: fx.Node) -> State:
    tensor, kind = tensor_of(program, path), known_type(node)
    if kind.dtype in (DType.BF16, DType.F8E4M3, DType.F8E5M2, DType.OTHER):
        raise CaptureError(
            path,
            None,
            f"the model changes this buffer while it runs, which is not supported for {tensor.dtype}",
            remedy="store it as float32 or as an integer type",
        )
    return State(node.name, value.name, path, kind, tensor.detach().contiguous().numpy().copy())


def _with_names_and_limits(signature: Signature, model: nn.Module, program: ExportedProgram, sizes: Sizes) -> Signature:
    """Return a signature with the parameter names of ``forward`` and what free sizes must be."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(n for n, p in inspect.signature(model.forward).parameters.items() if p.kind in kinds)
    ranges, conditions = ranges_of(program, sizes), conditions_of(program, sizes)
    return dataclasses.replace(signature, names=names, ranges=ranges, conditions=conditions)


def with_named_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> nn.Module:
    """Return the model with these keywords named in its forward.

    torch.export fixes the sizes of tensors in ``**kwargs``.
    """
    forward, kinds = model.forward, inspect.Parameter
    signature = inspect.signature(forward)
    own = [p for p in signature.parameters.values() if p.kind is not kinds.VAR_KEYWORD]
    extra = [kinds(name, kinds.KEYWORD_ONLY) for name in kwargs if name not in signature.parameters]
    if len(own) == len(signature.parameters) or not extra:
        return model

    @functools.wraps(forward)
    def call(*args: Any, **given: Any) -> Any:
        return forward(*args, **given)

    call.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]  # typeshed has no __signature__
    model.forward = call
    return model


def free_axes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    axes: Sequence[Collection[int]],
    second: Any = TorchDim.AUTO,
) -> Any:
    """Return `dynamic_shapes` that leave these axes of each leaf dynamic if the model allows it.

    Args:
        model: float model.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.
        axes: axes of each leaf.
        second: dimension of the second axis.

    Raises:
        CaptureError: the example does not fit the signature of forward.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    wanted = {id(leaf): free for leaf, free in zip(leaves, axes, strict=True) if isinstance(leaf, torch.Tensor)}

    def spec(leaf: Any) -> Any:
        if type(leaf) is PackedSequence:  # its constructor takes tensors only
            return tuple.__new__(PackedSequence, [spec(child) for child in leaf])
        if _is_record(leaf):  # torch.export expects a list of the fields
            return [pytree.tree_map(spec, child, is_leaf=_is_record) for child in _fields(leaf)]
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return None
        return {axis: second if axis == 1 else TorchDim.AUTO for axis in wanted[id(leaf)] if axis < leaf.dim()}

    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        problem = f"the example inputs do not fit forward(): {error}"
        raise CaptureError(type(model).__name__, None, problem, remedy="pass the arguments of one call") from error
    return {name: pytree.tree_map(spec, value, is_leaf=_is_record) for name, value in bound.items()}


def is_sequence(leaf: Any) -> bool:
    """Return whether a leaf is an integer or boolean matrix, as token ids and their masks are."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and leaf.dtype in INTEGERS


INTEGERS = (torch.int64, torch.int32, torch.bool)


def _is_record(value: Any) -> bool:
    """Return whether a value is a dataclass, a packed sequence or another class that is registered as a pytree node."""
    registered = type(value) in pytree.SUPPORTED_NODES and not isinstance(value, (tuple, list, dict))
    return registered or type(value) is PackedSequence


def _fields(record: Any) -> list[Any]:
    return pytree.SUPPORTED_NODES[type(record)].flatten_fn(record)[0]
