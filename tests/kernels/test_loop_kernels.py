"""Float operators between integer or float ends as one generated loop: references, kernels, what is merged."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import intaglio
from intaglio import stages
from intaglio.ir import Graph, Op, TensorType
from intaglio.lower import Lowered
from intaglio.numerics import float_math
from intaglio.ops import check_graph
from intaglio.ops.loop_ops.loop_builder import Body as Inside
from intaglio.ops.loop_ops.primitives import PRIMITIVES
from support.float_loops import (
    BF16,
    BOOL,
    F32,
    I64,
    SPECIAL_VALUES,
    U8,
    C,
    LoopGraph,
    N,
    equal,
    random_rows,
    write_quantize,
)
from support.matmul_library import BEST_ISA_PARAMS, CPP_ISA_PARAMS
from support.slow_params import slow_params


def test_every_operator_of_a_loop_body_has_c_code():
    """Rows of tables and axes less or more are read as they are; three depend on types, which `emit_loops` spells."""
    without = {name for name, row in PRIMITIVES.items() if row.elementwise and not row.c}
    assert without == {"cast", "quantize", "dequantize"}
    assert all(row.lanes is not None for row in PRIMITIVES.values() if row.reduces)


# ---- numbers


def test_powers_and_logarithms_are_within_a_part_in_eight_million():
    draw = np.random.default_rng(0)
    x = draw.uniform(-87, 88.7, 100000).astype(np.float32)
    assert np.abs(float_math.exp(x) / np.exp(x.astype(np.float64)) - 1).max() < 1.2e-7
    y = draw.integers(1, 0x7F800000, 100000).astype(np.int32).view(np.float32)
    exact = np.log(y.astype(np.float64))
    assert (np.abs(float_math.log(y) - exact) / np.maximum(np.abs(exact), 1)).max() < 1.2e-7


@pytest.mark.parametrize("largest", [1.0, 1e3, 1e6, 2.0**29])
def test_sines_and_cosines_are_within_a_part_in_eight_million(largest):
    x = np.random.default_rng(0).uniform(-largest, largest, 100000).astype(np.float32)
    for ours, exact in ((float_math.sin, np.sin), (float_math.cos, np.cos)):
        assert np.abs(ours(x) - exact(x.astype(np.float64))).max() < 1.2e-7
    enormous = np.array([2.0**35, 3e38, -3e38], np.float32)
    assert (np.abs(float_math.sin(enormous)) <= 1).all()
    assert np.isnan(float_math.cos(np.array([np.inf, -np.inf, np.nan], np.float32))).all()


def test_special_float_values_are_handled_as_in_torch():
    x = torch.tensor(SPECIAL_VALUES)
    for ours, theirs in ((float_math.exp, torch.exp), (float_math.log, torch.log)):
        found = torch.from_numpy(ours(x.numpy()))
        torch.testing.assert_close(found, theirs(x), rtol=2e-7, atol=1.2e-38, equal_nan=True)
    assert torch.equal(
        torch.from_numpy(float_math.to_bfloat16(x.numpy())).nan_to_num(7), x.bfloat16().float().nan_to_num(7)
    )


# ---- kernels: bodies written by hand and at random, against their reference


UNARY = [
    name for name, row in PRIMITIVES.items() if row.operands[0] == ((F32, BF16),) and not row.attrs and name != "cast"
]
INTEGERS = [name for name, row in PRIMITIVES.items() if ((I64,),) in row.operands and not row.attrs and name != "cast"]
PAIRS_OF_INTEGERS = [
    name for name, row in PRIMITIVES.items() if len(row.operands) == 2 and ((I64,), (I64,)) in row.operands
]
REDUCTIONS = [name for name, row in PRIMITIVES.items() if row.reduces]
ATTRS = {"leaky_relu": {"slope": 0.1}, "clamp": {"low": -1.0, "high": 2.0}}


def each_operator() -> Lowered:
    """Every primitive once: between float ends, along rows of free length."""
    net = LoopGraph(
        x=TensorType((N, C), F32),
        y=TensorType((N, C), F32),
        ids=TensorType((N, C), I64),
        few=TensorType((N, C), I64),
        m=TensorType((N, C), BOOL),
    )
    for kind in UNARY:
        net.add(lambda b, kind=kind: b(kind, "x"))
    for kind, attrs in ATTRS.items():
        net.add(lambda b, kind=kind, attrs=attrs: b(kind, "x", **attrs))
    for kind in INTEGERS:
        net.add(lambda b, kind=kind: b(kind, "ids"))
    for kind in ("add", "sub", "mul", "div", "maximum", "minimum"):
        net.add(lambda b, kind=kind: (b(kind, "x", "y"), b(kind, "x", 1.5), b(kind, 1.5, "x")))
    for kind in PAIRS_OF_INTEGERS:
        net.add(lambda b, kind=kind: (b(kind, "x", "y"), b(kind, "x", 0.5), b(kind, "ids", "ids")))
    for divisor in ("few", 1, 3, -1, -7, 8, 0):
        net.add(lambda b, divisor=divisor: b("floor_divide", "ids", divisor))
    for kind in ("and", "or", "xor"):
        net.add(lambda b, kind=kind: b(kind, "m", b("lt", "x", "y")))
    net.add(lambda b: (b("not", "m"), b("where", "m", "x", -np.inf), b("where", "m", "x", "y")))
    net.add(lambda b: [b("cast", v, dtype=d) for v, d in (("m", F32), ("ids", F32), ("x", BOOL), ("ids", BOOL))])
    for kind in REDUCTIONS:
        net.add(lambda b, kind=kind: (b(kind, "x", axis=1), b("squeeze", b(kind, "y", axis=1), axis=1)))
    return net.lowered()


class Pair(NamedTuple):
    """A graph and a program of it."""

    lowered: Lowered
    model: intaglio.QuantizedModel

    def __repr__(self) -> str:
        return self.model.artifact.program.isa


@pytest.fixture(scope="module", params=BEST_ISA_PARAMS)
def operators(request):
    lowered = each_operator()
    return Pair(lowered, stages.compile(lowered, isa=request.param))


@settings(max_examples=25)
@given(st.integers(0, 5), st.integers(1, 70), st.integers(0, 100))
def test_every_host_operator_matches_its_meaning(operators, rows, columns, seed):
    """Whatever the length of a row."""
    lowered, model = operators
    draw = np.random.default_rng(seed)
    ids = torch.from_numpy(draw.integers(-(2**40), 2**40, (rows, columns)) * draw.integers(0, 2, (rows, columns)))
    ids[draw.random((rows, columns)) < 0.1] = -(2**63)
    given = (
        random_rows((rows, columns), seed),
        random_rows((rows, columns), seed + 1),
        ids,
        torch.from_numpy(draw.integers(-4, 5, (rows, columns))),
        torch.from_numpy(draw.random((rows, columns)) < 0.5),
    )
    for name, found, expected in zip(lowered.graph.outputs, model(*given), lowered(*given), strict=True):
        assert equal(found, expected), name


def at_random(seed: int, columns: int) -> Lowered:
    """Loops of random operators and reductions over quantized values, floats and constants; some results read by
    others."""
    draw = np.random.default_rng(seed)
    net = LoopGraph(
        x=TensorType((N, 3, columns), F32), y=TensorType((N, 1, columns), F32), z=TensorType((N, 3, 1), F32)
    )
    values = [
        "x",
        "y",
        "z",
        net.quantize("x", 0.03, 117),
        net.constant(draw.standard_normal(columns).astype(np.float32)),
    ]

    def write(body: Inside) -> tuple[str, ...]:
        given = list(values)
        for _ in range(draw.integers(2, 9)):
            picked = [str(draw.choice(given[-5:])) for _ in range(2)]
            picked = [body("dequantize", v) if body.types[v].dtype is U8 else v for v in picked]
            kind = str(draw.choice(["binary", "unary", "sum"], p=[0.5, 0.3, 0.2]))
            if kind == "binary":
                made = body(str(draw.choice(["add", "sub", "mul", "maximum"])), *picked)
            elif (
                kind == "unary"
                or body.types[picked[0]].shape[-1:] != (columns,)
                or body.types[picked[0]].shape == (columns,)
            ):
                made = body(str(draw.choice(["relu", "tanh", "neg", "sigmoid"])), body("add", picked[0], "x"))
            else:
                made = body(str(draw.choice(["mean", "max", "sum", "min"])), body("add", picked[0], "x"), axis=2)
            given.append(made)
        last = body("add", given[-1], "x")
        return last, write_quantize(body, last, 0.02, 100, 3, 240), given[-2] if given[-2] not in values else given[-1]

    for _ in range(4):
        made = net.add(write)
        values += made[:2]
    return net.lowered(merge=bool(seed % 2))


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize(
    ("seed", "columns"),
    [
        *slow_params((0, 35), reason="a longer body at random"),
        (5, 1),
        *slow_params((3, 3), (1, 35), (2, 16), (7, 100), reason="more random bodies"),
    ],
)
def test_random_loop_bodies_match_the_reference(isa, seed, columns):
    lowered = at_random(seed, columns)
    model = stages.compile(lowered, isa=isa)
    for batch in (0, 1, 4):
        given = [random_rows((batch, *rest), seed) for rest in ((3, columns), (1, columns), (3, 1))]
        for name, found, expected in zip(lowered.graph.outputs, model(*given), lowered(*given), strict=True):
            assert equal(found, expected), name


@pytest.mark.slow(reason="programs with rows of 5,000 values")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_rows_longer_than_the_cache_are_bit_identical(isa):
    """Values are computed again rather than kept: layer norm of what an exponential gives. One row length is free."""
    columns = {"free": C, "short": 35, "long": 5000}
    net = LoopGraph(**{name: TensorType((N, length), F32) for name, length in columns.items()})

    def write(b: Inside, x: str) -> str:
        power = b("exp", b("add", b("mul", x, x), -1.0))
        centred = b("sub", power, b("mean", power, axis=1))
        return b("div", centred, b("sqrt", b("mean", b("mul", centred, centred), axis=1)))

    for name in columns:
        net.add(lambda b, name=name: write(b, name))
    lowered = net.lowered()
    model = stages.compile(lowered, isa=isa)
    for free in (17, 4096, 4099):
        rows = [random_rows((3, free if length is C else length), 2).clamp(-3, 3) for length in columns.values()]
        for name, found, expected in zip(columns, model(*rows), lowered(*rows), strict=True):
            assert equal(found, expected), (name, free)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
def test_quantized_values_saturate_and_round_ties_to_even(isa):
    net = LoopGraph(x=TensorType((N, 40), F32))
    net.add(lambda b: write_quantize(b, b("neg", "x"), 0.5, 7, 2, 201))
    lowered = net.lowered()
    x = -torch.cat([torch.arange(-20, 20) * 0.25, torch.tensor([*SPECIAL_VALUES[:8]] * 5)]).reshape(2, 40)
    (found,), (expected,) = stages.compile(lowered, isa=isa)(x), lowered(x)
    assert torch.equal(found, expected)
    quantized = found / 0.5 + 7
    assert quantized.min() == 2
    assert quantized.max() == 201
    assert quantized[0, 16:24].tolist() == [5, 5, 6, 7, 7, 7, 8, 9]
    assert quantized[1, 0] == 7  # NaN


def test_the_comparison_detects_one_changed_bit():
    x = torch.tensor([1.0, np.nan])
    assert equal(x, x.clone())
    assert not equal(x, torch.nextafter(x, torch.tensor(2.0)))
    assert not equal(torch.tensor([0.0]), torch.tensor([-0.0]))


# ---- files


def broken(change) -> Graph:
    """A softmax whose body ``change`` spoils."""
    net = LoopGraph(x=TensorType((N, 5), F32))

    def write(b: Inside) -> str:
        powers = b("exp", b("sub", "x", b("max", "x", axis=1)))
        return b("div", powers, b("sum", powers, axis=1))

    net.add(write)
    graph = net.lowered().graph
    (loop,) = graph.ops
    return graph.replace(ops=(Op("loop", loop.inputs, loop.outputs, {}, change(loop.body)),))


def with_op(body: Graph, index: int, **changes) -> Graph:
    op = body.ops[index]
    fields = {"kind": op.kind, "inputs": op.inputs, "outputs": op.outputs, "attrs": op.attrs} | changes
    return Graph(
        body.inputs, body.outputs, body.types, (*body.ops[:index], Op(**fields), *body.ops[index + 1 :]), body.constants
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda b: with_op(b, 2, kind="system"), "not an operator of loops"),
        (lambda b: with_op(b, 0, attrs={"axis": 0}), "another shape"),
        (lambda b: with_op(b, 0, attrs={"axis": 7}), "axis 7"),
        (lambda b: with_op(b, 2, kind="not"), "cannot compute"),
        (lambda b: with_op(b, 2, attrs={"low": 1.0}), "not an operator of loops"),
        (lambda b: with_op(b, 4, kind="squeeze", inputs=b.ops[3].inputs, attrs={"axis": 1}), "squeeze expects size 1"),
    ],
)
def test_a_loop_body_from_a_file_is_checked(change, problem):
    with pytest.raises(ValueError, match=problem):
        check_graph(broken(change))
