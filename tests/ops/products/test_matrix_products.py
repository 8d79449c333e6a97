"""Products of two activations: kernels against the operator's reference, and in programs."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

from intaglio import build, numerics
from intaglio.ir import DType, Op, QParams, TensorType, evaluate
from intaglio.ops import OPS
from intaglio.ops.products.scratch_memory import CACHE_LINE
from intaglio.tracing import capture
from support.attention_library import kernels
from support.integer_graphs import H, N, Net
from support.lowering import assert_equal_quantized, quantized
from support.lowering import lowered as calibrated
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS, Memory
from support.nets import Body, randomize
from support.programs import assert_bits_of_the_interpreter, assert_same_bits, assert_stays_inside, built, compiled
from support.side_by_side import SideBySide

SLACK = 64
MEMORY = [Memory(1 << 20) for _ in range(3)]


@dataclass(frozen=True)
class Case:
    """[outer..., rows, depth] times [outer..., depth, columns]; the second operand lies as ``b_order`` says, its last
    axis ``apart`` longer than it is."""

    outer_a: tuple[int, int] = (1, 1)
    outer_b: tuple[int, int] = (1, 1)
    rows: int = 7
    depth: int = 20
    columns: int = 33
    b_order: tuple[int, int, int, int] = (0, 1, 2, 3)
    apart: int = 0
    zero: int = 100
    floats: bool = False
    table: bool = False
    extreme: bool = False
    seed: int = 0
    lowest: bool = False


def types_of(case: Case) -> list[TensorType]:
    q = [QParams((0.5,), (zero,), low, 255) for zero, low in ((case.zero, 0), (128, 1))]
    shapes = (*case.outer_a, case.rows, case.depth), (*case.outer_b, case.depth, case.columns)
    return [TensorType(shape, DType.U8, own) for shape, own in zip(shapes, q, strict=True)]


def drawn(case: Case) -> list[np.ndarray]:
    draw = np.random.default_rng(case.seed)

    def q_values(kind: TensorType) -> np.ndarray:
        low = kind.qparams.qmin
        if case.lowest:
            return np.full(kind.shape, low, np.uint8)
        return (draw.choice([low, 255], kind.shape) if case.extreme else draw.integers(low, 256, kind.shape)).astype(
            np.uint8
        )

    return [q_values(kind) for kind in types_of(case)]


FACTOR = np.float32(0.0131)
BOUNDS = 90, 5, 251
TABLE = np.random.default_rng(0).permutation(256).astype(np.uint8)


def expected(case: Case) -> np.ndarray:
    types = types_of(case)
    acc = OPS["bmm"].reference(Op("bmm", ("a", "b"), ("y",)), drawn(case), types, types[0])
    if case.floats:
        return acc.astype(np.float32) * FACTOR
    q_values = numerics.requantize(acc, FACTOR, *BOUNDS).astype(np.uint8)
    return TABLE[q_values] if case.table else q_values


def place(array: np.ndarray, order: tuple[int, ...], apart: int, memory: Memory) -> np.ndarray:
    """The array with its axes in this order in memory, the last one longer, at the end of guarded bytes."""
    shape = [array.shape[axis] for axis in order]
    size = int(np.prod([*shape[:-1], shape[-1] + apart]))
    lying = memory.end(size * array.itemsize, SLACK).view(array.dtype).reshape(*shape[:-1], shape[-1] + apart)
    lying = lying[..., : shape[-1]].transpose(np.argsort(order))
    lying[...] = array
    return lying


def run(case: Case, isa: str, threads: int) -> np.ndarray:
    (a, b), types = drawn(case), types_of(case)
    a, b = place(a, (1, 2, 0, 3), 5, MEMORY[0]), place(b, case.b_order, case.apart, MEMORY[1])
    wide = np.broadcast_shapes(case.outer_a, case.outer_b)
    out = np.full((*wide, case.rows, case.columns), 99, np.float32 if case.floats else np.uint8)
    out = place(out, (0, 2, 1, 3), 3, MEMORY[2])
    address = {id(x): x.__array_interface__["data"][0] for x in (a, b, out)}

    def outer(x: np.ndarray) -> list[int]:
        return [0 if size == 1 else step for size, step in zip(x.shape[:2], x.strides[:2], strict=True)]

    numbers = {
        "b": address[id(b)],
        "depth_stride": b.strides[2],
        "column_stride": b.strides[3],
        "batch": wide[0],
        "heads": wide[1],
        "rows": case.rows,
        "depth": case.depth,
        "columns": case.columns,
        "zero_a": case.zero,
        "table.entries": TABLE.ctypes.data if case.table else 0,
    }
    numbers |= dict(zip(("b_batch", "b_head"), outer(b), strict=True))
    for name, x in (("a", a), ("out", out)):
        batch, head = outer(x)
        numbers |= {f"{name}.base": address[id(x)], f"{name}.batch": batch, f"{name}.head": head}
        numbers[f"{name}.row"] = x.strides[2]
    lines = evaluate(OPS["bmm"].scratch(Op("bmm", ("a", "b"), ("y",)), dict(zip("ab", types, strict=True))), {})
    bounds = None if case.floats else BOUNDS
    kernels(isa).run("Product", numbers, {"factor": FACTOR}, bounds, threads, lines * CACHE_LINE)
    return out.copy()


@st.composite
def cases(draw) -> Case:
    outer = [draw(st.integers(1, 3)) for _ in range(2)]
    outer_a, outer_b = (tuple(size if draw(st.booleans()) else 1 for size in outer) for _ in range(2))
    if draw(st.integers(0, 9)) == 0:
        outer_a = (0, *outer_a[1:])
        outer_b = (1, *outer_b[1:])
    floats = draw(st.booleans())
    return Case(
        outer_a,
        outer_b,
        draw(st.integers(0, 60)),
        draw(st.integers(1, 100)),
        draw(st.integers(1, 150)),
        tuple(draw(st.permutations(range(4)))),
        draw(st.integers(0, 5)),
        draw(st.sampled_from([0, 100, 255])),
        floats,
        not floats and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@given(case=cases(), threads=st.integers(1, 3))
def test_kernels_are_bit_identical_to_the_reference(isa, case, threads):
    assert np.array_equal(run(case, isa, threads), expected(case))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_sums_of_deep_columns_are_exact(isa):
    """The sums of so many of the lowest values need more than 16 bits."""
    case = Case(depth=1030, columns=40, floats=True, lowest=True)
    assert np.array_equal(run(case, isa, 1), expected(case))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_kernels_write_nothing_past_a_row(isa):
    """Results in float lie apart; kernels of other products would fill their last block."""
    case = Case(rows=30, columns=37, floats=True)
    run(case, isa, 1)
    raw = MEMORY[2].end(4 * 30 * 40, SLACK).view(np.int32).reshape(30, 40)
    before = raw[:, 37:].copy()
    run(Case(rows=30, columns=37, floats=True, seed=1), isa, 2)
    assert np.array_equal(raw[:, 37:], before)


def test_the_comparison_detects_an_operand_with_other_strides():
    """Square, so that both readings are possible."""
    case = Case(depth=24, columns=24, b_order=(0, 1, 3, 2))
    straight = Case(depth=24, columns=24)
    assert np.array_equal(run(case, RUNNABLE_ISAS[0], 1), run(straight, RUNNABLE_ISAS[0], 1))
    assert not np.array_equal(run(case, RUNNABLE_ISAS[0], 1), expected(Case(depth=24, columns=24, seed=1)))


# ---- programs


def products(net: Net) -> tuple[str, ...]:
    """Every tail, batch axes that broadcast, a second operand that is turned."""
    x, y = net.quantize(net.input(N, 3, 9, 20)), net.centred(net.quantize(net.input(3, 31, 20), 128))
    turned = net.same("permute", y, order=(0, 2, 1))
    one = net.centred(net.quantize(net.input(31, 70), 128))
    z = net.bmm(x, turned, low=7)
    rows = net.centred(net.quantize(net.input(N, H, 12), 128))
    square = net.bmm(net.quantize(net.input(N, 5, 12)), net.same("permute", rows, order=(0, 2, 1)), f32=True)
    return (
        net.bmm(z, one, f32=True),
        net.dequantize(net.table(net.bmm(z, one))),
        square,
        net.bmm(net.same("reshape", one, shape=(31, 70)), net.same("permute", one, order=(1, 0)), f32=True),
    )


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_program_has_the_bits_of_the_interpreter(isa):
    net, lowered = built(products)
    model = compiled(products, isa)
    assert_bits_of_the_interpreter(net, lowered, model)
    assert_stays_inside(net, lowered, model.artifact)


def test_products_are_counted():
    work = [step.cost for step in compiled(products, RUNNABLE_ISAS[0]).artifact.program.steps if "bmm" in step.kinds]
    free = {"n": 2, "h": 8, "w": 11}
    counted = sorted(evaluate(each.macs, free) for each in work)
    assert counted == sorted([2 * 3 * 9 * 20 * 31, *[2 * 3 * 9 * 31 * 70] * 2, 2 * 5 * 12 * 8, 31 * 70 * 31])


# ---- models


def linear_attention(m, x):
    """Products without a softmax between them, of the three parts of one layer's result."""
    q, k, v = m.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    return m.out((F.relu(q @ k.transpose(-2, -1)) @ v).transpose(1, 2).reshape(*x.shape[:2], 16))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_products_of_activations_in_a_model_are_integer(isa):
    """Second factors, and what shares their parameters, lie around zero."""
    model = randomize(Body(linear_attention, qkv=nn.Linear(24, 48), out=nn.Linear(16, 5)))
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(0))
    reference, lowered = quantized(model, x)
    products = [op for op in lowered.graph.ops if op.kind == "bmm"]
    assert len(products) == 2
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, x)
    compiled_model = build.compile(lowered, isa=isa)
    for batch in (x, x[:1]):
        assert torch.equal(compiled_model(batch), lowered(batch))


