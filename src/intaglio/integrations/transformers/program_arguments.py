"""Arguments of the programs of a generator, by position and by name."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from intaglio.ir import Signature, TensorType
from intaglio.torch_private import pytree


class _Arguments:
    """Arguments of a program.

    Attributes:
        names: keys of the dictionary that is the first argument.
        types: types of the tensors in each positional argument.
    """

    def __init__(self, signature: Signature) -> None:
        tree = signature.in_tree
        args, _ = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
        leaves = [set(pytree.tree_leaves(argument)) for argument in args]
        self.names = list(args[0])
        self.types = [[entry.type for entry in signature.inputs if entry.leaf in own] for own in leaves]


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


def input_names(program: Any) -> list[str]:
    """Return the keys of the dictionary that a program takes as first argument."""
    return _arguments_of(program).names
