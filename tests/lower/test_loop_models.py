"""Models whose float operators run as loops: blocks of transformers, images, every ATen operator, what is merged."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.ir import DType
from intaglio.plan.graph_passes.loop_merging import merge_loops
from support.float_loops import equal
from support.lowering import assert_equal_quantized, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.side_by_side import SideBySide
from support.slow_params import slow_params

F32, U8 = DType.F32, DType.U8


def block(m, x, ids, mask):
    """Ends of every element type: ids, integers as a mask, floats, bfloat16, quantized values."""
    y = m.a(m.norm(m.table(ids) + m.place + x))
    z = F.gelu(y) + m.table(ids)
    scores = (z * 0.1).masked_fill(mask.unsqueeze(-1) == 0, -torch.inf).transpose(1, 2)
    half = z.to(torch.bfloat16) * 3
    return m.b(z), torch.softmax(scores, -1), half, half.float() + 1, z.std(-1), z.amax(-1, keepdim=True)


@pytest.fixture(scope="module")
def blocks():
    model = randomize(
        Body(
            block,
            table=nn.Embedding(50, 35),
            place=nn.Parameter(torch.randn(1, 7, 35)),
            norm=nn.LayerNorm(35),
            a=nn.Linear(35, 35),
            b=nn.Linear(35, 5),
        )
    )
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(3, 7, 35, generator=draw)]
    given += [torch.randint(0, most, (3, 7), generator=draw) for most in (50, 2)]
    return given, *quantized(model, *given)


def test_a_residual_block_is_few_loops_and_no_island(blocks):
    given, reference, lowered = blocks
    assert not lowered.islands
    assert all(skip.node in lowered.native for skip in lowered.skipped)
    assert [op.kind for op in lowered.graph.ops].count("loop") <= 4
    assert_equal_quantized(reference, lowered, *given)
    found, expected = lowered(*given), reference(*given)
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-2 if one.dtype is torch.bfloat16 else 1e-5, atol=1e-5, equal_nan=True
        )


@pytest.mark.slow(reason="compiles a block to save it; loops run in the program below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_block_is_bit_identical_after_saving_and_loading(isa, blocks, tmp_path):
    given, _, lowered = blocks
    model = stages.compile(lowered, isa=isa)
    model.save(tmp_path / "m")
    for one in (model, intaglio.load(tmp_path / "m", isa=isa)):
        for batch in (given, [x[:1] for x in given]):
            assert all(equal(*pair) for pair in zip(one(*batch), lowered(*batch), strict=True))


@pytest.mark.parametrize("outside", [-1, 50, 2**40])
def test_an_id_outside_the_table_is_an_error_as_in_torch(blocks, outside):
    (x, ids, mask), _, lowered = blocks
    model, wrong = stages.compile(lowered), ids.clone()
    wrong[2, 6] = outside
    for run in (model, lowered):
        with pytest.raises(IndexError, match="index out of range in self"):
            run(x, wrong, mask)
    assert equal(model(x, ids, mask)[0], lowered(x, ids, mask)[0])


OPERATORS = {
    "arithmetic": lambda x, y: (x - y * 3, x.sub(y, alpha=0.5), 1 - x, x / (y.abs() + 1), x.add(y, alpha=2)),
    "powers": lambda x, y: (x**2, x**3, (x.abs() + 1) ** 0.5, (x.abs() + 1) ** -0.5, (x * x + 1).rsqrt(), x.square()),
    "choices": lambda x, y: (torch.where(x > y, x, y), x.masked_fill(y < 0, 2.0), x.clamp(-1, 1), x.clamp(min=0.5)),
    "truth": lambda x, y: ((x > 0) & (y <= 0), ~(x == y) | (x != 1.0), (x > 0).logical_and(y > 0), (x >= 0).float()),
    "functions": lambda x, y: (
        F.gelu(x - y),
        F.silu(x - y),
        torch.tanh(x - y),
        torch.exp(x - y),
        torch.log(x * x + 1),
        torch.sin(x - y),
        torch.cos(x - y),
        F.hardswish(x - y),
        F.leaky_relu(x - y, 0.2),
        F.hardtanh(x - y),
        F.relu(x - y),
    ),
    "reductions": lambda x, y: (
        (x - y).sum(-1),
        (x - y).mean(1, keepdim=True),
        (x - y).amax(-1),
        (x - y).amin(1),
        (x - y).var(-1),
        (x - y).var(1, unbiased=False, keepdim=True),
        (x - y).std(-1),
    ),
    "reductions of several axes": lambda x, y: (
        (x - y).sum((0, 2)),
        (x - y).mean((1, 2), keepdim=True),
        (x - y).amax((0, 1)),
        (x - y).sum(),
        (x - y).mean(),
        (x - y).max(),
        (x - y).min(),
        F.adaptive_avg_pool2d(x[:, None] - y[:, None], 1),
        F.adaptive_avg_pool1d(x - y, 1),
    ),
    "vector norms": lambda x, y: (
        F.normalize(x - y, dim=-1),
        torch.linalg.vector_norm(x - y, dim=(0, 2)),
        (x - y).norm(),
        (x - y).norm(1, -1),
        torch.linalg.vector_norm(x - y, torch.inf, 1, keepdim=True),
        (x - y).clamp_min(0.25) + y,
        (x - y).clamp_max(0.25) + y,
    ),
    "norms": lambda x, y: (F.layer_norm(x - y, (9,)), F.rms_norm(x - y, (9,)), F.log_softmax(x - y, -1)),
    "maxima": lambda x, y: (torch.maximum(x, y), torch.minimum(x, y * 2), x.round() + y),
    "activations of exponentials": lambda x, y: (
        F.elu(x - y, 0.7),
        F.selu(x - y),
        F.celu(x - y, 0.6),
        F.softplus(x - y, 2.0, 3.0),
        F.mish(x - y),
        F.logsigmoid(x - y),
        F.threshold(x - y, 0.3, -0.5),
        torch.expm1(x - y),
        torch.expm1((x - y) * 0.0001) * 9999,
    ),
    "whole numbers": lambda x, y: (torch.floor(x - y), torch.ceil(x - y), torch.sign(x - y), (x * 3).long()),
    "integers": lambda x, y: (
        (x * 9).long() * 3 - (y * 9).long(),
        torch.where(x > y, (x * 9).long(), -2),
        (x * 9).long().clamp(-3, 5).abs() + (x > y),
        torch.maximum((x * 9).long(), (y * 9).long()) > 4,
        ((x > y).int() * (y > 0).int() + 1).long(),
        -(x * 9).long().sign() << 3,
        (x * 99).long() // 7 + (y * 99).long().div(-4, rounding_mode="floor"),
        (x * 99).long().div(7, rounding_mode="trunc") + (y * 99).long().div(-4, rounding_mode="trunc"),
    ),
}


FEW = (
    "choices",
    "truth",
    "reductions of several axes",
    "vector norms",
    "norms",
    "activations of exponentials",
    "integers",
)


@pytest.mark.slow(reason="a program of many loops; kernels of loops are compared operator by operator")
@pytest.mark.parametrize(
    "names",
    [FEW, *slow_params((tuple(OPERATORS),), reason="operators whose loops are like those of the few")],
    ids=["few", "all"],
)
def test_operators_are_torchs_to_rounding_and_run_in_the_program(names, subtests):
    """Every row of the table reads two layers of its own."""
    rows = {
        name: randomize(
            Body(
                lambda m, x, row=OPERATORS[name]: row(*(f(x).exp() * 0.5 - 1 for f in (m.a, m.b))),
                a=nn.Linear(9, 9),
                b=nn.Linear(9, 9),
            )
        )
        for name in names
    }
    x = torch.randn(4, 5, 9, generator=torch.Generator().manual_seed(1))
    reference, lowered = quantized(SideBySide({name: (model, [x]) for name, model in rows.items()}), x)
    assert not lowered.islands, lowered.skipped
    program, q_values, simulated = stages.compile(lowered)(x), lowered(x), reference(x)
    for name in names:
        with subtests.test(name):
            for found, expected in zip(q_values[name], simulated[name], strict=True):
                assert found.dtype is expected.dtype
                same = torch.eq if found.dtype is torch.bool else partial(torch.isclose, rtol=1e-5, atol=2e-6)
                assert same(found, expected).float().mean() > 0.99
            assert all(equal(*pair) for pair in zip(program[name], q_values[name], strict=True))


def image(m, x):
    """Channels last with a border of zero points, constants per channel, rows along every axis."""
    y = m.c(x)
    z = y / (torch.erf(x).abs().mean(1, keepdim=True) + 1)
    wide = m.d(torch.maximum(z, m.least))
    flat = z.flatten(2).softmax(-1)
    return m.d(z), torch.softmax(z, 1), z.sum(-1), wide, torch.log_softmax(y.permute(0, 2, 3, 1), -1), flat


@pytest.mark.slow(reason="compiles a model of images; loops write into moved buffers below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_images_are_read_and_written_in_their_memory_format(isa):
    layers = {"c": nn.Conv2d(3, 8, 3, padding=1), "d": nn.Conv2d(8, 5, 3, padding=1)}
    x = torch.randn(2, 3, 9, 11, generator=torch.Generator().manual_seed(0))
    _, lowered = quantized(randomize(Body(image, least=nn.Parameter(torch.randn(8, 1, 1)), **layers)), x)
    model = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1], x.contiguous(memory_format=torch.channels_last)):
        assert all(equal(*pair) for pair in zip(model(batch), lowered(batch), strict=True))


# ---- what is merged


def test_a_third_operator_between_two_loops_keeps_them_apart():
    """The first loop feeds the second directly, and through an island."""

    def body(m, x):
        return (lambda y: y / (torch.erf(y) + 2))(m.a(x) / (x.abs() + 1))

    _, lowered = quantized(randomize(Body(body, a=nn.Linear(4, 4))), torch.randn(3, 4))
    assert [op.kind for op in lowered.graph.ops][-3:] == ["loop", "island", "loop"]


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_loop_writes_directly_into_the_buffer_of_the_move_after_it(isa):
    def stacked(m, x):
        y = m.conv(x).clone()
        y[:, 0] = 0
        return torch.stack([y, y * 2]).sum(0)

    x = torch.randn(2, 8, 10, 10, generator=torch.Generator().manual_seed(0))
    _, lowered = quantized(Body(stacked, conv=nn.Conv2d(8, 8, 3)), x)
    assert equal(stages.compile(lowered, isa=isa)(x), lowered(x))


def test_values_without_other_readers_are_not_stored():
    """A sum, its layer norm, the quantized values of that: the sum and the quantized values are results."""

    def body(m, x):
        total = m.a(x) / (x.abs() + 1)
        return total, m.b(m.norm(total))

    _, lowered = quantized(
        randomize(Body(body, a=nn.Linear(8, 8), b=nn.Linear(8, 8), norm=nn.LayerNorm(8))), torch.randn(3, 5, 8)
    )
    (loop,) = [op for op in lowered.graph.ops if op.kind == "loop"]
    assert [lowered.graph.types[name].dtype for name in loop.outputs] == [F32, U8]


def test_merging_again_changes_nothing(blocks):
    graph, count = merge_loops(blocks[2].graph)
    assert count == 0
    assert graph.ops == blocks[2].graph.ops


def test_the_types_of_a_loop_are_listed_in_the_order_of_its_values():
    """Files, and the keys of their programs, would else differ from process to process, as sets of strings do."""
    model = Body(lambda m, x: (m.a(x), x.std(-1)), a=nn.Linear(4, 4))
    _, lowered = quantized(randomize(model), torch.randn(3, 4))
    body = next(op for op in lowered.graph.ops if op.is_loop and len(op.body.ops) > 2).body
    made = [op.output for op in body.ops]
    assert list(body.types) == list(dict.fromkeys([*body.inputs, *body.outputs, *body.constants, *made])), body


def test_vectors_of_zeros_are_normalized_to_zeros():
    """The smallest divisor, 1e-12, is not rounded to zero."""
    model = Body(lambda m, x: m.d(F.normalize(m.c(x), dim=-1)), c=nn.Conv2d(3, 4, 1, bias=False), d=nn.Conv2d(4, 2, 1))
    x = torch.randn(4, 3, 5, 1, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    reference, lowered = quantized(randomize(model), x)
    assert torch.isfinite(reference(x)).all()
    assert_equal_quantized(reference, lowered, x)