def similarities(m, x):
    """Scores of all pairs of rows, and their sums of rows: a free last axis, then a free depth."""
    a, b = m.a(x), m.b(x)
    scores = torch.relu(a @ b.transpose(-2, -1))
    return scores, m.out(scores @ b), torch.relu(a[:, 0]) @ torch.tanh(b[:, 0]).t()


@pytest.mark.slow(reason="products of free sizes; those of fixed sizes run above")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_products_along_free_axes_are_integer(isa):
    model = randomize(Body(similarities, a=nn.Linear(8, 8), b=nn.Linear(8, 8), out=nn.Linear(8, 5)))
    x = torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(0))
    captured = capture(model.eval(), (x,), dynamic_shapes=(({0: Dim("n"), 1: Dim("rows")},),))
    reference, lowered = calibrated(captured, x)
    assert not lowered.islands
    assert lowered.macs[0] == lowered.macs[1]
    assert_equal_quantized(reference, lowered, x)
    compiled_model = build.compile(lowered, isa=isa)
    for rows in (1, 2, 5, 21, 70):
        batch = torch.randn(1 + rows % 3, rows, 8)
        assert_same_bits(compiled_model(batch), lowered(batch))


EINSUMS = {
    "attention scores": lambda m, x: torch.einsum("bqd,bkd->bqk", m.a(x), m.b(x)),
    "a constant matrix": lambda m, x: torch.einsum("bld,df->blf", m.a(x), m.matrix),
    "a constant matrix for each head": lambda m, x: torch.einsum("bld,hdf->blhf", m.a(x), m.heads),
    "outer products": lambda m, x: torch.einsum("bi,bj->bij", m.a(x)[:, 0], m.b(x)[:, 0]),
    "no product": lambda m, x: torch.einsum("bld->bdl", m.a(x)),
    "matmul with a constant matrix": lambda m, x: m.a(x) @ m.matrix,
}


def with_einsum(call) -> nn.Module:
    constants = {"matrix": nn.Parameter(torch.randn(8, 5)), "heads": nn.Parameter(torch.randn(4, 8, 6))}
    return randomize(Body(call, a=nn.Linear(8, 8), b=nn.Linear(8, 8), **constants))


@pytest.mark.slow(reason="a product for each einsum, side by side; products of activations run above")
def test_an_einsum_is_products_of_matrices(subtests):
    """Each beside the others, behind layers of its own."""
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
    model = SideBySide({name: (with_einsum(call), [x]) for name, call in EINSUMS.items()})
    reference, lowered = quantized(model, x)
    assert not lowered.islands
    assert lowered.macs[0] == lowered.macs[1]
    assert_equal_quantized(reference, lowered, x)
    found, exact = lowered(x[:1]), model(x[:1])
    for name in EINSUMS:
        with subtests.test(name):
            assert found[name].shape == exact[name].shape
