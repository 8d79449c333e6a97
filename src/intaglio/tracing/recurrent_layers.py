"""Substitute operators for recurrent layers during export.

torch.export would trace every time step, which is slow (seconds for ten steps) and fixes the sequence length. Operators
with a shape function replace the layers until the graph exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

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
RECURRENT_LIBRARIES: list[torch.library.Library] = []
"""Keeps the libraries alive, because operators are removed with their library."""


class RecurrentCapture(TorchFunctionMode):
    """Replaces calls of recurrent layers by the substitute operators; calls with packed sequences are not changed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RECURRENT_LAYERS and not kwargs:
            name, states = RECURRENT_LAYERS[func]
            lists = [
                isinstance(arg, (list, tuple)) for arg in args[1:3]
            ]  # a packed sequence has its batch sizes as second argument
            func = _operators()[name] if lists == [states > 1, True] else func
        return func(*args, **(kwargs or {}))


def restore_torch_operators(program: ExportedProgram) -> ExportedProgram:
    """Replace the substitute operators of a program by torch's own."""
    if not RECURRENT_LIBRARIES:
        return program
    own = {op: getattr(torch.ops.aten, name).input for name, op in _operators().items()}
    for module in (part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)):
        for node in module.graph.nodes:
            node.target = own.get(node.target, node.target)
        module.recompile()
    return program


@functools.cache
def _operators() -> dict[str, Any]:
    library = torch.library.Library("intaglio", "FRAGMENT")
    RECURRENT_LIBRARIES.append(library)
    for function, (name, count) in RECURRENT_LAYERS.items():
        states = "Tensor[] hx" if count > 1 else "Tensor hx"
        library.define(
            f"{name}(Tensor input, {states}, {REFUSED_FUNCTIONS}) -> ({', '.join(['Tensor'] * (1 + count))})"
        )
        library.impl(name, function, "CPU")
        torch.library.register_fake(f"intaglio::{name}", _shapes, lib=library)
    return {name: getattr(torch.ops.intaglio, name).default for name, _ in RECURRENT_LAYERS.values()}


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
