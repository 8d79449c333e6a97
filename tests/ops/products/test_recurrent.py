"""LSTM, GRU and plain RNN: law against torch, kernels against the law, flags, states, refusals, files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import intaglio
from intaglio import stages
from intaglio.errors import CaptureError
from intaglio.fxgraph.nodes import operator
from intaglio.ir import DType, Op, QParams, TensorType, symbol
from intaglio.ops import check_graph
from intaglio.ops.dynamic_quant import per_token_qparams, quantize_dynamic
from intaglio.ops.products.recurrent import GATE_COUNT, RECURRENT, recurrent_reference, states
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing.capture_check import free_symbols
from support.lowering import kinds, quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body, randomize
from support.programs import threads
from support.side_by_side import SideBySide
from support.slow_params import slow_params, slow_params_except

DYNAMIC = Recipe.named("int8_dynamic")
RECIPES = {"static": None, "dynamic": DYNAMIC}
MODULES = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": partial(nn.RNN, nonlinearity="relu"),
}
CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": partial(nn.RNNCell, nonlinearity="relu"),
}
FLAGS: Mapping[str, dict[str, Any]] = {
    "one layer": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "two ways": {"bidirectional": True},
    "deep": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "three layers": {"num_layers": 3, "bias": False},
}
BOUND = 0.02
"""Distance of results from the float model's, which lie in -1..1; measured: 0.007 at most."""


def assert_bits(compiled, lowered, *x: torch.Tensor) -> None:
    """Name the results that differ; NaN equals NaN."""
    pairs = zip(pytree.tree_leaves_with_path(compiled(*x)), tensors(lowered(*x)), strict=True)
    assert not [pytree.keystr(path) for (path, a), b in pairs if not torch.equal(a.nan_to_num(7), b.nan_to_num(7))]


def everywhere(lowered, *batches: tuple[torch.Tensor, ...], isas: Sequence[str] = RUNNABLE_ISAS[:1]) -> None:
    """The best instruction set, or others; fewer, as many and more rows than threads."""
    for isa in isas:
        compiled = stages.compile(lowered, isa=isa)
        for batch in batches:
            for count in (1, 3):
                with threads(count):
                    assert_bits(compiled, lowered, *batch)


FEW_KINDS = slow_params_except("lstm", "rnn_tanh", of=RECURRENT, reason="each kind is tested with states and in cells")


# ---- the law


def constants(draw: np.random.Generator, kind: str, inputs: int, hidden: int, layers: int, directions: int):
    """Operands of all places: weights of float, and as quantized values with their scales."""
    gates = GATE_COUNT[kind] * hidden
    found, real = [], []
    for place in range(layers * directions):
        width = inputs if place < directions else directions * hidden
        q_values = [draw.integers(-127, 128, (gates, size)).astype(np.int8) for size in (width, hidden)]
        scales = draw.uniform(0.5, 1.5, (2, gates)).astype(np.float32) / np.float32(127 * np.sqrt(hidden))
        biases = draw.normal(size=(2, gates)).astype(np.float32)
        found += [*q_values, *scales, *biases]
        real += [*[w * s[:, None] for w, s in zip(q_values, scales, strict=True)], *biases]
    return found, [torch.from_numpy(array.astype(np.float64)) for array in real]


@given(
    kind=st.sampled_from(RECURRENT),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20)),
    hidden=st.integers(1, 40),
    layers=st.integers(1, 2),
    directions=st.integers(1, 2),
    batch_first=st.booleans(),
    rows=st.booleans(),
    start=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_recurrent_layer_matches_torch_except_for_rounded_states(
    kind, sizes, hidden, layers, directions, batch_first, rows, start, seed
):
    """Of the same integers: in float64, with states that are not rounded."""
    draw, (steps, batch, inputs) = np.random.default_rng(seed), sizes
    shape = (batch, steps, inputs) if batch_first else (steps, batch, inputs)
    x = draw.normal(size=shape).astype(np.float32)
    q_values, scales = quantize_dynamic(x, "token")
    q = per_token_qparams("scales")
    if not rows:
        q, q_values = QParams((0.02,), (100,), 0, 255), draw.integers(0, 256, shape).astype(np.uint8)
    held, real = constants(draw, kind, inputs, hidden, layers, directions)
    given = [draw.normal(size=(layers * directions, batch, hidden)).astype(np.float32) for _ in range(states(kind))]
    attrs = {"layers": layers, "directions": directions, "batch_first": batch_first, "cell": False, "rows": rows}
    arrays = [q_values, *([scales] if rows else []), *held, *(given if start else [])]
    kind_of_x = TensorType(shape, DType.U8, q)
    found = recurrent_reference(Op(kind, (), ("y",), attrs), arrays, [kind_of_x], kind_of_x)
    exact = (q_values.astype(np.float64) - q.zero) * (scales if rows else 0.02)
    first = [torch.from_numpy((s if start else 0 * s).astype(np.float64)) for s in given]
    call = getattr(torch.ops.aten, kind).input
    expected = call(
        torch.from_numpy(exact),
        first if kind == "lstm" else first[0],
        real,
        True,
        layers,
        0.0,
        False,
        directions == 2,
        batch_first,
    )
    for a, b in zip(found, expected, strict=True):
        largest = max(1, b.abs().max()) if kind == "rnn_relu" else 1  # the others are at most 1, or as the state was
        np.testing.assert_allclose(a, b.numpy(), atol=0.05 * (1 + start) * largest)


