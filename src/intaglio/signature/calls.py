"""Conversion of a call's arguments to input tensors and of output tensors to its result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from intaglio import numerics
from intaglio.argument_checks import WITHOUT_CYCLES, nesting_problem
from intaglio.errors import InputError
from intaglio.ir import DType, Expression, QParams, Signature, evaluate
from intaglio.signature.shapes import input_error, match_shapes
from intaglio.signature.tensor_checks import (
    PLAIN_TENSORS,
    TO_DENSE_ON_CPU,
    bytes_spanned,
    check_memory_of,
    memory_problem,
    unsupported_reason,
)
from intaglio.torch_private import is_traced, pytree, storage_key

DTYPES = {
    torch.uint8: DType.U8,
    torch.uint16: DType.U16,
    torch.int8: DType.S8,
    torch.int16: DType.I16,
    torch.int32: DType.I32,
    torch.int64: DType.I64,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
    torch.float8_e4m3fn: DType.F8E4M3,
    torch.float8_e5m2: DType.F8E5M2,
    torch.float32: DType.F32,
    torch.float64: DType.F64,
    torch.bool: DType.BOOL,
}
TORCH_DTYPES = {kind: dtype for dtype, kind in DTYPES.items()}


def bind(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensor leaves of a call in the order of the signature's inputs.

    Args:
        signature: the signature of the captured model.
        args: positional arguments.
        kwargs: keyword arguments. Arguments of ``forward`` may be passed by position or by keyword.

    Raises:
        InputError: the nesting differs from the captured call, or a leaf that is not a tensor has another value.
    """
    try:
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        if tree != signature.in_tree:
            leaves = _rearranged(signature, args, kwargs)
    except RecursionError as error:
        raise _badly_nested(error, (args, kwargs)) from None
    for leaf, value in signature.fixed.items():
        same = leaves[leaf] is value or (type(leaves[leaf]) is type(value) and leaves[leaf] == value)
        if not same:
            raise InputError(
                f"argument leaf {leaf}",
                None,
                f"its value is {leaves[leaf]!r}, but the model was captured with {value!r}",
                remedy="quantize again with this value in the example inputs",
            )
    tensors = [leaves[entry.leaf] for entry in signature.inputs]
    return tensors


def _badly_nested(error: RecursionError, arguments: Any) -> Exception:
    """Return the error for arguments with a list or dictionary that contains itself, or the given one for others."""
    problem = nesting_problem(arguments)
    return error if problem is None else InputError("arguments", None, problem, remedy=WITHOUT_CYCLES)


