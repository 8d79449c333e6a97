"""The integer graph against the Q/DQ reference, region by region on the same integers."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from intaglio import numerics
from intaglio.ir import DType
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


def largest_differences(reference: Reference, lowered: Lowered, *args: Any, **kwargs: Any) -> QuantizedDifferences:
    """Every integer operator is fed what the reference has there, so that errors do not add up along the network."""
    leaves = bind(reference.signature, args, kwargs)
    symbols = dims_of(reference.signature, leaves)
    island = lowered.runner(symbols)
    truth = _reference_values(reference, leaves)
    values = {**lowered.graph.constants, **dict(zip(lowered.graph.inputs, map(_array, leaves), strict=True))}
    worst, wrong, total, floats = {}, 0, 0, 0.0
    for op in lowered.graph.ops:
        given = [values[name] for name in op.inputs]
        results = island(op, given) if op.kind == "island" else run_op(op, given, lowered.graph, OPS, symbols)
        for name, result in zip(op.outputs, results, strict=True):
            expected = truth.get(name)
            values[name] = result if expected is None else expected
            if expected is None:
                continue
            assert result.shape == expected.shape, f"%{name}: {result.shape}, the reference has {expected.shape}"
            if lowered.graph.types[name].dtype is DType.U8:
                distance = np.abs(result.astype(int) - expected.astype(int))
                worst[name] = int(distance.max(initial=0))
                wrong, total = wrong + int((distance > 0).sum()), total + distance.size
            elif op.kind == "dequantize":
                peak = np.abs(expected).max(initial=1e-30)
                floats = max(floats, float(np.abs(result - expected).max(initial=0) / peak))
    return QuantizedDifferences(worst, wrong, total, floats)


def _reference_values(reference: Reference, leaves: list[Tensor]) -> dict[str, np.ndarray]:
    """Value of the integer graph -> what the reference computes there: quantized values where it quantizes, else
    float."""
    recorder = _Recorder(reference.module)
    with torch.no_grad():
        recorder.run(*leaves)
    builder = NodeLowering(reference.module).run()  # the same names again, with the nodes they came from
    found = {}
    for node, name in builder.values.items():
        kind, value = builder.types.get(name), recorder.seen[node]
        if (
            isinstance(value, Tensor)
            and kind
            and (kind.dtype is not DType.U8 or kind.q is None or quantize_qparams(node))
        ):
            found.setdefault(name, _array(value))
        elif isinstance(value, Tensor) and quantize_qparams(node, DType.U16):
            level, rest = numerics.split_16bit(_array(value))
            found |= {name: level.astype(np.uint8), builder.low_bytes[name]: rest.astype(np.uint8)}
    return found


def _array(tensor: Tensor) -> np.ndarray:
    """As the interpreter holds it: bfloat16 is float32 there."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().numpy()


@functools.cache
def captured_net(net: type[nn.Module]) -> tuple[nn.Module, Captured]:
    """One of `nets.ALL` with random weights, captured once for all tests from an example of batch 1."""
    model = nets.randomize(net())
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