def test_the_comparison_with_torch_detects_swapped_gates():
    draw = np.random.default_rng(0)
    held, _ = constants(draw, "lstm", 5, 6, 1, 1)
    q_values = draw.integers(0, 256, (4, 2, 5)).astype(np.uint8)
    attrs = {"layers": 1, "directions": 1, "batch_first": False, "cell": False, "rows": False}
    kind = TensorType(q_values.shape, DType.U8, QParams((0.02,), (100,), 0, 255))
    op = Op("lstm", (), ("y",), attrs)
    swapped = [np.concatenate([array[6:12], array[:6], array[12:]]) for array in held]
    y, other = (recurrent_reference(op, [q_values, *parts], [kind], kind)[0] for parts in (held, swapped))
    assert np.abs(y - other).max() > 0.05


# ---- models


@pytest.mark.case("backend 30")
@pytest.mark.parametrize("mode", RECIPES)
@pytest.mark.parametrize(
    "kind",
    slow_params_except(
        "lstm", of=RECURRENT, reason="hidden sizes, free steps and cells of both kinds are tested below"
    ),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_recurrent_layers_support_all_flags(mode, kind, isa, subtests):
    """One integer operator each, close to the float model, the bits of its reference everywhere."""
    torch.manual_seed(0)
    x = torch.randn(7, 5, 11)
    model = SideBySide({name: (MODULES[kind](11, 21, **flags).eval(), [x]) for name, flags in FLAGS.items()})
    reference, lowered = quantized(model, x, recipe=RECIPES[mode])
    assert [k for k in kinds(lowered) if k in RECURRENT] == [kind] * len(FLAGS)
    assert not lowered.islands
    assert not lowered.skipped
    assert lowered.macs[0] == lowered.macs[1] > 0
    integers, floats, simulated = lowered(x), model(x), reference(x)
    for name in FLAGS:
        with subtests.test(flags=name):
            for a, b in zip(tensors(integers[name]), tensors(floats[name]), strict=True):
                assert (a - b).abs().max() < BOUND
            pairs = zip(tensors(simulated[name]), tensors(integers[name]), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
    everywhere(lowered, (x,), isas=[isa])


@pytest.mark.slow(reason="four layers of other sizes")
@pytest.mark.parametrize(
    "kind", slow_params_except("gru", of=RECURRENT, reason="every flag of an LSTM is tested above")
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_hidden_sizes_that_fill_vectors_and_that_do_not(kind, isa):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 3)
    layers = {size: MODULES[kind](3, size, bidirectional=True, num_layers=2).eval() for size in (1, 16, 33, 80)}
    model = SideBySide({str(size): (layer, [x]) for size, layer in layers.items()})
    _, lowered = quantized(model, x, recipe=DYNAMIC)
    everywhere(lowered, (x,), isas=[isa])


def with_free_steps(lowered, steps: int):
    """The same with a symbol in place of that size; torch.export itself fixes how many steps an LSTM has."""
    free = symbol("t")

    def freed(kind: TensorType) -> TensorType:
        return replace(kind, shape=tuple(free if size == steps else size for size in kind.shape))

    graph, signature = lowered.graph, lowered.signature
    types = {name: kind if name in graph.constants else freed(kind) for name, kind in graph.types.items()}
    inputs = tuple(replace(entry, type=freed(entry.type)) for entry in signature.inputs)
    return replace(lowered, graph=replace(graph, types=types), signature=replace(signature, inputs=inputs))


@pytest.mark.parametrize(
    "mode", slow_params_except("static", of=RECIPES, reason="scales made per call run with every flag above")
)
@pytest.mark.parametrize("kind", FEW_KINDS)
def test_steps_and_batch_are_free(mode, kind):
    torch.manual_seed(0)
    model, x = MODULES[kind](8, 12, num_layers=2, bidirectional=True, batch_first=True).eval(), torch.randn(4, 9, 8)
    lowered = with_free_steps(quantized(model, x, recipe=RECIPES[mode])[1], 9)
    everywhere(lowered, *[(torch.randn(b, t, 8),) for b, t in ((1, 1), (2, 30), (17, 3), (0, 4))])


@pytest.mark.parametrize(
    "kind", slow_params_except("lstm", "rnn_relu", of=RECURRENT, reason="each kind is tested with states in cells")
)
def test_states_may_be_given_and_be_large(kind):
    """Beyond what a hidden state can become, laid in any order."""
    torch.manual_seed(0)
    layer = MODULES[kind](6, 10, num_layers=2).eval()
    body = (lambda m, x, h, c: m.layer(x, (h, c))) if kind == "lstm" else (lambda m, x, h: m.layer(x, h))
    x, given = torch.randn(5, 3, 6), [torch.randn(2, 3, 10) * 5 for _ in range(states(kind))]
    model = Body(body, layer=layer).eval()
    captured = stages.capture(model, (x, *given), dynamic_shapes=(({1: Dim.AUTO},) * (1 + len(given)),))
    lowered = stages.requantize(stages.convert(prepare(captured, Quantizer(DYNAMIC))))
    assert not lowered.islands
    for a, b in zip(tensors(lowered(x, *given)), tensors(model(x, *given)), strict=True):
        assert (a - b).abs().max() < 5 * BOUND
    turned = [state.transpose(0, 2).contiguous().transpose(0, 2) for state in given]
    everywhere(lowered, (x, *given), (x, *turned))


MODES_OF_CELLS = [(kind, list(RECIPES)[place % 2]) for place, kind in enumerate(RECURRENT)]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *MODES_OF_CELLS,
        *slow_params(
            *((kind, mode) for kind in RECURRENT for mode in RECIPES if (kind, mode) not in MODES_OF_CELLS),
            reason="every kind runs with one recipe, and every recipe with two kinds",
        ),
    ],
)
def test_recurrent_cells_with_and_without_states_run_in_int8(mode, kind):
    """With states of their own and with zeros; their results are read by a layer."""
    torch.manual_seed(0)

    def body(m, x, h):
        once = m.cell(x, (h, h)) if kind == "lstm" else m.cell(x, h)
        hidden = once[0] if kind == "lstm" else once
        return m.last(hidden), m.plain(x)

    model = Body(body, cell=CELLS[kind](6, 10), plain=CELLS[kind](6, 5, bias=False), last=nn.Linear(10, 3)).eval()
    x, h = torch.randn(4, 6), torch.randn(4, 10)
    _, lowered = quantized(model, x, h, recipe=RECIPES[mode])
    assert kinds(lowered).count(kind) == 2
    assert not lowered.islands
    for a, b in zip(tensors(lowered(x, h)), tensors(model(x, h)), strict=True):
        assert (a - b).abs().max() < 2 * BOUND
    everywhere(lowered, (x, h), (x[:1], h[:1]))


