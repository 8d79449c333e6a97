"""The integer graph against the Q/DQ reference, region by region on the same integers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from intaglio import numerics
from intaglio.fxgraph.node_info import info
from intaglio.fxgraph.nodes import name_of
from intaglio.ir import DType
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.lower.lowered import Lowered
from intaglio.lower.lowering import requantize
from intaglio.lower.node_lowering import NodeLowering
from intaglio.ops import OPS, run_op
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.integer_regions import quantize_qparams
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.signature import bind, dims_of
from intaglio.tracing import Captured, capture
from support import nets

ROUNDED = Recipe(default=Setting(results="int8"))
"""Recipe with which every result behind a tail is quantized, although only floats are read."""


@dataclass(frozen=True)
class QuantizedDifferences:
    """``worst``: largest distance in quantized values per value; ``wrong`` of ``total`` quantized values differ at all;
    ``floats``: largest distance of a float value that leaves a region, relative to the largest there."""

    worst: dict[str, int]
    wrong: int
    total: int
    floats: float

    @property
    def rate(self) -> float:
        return self.wrong / max(self.total, 1)


class _Recorder(fx.Interpreter):
    """Keeps what every node of a reference gave."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.seen: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n] = super().run_node(n)
        return self.seen[n]


ROUNDING = 2.0**-20
"""Relative noise as large as the rounding of sums in float32, a few units in the last place."""


class _RoundedRecorder(_Recorder):
    """Runs a reference with noise as large as rounding at every float value.

    Each operator of the integer graph reads what the reference has there, with noise, so that noise does not add up
    along the network. The second run of each pair has the noise of the first with other signs. In the first pair all
    values grow or shrink alike, in the second one those of a node do, and in all others each element has its own noise.
    """

    def __init__(self, exact: _Recorder, held: set[fx.Node], run: int) -> None:
        super().__init__(exact.module)
        self.exact, self.held, self.pair, self.largest = exact.seen, held, run // 2, ROUNDING * (1 - 2 * (run % 2))
        self.generator = torch.Generator().manual_seed(self.pair)

    def run_node(self, n: fx.Node) -> Any:
        self.seen[n] = self._noisy(n, super().run_node(n))
        return self._noisy(n, self.exact[n]) if n in self.held else self.seen[n]

    def _noisy(self, n: fx.Node, value: Any) -> Any:
        if n.op != "call_function" or not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        if self.pair == 0:
            return value + self.largest * self._magnitude(n, value).copysign(value)
        shape = () if self.pair == 1 else value.shape
        draw = 2 * torch.rand(shape, generator=self.generator) - 1
        return value + self.largest * draw * self._magnitude(n, value)

    def _magnitude(self, n: fx.Node, value: Tensor) -> Tensor:
        """Return the largest number at each place of a result and of the operands that have its shape.

        GELU of -6 is the product of -6 and of the rounding of 1 - 1, so its error is relative to -6.
        """
        sources = [self.exact[source] for source in n.all_input_nodes if source in self.exact]
        alike = [source.abs() for source in sources if _is_like(source, value)]
        return functools.reduce(torch.maximum, (part.to(value.dtype) for part in alike), value.abs())


def _is_like(source: Any, value: Tensor) -> bool:
    """Return whether an operand has numbers, and the shape of a result."""
    return isinstance(source, Tensor) and source.shape == value.shape and source.dtype is not torch.bool


def largest_differences(
    reference: Reference, lowered: Lowered, *args: Any, rounded_runs: int = 0, **kwargs: Any
) -> QuantizedDifferences:
    """Every integer operator is fed what the reference has there, so that errors do not add up along the network.

    With ``rounded_runs``, distances are those from the range of what as many runs of the reference give whose values
    have noise as large as rounding. Where a function jumps, as a comparison of equal values does, or where values
    cancel to nothing, rounding changes its results by more than a step.
    """
    leaves = bind(reference.signature, args, kwargs)
    symbols = dims_of(reference.signature, leaves)
    island = lowered.runner(symbols)
    computed = {name for op in lowered.graph.ops for name in op.outputs}
    truth, ranges = _reference_values(reference, leaves, rounded_runs, computed)
    values = {**lowered.graph.constants, **dict(zip(lowered.graph.inputs, map(_array, leaves), strict=True))}
    worst, wrong, total, floats = {}, 0, 0, 0.0
    low_bytes, computed_values = _low_bytes(reference), dict[str, np.ndarray]()
    for op in lowered.graph.ops:
        given = [values[name] for name in op.inputs]
        results = island(op, given) if op.kind == "island" else run_op(op, given, lowered.graph, OPS, symbols)
        for name, result in zip(op.outputs, results, strict=True):
            expected = truth.get(name)
            values[name] = result if expected is None else expected
            computed_values[name] = result
            if expected is None:
                continue
            assert result.shape == expected.shape, f"%{name}: {result.shape}, the reference has {expected.shape}"
            low, high = ranges[name]
            if lowered.graph.types[name].dtype is DType.U8:
                distance = _distance(result.astype(int), low.astype(int), high.astype(int))
                if name in low_bytes:
                    found, exact = (_joined(of[low_bytes[name]], of[name]) for of in (computed_values, truth))
                    distance = np.maximum(np.abs(found - exact) - NEAR_IN_TWO_BYTES, 0)
                worst[name] = int(distance.max(initial=0))
                wrong, total = wrong + int((distance > 0).sum()), total + distance.size
            elif op.kind == "dequantize":
                peak = np.abs(expected).max(initial=1e-30)
                floats = max(floats, float(_distance(result, low, high).max(initial=0) / peak))
    return QuantizedDifferences(worst, wrong, total, floats)


