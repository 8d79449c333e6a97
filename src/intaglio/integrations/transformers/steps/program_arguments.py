"""Arguments of the programs of a generator, by position and by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from intaglio.errors import InputError
from intaglio.integrations.transformers.steps.cache_memory import memory_for
from intaglio.integrations.transformers.steps.decoder_cache import KeyValues, tensors_of, windows_of
from intaglio.integrations.transformers.surface import STATE_OF_GENERATE
from intaglio.ir import Signature, TensorType
from intaglio.runtime import Artifact, QuantizedModel
from intaglio.runtime.calls.growing_calls import TOKENS, GrowingCalls, can_grow
from intaglio.torch_private import is_traced, pytree


class _Arguments:
    """Arguments of a program.

    Attributes:
        names: keys of the dictionary that is the first argument.
        types: types of the tensors in each positional argument.
        shapes: shapes of the tensors in that dictionary.
        order: where each input of the signature comes from, for programs that take a dictionary and lists of pairs of
            keys and values, and return logits and such pairs: a key of the dictionary, or a place among the keys and
            values of all lists. Empty for other programs.
        windows: what `windows_of_program` has found.
    """

    def __init__(self, signature: Signature) -> None:
        tree = signature.in_tree
        args, _ = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
        leaves = [set(pytree.tree_leaves(argument)) for argument in args]
        self.names = list(args[0])
        self.types = [[entry.type for entry in signature.inputs if entry.leaf in own] for own in leaves]
        shapes = {entry.leaf: entry.type.shape for entry in signature.inputs}
        self.shapes = {name: shapes[leaf] for name, leaf in args[0].items() if leaf in shapes}
        self.order: list[str | int] = []
        plain = not signature.fixed and all(one.value is not None and one.qparams is None for one in signature.outputs)
        if plain and len(args) > 1 and _is_step(args[1:], range(len(args[0]), tree.num_leaves)):
            out = pytree.tree_unflatten(list(range(signature.out_tree.num_leaves)), signature.out_tree)
            if isinstance(out, tuple) and len(out) == 2 and _is_step(out[1:], range(1, len(signature.outputs))):
                places = {leaf: name for name, leaf in args[0].items()} | {
                    leaf: place for place, leaf in enumerate(pytree.tree_leaves(args[1:]))
                }
                self.order = [places[entry.leaf] for entry in signature.inputs]
        self.windows: Mapping[int, int] | None = None
        self._growing: tuple[Artifact, GrowingCalls | None] | None = None

    def growing_calls(self, program: QuantizedModel) -> GrowingCalls | None:
        """Return calls that append to blocks of memory, or ``None`` for programs that cannot."""
        if self._growing is None or self._growing[0] is not program.artifact:
            places = {one: position for position, one in enumerate(self.order) if isinstance(one, int)}
            grown = [places[place] for place in sorted(places)[: len(self.types[1])]]
            self._growing = program.artifact, GrowingCalls(program, grown) if can_grow(program, grown) else None
        return self._growing[1]


def _is_step(arguments: Sequence[Any], leaves: range) -> bool:
    """Return whether parts of a structure of leaf numbers are lists of pairs with these numbers in order."""
    lists = all(isinstance(pairs, list) for pairs in arguments)
    return lists and [leaf for pairs in arguments for pair in pairs for leaf in pair] == list(leaves)


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


def windows_of_program(program: Any, config: PreTrainedConfig) -> Mapping[int, int]:
    """Return the layers of which the program of a decoder reads the last tokens only: index -> number of these.

    Programs of earlier releases read all tokens of all layers, and mask those outside of the window.
    """
    known = _arguments_of(program)
    if known.windows is None:
        windows = windows_of(config)
        if windows:
            (inputs, past, *_), place = known.types, known.names.index("past_mask")
            whole = inputs[place].shape[1]
            windows = {index: size - 1 for index, size in windows.items() if past[2 * index].shape[TOKENS] != whole}
        known.windows = windows
    return known.windows


def run_step(
    program: Any, inputs: Mapping[str, Tensor], past: list[Tensor], cross: KeyValues
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Run the program of a decoder, and return logits, and keys and values of the new tokens.

    Where its arguments and results are known to be flat lists, they are neither flattened nor nested again, which
    takes longer than the checks of a call.

    Args:
        program: the `QuantizedModel`.
        inputs: its arguments beside keys and values.
        past: keys and values of earlier tokens, layer by layer.
        cross: those of cross-attention, of every layer of an encoder-decoder.
    """
    known = _arguments_of(program)
    if not (known.order and list(inputs) == known.names and runs_now(program)):
        logits, new = program(inputs, pairs_of(past), *[cross] * bool(cross))
        return logits, new
    held = [*past, *tensors_of(cross)]
    logits, *new = program.results([inputs[one] if isinstance(one, str) else held[one] for one in known.order])
    return logits, pairs_of(new)


def runs_now(program: Any) -> bool:
    """Return whether a call of a program does nothing but compute its results, and is not traced."""
    plain = isinstance(program, QuantizedModel) and not program.has_side_effects
    return plain and not torch.compiler.is_compiling() and not is_traced()


def run_growing_step(
    program: Any, inputs: Mapping[str, Tensor], cache: Cache, cross: KeyValues, windows: Mapping[int, int]
) -> Tensor | None:
    """Run the program of a decoder for tokens behind those of a cache, append their keys and values, and return logits.

    Return ``None``, without having done anything, for programs and caches whose keys and values are not in one piece of
    memory, and in calls that are traced.

    Args:
        program: the `QuantizedModel`.
        inputs: its arguments beside the keys and values of earlier tokens.
        cache: the cache of self-attention.
        cross: keys and values of cross-attention, of every layer of an encoder-decoder.
        windows: layers of which the program reads the last tokens only: index -> number of these.
    """
    known = _arguments_of(program)
    calls = known.growing_calls(program) if list(inputs) == known.names and runs_now(program) else None
    memory = None if calls is None else memory_for(cache, inputs["tokens"].shape[1], windows)
    if calls is None or memory is None or [block.places for block in memory.blocks] != calls.groups:
        return None
    if [block.memory.dtype for block in memory.blocks] != calls.dtypes:
        return None
    others: dict[str | int, Tensor] = dict(enumerate(tensors_of(cross), len(known.types[1])))
    others.update(inputs)
    given = [others[one] for one in known.order if one in others]
    earlier = [block.last(memory.tokens, windows.get(block.places[0] // 2)) for block in memory.blocks]
    logits = calls.run(program, given, earlier)
    memory.count(inputs["tokens"].shape[1])
    return logits


def pairs_of(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values of each layer, from one list of all."""
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def input_names(program: Any) -> list[str]:
    """Return the keys of the dictionary that a program takes as first argument."""
    return _arguments_of(program).names


def shapes_of_inputs(program: Any) -> Mapping[str, Sequence[Any]]:
    """Return the shapes of the tensors in the dictionary that a program takes as first argument."""
    return _arguments_of(program).shapes


def check_ignorable(given: Mapping[str, Any], places: range) -> None:
    """Raise `InputError` if an argument that no program takes would change the result.

    Earlier releases of the library pass the places of new tokens in the cache, which its length says too.
    """
    for name, value in given.items():
        if name == STATE_OF_GENERATE or (not isinstance(value, Tensor) and not value):
            continue
        if name == "cache_position" and isinstance(value, Tensor) and value.tolist() == [*places]:
            continue
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        problem = f"it is {shown:.60}, which the programs of this model do not take"
        raise InputError(f"argument '{name}'", None, problem, remedy=f"leave {name} out")