@pytest.mark.parametrize("kind", slow_params_except("lstm", of=RECURRENT, reason="one loop over steps for all kinds"))
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_results_depend_on_no_other_entry_of_the_batch(kind, isa):
    torch.manual_seed(0)
    model = MODULES[kind](6, 10, batch_first=True, bidirectional=True, num_layers=2).eval()
    x = torch.randn(4, 5, 6) * torch.tensor([1e-3, 1, 30, 1e4]).reshape(4, 1, 1)
    quick = intaglio.quantize(model, x, recipe="int8_dynamic", progress=False)
    for entry in range(4):
        assert torch.equal(quick(x)[0][entry], quick(x[entry : entry + 1])[0][0])
    x[2, 1] = torch.nan
    strange = quick(x)[0]
    assert strange[2].isnan().all()
    assert strange[[0, 1, 3]].isfinite().all()
    assert_bits(
        stages.compile(
            stages.requantize(stages.convert(prepare(stages.capture(model, x), Quantizer(DYNAMIC)))), isa=isa
        ),
        quick,
        x,
    )


def test_a_classifier_of_sequences_is_one_program():
    """Both ends of an LSTM in quantized values, its last state read by a linear layer."""

    def body(m, x):
        y, _ = m.lstm(torch.relu(m.first(x)))
        return m.last(y.mean(1))

    model = randomize(Body(body, first=nn.Linear(6, 12), lstm=nn.LSTM(12, 16, batch_first=True), last=nn.Linear(16, 3)))
    x = torch.randn(8, 7, 6)
    _, lowered = quantized(model, x)
    assert kinds(lowered)[:3] == ["quantize", "linear", "requantize"]
    everywhere(lowered, (x,))


# ---- what stays in float


