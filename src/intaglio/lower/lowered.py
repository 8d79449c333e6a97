"""`Lowered`: the integer graph and the float islands it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.ir import About, Dim, DType, Graph, Op, Signature, evaluate, graph_text
from intaglio.ops import OPS, OpDef, interpret
from intaglio.quant.annotate.sites import Skip
from intaglio.signature import bind, dims_of, initial_state, kept_state, rebuild


@dataclass(frozen=True)
class Island:
    """A float part of the model: a torch.fx module of tensors, then of the free dimensions it needs. ``loops``: name ->
    how many values it carries, and its condition."""

    module: fx.GraphModule
    dims: tuple[Dim, ...]
    operators: tuple[str, ...]
    loops: Mapping[str, tuple[int, fx.GraphModule]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lowered:
    """What `requantize` makes: printable, and runnable in NumPy through `__call__`.

    ``macs``: multiply-accumulates at batch 1, (in int8, in all). ``operators``: operators of the model in int8.
    ``hosts``: records of a user's own, by name. ``native``: nodes of float operators that the program runs itself.
    ``bodies``: of loops that islands run, by name; their work is counted apart.
    """

    graph: Graph
    islands: Mapping[str, Island]
    signature: Signature
    skipped: tuple[Skip, ...] = ()
    macs: tuple[int, int] = (0, 0)
    operators: int = 0
    about: About = field(default_factory=About)
    hosts: Mapping[str, OpDef] = field(default_factory=dict)
    native: frozenset[str] = frozenset()
    bodies: Mapping[str, Lowered] = field(default_factory=dict)

    def text(self) -> str:
        bodies = [f"body of {name}:\n{body.text()}" for name, body in self.bodies.items()]
        return "".join([graph_text(self.graph), *bodies])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result by the integer interpreter: exact, slow, kernels must equal it bit for bit."""
        leaves = bind(self.signature, args, kwargs)
        symbols = dims_of(self.signature, leaves, self.graph.byte_inputs())
        records = {**OPS, **self.hosts}
        arrays = [_array(leaf.detach()) for leaf in (*leaves, *self.state)]
        found = interpret(self.graph, arrays, records, self.runner(symbols))
        results = tuple(map(self._tensor, self.graph.outputs, found))
        self.state[:] = kept_state(self.signature, results)
        return rebuild(self.signature, results, symbols)

    @cached_property
    def state(self) -> list[torch.Tensor]:
        """Values of the buffers the model changes: as captured, then as each call leaves them."""
        return initial_state(self.signature)

    def runner(self, symbols: Mapping[str, int]) -> Any:
        """Callback of the interpreter for islands, for one set of free dimensions."""

        def run(op: Op, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            island = self.islands[op.attrs["key"]]
            tensors = list(map(self._tensor, op.inputs, arrays))
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                results = island.module(*tensors, *[evaluate(dim, symbols) for dim in island.dims])
            return [_array(result) for result in results]

        return run

    def _tensor(self, name: str, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(array, order="C"))  # ascontiguousarray would give a scalar an axis
        return tensor.bfloat16() if self.graph.types[name].dtype is DType.BF16 else tensor


def _array(tensor: torch.Tensor) -> np.ndarray:
    """As the interpreter holds it: bfloat16 is float32 there."""
    array: np.ndarray = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array
