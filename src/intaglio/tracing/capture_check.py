"""Comparison of a captured graph with the float model at several sizes of its dynamic dimensions."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from intaglio.errors import CaptureError, InputError
from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.passes.element_types.half_precision import UPCAST_NOTE
from intaglio.ir import Dim, DType, Expression, evaluate, has_quotient, symbol, symbols_of
from intaglio.native.native_library import builds_in_background
from intaglio.signature import bind, clone_tensors, dims_of
from intaglio.torch_private import pytree
from intaglio.tracing.captured import Captured
from intaglio.tracing.changed_arguments import LEFT_OUT, WITHOUT_CACHE
from intaglio.tracing.copies.copy_model import copy_model
from intaglio.tracing.result_order import leaf_order
from intaglio.tracing.sizes.size_conditions import sizes_with_conditions

BATCH_SIZES = (1, 3)
LARGER_BATCH_SIZES = (4, 8)
"""Further batch sizes if a size in the graph is a quotient, which may be equal for several batches."""
TRAINING_BATCH_SIZES = (2, 3)
"""Batch sizes at which graph and model are compared in training; batch norm in training needs more than one vector."""
LARGEST_FACTOR = 16
"""Largest factor of sizes in the search for sizes that change a quotient."""
ADDITIONAL_TOKENS = 3
"""Number of additional tokens in the comparison if the sequence length is dynamic."""
FLOAT32_TOLERANCE, HALF_TOLERANCE = (1e-3, 1e-4), (0.05, 0.05)
"""Relative and absolute tolerance (the latter relative to the largest value), in float32 and in half precision."""
NO_TOLERANCE_LIMIT = (0.0, math.inf)
"""Tolerance for models that draw random numbers, which differ between graph and model."""
TOKEN_DTYPES = (DType.I64, DType.I32, DType.BOOL)
OF_ANY_SIZES = {LEFT_OUT, UPCAST_NOTE, WITHOUT_CACHE}
"""Notes of a graph that are not about its sizes. Others say that a size is fixed, or begin with `CONDITION_NOTE`."""
CONDITION_NOTE = "calls must have sizes with"
"""Begin of a note about a condition on free sizes."""


def free_symbols(captured: Captured) -> set[str]:
    """Return the names of the dynamic dimensions."""
    dims = [dim for entry in captured.signature.inputs for dim in entry.type.shape]
    return set().union(*[symbols_of(dim) for dim in dims]) if dims else set()


def has_fixed_sizes(captured: Captured) -> bool:
    """Return whether a note says that a size of the graph is that of the example, because it could not be free."""
    return not {note for note in captured.notes if not note.startswith(CONDITION_NOTE)} <= OF_ANY_SIZES


def disagreement(captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return how graph and model differ, or ``None``.

    They are compared at every batch size in `BATCH_SIZES` (`TRAINING_BATCH_SIZES` in training) if the batch is dynamic,
    and at two sequence lengths if these are. If the model itself fails at one of them, as with the edges of a graph of
    which few nodes are left, they are compared at the size of the example and at twice that.
    """
    try:
        dims_of(captured.signature, bind(captured.signature, args, kwargs))
    except InputError as error:
        return f"it does not take the example inputs: {error.problem}"
    if not free_symbols(captured):
        return difference_in_call(captured, model, args, kwargs, "the example inputs")
    batches = TRAINING_BATCH_SIZES if captured.training else BATCH_SIZES
    quotients = _quotients(captured)
    divided = set().union(*map(symbols_of, quotients)) & free_symbols(captured)

    def compared(batch: int) -> str | None:
        wanted = _sizes(captured, args, kwargs, batch, change_lengths=batch > 1)
        if (sizes := sizes_with_conditions(captured, wanted, _batch(captured))) is None:
            return None
        some_args, some_kwargs = resized(captured, args, kwargs, sizes)
        return difference_in_call(captured, model, some_args, some_kwargs, f"batch {batch}")

    failure = None
    for batch in (*batches, *LARGER_BATCH_SIZES) if divided & _batch(captured) else batches:
        reason = compared(batch)
        if reason is not None and MODEL_FAILS not in reason:
            return reason
        failure = failure or reason
    own = _example_batch(captured, args, kwargs)
    if failure is not None and any(compared(batch) is not None for batch in (own, 2 * own)):
        return failure
    if not divided:
        return None
    sizes = _sizes(captured, args, kwargs, BATCH_SIZES[-1], change_lengths=False)
    return _wrong_type_at(captured, args, kwargs, _larger_sizes(captured, quotients, sizes))