def _rearranged(signature: Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a call that passes captured positional arguments by keyword, or captured keywords by
    position."""
    example_args, example_kwargs = pytree.tree_unflatten([None] * signature.in_tree.num_leaves, signature.in_tree)
    args = (
        tuple(_in_order_of(a, example) for a, example in zip(args, example_args, strict=False))
        + args[len(example_args) :]
    )
    names, given = (
        signature.names,
        {name: _in_order_of(value, example_kwargs.get(name)) for name, value in kwargs.items()},
    )
    if len(args) <= len(names) and not given.keys() & set(names[: len(args)]):
        given.update(zip(names, args, strict=False))
        positional = names[: len(example_args)]
        given.update(
            (n, _in_order_of(given[n], e)) for n, e in zip(positional, example_args, strict=False) if n in given
        )
        if set(given) == {*positional, *example_kwargs}:
            call = tuple(given[name] for name in positional), {name: given[name] for name in example_kwargs}
            leaves, tree = pytree.tree_flatten(call)
            if tree == signature.in_tree:
                return leaves
    raise InputError(
        "call",
        None,
        f"it has {_arguments_text(args, kwargs)}, but the model was captured with "
        f"{_arguments_text(example_args, example_kwargs)}"
        + (f" of forward({', '.join(names)})" if names else "")
        + "; number, names and nesting of the arguments must be the same",
        remedy="call the model with arguments of the same structure as the example inputs",
    )


def _arguments_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    named = f"the keyword arguments {', '.join(sorted(kwargs))}" if kwargs else "no keyword arguments"
    return f"{len(args)} positional argument{'s' * (len(args) != 1)} and {named}"


def plain_mapping(value: Any) -> Any:
    """Return a mapping that PyTorch's pytree does not know as a container (for example the result of a tokenizer) as a
    dictionary, and other values unchanged."""
    return dict(value) if isinstance(value, Mapping) and type(value) not in pytree.SUPPORTED_NODES else value


def _in_order_of(value: Any, example: Any) -> Any:
    """Return ``value`` with mappings as dictionaries whose keys have the order of ``example``."""
    value = plain_mapping(value)
    if type(value) is dict and type(example) is dict and value.keys() == example.keys():
        return {key: _in_order_of(value[key], example[key]) for key in example}
    return value


def dims_of(
    signature: Signature, leaves: Sequence[Any], byte_inputs: Collection[int] = (), *, in_memory: bool = True
) -> dict[str, int]:
    """Return the sizes of the dynamic dimensions in a call.

    Args:
        signature: the signature of the captured model.
        leaves: the tensors of the call, in the order of the signature's inputs.
        byte_inputs: positions of inputs that may be uint8 instead of their captured type.
        in_memory: whether all elements must be in memory, which the tensors of a tracer lack.

    Raises:
        InputError: a tensor does not fit its captured type or is not in memory, or a dynamic dimension is out of its
            range.
    """
    check_tensors(signature, leaves, byte_inputs)
    if in_memory:
        check_memory(signature, leaves)
    return match_shapes(signature, [leaf.shape for leaf in leaves])


def check_tensors(signature: Signature, leaves: Sequence[Any], byte_inputs: Collection[int] = ()) -> None:
    """Raise `InputError` unless every leaf is a dense CPU tensor of the captured element type. Shapes are not
    checked."""
    for index, (entry, value) in enumerate(zip(signature.inputs, leaves, strict=True)):
        dtype = entry.type.dtype
        if not isinstance(value, torch.Tensor):
            remedy = "convert the array with torch.from_numpy" if hasattr(value, "__array__") else None
            raise input_error(entry, f"it is of type {type(value).__name__}; the model takes a tensor here", remedy)
        if (given := DTYPES.get(value.dtype)) is not dtype and not (given is DType.U8 and index in byte_inputs):
            remedy = f"convert it with .to({TORCH_DTYPES.get(dtype, dtype)})"
            if value.dtype is torch.uint8:
                remedy += ", or quantize with input=intaglio.Image(mean, std) for a model that takes uint8 images"
            allowed = (dtype, DType.U8) if index in byte_inputs else (dtype,)
            expected = " or ".join(str(TORCH_DTYPES.get(one, one)) for one in allowed)
            raise input_error(entry, f"its data type is {value.dtype}; the model takes {expected}", remedy)
        if (reason := unsupported_reason(value)) is not None:
            raise input_error(entry, reason, TO_DENSE_ON_CPU)


def check_memory(signature: Signature, leaves: Sequence[torch.Tensor]) -> None:
    """Raise `InputError` unless all elements of all inputs are in memory that their storages own, and inputs that the
    model updates in memory of their own.

    Args:
        signature: the signature of the model.
        leaves: the tensors of a call, followed by the buffers that the model updates.
    """
    for index, tensor in enumerate(leaves):
        if (problem := memory_problem(tensor)) is not None:
            names = [f"input '{entry.name}'" for entry in signature.inputs]
            names += [f"buffer '{entry.path}'" for entry in signature.state]
            raise InputError(names[index], None, problem, remedy=PLAIN_TENSORS)
    if signature.updated_inputs:
        _check_updates(signature, leaves)


def initial_state(signature: Signature) -> list[torch.Tensor]:
    """Return copies of what the model's mutable buffers held at capture. They are the graph's last inputs."""
    return [torch.from_numpy(entry.initial.copy()) for entry in signature.state]


def updated_state(signature: Signature, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of the new values of mutable buffers, which are the last results of a call."""
    return [value.clone() for value in results[len(results) - len(signature.state) :]]


def clone_tensors(value: Any) -> Any:
    """Return nested arguments with a copy of every tensor, for a model that may write into its inputs.

    Raises:
        InputError: a tensor is not in memory, or a container contains itself.
    """
    try:
        check_memory_of(value)
        return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)
    except RecursionError as error:
        raise _badly_nested(error, value) from None


