"""Tables of embeddings as quantized values: torch's parameters, the Q/DQ model, the loops that read rows; recipes,
files."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

import intaglio
from intaglio import Recipe, numerics, stages
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.ir import DType, Graph, Op, TensorType, symbol
from intaglio.ops import check_graph
from support.float_loops import LoopGraph, equal
from support.lowering import assert_equal_quantized, kinds, quantized
from support.matmul_library import BEST_ISA_PARAMS, CPP_ISA_PARAMS
from support.nets import Body, randomize

INT8 = Recipe.of({"type:Embedding*": {"embeddings": "int8"}})
F32, I64, U8 = DType.F32, DType.I64, DType.U8


# ---- the law


def torchs(table: torch.Tensor) -> torch.Tensor:
    """The table under parameters of `torch.per_channel_affine_float_qparams`."""
    observer = torch.ao.quantization.PerChannelMinMaxObserver(
        ch_axis=0, dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams
    )
    observer(table)
    return torch.quantize_per_channel(table, *observer.calculate_qparams(), 0, torch.quint8)


@pytest.mark.case("frontends C6")
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 40)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    )
)
def test_quantized_values_and_parameters_match_torch(table):
    q_values, scales, zeros = numerics.quantize_table(table)
    expected = torchs(torch.from_numpy(table))
    assert np.array_equal(scales, expected.q_per_channel_scales().numpy())
    assert np.array_equal(zeros, expected.q_per_channel_zero_points().numpy())
    assert np.array_equal(q_values, expected.int_repr().numpy())
    real = numerics.dequantize_table(q_values, scales, zeros)
    assert np.array_equal(real, expected.dequantize().numpy())


def test_the_comparison_with_torch_detects_a_range_that_includes_zero():
    table = np.array([[1.0, 2.0, 1.5]], np.float32)
    wide = numerics.quantize_table(np.append(table, [[0.0]], 1).astype(np.float32))
    assert not np.array_equal(wide[1], torchs(torch.from_numpy(table)).q_per_channel_scales().numpy())


def test_constant_embedding_rows_have_scale_one():
    q_values, scales, zeros = numerics.quantize_table(np.full((2, 3), [[0.25], [-3.0]], np.float32))
    assert scales.tolist() == [1, 1]
    assert zeros.tolist() == [-0.25, 3]
    assert not q_values.any()


# ---- models


def two(m, x, ids):
    """Two tables, one of them read twice; a norm of their sum."""
    y = m.norm(m.words(x) + m.places(ids) + m.words(ids))
    return m.last(y), y


@pytest.fixture(scope="module")
def sums():
    model = randomize(
        Body(
            two,
            words=nn.Embedding(50, 35, padding_idx=0),
            places=nn.Embedding(9, 35),
            norm=nn.LayerNorm(35),
            last=nn.Linear(35, 5),
        )
    )
    x, ids = torch.randint(50, (3, 7)), torch.arange(7).repeat(3, 1)
    return (x, ids), model, *quantized(model, x, ids, recipe=INT8)


def test_quantized_embedding_tables_stay_uint8_in_reference_and_loop(sums):
    given, model, reference, lowered = sums
    assert not lowered.islands
    assert {skip.node for skip in lowered.skipped} <= lowered.native
    assert lowered.operators == 4
    assert kinds(lowered) == ["loop", "linear", "dequantize"]
    held = {name: str(kind) for name, kind in lowered.graph.types.items() if "levels" in name}
    assert held == {"words_weight_levels": "u8[50, 35]", "places_weight_levels": "u8[9, 35]"}
    assert not any(kind.shape == (50, 35) and kind.dtype is F32 for kind in lowered.graph.types.values())
    names = [str(node.target) for node in reference.module.graph.nodes]
    assert names.count("quantized_decomposed.dequantize_per_channel.default") == 3 + 2  # a weight and a bias too
    assert_equal_quantized(reference, lowered, *given)
    for found, expected, real in zip(lowered(*given), reference(*given), model(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert (found - real).abs().max() < 0.05


@pytest.mark.case("frontends C6")
def test_an_embedding_is_torchs_quantized_one():
    table = nn.Embedding(50, 19)
    x = torch.randint(50, (4, 6))
    table.qconfig = torch.ao.quantization.float_qparams_weight_only_qconfig
    expected = torch.ao.nn.quantized.Embedding.from_float(table)(x)
    _, lowered = quantized(table.eval(), x, recipe=INT8)
    assert kinds(lowered) == ["loop"]
    assert torch.equal(lowered(x), torch.from_numpy(torchs(table.weight.detach()).dequantize().numpy())[x])
    torch.testing.assert_close(lowered(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(reason="compiles and saves a model; kernels of embeddings are compared below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_embedding_rows_are_bit_identical_after_saving_and_loading(isa, sums, tmp_path):
    given, _, _, lowered = sums
    model = stages.compile(lowered, isa=isa)
    model.save(tmp_path / "m")
    for one in (model, intaglio.load(tmp_path / "m", isa=isa)):
        for batch in (given, [x[:1] for x in given], [x[:, :1] for x in given], [x[:0] for x in given]):
            assert all(equal(*pair) for pair in zip(one(*batch), lowered(*batch), strict=True))


@pytest.mark.parametrize("outside", [-1, 50, 2**40])
def test_an_id_outside_the_table_is_an_error_as_in_torch(sums, outside):
    (x, ids), _, _, lowered = sums
    model, wrong = stages.compile(lowered), x.clone()
    wrong[2, 6] = outside
    for run in (model, lowered):
        with pytest.raises(IndexError, match="index out of range in self"):
            run(wrong, ids)


WIDTHS = (1, 7, 16, 37, 64)


def every_width() -> LoopGraph:
    net = LoopGraph(ids=TensorType((symbol("n"), 3), I64))
    draw = np.random.default_rng(0)
    for width in WIDTHS:
        table = (draw.standard_normal((23, width)) * np.exp(draw.uniform(-20, 20, (23, 1)))).astype(np.float32)
        q_values, scales, zeros = numerics.quantize_table(table)
        names = [net.constant(q_values, U8), net.constant(scales), net.constant(zeros)]

        def write(body, names=names):
            ids = body("unsqueeze", "ids", axis=2)
            rows = body("gather_levels", names[0], ids, *names[1:])
            return rows, body("sum", rows, axis=2)

        net.add(write)
    return net


@pytest.fixture(scope="module", params=CPP_ISA_PARAMS)
def widths(request):
    lowered = every_width().lowered()
    return lowered, stages.compile(lowered, isa=request.param)


@settings(max_examples=25)
@given(st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_embedding_kernels_match_the_interpreter_for_any_width(widths, batch, seed):
    lowered, model = widths
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, 23, (batch, 3)))
    assert all(equal(*pair) for pair in zip(model(ids), lowered(ids), strict=True))


# ---- recipes, what stays in float, files


def test_embedding_tables_stay_in_float_unless_the_recipe_quantizes_them(sums):
    (x, ids), model, *_ = sums
    _, lowered = quantized(model, x, ids)
    assert "gather_levels" not in lowered.text()
    some = Recipe.of({"words": {"embeddings": "int8"}, "places": None})
    assert quantized(model, x, ids, recipe=some)[1].text().count("gather_levels") == 2
    with pytest.raises(SelectorError, match="embeddings = 'u4'"):
        Recipe.of({"words": {"embeddings": "u4"}})


def test_a_tied_layer_keeps_its_own_integers():
    """The table of a language model's words is its last layer's weight."""
    last = nn.Linear(16, 30, bias=False)
    model = randomize(Body(lambda m, x: m.last(m.words(x)), words=nn.Embedding(30, 16), last=last))
    model.last.weight = model.words.weight
    x = torch.randint(30, (2, 5))
    reference, lowered = quantized(model, x, recipe=INT8)
    assert {kind.dtype for kind in lowered.graph.types.values() if kind.shape == (30, 16)} == {U8, DType.S8}
    assert_equal_quantized(reference, lowered, x)


def test_a_table_that_is_not_finite_stays_in_float_and_says_why():
    model = Body(lambda m, x: m.last(m.words(x)), words=nn.Embedding(5, 4), last=nn.Linear(4, 4)).eval()
    model.words.weight.data[3, 1] = torch.inf
    _, lowered = quantized(model, torch.tensor([[0, 1, 2]]), recipe=INT8)
    assert "gather_levels" not in lowered.text()
    assert any("table of words: float" in note and "not finite" in note for note in lowered.model_info.notes)
    with pytest.raises(UnsupportedError, match="nothing in it can be quantized"):
        stages.prepare(stages.capture(model.words, torch.tensor([0, 1])), stages.Quantizer(INT8))


def respelled(graph: Graph, **changes) -> Graph:
    """The loop's gather with other operands."""
    (loop,) = [op for op in graph.ops if op.kind == "loop"]
    steps = [
        Op(op.kind, changes.get("inputs", op.inputs), op.outputs) if op.kind == "gather_levels" else op
        for op in loop.body.ops
    ]
    types = {**loop.body.types, **changes.get("types", {})}
    body = Graph(loop.body.inputs, loop.body.outputs, types, tuple(steps), loop.body.constants)
    return graph.replace(
        ops=tuple(Op("loop", op.inputs, op.outputs, {}, body) if op is loop else op for op in graph.ops)
    )


def test_embedding_graphs_with_invalid_operands_are_refused():
    _, lowered = quantized(nn.Embedding(50, 19).eval(), torch.tensor([[1, 2]]), recipe=INT8)
    graph = lowered.graph
    check_graph(graph)
    (loop,) = graph.ops
    (gather,) = [op for op in loop.body.ops if op.kind == "gather_levels"]
    table, ids, scales, zeros = gather.inputs
    free = Graph(
        (*graph.inputs, table),
        graph.outputs,
        graph.types,
        graph.ops,
        {name: array for name, array in graph.constants.items() if name != table},
    )
    for bad in (
        respelled(graph, inputs=(table, ids, scales)),
        respelled(graph, inputs=(scales, ids, scales, zeros)),
        respelled(graph, types={scales: TensorType((49,), F32)}),
        free,
    ):
        with pytest.raises(ValueError, match=r"loop|gather_levels|table|ends"):
            check_graph(bad)
