"""Multiply-accumulates of every operator that multiplies are in its record, and counted in islands too."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio.fxgraph.grouped_operator import grouped_linear
from intaglio.fxgraph.nodes import overload_of
from intaglio.ops import BY_NAME, BY_TARGET
from intaglio.ops.products.recurrent import RECURRENT_OPS
from support.lowering import quantized as lowered_of
from support.nets import Body, randomize
from support.slow_params import slow_params_except


def f32(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


GROUPS = torch.tensor([2, 6], dtype=torch.int32)
CALLS = {
    "aten.conv1d.default": ((f32(2, 4, 9), f32(6, 2, 3), None, [2], [1], [1], 2), 2 * 6 * 5 * (2 * 3)),
    "aten.conv1d.padding": ((f32(2, 4, 9), f32(6, 4, 3), None, [1], "same"), 2 * 6 * 9 * (4 * 3)),
    "aten.conv2d.default": ((f32(2, 3, 8, 7), f32(5, 3, 3, 3)), 2 * 5 * 6 * 5 * (3 * 9)),
    "aten.conv2d.padding": ((f32(2, 3, 8, 7), f32(5, 3, 3, 3), None, [1, 1], "valid"), 2 * 5 * 6 * 5 * (3 * 9)),
    "aten.conv3d.default": ((f32(1, 2, 4, 5, 6), f32(3, 2, 2, 2, 2)), 3 * 3 * 4 * 5 * (2 * 8)),
    "aten.conv3d.padding": ((f32(1, 2, 4, 5, 6), f32(3, 2, 2, 2, 2), None, [1] * 3, "valid"), 3 * 3 * 4 * 5 * (2 * 8)),
    "aten.conv_transpose1d.default": ((f32(2, 4, 9), f32(4, 3, 3), None, [2]), 2 * 4 * 9 * (3 * 3)),
    "aten.conv_transpose2d.input": ((f32(2, 4, 5, 6), f32(4, 3, 2, 2), None, [2, 2]), 2 * 4 * 5 * 6 * (3 * 4)),
    "aten.conv_transpose3d.input": ((f32(1, 2, 3, 4, 5), f32(2, 3, 2, 2, 2)), 2 * 3 * 4 * 5 * (3 * 8)),
    "aten.convolution.default": (
        (f32(2, 4, 8, 7), f32(6, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2),
        2 * 6 * 6 * 5 * (2 * 9),
    ),
    "aten.linear.default": ((f32(2, 5, 7), f32(3, 7)), 2 * 5 * 7 * 3),
    "aten.matmul.default": ((f32(2, 1, 5, 7), f32(3, 7, 4)), 2 * 3 * 5 * 7 * 4),
    "aten.scaled_dot_product_attention.default": (
        (f32(2, 3, 5, 8), f32(2, 3, 7, 8), f32(2, 3, 7, 9)),
        2 * 3 * 5 * 7 * (8 + 9),
    ),
    "aten.mm.default": ((f32(5, 7), f32(7, 3)), 5 * 7 * 3),
    "aten.bmm.default": ((f32(2, 5, 7), f32(2, 7, 3)), 2 * 5 * 7 * 3),
    "aten.addmm.default": ((f32(3), f32(5, 7), f32(7, 3)), 5 * 7 * 3),
    "aten.baddbmm.default": ((f32(3), f32(2, 5, 7), f32(2, 7, 3)), 2 * 5 * 7 * 3),
    "aten.addbmm.default": ((f32(3), f32(2, 5, 7), f32(2, 7, 3)), 2 * 5 * 7 * 3),
    "aten.mv.default": ((f32(5, 7), f32(7)), 5 * 7),
    "aten.addmv.default": ((f32(5), f32(5, 7), f32(7)), 5 * 7),
    "aten.dot.default": ((f32(7), f32(7)), 7),
    "aten.vdot.default": ((f32(7), f32(7)), 7),
    "aten.inner.default": ((f32(2, 5, 7), f32(3, 7)), 2 * 5 * 3 * 7),
    "aten.linalg_vecdot.default": ((f32(4, 7), f32(4, 7)), 4 * 7),
    "aten.cdist.default": ((f32(2, 5, 7), f32(2, 3, 7)), 2 * 5 * 3 * 7),
    "aten._cdist_forward.default": ((f32(5, 7), f32(3, 7), 2.0, None), 5 * 3 * 7),
    "aten._euclidean_dist.default": ((f32(5, 7), f32(3, 7)), 5 * 3 * 7),
    "aten.conv_tbc.default": ((f32(9, 2, 4), f32(3, 4, 6), f32(6)), 7 * 2 * (3 * 4 * 6)),
    "aten.bilinear.default": ((f32(4, 5), f32(4, 6), f32(3, 5, 6), None), 4 * 3 * 5 * 6),
    "aten.einsum.default": (("nd,ndo->no", [f32(4, 5), f32(4, 5, 3)]), 4 * 5 * 3),
    "aten._grouped_mm.default": ((f32(6, 16), f32(2, 16, 8), GROUPS), 6 * 16 * 8),
    "intaglio.grouped_linear.default": ((f32(6, 16), f32(2 * 8, 16), None, GROUPS), 6 * 16 * 8),
}
"""ATen overload -> arguments and multiply-accumulates of a call."""
NOT_CALLED = {
    "aten._convolution.default": "takes arguments of one backend; counted as aten.convolution",
    "aten.convolution_overrideable.default": "has no kernel on a CPU; counted as aten.convolution",
    "aten._int_mm.default": "takes bytes; counted as aten.mm",
    "aten._scaled_grouped_mm.default": "has no kernel on this CPU; counted as aten._grouped_mm",
    **dict.fromkeys(
        (target for record in RECURRENT_OPS for target in record.targets),
        "counted with its weights, see test_recurrent.py",
    ),
    "transformers.grouped_mm_fallback.default": "of another package; counted as aten._grouped_mm",
}


def test_every_operator_with_macs_has_a_test_call():
    counted = {target for record in BY_NAME.values() if record.macs is not None for target in record.targets}
    assert {*CALLS, *NOT_CALLED} == counted


@pytest.mark.parametrize("target", CALLS)
def test_a_record_counts_the_macs_of_a_call(target):
    arguments, expected = CALLS[target]
    grouped_linear()
    call = overload_of(target)
    given = {a.name: value for a, value in zip(call._schema.arguments, arguments, strict=False)}
    record = BY_TARGET[target]
    read = given[record.operands[0]] if record.variadic else [given.get(name) for name in record.operands]
    shapes = [() if value is None else tuple(value.shape) for value in read]
    attrs = {name: value for name, value in given.items() if name not in record.operands}
    assert record.macs(attrs, shapes, tuple(call(*arguments).shape)) == expected


EINSUMS = {
    "ij,jk": ([(2, 3), (3, 4)], 2 * 3 * 4),
    "ij,jk,kl->il": ([(2, 3), (3, 4), (4, 5)], 2 * 3 * 4 + 2 * 4 * 5),
    "...ij,...jk->...ik": ([(6, 2, 3), (1, 3, 4)], 6 * 2 * 3 * 4),
    "ij,ij->": ([(2, 3), (2, 3)], 2 * 3),
    "ii->i": ([(3, 3)], 0),
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_an_einsum_is_counted_from_left_to_right(equation):
    shapes, expected = EINSUMS[equation]
    result = torch.einsum(equation, [f32(*shape) for shape in shapes])
    assert BY_NAME["einsum"].macs({"equation": equation}, shapes, tuple(result.shape)) == expected


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_count_both_weights_of_every_step(kind, gates):
    model = randomize(Body(lambda m, x: m.layers(x)[0], layers=kind(8, 16, 2, batch_first=True, bidirectional=True)))
    _, lowered = lowered_of(model, f32(2, 5, 8))
    first, second = 2 * gates * 16 * (8 + 16), 2 * gates * 16 * (32 + 16)
    assert lowered.macs[1] == 5 * (first + second)


MATRIX = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))
PRODUCTS = {
    "rnn": (nn.RNN(16, 64), lambda m, y: m.of(y[:, None])[0], 64 * (16 + 64), 64 * (16 + 64)),
    "rnn_cell": (nn.RNNCell(16, 64), lambda m, y: m.of(y), 64 * (16 + 64), 64 * (16 + 64)),
    "tensordot": (None, lambda m, y: torch.tensordot(y, MATRIX, ([1], [1])), 80, 80),
    "multi_dot": (None, lambda m, y: torch.linalg.multi_dot([y, MATRIX.T, MATRIX]), 960, 960),
    "chain_matmul": (None, lambda m, y: torch.chain_matmul(y, MATRIX.T, MATRIX), 960, 960),
    "conv_tbc": (None, lambda m, y: torch.conv_tbc(y[:, None], MATRIX.T[None], y[0, :5]), 6 * 80, 0),
    "cdist": (None, lambda m, y: torch.cdist(y, MATRIX), 80, 0),
    "vecdot": (None, lambda m, y: torch.linalg.vecdot(y, y), 16, 0),
}
"""Name -> a layer, a function of the model and the result of a linear layer for six samples, the multiply-accumulates
of the function and those of them in int8. They are of all samples where the batch is fixed, and else of one."""


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        *(name for name in PRODUCTS if name not in ("rnn_cell", "chain_matmul")),
        of=PRODUCTS,
        reason="counted like a recurrent layer, and like the product of several matrices",
    ),
)
def test_operators_that_multiply_count_in_the_coverage(name):
    layer, call, all_macs, int8_macs = PRODUCTS[name]
    model = randomize(Body(lambda m, x: call(m, m.first(x)), first=nn.Linear(8, 16), of=layer or nn.Identity()))
    coverage = intaglio.quantize(model, [f32(6, 8)], progress=False).coverage
    fixed = 6 if name in ("multi_dot", "chain_matmul", "conv_tbc") else 1
    assert (coverage.macs_total, coverage.macs_int8) == (fixed * 128 + all_macs, fixed * 128 + int8_macs)


@pytest.mark.slow(reason="a model with two islands; operators that multiply are counted above")
def test_products_in_islands_count_in_the_coverage():
    """Products that int8 has no kernel for: a grouped and a bilinear one. A constant matrix for each sample has one."""

    def body(m, x):
        y = m.first(x)
        grouped = torch._grouped_mm(y.bfloat16(), m.experts, m.ends)
        return torch.einsum("nd,ndo->no", y, m.each), grouped, torch.nn.functional.bilinear(y, y, m.pairs)

    model = randomize(Body(body, first=nn.Linear(8, 16)))
    model.each, model.experts, model.pairs = (
        nn.Buffer(f32(6, 16, 3)),
        nn.Buffer(f32(2, 16, 8).bfloat16()),
        nn.Buffer(f32(3, 16, 16)),
    )
    model.ends = nn.Buffer(GROUPS)
    quantized = intaglio.quantize(model, [f32(6, 8)], progress=False)
    floats = {part.operator: part.macs for part in quantized.coverage.floats if part.macs}
    grouped, each, bilinear = 6 * 16 * 8, 6 * 16 * 3, 6 * 3 * 16 * 16
    assert floats == {
        "aten._grouped_mm.default": grouped,
        "aten.bilinear.default": bilinear,
    }
    share = (6 * 8 * 16 + each) / (6 * 8 * 16 + each + grouped + bilinear)
    assert quantized.coverage.macs == share
    quantized.assert_int8(macs=share)
    with pytest.raises(AssertionError):
        quantized.assert_int8(macs=1.0)
