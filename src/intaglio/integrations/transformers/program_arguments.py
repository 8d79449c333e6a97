"""Arguments of the programs of a generator, by position and by name."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from intaglio.ir import Signature, TensorType
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import is_traced, pytree


class _Arguments:
    """Arguments of a program.

    Attributes:
        names: keys of the dictionary that is the first argument.
        types: types of the tensors in each positional argument.
        order: where each input of the signature comes from, for programs that take a dictionary and pairs of keys and
            values, and return logits and such pairs: a key of the dictionary, or a place among keys and values. Empty
            for other programs.
    """

    def __init__(self, signature: Signature) -> None:
        tree = signature.in_tree
        args, _ = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
        leaves = [set(pytree.tree_leaves(argument)) for argument in args]
        self.names = list(args[0])
        self.types = [[entry.type for entry in signature.inputs if entry.leaf in own] for own in leaves]
        self.order: list[str | int] = []
        plain = not signature.fixed and all(one.value is not None and one.qparams is None for one in signature.outputs)
        if plain and len(args) == 2 and _is_step(args[1], range(len(args[0]), tree.num_leaves)):
            out = pytree.tree_unflatten(list(range(signature.out_tree.num_leaves)), signature.out_tree)
            if isinstance(out, tuple) and len(out) == 2 and _is_step(out[1], range(1, len(signature.outputs))):
                places = {leaf: name for name, leaf in args[0].items()} | {
                    leaf: place for place, leaf in enumerate(pytree.tree_leaves(args[1]))
                }
                self.order = [places[entry.leaf] for entry in signature.inputs]


def _is_step(pairs: Any, leaves: range) -> bool:
    """Return whether a part of a structure of leaf numbers is a list of pairs with these numbers in order."""
    return isinstance(pairs, list) and [leaf for pair in pairs for leaf in pair] == list(leaves)


_ARGUMENTS: WeakKeyDictionary[Any, _Arguments] = WeakKeyDictionary()
"""Arguments of programs that were called."""


def _arguments_of(program: Any) -> _Arguments:
    found = _ARGUMENTS.get(program)
    if found is None:
        found = _ARGUMENTS[program] = _Arguments(program.signature)
    return found


def types_of_argument(program: Any, position: int) -> list[TensorType]:
    """Return the types of the tensors in one positional argument of a program."""
    return _arguments_of(program).types[position]


def run_step(program: Any, call: list[Any], past: list[Tensor]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run the program of a decoder, and return logits, and keys and values of the new tokens.

    Where its arguments and results are known to be flat lists, they are neither flattened nor nested again, which
    takes longer than the checks of a call.

    Args:
        program: the `QuantizedModel`.
        call: its arguments, of which the second is for keys and values of earlier tokens.
        past: these keys and values, layer by layer.
    """
    known = _arguments_of(program)
    inputs = call[0]
    flat = known.order and list(inputs) == known.names and isinstance(program, QuantizedModel)
    if not flat or program.has_side_effects or torch.compiler.is_compiling() or is_traced():
        logits, new = program(*call[:1], pairs_of(past), *call[2:])
        return logits, new
    logits, *new = program.results([inputs[one] if isinstance(one, str) else past[one] for one in known.order])
    return logits, pairs_of(new)


def pairs_of(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of each layer, from one list of all."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def input_names(program: Any) -> list[str]:
    """Return the keys of the dictionary that a program takes as first argument."""
    return _arguments_of(program).names
