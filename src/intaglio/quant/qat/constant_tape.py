"""Recording of how passes compute constants, to recompute them from other parameters and to differentiate them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from intaglio.torch_private import TorchDispatchMode, pytree, schema_of

aten = torch.ops.aten
SAME = (aten.detach.default, aten.alias.default, aten.clone.default)
"""Operators that return their input's values. They are skipped, because `detach` would stop the gradient."""


Fixed = Callable[[torch.Tensor], fx.Node]


@dataclass(frozen=True)
class _Step:
    """One recorded operator call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    place: int | None
    """Index of the result among several; ``None`` for an only result."""


@dataclass
class Tape:
    """Records every operator that creates a tensor while it is entered.

    It keeps all tensors alive, because they are identified by `id`.
    """

    steps: dict[int, _Step] = field(default_factory=dict)
    alive: list[Any] = field(default_factory=list)

    def __enter__(self) -> Tape:
        self.mode = _Recording(self)
        self.mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self.mode.__exit__(*raised)

    def write(self, graph: fx.Graph, tensor: torch.Tensor, known: dict[int, fx.Node], fixed: Fixed) -> fx.Node | None:
        """Add the nodes that compute a tensor to `graph` and return the last one.

        Args:
            graph: graph to extend.
            tensor: the tensor to compute.
            known: `id` of a tensor -> node that computes it; extended on the way.
            fixed: returns a node for a tensor that depends on no known tensor.

        Returns:
            The node of the tensor, or ``None`` if it depends on no known tensor.
        """
        if id(tensor) in known:
            return known[id(tensor)]
        step = self.steps.get(id(tensor))
        if step is None:
            return None
        leaves = pytree.tree_leaves((step.args, dict(step.kwargs)))
        sources = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        nodes = {key: self.write(graph, source, known, fixed) for key, source in sources.items()}
        if not any(nodes.values()):
            return None
        if step.target in SAME:
            (node,) = nodes.values()
        else:
            nodes = {key: node or fixed(sources[key]) for key, node in nodes.items()}
            args, kwargs = pytree.tree_map(
                lambda leaf: nodes[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf, (step.args, dict(step.kwargs))
            )
            node = graph.call_function(step.target, args, kwargs)
            if step.place is not None:
                node = graph.call_function(getitem, (node, step.place))
        known[id(tensor)] = node
        return node


class _Recording(TorchDispatchMode):
    """Dispatch mode that adds every operator to a tape; in-place operators and returned inputs are kept alive only."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tape.alive.append((args, kwargs, result))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)}
        if schema_of(func).is_mutable or id(result) in given:
            return result
        if isinstance(result, torch.Tensor):
            self.tape.steps[id(result)] = _Step(func, args, kwargs or {}, None)
        elif isinstance(result, (tuple, list)):
            for place, one in enumerate(result):
                self.tape.steps[id(one)] = _Step(func, args, kwargs or {}, place)
        return result
