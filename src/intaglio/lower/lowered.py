"""`Lowered`: the integer graph and the float islands it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.argument_checks import check_arguments
from intaglio.formatting.html_text import element, folded_text, html_table, shortened
from intaglio.ir import Dim, DType, External, Graph, ModelInfo, Op, Signature, evaluate, graph_text
from intaglio.ops import OPS, OpDef, interpret
from intaglio.plan import plan_graph
from intaglio.quant.annotate.sites import Skip
from intaglio.signature import bind, dims_of, initial_state, unflatten_result, update_inputs, updated_state
from intaglio.torch_private import without_global_hooks


@dataclass(frozen=True)
class Island:
    """A part of the model that runs in PyTorch.

    Attributes:
        module: Graph module that takes tensors, followed by the dynamic dimensions `dims`.
        dims: Dynamic dimensions that the module needs.
        operators: ATen operators of the island.
        loops: For each loop by name, the number of values that it carries and its condition.
    """

    module: fx.GraphModule
    dims: tuple[Dim, ...]
    operators: tuple[str, ...]
    loops: Mapping[str, tuple[int, fx.GraphModule]] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class Lowered:
    """Result of `requantize`. It can be printed, and `__call__` runs it with the NumPy interpreter.

    Attributes:
        graph: The integer graph.
        islands: Float islands, by key.
        signature: Signature of the model.
        skipped: Operators that stay in float, with reasons.
        macs: Multiply-accumulates at batch 1: in int8, and in total.
        operators: Number of the model's operators in int8.
        model_info: Information about the model, with the texts of earlier stages.
        hosts: Records of user-defined operators, by name.
        native: Nodes of float operators that the compiled program runs itself.
        bodies: Bodies of loops that islands run, by name. Their work is counted separately.
        integer: Nodes of the reference that are computed on integers.
        values: Value of the graph by node of the reference, before the passes over the graph. Values of nodes that only
            run inside of an island are "".
    """

    graph: Graph
    islands: Mapping[str, Island]
    signature: Signature
    skipped: tuple[Skip, ...] = ()
    macs: tuple[int, int] = (0, 0)
    operators: int = 0
    model_info: ModelInfo = field(default_factory=ModelInfo)
    hosts: Mapping[str, OpDef] = field(default_factory=dict)
    native: frozenset[str] = frozenset()
    bodies: Mapping[str, Lowered] = field(default_factory=dict)
    integer: frozenset[str] = frozenset()
    values: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        islands = f"{len(self.islands)} float island{'s' * (len(self.islands) != 1)}"
        return f"Lowered({self.model_info.name}: {self.operators} operators on integers, {islands})"

    def _repr_html_(self) -> str:
        """Return the operators that stay in float, and the integer graph at a click, for notebooks."""
        places = [(skip.origin.path or "model", skip.origin.operator, skip.reason) for skip in self.skipped]
        rows, more = shortened(places, "operators")
        table = html_table(("stays in float", "operator", "reason"), rows, text=3) if rows else ""
        return element("p", repr(self)) + table + element("p", more) * bool(more) + folded_text("Graph", self.text())

    def text(self) -> str:
        """Return the text of the integer graph, followed by those of loop bodies."""
        bodies = [f"body of {name}:\n{body.text()}" for name, body in self.bodies.items()]
        return "".join([graph_text(self.graph), *bodies])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with the integer interpreter. It is slow, and kernels must equal its results bit for bit."""
        leaves = bind(self.signature, args, kwargs)
        symbols = dims_of(self.signature, leaves, self.graph.byte_inputs())
        records = {**OPS, **self.hosts}
        arrays = [_array(leaf.detach()) for leaf in (*leaves, *self.state)]
        found = interpret(self.graph, arrays, records, self.runner(symbols))
        results = tuple(map(self._tensor, self.graph.outputs, found))
        self.state[:] = updated_state(self.signature, results)
        with torch.no_grad():
            results = update_inputs(self.signature, leaves, results)
        return unflatten_result(self.signature, results, symbols)

    @cached_property
    def state(self) -> list[torch.Tensor]:
        """Return the values of mutable buffers: the captured ones at first, then those of the last call."""
        return initial_state(self.signature)

    @check_arguments
    def runner(self, symbols: Mapping[str, int]) -> Any:
        """Return the callback that runs islands for the interpreter, for these values of the dynamic dimensions."""

        def run(op: Op, arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            island = self.islands[op.attrs["key"]]
            tensors = list(map(self._island_input, op.inputs, arrays))
            with torch.no_grad(), torch.autocast("cpu", enabled=False), without_global_hooks():
                results = island.module(*tensors, *[evaluate(dim, symbols) for dim in island.dims])
            return [_array(result) for result in results]

        return run

    def _tensor(self, name: str, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.asarray(array, order="C"))  # ascontiguousarray would add an axis to a scalar
        return tensor.bfloat16() if self.graph.types[name].dtype is DType.BF16 else tensor

    def _island_input(self, name: str, array: np.ndarray) -> torch.Tensor:
        """Return an operand of an island with the strides that it has in a compiled program.

        PyTorch adds in the order of the memory, so that other strides can change the last bits of a result.
        """
        external = self._computed_externals.get(name)
        if external is None:  # a tensor of the caller or of another island, whose strides the array has
            tensor = torch.from_numpy(array)
            return tensor.bfloat16() if self.graph.types[name].dtype is DType.BF16 else tensor
        tensor = self._tensor(name, array)
        return torch.empty_strided(array.shape, external.strides(array.shape), dtype=tensor.dtype).copy_(tensor)

    @cached_property
    def _computed_externals(self) -> dict[str, External]:
        """Return the operands of islands that the program computes, with their memory formats."""
        row_major, types = plan_graph(self.graph).row_major, self.graph.types
        computed = {name for op in self.graph.ops if not op.is_island for name in op.outputs}
        read = computed.intersection(name for op in self.graph.ops if op.is_island for name in op.inputs)
        return {name: External(name, types[name].shape, types[name].dtype, True, name in row_major) for name in read}


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as the interpreter represents it, with bfloat16 as float32."""
    array: np.ndarray = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).resolve_neg().numpy()
    return array
