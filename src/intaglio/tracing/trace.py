"""Capture with a dynamic batch if possible, otherwise with the shapes of the example."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim as TorchDim
from torch.export import ExportedProgram
from torch.nn.utils.rnn import PackedSequence

from intaglio.argument_checks import WITHOUT_CYCLES, nesting_problem
from intaglio.errors import CaptureError
from intaglio.signature import clone_tensors, plain_mapping
from intaglio.signature.tensor_checks import TO_DENSE_ON_CPU, check_memory_of, unsupported_reason
from intaglio.torch_private import global_hooks_for, pytree
from intaglio.tracing.capture_check import (
    allow_length_one,
    difference_in_call,
    disagreement,
    free_symbols,
    threads_beside_compilers,
)
from intaglio.tracing.captured import Captured, ExampleError
from intaglio.tracing.changed_arguments import LEFT_OUT, WITHOUT_CACHE, ContainerContents
from intaglio.tracing.copies.copy_model import frozen_copy
from intaglio.tracing.copies.shared_parameters import shareable_parameters, without_writes
from intaglio.tracing.result_order import with_fields_ordered
from intaglio.tracing.sizes.needed_conditions import with_needed_conditions
from intaglio.tracing.sizes.requested_sizes import checked, with_requested_sizes
from intaglio.tracing.torch_export import export, free_axes, is_sequence, to_captured, with_named_keywords


def trace(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    dynamic_shapes: Any,
    train: bool,
    free: Mapping[int, Collection[int]],
    copies_parameters: bool,
) -> Captured:
    """Implement `capture`, which imports this module late because it imports torch.export."""
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    args = tuple(map(plain_mapping, args))
    kwargs = {name: plain_mapping(value) for name, value in (example_kwargs or {}).items()}
    args, kwargs = pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, (args, kwargs))
    _check_example(args, kwargs)
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        if train:
            _check_batch_norms(model)
        shared = {} if copies_parameters or train else shareable_parameters(model)
        model_copy = frozen_copy(model, train, shared)
        with global_hooks_for(set(model_copy.modules()).__contains__):
            captured = _trace_copy(model_copy, args, kwargs, dynamic_shapes, train, free, shared)
    if captured is None:
        return trace(model, example_inputs, example_kwargs, dynamic_shapes, train, free, copies_parameters=True)
    with global_hooks_for(set(model_copy.modules()).__contains__):
        # outside of torch.device, which keeps encoders from skipping padding
        return _with_padding(captured, model_copy, args, kwargs)


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def _check_batch_norms(model: nn.Module) -> None:
    """Raise `CaptureError` for batch norms in training whose factor of running statistics depends on data."""
    for path, part in model.named_modules():
        if isinstance(part, BATCH_NORMS) and part.track_running_stats and part.momentum is None:
            problem = "with momentum=None it averages over all batches so far, which torch.export cannot trace"
            remedy = "set the attribute momentum of the batch norm to a number, such as 0.1"
            raise CaptureError(path, type(part).__name__, problem, remedy=remedy)


def _trace_copy(
    model_copy: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    train: bool,
    free: Mapping[int, Collection[int]],
    shared: Mapping[int, torch.Tensor],
) -> Captured | None:
    """Return the graph of a copy of the model, or ``None`` if it writes to the parameters that it shares."""
    model_copy = with_named_keywords(model_copy, kwargs)
    returns_caches, changes_arguments, structure = train, False, None
    if not train:
        buffers = {name: buffer.clone() for name, buffer in model_copy.named_buffers()}
        found = without_writes(shared, lambda: _run_example(model_copy, args, kwargs))
        if found is None:
            return None
        result, changes_arguments = found
        returns_caches, structure = _returns_caches(result), pytree.tree_structure(result)
        for name, buffer in model_copy.named_buffers():
            buffer.copy_(buffers[name])
    notes: tuple[str, ...] = (LEFT_OUT,) if changes_arguments else ()
    notes += _without_caches(model_copy) if returns_caches and "use_cache" not in kwargs else ()
    if dynamic_shapes is not None:
        captured = with_requested_sizes(model_copy, args, kwargs, dynamic_shapes, train)
    else:
        captured = _capture(model_copy, args, kwargs, free, train)
    if structure is not None:
        captured = with_fields_ordered(captured, structure)
    return replace(captured, model_info=captured.model_info.with_stage(notes)) if notes else captured


def _without_caches(model_copy: nn.Module) -> tuple[str, ...]:
    """Switch off the key-value caches of decoders of Transformers, which return them by default, and return a note.

    torch.export cannot return objects of their classes, and a call without a cache as argument computes the
    same result without one. Configurations of encoders have the same setting, so what the example returns decides; in
    training, where no example runs, the setting does.
    """
    configs = [getattr(module, "config", None) for module in model_copy.modules()]
    using = [config for config in configs if getattr(config, "use_cache", None) is True]
    for config in using:
        vars(config)["use_cache"] = False
    return (WITHOUT_CACHE,) if using else ()


def _returns_caches(result: Any) -> bool:
    return any(map(_is_cache, pytree.tree_leaves(result, is_leaf=_is_cache)))


def _is_cache(value: Any) -> bool:
    """Return whether a value is a key-value cache of Transformers, or the state that other decoders keep as one."""
    bases = type(value).__mro__
    return any(cls.__module__.startswith("transformers.") and cls.__name__.endswith("Cache") for cls in bases)


PADDING_SKIPPED = (
    "at padding positions the results are what the layers compute; nn.TransformerEncoder returns zeros there when it "
    "evaluates without gradients (enable_nested_tensor)"
)


def _with_padding(captured: Captured, model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """Add a note if the model in normal use skips padding and the graph does not."""
    skips = any(isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor for part in model_copy.modules())
    if not skips or captured.training:
        return captured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype
        differs = difference_in_call(captured, model_copy, args, kwargs, "the example") is not None
    return replace(captured, model_info=captured.model_info.with_stage((PADDING_SKIPPED,))) if differs else captured


PASS_REAL = "pass torch.view_as_real(tensor), and call torch.view_as_complex in forward"


def _check_example(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    values = pytree.tree_leaves((args, dict(kwargs)), is_leaf=_is_packed)
    if any(map(_is_packed, values)):
        remedy = "let forward take the padded tensor, and pack it in float outside of the quantized layers"
        raise CaptureError("example inputs", None, "torch.export cannot trace a PackedSequence", remedy=remedy)
    for index, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
        if isinstance(leaf, torch.Tensor) and (problem := unsupported_reason(leaf)) is not None:
            raise CaptureError(f"example input {index}", None, problem, remedy=TO_DENSE_ON_CPU)
        if isinstance(leaf, torch.Tensor) and leaf.is_complex():
            problem = f"its data type is {leaf.dtype}; int8 models take real numbers"
            raise CaptureError(f"example input {index}", None, problem, remedy=PASS_REAL)
    check_memory_of((args, dict(kwargs)), "example inputs")


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _run_example(model_copy: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
    """Run the float model on its example, to report its own errors before torch.export does.

    Returns:
        The result, and whether the model removes entries of lists or dictionaries of its arguments.

    Raises:
        CaptureError: the model fails, or puts a tensor into a list or dictionary of its arguments.
    """
    args, kwargs = clone_tensors(args), clone_tensors(dict(kwargs))
    contents = ContainerContents({**dict(enumerate(args)), **kwargs})
    try:
        with torch.no_grad(), threads_beside_compilers():
            result = model_copy(*args, **kwargs)
    except Exception as error:
        kinds = [f"{type(v).__name__}{list(v.shape) if isinstance(v, torch.Tensor) else ''}" for v in args]
        raise ExampleError(
            type(model_copy).__name__,
            None,
            f"the float model fails on the example inputs ({', '.join(kinds)}): {error}",
            remedy=_example_remedy(model_copy, (*args, *kwargs.values())),
        ) from error
    if (problem := nesting_problem(result)) is not None:
        raise CaptureError(type(model_copy).__name__, None, f"its result: {problem}", remedy=WITHOUT_CYCLES)
    return result, contents.changed()


def _example_remedy(model_copy: nn.Module, example: tuple[Any, ...]) -> str:
    """Return what to do about an example on which the float model fails."""
    wanted = {p.dtype for p in model_copy.parameters() if p.is_floating_point()}
    given = {t.dtype for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.is_floating_point()}
    if len(wanted) == 1 and (odd := given - wanted):
        return f"convert the inputs from {', '.join(sorted(map(str, odd)))} with .to({wanted.pop()})"
    return "pass example_inputs as the tuple of arguments that forward takes, or batches that hold them"


def _capture(
    model_copy: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    free: Mapping[int, Collection[int]],
    train: bool,
) -> Captured:
    notes: tuple[str, ...] = ()
    choices = [_free(lengths, free) for lengths in _lengths(pytree.tree_leaves((args, kwargs)))]
    for axes in choices:
        captured, reason = _with_free_axes(model_copy, args, kwargs, axes, train)
        if captured is not None:
            notes += _fixed_lengths(captured, model_copy, args, kwargs) if axes is not choices[-1] else ()
            return replace(captured, model_info=captured.model_info.with_stage(notes))
        if axes is not choices[-1]:
            notes = (f"sequence lengths are fixed to those of the example: {reason}",)
    note = f"the batch size is fixed to that of the example: {reason}"
    return checked(
        to_captured(export(model_copy, args, kwargs, None), model_copy, (*notes, note), train), model_copy, args, kwargs
    )


def _with_free_axes(
    model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], axes: Sequence[Collection[int]], train: bool
) -> tuple[Captured | None, str | None]:
    """Return the graph with these axes of each leaf dynamic, or ``None`` and the reason."""
    reason = None
    for wide_args, wide_kwargs in _examples(args, kwargs, axes):
        try:
            shapes = free_axes(model_copy, wide_args, wide_kwargs, axes)
            captured = _with_one_batch(export(model_copy, wide_args, wide_kwargs, shapes), model_copy, train)
            captured = with_needed_conditions(captured, model_copy, wide_args, wide_kwargs)
            found = disagreement(captured, model_copy, args, kwargs) if free_symbols(captured) else "the model fixes it"
        except CaptureError as error:
            found = error.problem
        if found is None:
            return allow_length_one(captured, model_copy, args, kwargs), None
        reason = reason or found
    return None, reason


def _with_one_batch(program: ExportedProgram, model_copy: nn.Module, train: bool) -> Captured:
    """Return the graph of a program. If it has sizes that cannot be written, all inputs get the same batch.

    torch.export does not find out that the batches of two inputs are equal if they are joined and separated again.
    """
    try:
        return to_captured(program, model_copy, (), train)
    except CaptureError as error:
        try:
            return to_captured(program, model_copy, (), train, one_batch=True)
        except CaptureError:
            raise error from None


def _lengths(leaves: Sequence[Any]) -> list[list[bool]]:
    """Return which leaves may have a dynamic length in their second axis, the choice with the most of them first.

    These are token ids and masks, and leaves whose second axis has the length of one of them, as the boxes of words.
    """
    tokens = [is_sequence(leaf) for leaf in leaves]
    sizes = {leaf.shape[1] for leaf, found in zip(leaves, tokens, strict=True) if found} - {1}
    alike = [
        found or (isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[1] in sizes)
        for leaf, found in zip(leaves, tokens, strict=True)
    ]
    return [*([alike] if alike != tokens else []), *([tokens] if any(tokens) else []), [False] * len(leaves)]


def _free(lengths: Sequence[bool], free: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """Return the axes of each leaf that should be dynamic: the first, the second of `lengths`, and those in `free`.

    If `free` has no axis for a leaf, only the first is dynamic.
    """
    named = [found and (index not in free or len(free[index]) > 0) for index, found in enumerate(lengths)]
    return [(0, *((1,) if found else ()), *free.get(index, ())) for index, found in enumerate(named)]


def _fixed_lengths(
    captured: Captured, model_copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """Return a note for each sequence length that torch.export fixed, with the reason."""
    leaves = pytree.tree_leaves((args, kwargs))
    inputs = [e for e in captured.signature.inputs if is_sequence(leaves[e.leaf]) and isinstance(e.type.shape[1], int)]
    if not inputs:
        return ()
    axes = _free(_lengths(leaves)[0], {})
    wide_args, wide_kwargs = next(_examples(args, kwargs, axes))
    try:
        export(
            model_copy, wide_args, wide_kwargs, free_axes(model_copy, wide_args, wide_kwargs, axes, TorchDim.DYNAMIC)
        )
        reason = "the model fixes it"
    except CaptureError as error:
        reason = error.problem
    return tuple(f"the length of '{entry.name}' is fixed to that of the example: {reason}" for entry in inputs)


def _examples(
    args: tuple[Any, ...], kwargs: dict[str, Any], axes: Sequence[Collection[int]]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield examples to export: with dynamic axes of size 1 repeated to 2, then as given unless all batches are 1."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    sizes = {leaf.shape[0] for leaf in _with_axes((args, kwargs))}
    wide = [_widened(leaf, free) for leaf, free in zip(leaves, axes, strict=True)]
    if any(a is not b for a, b in zip(leaves, wide, strict=True)):
        yield pytree.tree_unflatten(wide, tree)
    if sizes != {1}:
        yield args, kwargs


def _widened(leaf: Any, axes: Collection[int]) -> Any:
    if isinstance(leaf, torch.Tensor):
        for axis in axes:
            leaf = torch.cat([leaf, leaf], axis) if axis < leaf.dim() and leaf.shape[axis] == 1 else leaf
    return leaf


def _with_axes(call: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim()]