def test_projected_states_stay_in_float_and_say_why():
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 10, proj_size=4)).eval(), torch.randn(5, 3, 6)
    _, lowered = quantized(model, x, recipe=DYNAMIC)
    assert any("proj_size" in skip.reason for skip in lowered.skipped)
    for a, b in zip(tensors(stages.compile(lowered)(x)), tensors(model(x)), strict=True):
        assert (a - b).abs().max() < BOUND


@pytest.mark.case("backend 30")
def test_packed_sequences_are_refused_and_their_layers_can_be_quantized():
    """torch.export cannot trace a packed sequence; the float model around a quantized layer is right."""

    def body(m, x):
        packed = pack_padded_sequence(m.first(x), torch.tensor([5, 3, 2]), batch_first=True)
        return pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0]

    model = randomize(Body(body, first=nn.Linear(6, 8), lstm=nn.LSTM(8, 10, batch_first=True)))
    x = torch.randn(3, 5, 6)
    with pytest.raises(CaptureError, match="cannot trace the model") as error:
        intaglio.quantize(model, x, recipe="int8_dynamic", progress=False)
    assert "quantize the submodules" in error.value.remedy
    expected = model(x)
    model.first = intaglio.quantize(model.first, x, recipe="int8_dynamic", progress=False)
    torch.testing.assert_close(model(x), expected, atol=5 * BOUND, rtol=0)


# ---- recipe, parameters, files


def test_parameters_of_weights_are_kept():
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 10).eval(), torch.randn(5, 3, 6)
    captured = stages.capture(model, x)
    reference, lowered = quantized(model, x)
    assert {name for name in reference.parameters.entries if name.startswith("weight")} == {
        "weight_ih_l0",
        "weight_hh_l0",
    }
    again = stages.requantize(stages.convert(prepare(captured), reference.parameters))
    assert all(torch.equal(a, b) for a, b in zip(tensors(again(x)), tensors(lowered(x)), strict=True))


@pytest.mark.parametrize("mode", slow_params_except("dynamic", of=RECIPES, reason="the recipe with fewer operators"))
def test_a_recurrent_model_is_saved_and_loaded(tmp_path, mode):
    torch.manual_seed(0)
    model, x = nn.GRU(6, 10, num_layers=2, bidirectional=True).eval(), torch.randn(5, 3, 6)
    quick = stages.compile(quantized(model, x, recipe=RECIPES[mode])[1])
    quick.save(tmp_path / "gru.intaglio")
    loaded = intaglio.load(tmp_path / "gru.intaglio")
    assert all(torch.equal(a, b) for a, b in zip(tensors(loaded(x)), tensors(quick(x)), strict=True))


def changed(graph, **fields):
    """The recurrent operator with other inputs or attributes."""
    ops = [
        Op(op.kind, **{"inputs": op.inputs, "outputs": op.outputs, "attrs": dict(op.attrs)} | fields)
        if op.kind == "lstm"
        else op
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops))


def test_recurrent_graphs_with_invalid_operands_are_refused():
    _, lowered = quantized(nn.LSTM(6, 10).eval(), torch.randn(5, 3, 6), recipe=DYNAMIC)
    graph = lowered.graph
    check_graph(graph)
    op = next(op for op in graph.ops if op.kind == "lstm")
    x, scales, w_x, w_h, *rest = op.inputs
    wide = {name: TensorType((1000, 10), DType.S8) for name in (w_h,)}
    for bad in (
        changed(graph, attrs={**op.attrs, "layers": 2}),
        changed(graph, attrs={**op.attrs, "directions": 3}),
        changed(graph, attrs={**op.attrs, "rows": 1}),
        changed(graph, attrs={**op.attrs, "cell": True}),
        changed(graph, inputs=(x, scales, w_h, w_x, *rest)),
        changed(graph, inputs=(x, scales, w_x, w_h, *rest[1:])),
        changed(graph, inputs=(*op.inputs, graph.inputs[0], graph.inputs[0])),
        changed(graph, inputs=(x, graph.inputs[0], w_x, w_h, *rest)),
        replace(graph, types={**graph.types, **wide}),
    ):
        with pytest.raises((ValueError, IndexError)):
            check_graph(bad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_time_steps_are_dynamic_if_the_caller_says_so(kind):
    """torch.export alone runs every step, and takes their number for a constant."""
    model = Body(lambda m, x: m.layer(x)[0], layer=kind(4, 6, batch_first=True)).eval()
    captured = stages.capture(model, torch.randn(2, 3, 4), dynamic_shapes=(({0: Dim.AUTO, 1: Dim.AUTO},),))
    assert len(free_symbols(captured)) == 2
    x = torch.randn(3, 7, 4)
    torch.testing.assert_close(captured(x), model(x))
    whole = f"aten.{'rnn_tanh' if kind is nn.RNN else kind.__name__.lower()}.input"
    assert [operator(node) for node in captured.module.graph.nodes].count(whole) == 1