def _distance(values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.maximum(np.maximum(low - values, values - high), 0)


NEAR_IN_TWO_BYTES = 16
"""Steps of the low byte by which a value in two bytes may differ, because functions are computed in float32."""


def _joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Return the values of two bytes in steps of the low one."""
    return 256 * high.astype(int) + low.astype(int)


def _low_bytes(reference: Reference) -> dict[str, str]:
    """Return the low bytes of operands in two bytes -> their high bytes, by names in the integer graph.

    The low byte of a value just above the middle between two steps of the high byte is far from that of one just below.
    """
    builder, found = NodeLowering(reference.module).run(), dict[str, str]()
    names = {node: builder.values[node] for node in builder.values if quantize_qparams(node)}
    of_float = {node.args[0].name: name for node, name in names.items()}
    for node in reference.module.graph.nodes:
        part = info(node).part
        if part is not None and part.label == "low byte of the operand in finer steps":
            high = node.args[0].args[1]  # scaled - high, times 256
            found[of_float[node.name]] = of_float[name_of(high)]
    return found


Ranges = dict[str, tuple[np.ndarray, np.ndarray]]


def _reference_values(
    reference: Reference, leaves: list[Tensor], rounded_runs: int, computed: set[str]
) -> tuple[dict[str, np.ndarray], Ranges]:
    """Value of the integer graph -> what the reference computes there, and its smallest and largest value in all runs.

    It is quantized values where the reference quantizes, else floats. ``computed``: values that operators of the
    integer graph compute; those inside of merged loops are not among them.
    """
    builder = NodeLowering(reference.module).run()  # the same names again, with the nodes they came from
    exact = _Recorder(reference.module)
    held = {node for node, name in builder.values.items() if name in computed and _is_compared(builder, node, name)}
    runs = [exact, *(_RoundedRecorder(exact, held, run) for run in range(rounded_runs))]
    with torch.no_grad():
        for recorder in runs:
            recorder.run(*leaves)
    all_values = [_values_by_name(builder, recorder.seen) for recorder in runs]
    stacked = {name: np.stack([values[name] for values in all_values]) for name in all_values[0]}
    return all_values[0], {name: (values.min(0), values.max(0)) for name, values in stacked.items()}


def _values_by_name(builder: GraphBuilder, seen: Mapping[fx.Node, Any]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for node, name in builder.values.items():
        value = seen[node]
        if isinstance(value, Tensor) and _is_compared(builder, node, name):
            found.setdefault(name, _array(value))
        elif isinstance(value, Tensor) and quantize_qparams(node, DType.U16):
            level, rest = numerics.split_16bit(_array(value))
            found |= {name: level.astype(np.uint8), builder.low_bytes[name]: rest.astype(np.uint8)}
    return found


def _is_compared(builder: GraphBuilder, node: fx.Node, name: str) -> bool:
    """Return whether a node computes a value of the integer graph, and not the floats that one stands for."""
    kind = builder.types.get(name)
    return kind is not None and (kind.dtype is not DType.U8 or kind.q is None or bool(quantize_qparams(node)))


def _array(tensor: Tensor) -> np.ndarray:
    """As the interpreter holds it: bfloat16 is float32 there."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().numpy()


@functools.cache
def captured_net(net: type[nn.Module], uneven: bool = False) -> tuple[nn.Module, Captured]:
    """One of `nets.ALL` with random weights, or uneven ones, captured once for all tests from an example of batch 1."""
    model = nets.randomize(net())
    model = nets.uneven(model) if uneven else model
    return model, capture(model, nets.example(model, 1))


def quantized(model: nn.Module, *example: Any, recipe=None, **kwargs: Any) -> tuple[Reference, Lowered]:
    """The whole way for one model, calibrated on its example."""
    return lowered(capture(model.eval(), example, example_kwargs=kwargs), *example, recipe=recipe, **kwargs)


def lowered(captured: Captured, *batch: Any, recipe=None, **kwargs: Any) -> tuple[Reference, Lowered]:
    """From a captured model on, calibrated on one batch."""
    prepared = prepare(captured, Quantizer(recipe) if recipe else None)
    reference = convert(prepared, calibrate(prepared, lambda run: run(*batch, **kwargs)))
    return reference, requantize(reference)


def assert_equal_quantized(reference: Reference, lowered: Lowered, *args: Any, **kwargs: Any) -> QuantizedDifferences:
    """At most ``OpDef.tolerance`` in every region; float results of regions equal but for rounding. Prints the rate."""
    differences = largest_differences(reference, lowered, *args, **kwargs)
    kinds = {name: op.kind for op in lowered.graph.ops for name in op.outputs}
    far = {name: worst for name, worst in differences.worst.items() if worst > OPS[kinds[name]].tolerance}
    rate = f"{differences.wrong} of {differences.total} quantized values differ ({differences.rate:.1e})"
    print(f"{rate}, floats by {differences.floats:.1e}")
    assert not far, f"more than the contract allows: {far}"
    assert differences.floats < 1e-5
    return differences


def tensors(value: Any) -> list[Tensor]:
    """Tensor leaves of a nested result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def sqnr(result: Tensor, target: Tensor) -> float:
    """Signal to quantization noise in decibels."""
    noise = (result.double() - target.double()).square().sum().clamp_min(1e-300)
    return (10 * torch.log10(target.double().square().sum() / noise)).item()


def kinds(lowered: Lowered) -> list[str]:
    """Operators of the integer graph in order."""
    return [op.kind for op in lowered.graph.ops]