def larger_example(
    captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example with dynamic dimensions so large that quotients differ, the batch with `BATCH_SIZES[-1]`."""
    sizes = _sizes(captured, args, kwargs, BATCH_SIZES[-1], change_lengths=False)
    return resized(captured, args, kwargs, _larger_sizes(captured, _quotients(captured), sizes))


def _larger_sizes(captured: Captured, quotients: Collection[Dim], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return sizes at which quotients differ from those of these sizes, as far as ranges and `LARGEST_FACTOR` allow.

    Args:
        captured: graph with dynamic dimensions.
        quotients: sizes in the graph that contain a floor division.
        sizes: sizes of all dynamic dimensions.
    """
    larger = dict(sizes)
    for name in sizes:
        own = [dim for dim in quotients if name in symbols_of(dim) and symbols_of(dim) <= sizes.keys()]
        high = captured.signature.ranges.get(name, (0, None))[1]
        factor = 2 if own else 1
        while factor < LARGEST_FACTOR and any(
            evaluate(dim, {**sizes, name: factor * sizes[name]}) == evaluate(dim, sizes) for dim in own
        ):
            factor *= 2
        larger[name] = factor * sizes[name] if high is None else min(factor * sizes[name], high)
    return larger


def _wrong_type_at(
    captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> str | None:
    """Return a value of the graph whose type does not fit calls with dimensions of these sizes, or ``None``.

    Not every part of a model can be called with these sizes, so operators that fail, and those that read them, are left
    out.
    """
    checker = _TypeChecker(captured.module, sizes, omit_failing=True)
    larger_args, larger_kwargs = resized(captured, args, kwargs, sizes)
    with contextlib.suppress(Exception):  # the result has omitted values if an operator before it fails
        replace(captured, module=checker.run)(*larger_args, **larger_kwargs)
    return f"with larger sizes {checker.wrong}" if checker.wrong else None


def check_calls(
    captured: Captured, model: nn.Module, calls: Sequence[tuple[Any, ...]], kwargs: Mapping[str, Any] | None = None
) -> None:
    """Raise `CaptureError` unless graph and model agree in calls of other sizes than the example.

    Args:
        captured: the captured model.
        model: the float model.
        calls: positional arguments of each call.
        kwargs: keyword arguments of every call.
    """
    for number, args in enumerate(calls):
        if (reason := difference_in_call(captured, model, args, kwargs or {}, f"check {number}")) is not None:
            problem = f"the captured graph does not compute what the model computes: {reason}"
            raise CaptureError(type(model).__name__, None, problem, remedy="pass other dynamic_shapes")


def difference_in_call(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], label: str
) -> str | None:
    """Run graph and model on the same inputs and return how they differ, or ``None``."""
    if captured.signature.state:  # compare from the captured state
        captured, model = replace(captured), copy_model(model)
    try:
        with torch.no_grad(), threads_beside_compilers():
            expected = model(*clone_tensors(args), **clone_tensors(kwargs))
    except Exception as error:
        return f"with {label} {MODEL_FAILS}: {error}"
    try:
        with threads_beside_compilers():
            got = _call_checked(captured, clone_tensors(args), clone_tensors(kwargs))
    except Exception as error:
        return f"with {label} the graph fails: {error}"
    near = HALF_TOLERANCE if UPCAST_NOTE in captured.notes else FLOAT32_TOLERANCE
    difference = _difference(got, expected, NO_TOLERANCE_LIMIT if _is_random(captured) else near)
    return difference and f"with {label} {difference}"


@contextlib.contextmanager
def threads_beside_compilers() -> Iterator[None]:
    """Leave a core to the compilers in the background, if there are any and PyTorch uses all cores.

    Each parallel region of PyTorch waits for its slowest thread. On a machine with two cores, a call of MiniLM with a
    thread that shares its core with a compiler takes seven times as long as one with a single thread.
    """
    threads = torch.get_num_threads()
    if threads == 1 or threads < len(os.sched_getaffinity(0)) or not builds_in_background():
        yield
        return
    torch.set_num_threads(threads - 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


MODEL_FAILS = "the model itself fails"
"""Part of the message about a call at which the float model raises an error."""
WRONG_TYPE = "but torch.export states"
"""Part of the message about a value that does not have the shape of its type."""


class _WrongTypeError(Exception):
    """A value of a graph does not have the shape of its type."""


_OMITTED = object()
"""Result of operators that are left out of a run."""


class _TypeChecker(fx.Interpreter):
    """Runs a graph and checks that the tensors have the shapes that the types of their nodes state.

    torch.export may take a size of the example for the size of all calls, for example if a slice of the batch has one
    element.

    Attributes:
        symbols: sizes of the dynamic dimensions in this call.
        wrong: the first wrong type, or an empty text.
    """

    def __init__(self, module: fx.GraphModule, symbols: Mapping[str, int], omit_failing: bool = False) -> None:
        """Prepare a run.

        Args:
            module: the graph.
            symbols: sizes of the dynamic dimensions in this call.
            omit_failing: go on behind operators that fail, without those that read their results.
        """
        super().__init__(module)
        self.symbols, self.omit_failing, self.wrong = symbols, omit_failing, ""

    def run_node(self, node: fx.Node) -> Any:
        if any(self.env.get(source) is _OMITTED for source in node.all_input_nodes):
            return _OMITTED
        try:
            result = super().run_node(node)
        except Exception:
            if not self.omit_failing:
                raise
            return _OMITTED
        kind = tensor_type(node) if node.op == "call_function" and isinstance(result, torch.Tensor) else None
        if kind is None or any(not symbols_of(dim) <= self.symbols.keys() for dim in kind.shape):
            return result
        expected = [evaluate(dim, self.symbols) for dim in kind.shape]
        if list(result.shape) != expected and not self.wrong:
            self.wrong = f"{node.target} returns shape {list(result.shape)}, {WRONG_TYPE} {expected}"
        return result


def _call_checked(captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call the graph and return its result; raise `_WrongTypeError` if a value has another shape than its type."""
    symbols = dims_of(captured.signature, bind(captured.signature, args, kwargs))
    checker = _TypeChecker(captured.module, symbols)
    result = replace(captured, module=checker.run)(*args, **kwargs)
    if checker.wrong:
        raise _WrongTypeError(checker.wrong)
    return result


def _quotients(captured: Captured) -> set[Dim]:
    """Return the sizes in the graph that contain a floor division of dynamic dimensions."""
    kinds = [tensor_type(node) for node in captured.module.graph.nodes if node.op == "call_function"]
    return {dim for kind in kinds if kind is not None for dim in kind.shape if has_quotient(dim)}


def _is_random(captured: Captured) -> bool:
    """Return whether the graph draws random numbers, as dropout in training does."""
    tags = [getattr(node.target, "tags", ()) for node in captured.module.graph.nodes]
    return captured.training and any(torch.Tag.nondeterministic_seeded in own for own in tags)


def allow_length_one(
    captured: Captured, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Captured:
    """Return a copy whose sequence lengths may be 1 if graph and model agree at that length.

    torch.export only considers lengths of 2 and more.
    """
    ranges = dict(captured.signature.ranges)
    for name in sorted(_lengths(captured)):
        low, high = ranges.get(name, (0, None))
        if low <= 1:
            sizes = {**_sizes(captured, args, kwargs, BATCH_SIZES[-1], change_lengths=False), name: 1}
            sizes = sizes_with_conditions(captured, sizes, {name}) or sizes
            one_args, one_kwargs = resized(captured, args, kwargs, sizes)
            agrees = difference_in_call(captured, model, one_args, one_kwargs, "length 1") is None
            ranges[name] = (1 if agrees else 2, high)
    return replace(captured, signature=replace(captured.signature, ranges=ranges))


def _lengths(captured: Captured) -> set[str]:
    """Return the dynamic dimensions that are lengths of token ids and not the batch."""
    inputs = [entry.type for entry in captured.signature.inputs]
    matrices = [kind.shape[1] for kind in inputs if len(kind.shape) == 2 and kind.dtype in TOKEN_DTYPES]
    return {name for dim in matrices for name in symbols_of(dim)} - _batch(captured)


def _batch(captured: Captured) -> set[str]:
    """Return the dynamic dimensions that are first axes of inputs."""
    return set().union(*[symbols_of(entry.type.shape[0]) for entry in captured.signature.inputs if entry.type.shape])


def _example_batch(captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the largest size in the example of a first axis that is dynamic, or 1."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    inputs = [entry for entry in captured.signature.inputs if entry.type.shape]
    sizes = [leaves[entry.leaf].shape[0] for entry in inputs if isinstance(entry.type.shape[0], Expression)]
    return max(sizes, default=1)


def _sizes(
    captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int, change_lengths: bool
) -> dict[str, int]:
    """Return sizes for all dynamic dimensions, within their ranges.

    Args:
        captured: graph with dynamic dimensions.
        args: positional arguments of the example.
        kwargs: keyword arguments of the example.
        batch: size of dynamic first axes; all others have their size in the example.
        change_lengths: change the lengths of sequences too.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    sizes: dict[str, int] = {}
    for entry in captured.signature.inputs:
        for axis, dim in enumerate(entry.type.shape):
            names = symbols_of(dim)
            if len(names) == 1 and dim == symbol(*names):
                (name,) = names
                sizes[name] = batch if axis == 0 else sizes.get(name, leaves[entry.leaf].shape[axis])
    if change_lengths:
        for name in _lengths(captured) & sizes.keys():
            room = captured.signature.ranges.get(name, (0, None))[1]
            sizes[name] = (
                sizes[name] + ADDITIONAL_TOKENS
                if room is None or sizes[name] + ADDITIONAL_TOKENS <= room
                else sizes[name] // 2
            )
    found = {name: sizes.get(name, batch) for name in free_symbols(captured)}
    for name, (low, high) in captured.signature.ranges.items():
        if name in found:
            found[name] = max(low, found[name] if high is None else min(found[name], high))
    return found


def resized(
    captured: Captured, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the example with dynamic dimensions at other sizes, repeated and cut to fit."""
    leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
    for entry in captured.signature.inputs:
        for axis, dim in enumerate(entry.type.shape):
            if isinstance(dim, Expression):
                leaves[entry.leaf] = _stretch(leaves[entry.leaf], axis, evaluate(dim, sizes))
    return pytree.tree_unflatten(leaves, tree)


def _stretch(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    times = [1] * tensor.dim()
    times[axis] = -(-size // max(tensor.shape[axis], 1))
    return tensor.repeat(times).narrow(axis, 0, size).clone()


def _difference(got: Any, expected: Any, tolerance: tuple[float, float]) -> str | None:
    """Return how two results differ beyond the tolerance, or ``None``. The order of their fields may differ."""
    left, left_tree = pytree.tree_flatten(got)
    right, right_tree = pytree.tree_flatten(expected)
    order = leaf_order(left_tree, right_tree)
    if order is None:
        return "the result of the graph has another structure than that of the model"
    for a, b in zip((left[leaf] for leaf in order), right, strict=True):
        if isinstance(b, torch.Tensor):
            if a.shape != b.shape:
                return f"a result has shape {list(a.shape)}, but that of the model {list(b.shape)}"
            if a.dtype is b.dtype and torch.equal(a, b):
                continue
            near, far = tolerance
            x, y = _in_double_precision(a), _in_double_precision(b)
            if not torch.allclose(x, y, rtol=near, atol=far * _largest_magnitude(y), equal_nan=True):
                apart = torch.where(a == b, 0.0, (x - y).abs())  # equal infinities are not apart
                return f"a result differs from that of the model by {apart.max():.3g}"
        elif a != b:
            return f"a result is {a!r}, but that of the model {b!r}"
    return None


def _in_double_precision(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest_magnitude(tensor: torch.Tensor) -> float:
    finite = tensor.abs()
    finite = finite[torch.isfinite(finite)]
    return max(finite.max().item(), 1e-6) if finite.numel() else 1e-6
