"""Conversion of a call's arguments to input tensors and of output tensors to its result, with all argument checks."""

from intaglio.signature.calls import (
    DTYPES,
    TORCH_DTYPES,
    Integers,
    bind,
    check_memory,
    check_tensors,
    clone_tensors,
    count_positional_inputs,
    dims_of,
    initial_state,
    plain_mapping,
    returns_tensor,
    run_while_loop,
    unflatten_result,
    update_inputs,
    updated_state,
)
from intaglio.signature.shapes import match_shapes, match_size

__all__ = [
    "DTYPES",
    "TORCH_DTYPES",
    "Integers",
    "bind",
    "check_memory",
    "check_tensors",
    "clone_tensors",
    "count_positional_inputs",
    "dims_of",
    "initial_state",
    "match_shapes",
    "match_size",
    "plain_mapping",
    "returns_tensor",
    "run_while_loop",
    "unflatten_result",
    "update_inputs",
    "updated_state",
]
