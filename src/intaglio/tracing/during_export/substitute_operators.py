"""Substitutes during export: operators for recurrent layers and grouped products, with shape functions of their own,
and no masks where none are needed.

torch.export would trace every time step of a recurrent layer, which is slow (seconds for ten steps) and fixes the
sequence length. It refuses grouped products of float32, which PyTorch computes on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from intaglio.torch_private import grouped_mm

RECURRENT_LAYERS: dict[Callable[..., Any], tuple[str, int]] = {
    torch.lstm: ("lstm", 2),
    torch.gru: ("gru", 1),
    torch.rnn_tanh: ("rnn_tanh", 1),
    torch.rnn_relu: ("rnn_relu", 1),
}
"""Name of the substitute operator and number of states, by torch function."""
REFUSED_FUNCTIONS = (
    "Tensor[] params, bool has_biases, int num_layers, float dropout, bool train, bool bidirectional, bool batch_first"
)
GROUPED_MM = (
    "grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor"
)
SUBSTITUTE_LIBRARIES: list[torch.library.Library] = []
"""Keeps the libraries alive, because operators are removed with their library."""


class SubstituteOperators(TorchFunctionMode):
    """Replaces calls by the substitute operators.

    Recurrent layers with packed sequences, and grouped products other than of groups of rows, are not changed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is grouped_mm and [operand.dim() for operand in args[:2]] == [2, 3]:
            func = _operators()["_grouped_mm"]
        if func in RECURRENT_LAYERS and not kwargs:
            name, states = RECURRENT_LAYERS[func]
            lists = [
                isinstance(arg, (list, tuple)) for arg in args[1:3]
            ]  # a packed sequence has its batch sizes as second argument
            func = _operators()[name] if lists == [states > 1, True] else func
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def without_needless_values() -> Iterator[None]:
    """Leave out what libraries compute during an export although no result depends on it.

    Models of transformers get no mask of bidirectional attention in calls without a padding mask, as in calls that are
    not traced; a graph would add a mask of zeros, which some models do not take. Distributions of PyTorch do not check
    their parameters, which would be a branch that depends on data.
    """
    masking, distributions = sys.modules.get("transformers.masking_utils"), torch.distributions.Distribution
    with contextlib.ExitStack() as stack:
        stack.callback(distributions.set_default_validate_args, distributions._validate_args)
        distributions.set_default_validate_args(False)
        if (original := getattr(masking, LEAVES_OUT_MASK, None)) is not None:
            stack.callback(setattr, masking, LEAVES_OUT_MASK, original)
            setattr(masking, LEAVES_OUT_MASK, functools.partial(_leaves_out_mask, original))
        yield


LEAVES_OUT_MASK = "_ignore_bidirectional_mask_sdpa"
"""Function of transformers. Without it, graphs of calls without a padding mask add a mask of zeros."""


def _leaves_out_mask(original: Any, padding_mask: Any, *sizes: Any, **named_sizes: Any) -> Any:
    """Return whether attention needs no mask: without a padding mask and a limit of the distance (the last size), or if
    the function of transformers says so."""
    limit = named_sizes.get("local_attention_size", sizes[1] if len(sizes) > 1 else None)
    return (padding_mask is None and limit is None) or original(padding_mask, *sizes, **named_sizes)


def restore_torch_operators(program: ExportedProgram) -> ExportedProgram:
    """Replace the substitute operators of a program by torch's own."""
    if not SUBSTITUTE_LIBRARIES:
        return program
    packets = {op: getattr(torch.ops.aten, name) for name, op in _operators().items()}
    own = {op: packet.input if "input" in packet.overloads() else packet.default for op, packet in packets.items()}
    for module in (part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)):
        for node in module.graph.nodes:
            node.target = own.get(node.target, node.target)
        module.recompile()
    return program


@functools.cache
def _operators() -> dict[str, Any]:
    library = torch.library.Library("intaglio", "FRAGMENT")
    SUBSTITUTE_LIBRARIES.append(library)
    for function, (name, count) in RECURRENT_LAYERS.items():
        states = "Tensor[] hx" if count > 1 else "Tensor hx"
        library.define(
            f"{name}(Tensor input, {states}, {REFUSED_FUNCTIONS}) -> ({', '.join(['Tensor'] * (1 + count))})"
        )
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"intaglio::{name}", _shapes, lib=library)
    found = {name: getattr(torch.ops.intaglio, name).default for name, _ in RECURRENT_LAYERS.values()}
    if grouped_mm is not None:
        library.define(GROUPED_MM)
        library.impl("grouped_mm", grouped_mm, "CPU")
        torch.library.register_fake("intaglio::grouped_mm", _grouped_shape, lib=library)
        found["_grouped_mm"] = torch.ops.intaglio.grouped_mm.default
    return found


def _grouped_shape(
    x: torch.Tensor,
    matrices: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return an empty tensor with the shape of the product of groups of rows."""
    return x.new_empty((x.shape[0], matrices.shape[2]), dtype=out_dtype or x.dtype)


def _shapes(
    x: torch.Tensor,
    states: torch.Tensor | Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Return empty tensors with the shapes of the result, f[.., .., directions * hidden], and of every state."""
    before = (states,) if isinstance(states, torch.Tensor) else states
    width = before[0].shape[-1] * (1 + bidirectional)
    return x.new_empty((*x.shape[:2], width)), *[torch.empty_like(state) for state in before]
