"""Recurrent layers that are called with a packed sequence, computed for the sequences of each length together.

`torch.export` cannot trace a `PackedSequence`. Sequences of one length need no packing, and a recurrent layer has the
same results for each sequence whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from intaglio.torch_private import pytree


@dataclass(frozen=True)
class PackedCall:
    """A call of a recurrent layer with a packed sequence.

    Attributes:
        packed: the sequences.
        states: the first states by sequence, as the layer takes them, or ``None``.
        batch_first: whether the layer takes and returns sequences as [batch, length, features].
    """

    packed: PackedSequence
    states: Any
    batch_first: bool

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any], batch_first: Any) -> PackedCall | None:
        """Return the call with these arguments; ``None`` unless the first one is a packed sequence."""
        given = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
        packed = given.get("input")
        return PackedCall(packed, given.get("hx"), bool(batch_first)) if isinstance(packed, PackedSequence) else None

    def groups(self) -> Iterator[tuple[torch.Tensor, tuple[Any, ...]]]:
        """Yield the rows i64[length, sequences] of the packed data for the sequences of each length, and the arguments
        of the layer for them."""
        sizes = self.packed.batch_sizes
        starts = sizes.cumsum(0) - sizes
        lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)  # of sequences in packed order: descending
        states = _ordered(self.states, self.packed.sorted_indices)
        first = 0
        for length, count in zip(
            *(one.tolist() for one in lengths.unique_consecutive(return_counts=True)), strict=True
        ):
            chosen = slice(first, first + count)
            rows = starts[:length, None] + torch.arange(int(sizes[0]))[chosen]
            sequences = self.packed.data[rows]
            args: tuple[Any, ...] = (sequences.transpose(0, 1) if self.batch_first else sequences,)
            if states is not None:
                args += (pytree.tree_map(lambda state, chosen=chosen: state[:, chosen], states),)
            yield rows, args
            first += count

    def run(self, layer: Callable[..., tuple[torch.Tensor, Any]]) -> tuple[PackedSequence, Any]:
        """Return what the layer returns for the packed sequence.

        Args:
            layer: takes and returns tensors, as the layer does for sequences of one length.
        """
        rows, results, states = [], [], []
        for of_group, args in self.groups():
            found, last = layer(*args)
            found = found.transpose(0, 1) if self.batch_first else found
            rows.append(of_group.flatten())
            results.append(found.flatten(0, 1))
            states.append(last)
        data = torch.cat(results)[torch.cat(rows).argsort()]
        joined = pytree.tree_map(lambda *parts: torch.cat(parts, 1), *states)
        return self.packed._replace(data=data), _ordered(joined, self.packed.unsorted_indices)


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer of PyTorch, which may be called with packed sequences."""
    return isinstance(module, nn.RNNBase)


def _ordered(states: Any, order: torch.Tensor | None) -> Any:
    """Return states with their sequences in another order."""
    if states is None or order is None:
        return states
    return pytree.tree_map(lambda state: state.index_select(1, order), states)
