"""Linear layers of floats whose weights are integers with a scale, and perhaps an offset, for each group of inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intaglio import stages
from intaglio.ir import DType, Graph, Op, TensorType, symbol
from intaglio.numerics import float_math
from intaglio.ops import check_graph
from support.float_loops import LoopGraph, equal
from support.matmul_library import CPP_ISA_PARAMS
from support.programs import threads

F32, S8 = DType.F32, DType.S8
SIZES = ((1, 1, 1), (64, 64, 32), (70, 131, 16), (96, 10, 128), (33, 66, 5))
"""Inputs, outputs and inputs of a group: whole groups and panels, a smaller last group, a group larger than the layer,
and sizes that fill no vector."""


def steps_of(draw: np.random.Generator, outputs: int, groups: int, parts: int) -> np.ndarray:
    scales = draw.uniform(0.001, 0.02, (1, outputs, groups)) * draw.choice([-1, 1], (1, outputs, groups))
    return np.concatenate([scales, draw.standard_normal((parts - 1, outputs, groups))]).astype(np.float32)


def every_layer() -> LoopGraph:
    """Scales alone, and with offsets, with and without a bias."""
    draw, net = (
        np.random.default_rng(0),
        LoopGraph(**{f"x{k}": TensorType((symbol("n"), k), F32) for k, *_ in SIZES}),
    )
    for k, n, group in SIZES:
        weight = net.constant(draw.integers(-128, 128, (n, k)).astype(np.int8), S8)
        bias = net.constant(draw.standard_normal(n).astype(np.float32))
        for parts in (1, 2):
            steps = net.constant(steps_of(draw, n, -(-k // group), parts))
            for more in ((), (bias,)):
                name = f"y{len(net.outputs)}"
                net.types[name] = TensorType((symbol("n"), n), F32)
                net.ops.append(Op("linear_groups_f32", (f"x{k}", weight, steps, *more), (name,), {"group": group}))
                net.outputs.append(name)
    return net


@pytest.fixture(scope="module", params=CPP_ISA_PARAMS)
def every(request):
    graph = every_layer().lowered()
    return graph, stages.compile(graph, isa=request.param)


@settings(max_examples=15)
@given(st.integers(1, 120), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_kernels_of_groups_match_the_interpreter(every, rows, seed, workers):
    graph, model = every
    draw = np.random.default_rng(seed)
    call = [torch.from_numpy(draw.standard_normal((rows, k)).astype(np.float32)) for k, *_ in SIZES]
    expected = graph(*call)
    with threads(workers):
        found = model(*call)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("value", [np.nan, np.inf, -0.0, 1e38, 1e-45])
def test_kernels_of_groups_are_bit_identical_for_special_values(every, value):
    graph, model = every
    call = [torch.ones(7, k) for k, *_ in SIZES]
    for x in call:
        x[1:3, -1] = value
    assert all(equal(*pair) for pair in zip(model(*call), graph(*call), strict=True))


@settings(max_examples=50)
@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 41), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_weights_of_groups_are_products_and_sums_in_float32(outputs, inputs, group, parts, seed):
    """By hand, one weight after the other."""
    draw = np.random.default_rng(seed)
    quantized = draw.integers(-128, 128, (outputs, inputs)).astype(np.int8)
    steps = steps_of(draw, outputs, -(-inputs // group), parts)
    found = float_math.dequantize_groups(quantized, steps, group)
    for n in range(outputs):
        for k in range(inputs):
            wanted = np.float32(quantized[n, k]) * steps[0, n, k // group]
            wanted = wanted + steps[1, n, k // group] if parts == 2 else wanted
            assert found.dtype == np.float32
            assert found[n, k] == wanted


def test_a_layer_of_groups_is_the_layer_of_its_float_weight():
    graph = every_layer().lowered()
    draw = np.random.default_rng(1)
    call = [torch.from_numpy(draw.standard_normal((5, k)).astype(np.float32)) for k, *_ in SIZES]
    constants = graph.graph.constants
    for op, found in zip(graph.graph.ops, graph(*call), strict=True):
        x, weight, steps, *bias = op.inputs
        real = float_math.dequantize_groups(constants[weight], constants[steps], op.attrs["group"])
        given = call[graph.graph.inputs.index(x)].numpy()
        wanted = float_math.linear(given, real, None, *[constants[name] for name in bias])
        np.testing.assert_array_equal(found.numpy(), wanted)


def changed(graph: Graph, types: dict[str, TensorType] | None = None, **fields) -> Graph:
    op = graph.ops[-1]
    own = {"inputs": op.inputs, "outputs": op.outputs, "attrs": op.attrs} | fields
    return Graph(graph.inputs, (op.output,), {**graph.types, **(types or {})}, (Op(op.kind, **own),), graph.constants)


def test_graphs_with_invalid_groups_are_refused():
    graph = every_layer().lowered().graph
    check_graph(changed(graph))
    x, weight, steps, bias = graph.ops[-1].inputs
    outputs, inputs = graph.types[weight].shape
    for bad in (
        changed(graph, attrs={}),
        changed(graph, attrs={"group": 0}),
        changed(graph, attrs={"group": 6}),
        changed(graph, attrs={"group": True}),
        changed(graph, attrs={"group": 5, "more": 1}),
        changed(graph, inputs=(x, weight, bias)),
        changed(graph, inputs=(x, weight, steps, steps)),
        changed(graph, inputs=(x, weight, x, bias)),
        changed(graph, inputs=(x, weight)),
        changed(graph, types={x: TensorType((4, inputs + 1), F32)}),
        changed(graph, types={steps: TensorType((3, outputs, 7), F32)}),
        changed(graph, types={bias: TensorType((outputs + 1,), F32)}),
    ):
        with pytest.raises(ValueError, match=r"linear_groups_f32|constant"):
            check_graph(bad)