def update_inputs(
    signature: Signature, leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Copy to the input tensors of a call, in place, what the model writes to them.

    Args:
        signature: the signature of the captured model.
        leaves: the input tensors, in the order of the signature's inputs.
        results: the graph's output tensors: the result, new values of inputs, and new values of mutable buffers.

    Returns:
        The graph's output tensors. Those that were views of an updated input are copies with its earlier values.
    """
    if not signature.updated_inputs:
        return tuple(results)
    position = {entry.leaf: index for index, entry in enumerate(signature.inputs)}
    updated = [leaves[position[leaf]] for leaf in signature.updated_inputs]
    shared = [any(_share_memory(value, tensor) for tensor in updated) for value in results]
    results = tuple(value.clone() if also else value for value, also in zip(results, shared, strict=True))
    written = results[sum(output.value is not None for output in signature.outputs) :]
    for tensor, value in zip(updated, written, strict=False):
        tensor.copy_(value)
    return results


def _check_updates(signature: Signature, leaves: Sequence[torch.Tensor]) -> None:
    """Raise `InputError` if an input that the model updates shares memory with another input.

    The graph takes inputs for independent values.
    """
    for index, entry in enumerate(signature.inputs):
        if entry.leaf not in signature.updated_inputs:
            continue
        for other, tensor in enumerate(leaves[: len(signature.inputs)]):
            if other != index and _share_memory(leaves[index], tensor):
                raise InputError(
                    f"input '{signature.inputs[other].name}'",
                    None,
                    f"it shares memory with input '{entry.name}', which the model updates in place",
                    remedy="pass a copy of one of them: tensor.clone()",
                )


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether the memory from the first to the last element of two tensors overlaps. While a call is traced,
    tensors have no memory, and their storages decide."""
    if torch.compiler.is_compiling() or is_traced():
        return storage_key(a) == storage_key(b)
    begin_a, begin_b = a.data_ptr(), b.data_ptr()
    return begin_a < begin_b + bytes_spanned(b) and begin_b < begin_a + bytes_spanned(a)


class Integers(NamedTuple):
    """An output tensor of quantized values, ``real = (values - zero_point) * scale``.

    Attributes:
        values: the quantized values, uint8.
        scale: scale of the tensor.
        zero_point: zero point of the tensor.
    """

    values: torch.Tensor
    scale: float
    zero_point: int

    @staticmethod
    def of(real: torch.Tensor, q: QParams) -> Integers:
        """Return the quantized values of a tensor that the program dequantized. Rounding recovers them exactly: a
        quantized value times its scale is off by at most half a unit in the last place."""
        quantized = numerics.round_clamp(real * float(numerics.reciprocal(q.step)), q.qmin, q.qmax, q.zero)
        return Integers(quantized.to(torch.uint8), q.step, q.zero)

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized values as float32."""
        return (self.values.to(torch.int32) - self.zero_point).to(torch.float32) * self.scale


def unflatten_result(signature: Signature, results: Sequence[Any], symbols: Mapping[str, int]) -> Any:
    """Return the model's result in its original structure.

    Args:
        signature: the signature of the captured model.
        results: the graph's output tensors; constants of the result are filled in.
        symbols: sizes of the dynamic dimensions, for results that are sizes.
    """
    values = iter(results)
    leaves = []
    for output in signature.outputs:
        if output.value is not None:
            leaves.append(next(values) if output.qparams is None else Integers.of(next(values), output.qparams))
        elif isinstance(output.constant, Expression):
            leaves.append(evaluate(output.constant, symbols))
        else:
            leaves.append(output.constant)
    return pytree.tree_unflatten(leaves, signature.out_tree)


def run_while_loop(
    condition: Callable[..., Sequence[torch.Tensor]],
    body: Callable[..., Sequence[torch.Tensor]],
    carried: int,
    values: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Run ``while condition(*values): values = (*body(*values), *values[carried:])`` and return the carried values.

    Args:
        condition: returns a sequence whose first entry decides whether the body runs again.
        body: returns the new carried values.
        carried: number of values that the loop changes; the others are constant.
        values: the initial values, which are not changed.
    """
    state, constants = [value.clone() for value in values[:carried]], values[carried:]
    while condition(*state, *constants)[0]:
        state = list(body(*state, *constants))
    return tuple(state)


def returns_tensor(signature: Signature) -> bool:
    """Return whether a call returns one float tensor that is in no container."""
    tree, outputs = signature.out_tree, signature.outputs
    alone = tree is not None and tree.is_leaf() and len(outputs) == 1
    return alone and outputs[0].value is not None and outputs[0].qparams is None


def count_positional_inputs(signature: Signature) -> int:
    """Return the number of inputs if a call consists of positional tensors only, else 0."""
    tree, count = signature.in_tree, len(signature.inputs)
    if tree is None or signature.fixed or tree.num_leaves != count:
        return 0
    args = tuple(range(count))
    return count if pytree.tree_structure((args, {})) == tree else 0
