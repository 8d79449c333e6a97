"""Loops whose ends are quantized values: what becomes a table, what is near enough for quantized values, and large
results of floats."""

import numpy as np
import pytest
import torch

from intaglio import stages
from intaglio.ir import DType, Op, QParams, TensorType, prune
from intaglio.lower import Lowered
from intaglio.ops import verify
from intaglio.ops.loop_ops.loop_builder import Body as Inside
from intaglio.plan.graph_passes.loop_merging import merge_loops
from intaglio.plan.graph_passes.lut_passes import approximate_functions, replace_loops_by_luts
from intaglio.plan.loops.loop_stages import magnitudes
from support.float_loops import C, LoopGraph, N, equal, random_rows, write_quantize
from support.lowering import tensors
from support.matmul_library import CPP_ISA_PARAMS
from support.slow_params import slow_params

F32, U8 = DType.F32, DType.U8


def test_a_loop_over_one_quantized_value_becomes_a_table_of_its_results():
    """All 256 of them, with a number that the model learned."""
    net = LoopGraph(x=TensorType((N, 64), F32))
    net.quantize("x", 0.03, 117)
    least = net.constant(np.full((1, 1), -0.5, np.float32))

    def bounded(b):
        return b("maximum", b("add", b("dequantize", "x_u8"), 0.25), least)

    net.add(lambda b: write_quantize(b, b("gelu", bounded(b)), 0.02, 30, 3, 240))
    lowered = net.lowered()
    graph, count = replace_loops_by_luts(lowered.graph)
    assert count == 1
    assert [op.kind for op in graph.ops] == ["quantize", "table", "dequantize"]
    x = (torch.arange(256) - 117.0).mul(0.03).reshape(4, 64)
    found, expected = (tensors(one(x))[0] for one in (Lowered(verify(prune(graph)), {}, lowered.signature), lowered))
    assert len(expected.unique()) > 100
    assert torch.equal(found, expected)


OTHERS = {
    "two levels": lambda b: write_quantize(b, b("add", b("dequantize", "x_u8"), b("dequantize", "y_u8")), 0.02, 30),
    "floats as well": lambda b: write_quantize(b, b("add", b("dequantize", "x_u8"), "x"), 0.02, 30),
    "floats stored": lambda b: (write_quantize(b, real := b("relu", b("dequantize", "x_u8")), 0.02, 30), real),
    "a reduction": lambda b: write_quantize(b, b("sub", a := b("dequantize", "x_u8"), b("max", a, axis=1)), 0.02, 30),
}


@pytest.mark.parametrize("name", OTHERS)
def test_loops_with_float_inputs_or_results_do_not_become_tables(name):
    net = LoopGraph(x=TensorType((N, 40), F32), y=TensorType((N, 40), F32))
    net.quantize("x", 0.03, 117), net.quantize("y", 0.02, 100)
    net.add(OTHERS[name])
    graph, count = replace_loops_by_luts(net.lowered().graph)
    assert count == 0
    assert "loop" in {op.kind for op in graph.ops}


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
def test_a_quantized_gelu_uses_the_approximation_of_layer_epilogues(isa):
    """Its own where floats of it are stored too; within one step of the exact function, NaN the zero point."""
    net = LoopGraph(x=TensorType((N, C), F32))
    net.add(lambda b: write_quantize(b, b("gelu", "x"), 0.02, 30))
    net.add(lambda b: (write_quantize(b, real := b("gelu", "x"), 0.02, 30), real))
    lowered = net.lowered()
    graph, count = approximate_functions(lowered.graph)
    assert count == 1
    assert [[step.kind for step in op.body.ops] for op in graph.ops if op.kind == "loop"] == [
        ["near_gelu", "quantize"],
        ["gelu", "quantize"],
    ]
    near = Lowered(graph, {}, lowered.signature)
    model, x = stages.compile(near, isa=isa), random_rows((9, 131), 2)
    found, expected, exact = model(x), near(x), lowered(x)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))
    assert ((found[0] - exact[0]).abs() / 0.02).max() < 1.5
    assert (found[0][x.isnan()] == 0).all()


def test_value_bounds_follow_from_quantized_operands():
    """An infinity on the way would become no quantized value: what may overflow has no size."""
    net = LoopGraph(x=TensorType((N, 40), F32))
    net.quantize("x", 0.5, 100)

    def write(b: Inside) -> str:
        real = b("dequantize", "x_u8")
        known = b("tanh", b("mul", b("sub", real, 2.0), real))
        large = b("mul", b("mul", real, 1e30), 1e-30)
        return write_quantize(b, b("add", b("add", known, large), "x"), 0.02, 30)

    net.add(write)
    (body,) = [op.body for op in net.lowered().graph.ops if op.kind == "loop"]
    sizes = {op.kind: magnitudes(body).get(op.output) for op in body.ops if op.kind != "mul"}
    assert sizes == {"dequantize": 77.5, "sub": 79.5, "tanh": 1.0, "add": None, "quantize": None}


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("zero", [100, *slow_params(0, 255, reason="zero points at the ends")])
def test_quantize_without_bounds_checks_gives_the_same_values(isa, zero):
    """Of both ends, and of what lies far outside of them."""
    net = LoopGraph(x=TensorType((N, C), F32))
    net.quantize("x", 0.5, 100)
    for scale in (0.3, 1e-4):
        bounds = zero // 2, min(zero + 40, 255)
        net.add(
            lambda b, s=scale, ends=bounds: write_quantize(b, b("mul", b("dequantize", "x_u8"), -3.0), s, zero, *ends)
        )
    net.add(lambda b: write_quantize(b, b("mul", b("dequantize", "x_u8"), b("dequantize", "x_u8")), 0.7, zero, 0, 255))
    lowered = net.lowered()
    x = (torch.arange(3 * 331) % 256 - 100.0).mul(0.5).reshape(3, 331)
    found, expected = stages.compile(lowered, isa=isa)(x), lowered(x)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize(
    ("shape", "axis"), [((1100, 4096), 1), *slow_params(((2051, 2049), None), reason="another shape past the caches")]
)
def test_streaming_stores_of_floats_are_bit_identical(isa, shape, axis):
    """Rows that begin anywhere, and rows that begin where lines do; threads that share them."""
    net = LoopGraph(x=TensorType((N, C), F32))
    net.add(lambda b: b("neg", "x") if axis is None else b("sub", "x", b("max", "x", axis=axis)))
    lowered = net.lowered()
    x = torch.linspace(-3, 3, shape[0] * shape[1]).reshape(shape)
    assert equal(*[tensors(run(x))[0] for run in (stages.compile(lowered, isa=isa), lowered)])


def test_a_requantize_after_a_loop_is_one_table():
    """A chain is as long as merging makes it before it is looked at."""

    def write(b: Inside) -> str:
        return b("relu", b("dequantize", "x_u8"))

    net = LoopGraph(x=TensorType((N, 40), F32))
    net.quantize("x", 0.03, 117)
    (real,) = net.add(write)
    net.types["out"] = TensorType((N, 40), U8, QParams((0.01,), (5,), 0, 255))
    net.types["out_f32"] = TensorType((N, 40), F32)
    net.ops += [Op("quantize", (real,), ("out",)), Op("dequantize", ("out",), ("out_f32",))]
    net.outputs = ["out_f32"]
    graph, _ = replace_loops_by_luts(merge_loops(net.lowered().graph)[0])
    assert [op.kind for op in graph.ops] == ["quantize", "table", "dequantize"]
