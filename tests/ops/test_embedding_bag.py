"""embedding_bag: its reference is PyTorch's, its kernel its reference; models, what stays in PyTorch; arange."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import intaglio
from intaglio import Recipe, numerics, stages
from intaglio.ir import DType, Graph, Op, TensorType, symbol
from intaglio.ops import check_graph
from intaglio.ops.embedding import MODES
from support.float_loops import LoopGraph, equal
from support.lowering import assert_equal_quantized, kinds, lowered, quantized
from support.matmul_library import BEST_ISA_PARAMS, CPP_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import threads
from support.slow_params import slow_params, slow_params_except

F32, I64, U8 = DType.F32, DType.I64, DType.U8
INT8 = Recipe.of({"type:EmbeddingBag": {"embeddings": "int8"}})
ROWS, WIDTH = 23, 37


def every_bag() -> LoopGraph:
    """All modes over a table of floats and one of quantized values; weights, the other way to give ends, an id that is
    none."""
    count, bags = symbol("n"), symbol("n1")
    net = LoopGraph(ids=TensorType((count,), I64), offsets=TensorType((bags,), I64), weights=TensorType((count,), F32))
    table = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    q_values, scales, zeros = numerics.quantize_table(table)
    tables = [net.constant(table)], [net.constant(q_values, U8), net.constant(scales), net.constant(zeros)]
    for first, *by_row in tables:
        for mode in MODES:
            for ends, padding, weighted in ((False, -1, mode == "sum"), (True, 5, False)):
                name = f"y{len(net.outputs)}"
                given = (first, "ids", "offsets", *by_row, *(("weights",) if weighted else ()))
                attrs = {"mode": mode, "ends": ends, "padding": padding, "weighted": weighted}
                net.types[name] = TensorType((bags - int(ends), WIDTH), F32)
                net.ops.append(Op("embedding_bag", given, (name,), attrs))
                net.outputs.append(name)
    return net


@pytest.fixture(scope="module", params=CPP_ISA_PARAMS)
def bags(request):
    graph = every_bag().lowered()
    return graph, stages.compile(graph, isa=request.param)


def random_rows(count: int, cuts: list[int], seed: int) -> tuple[torch.Tensor, ...]:
    draw = np.random.default_rng(seed)
    offsets = [0, *sorted(cut % (count + 1) for cut in cuts), *[count] * (seed % 2)]
    found = draw.integers(0, ROWS, count), np.array(offsets), draw.standard_normal(count).astype(np.float32)
    return tuple(map(torch.from_numpy, found))


@settings(max_examples=30)
@given(st.integers(0, 30), st.lists(st.integers(0, 100), max_size=6), st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_bag_kernels_match_the_interpreter_and_torch(bags, count, cuts, seed, workers):
    graph, model = bags
    call = random_rows(count, cuts, seed)
    expected = graph(*call)
    with threads(workers):
        found = model(*call)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))
    for op, one in zip(graph.graph.ops, expected, strict=True):
        table = torch.from_numpy(graph.graph.constants[op.inputs[0]])
        if table.dtype is torch.uint8:
            parts = [graph.graph.constants[name] for name in (op.inputs[0], *op.inputs[3:5])]
            table = torch.from_numpy(numerics.dequantize_table(*parts))
        if op.attrs["ends"] and (len(call[1]) < 2 or call[1][-1] != count):  # torch's modes disagree about what is left
            continue
        wanted = F.embedding_bag(
            call[0],
            table,
            call[1],
            mode=op.attrs["mode"],
            include_last_offset=op.attrs["ends"],
            padding_idx=5 if op.attrs["padding"] == 5 else None,
            per_sample_weights=call[2] if op.attrs["weighted"] else None,
        )
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5)


def test_the_comparison_detects_a_missing_bag(bags):
    graph, model = bags
    ids, offsets, weights = random_rows(9, [2, 4], 0)
    assert not torch.equal(model(ids, offsets, weights)[0], graph(ids, offsets - (offsets > 3).long(), weights)[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda ids, offsets: (ids - 30, offsets),
        lambda ids, offsets: (ids + ROWS, offsets),
        lambda ids, offsets: (ids, offsets + 1),
        lambda ids, offsets: (ids, offsets * 100),
        lambda ids, offsets: (ids, offsets * torch.tensor([0, 1, -1])),
    ],
)
def test_ids_and_offsets_that_lead_outside_are_errors(bags, change):
    graph, model = bags
    ids, offsets, weights = random_rows(9, [2, 4], 0)
    for run in (graph, model):
        with pytest.raises(IndexError, match="index out of range in self"):
            run(*change(ids, offsets), weights)
    assert equal(model(ids, offsets, weights)[0], graph(ids, offsets, weights)[0])


# ---- models

CALLS = {
    "two axes": ({"mode": "sum"}, lambda n: (torch.randint(50, (n, 7)),)),
    "weights": ({"mode": "sum"}, lambda n: (torch.randint(50, (n, 7)), None, torch.rand(n, 7))),
    "padding": ({"mode": "mean", "padding_idx": -3}, lambda n: (torch.randint(44, 50, (n, 7)),)),
    "largest": ({"mode": "max", "padding_idx": 0}, lambda n: (torch.randint(3, (n, 7)),)),
}


@pytest.mark.case("frontends C6", "backend 30")
@pytest.mark.parametrize(
    "recipe",
    [*slow_params(None, reason="tables of floats are looked up in the kernels above"), INT8],
    ids=["float", "int8"],
)
@pytest.mark.parametrize("name", slow_params_except("weights", of=CALLS, reason="other arguments of the same kernel"))
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_bag_is_one_operator(name, recipe, isa):
    settings, example = CALLS[name]
    model = randomize(
        Body(lambda m, *x: m.last(m.bag(*x)), bag=nn.EmbeddingBag(50, 21, **settings), last=nn.Linear(21, 3))
    )
    call = example(4)
    reference, graph = quantized(model, *call, recipe=recipe)
    assert not graph.islands
    assert {skip.node for skip in graph.skipped} <= graph.native
    assert kinds(graph)[-4:] == ["embedding_bag", "quantize", "linear", "dequantize"]
    assert graph.operators == 1 + (recipe is INT8)
    assert_equal_quantized(reference, graph, *call)
    torch.testing.assert_close(graph(*call), reference(*call), rtol=1e-5, atol=1e-5)
    assert (graph(*call) - model(*call)).abs().max() < 0.1
    compiled = stages.compile(graph, isa=isa)
    for batch in (call, example(1), example(5)):
        assert equal(compiled(*batch), graph(*batch))


def test_embedding_bags_with_offsets_are_saved_and_loaded(tmp_path):
    model = nn.EmbeddingBag(50, 21, mode="mean", include_last_offset=True, padding_idx=3).eval()
    call = torch.randint(50, (9,)), torch.tensor([0, 2, 2, 9])
    _, graph = quantized(model, *call, recipe=INT8)
    assert kinds(graph) == ["embedding_bag"]
    compiled = stages.compile(graph)
    compiled.save(tmp_path / "m")
    loaded = intaglio.load(tmp_path / "m")
    for batch in (call, (torch.randint(50, (9,)), torch.tensor([0, 0, 4, 9]))):
        assert equal(loaded(*batch), graph(*batch))
        torch.testing.assert_close(graph(*batch), model(*batch), atol=0.05, rtol=0)


@pytest.mark.slow(reason="quantizes a model for the reason of a float part")
def test_bags_of_small_integers_stay_in_pytorch_and_say_why():
    model = randomize(Body(lambda m, x: m.last(m.bag(x)), bag=nn.EmbeddingBag(50, 8), last=nn.Linear(8, 3)))
    x = torch.randint(50, (4, 7), dtype=torch.int32)
    _, graph = quantized(model, x)
    assert any("the kernel takes i64" in skip.reason for skip in graph.skipped)
    assert equal(stages.compile(graph)(x), graph(x))


# ---- ranges of whole numbers


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_ranges_of_free_length_are_made_by_the_program(isa):
    def body(m, x):
        places = torch.arange(2, x.shape[1] + 2)
        return m.last(m.place(places) + x), torch.arange(3, -x.shape[1], -2)

    model = randomize(Body(body, place=nn.Embedding(40, 6), last=nn.Linear(6, 6)))
    x = torch.randn(2, 9, 6)
    _, graph = lowered(stages.capture(model, x, dynamic_shapes=(({0: Dim.AUTO, 1: Dim("t", min=4, max=30)},),)), x)
    assert not graph.islands
    compiled = stages.compile(graph, isa=isa)
    for length in (4, 9, 30):
        y = torch.randn(3, length, 6)
        assert all(equal(*pair) for pair in zip(compiled(y), graph(y), strict=True))
        assert torch.equal(compiled(y)[1], model(y)[1])


# ---- files


def changed(graph: Graph, types: dict[str, TensorType] | None = None, **fields) -> Graph:
    (op,) = graph.ops
    again = Op(op.kind, **{"inputs": op.inputs, "outputs": op.outputs, "attrs": dict(op.attrs)} | fields)
    return Graph(graph.inputs, graph.outputs, {**graph.types, **(types or {})}, (again,), graph.constants)


def test_bag_graphs_with_invalid_operands_are_refused():
    call = torch.randint(50, (9,)), torch.tensor([0, 2, 5])
    graph = quantized(nn.EmbeddingBag(50, 21).eval(), *call, recipe=INT8)[1].graph
    check_graph(graph)
    (op,) = graph.ops
    table, ids, offsets, scales, zeros = op.inputs
    for bad in (
        changed(graph, attrs={**op.attrs, "mode": "median"}),
        changed(graph, attrs={**op.attrs, "ends": 2}),
        changed(graph, attrs={**op.attrs, "weighted": True}),
        changed(graph, inputs=(table, ids, offsets, scales)),
        changed(graph, inputs=(table, offsets, ids, scales, ids)),
        changed(graph, types={scales: TensorType((49,), F32)}),
        changed(graph, types={ids: TensorType((9,), F32)}),
        changed(graph, types={op.output: TensorType((3, 22), F32)}),
        Graph(
            (*graph.inputs, zeros),
            graph.outputs,
            graph.types,
            graph.ops,
            {name: array for name, array in graph.constants.items() if name != zeros},
        ),
    ):
        with pytest.raises(ValueError, match=r"embedding_bag|shorter|longer"):
            check_graph(bad)
