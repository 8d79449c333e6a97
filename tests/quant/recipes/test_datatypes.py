"""Datatypes other than u8 and s8: rounding, groups, files, and what no kernel computes with."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn

import intaglio
from intaglio import numerics, stages
from intaglio.errors import SelectorError, UnsupportedError
from intaglio.ir import DType, Packing
from intaglio.quant.qdq.float8 import float8
from intaglio.quant.qdq.weight_grid import weight_grid, weight_scales
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype
from intaglio.quant.recipes.recipe import Recipe, Setting
from intaglio.runtime.saved.bit_packing import pack, pack_bits, unpack, unpack_bits
from support import nets
from support.lowering import assert_equal_quantized, captured_net, lowered, quantized, sqnr
from support.nets import Body
from support.processor import HAS_AVX512
from support.slow_params import slow_params_except

MODEL, CAPTURED = captured_net(nets.Residual)
X = nets.example(MODEL, 4)
FEW = [
    {"weights_dtype": "s4"},
    {"weights_dtype": "s4", "weights": "group:32"},
    {"weights_dtype": "s4", "weights": "tensor"},
    {"weights_dtype": "s3", "weights": "group:7"},
    {"weights_dtype": "s2"},
]
WIDE = [
    {"activations_dtype": "s16"},
    {"activations_dtype": "f8e4m3", "weights_dtype": "f8e4m3"},
    {"activations_dtype": "f8e5m2"},
    {"weights_dtype": "f8e5m2"},
]


def all_of(setting: dict) -> Recipe:
    return Recipe.of({"*": setting})


def file_of(model, path) -> dict[str, np.ndarray]:
    """Arrays of a saved file's weights."""
    import zipfile

    import safetensors.numpy

    model.save(path, library=False)
    with zipfile.ZipFile(path) as archive:
        return safetensors.numpy.load(archive.read("weights.safetensors"))


# ---- weights of few bits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", slow_params_except(FEW[0], FEW[4], of=FEW, reason="other numbers of bits in the same layers")
)
def test_weights_of_few_bits_run_as_int8_with_the_interpreter_s_bits(setting):
    reference, graph = lowered(CAPTURED, X, recipe=all_of(setting))
    assert not graph.islands
    assert_equal_quantized(reference, graph, X)
    model = stages.compile(graph)
    assert torch.equal(model(X), graph(X))
    assert any(
        line.startswith("weights: ") and "products are those of int8 weights" in line for line in reference.notes
    )


@pytest.mark.case("calibration 45")
@pytest.mark.parametrize(
    "setting", slow_params_except(FEW[2], FEW[3], of=FEW, reason="other numbers of bits in the same file")
)
def test_a_file_holds_few_bits_and_gives_the_same_integers_back(setting, tmp_path):
    """Case 45: the graph that is read is the graph that was saved, element for element."""
    _, graph = lowered(CAPTURED, X, recipe=all_of(setting))
    model = stages.compile(graph)
    stored = file_of(model, tmp_path / "model.intaglio")
    loaded = intaglio.load(tmp_path / "model.intaglio")
    weights = [name for name, kind in graph.graph.types.items() if kind.packing is not None]
    assert len(weights) == 7
    for name in weights:
        array, bits = graph.graph.constants[name], graph.graph.types[name].packing.bits
        np.testing.assert_array_equal(loaded.graph.constants[name], array)
        assert name not in stored
        assert stored[f"{name} levels"].nbytes == -(-array.size * bits // 8)
    assert torch.equal(loaded(X), model(X))
    assert loaded.text("integer") == model.text("integer")


@pytest.mark.case("calibration 45")
@given(st.integers(1, 7), st.integers(0, 41), st.data())
def test_packing_pads_odd_counts_and_unpacking_removes_the_padding(bits, count, data):
    """Case 45: numbers of any width, in any count."""
    values = data.draw(arrays.arrays(np.uint8, count, elements=st.integers(0, 2**bits - 1)))
    packed = pack_bits(values, bits)
    assert len(packed) == -(-count * bits // 8)
    np.testing.assert_array_equal(unpack_bits(packed, bits, count), values)


@pytest.mark.case("calibration 45")
@given(st.integers(1, 3), st.integers(1, 23), st.sampled_from([0, 1, 5, 8, 40]), st.data())
def test_groups_survive_packing(outputs, inputs, group, data):
    """Case 45: quantized values times multiples, with groups that do not divide the inputs."""
    q_values = data.draw(arrays.arrays(np.int8, (outputs, inputs), elements=st.integers(-8, 7)))
    if group:
        each = data.draw(arrays.arrays(np.int8, (outputs, -(-inputs // group)), elements=st.integers(1, 15)))
        q_values = q_values * np.repeat(each, group, axis=1)[:, :inputs]
    packing = Packing(4, -8, group)
    packed = pack(q_values, packing)
    assert packed is not None
    np.testing.assert_array_equal(unpack(*packed, packing, q_values.shape), q_values)


@given(st.integers(1, 3), st.integers(1, 23), st.sampled_from([1, 5, 8, 40]), st.integers(1, 7), st.data())
def test_groups_with_smallest_values_of_their_own_survive_packing(outputs, inputs, group, bits, data):
    above = data.draw(arrays.arrays(np.int8, (outputs, inputs), elements=st.integers(0, 2**bits - 1)))
    lows = data.draw(arrays.arrays(np.int8, (outputs, -(-inputs // group)), elements=st.integers(-128, 128 - 2**bits)))
    q_values = above + np.repeat(lows, group, axis=1)[:, :inputs]
    packing = Packing(bits, 0, lows=group)
    packed = pack(q_values, packing)
    assert packed is not None
    assert len(packed[1]) == lows.size
    np.testing.assert_array_equal(unpack(*packed, packing, q_values.shape), q_values)


def test_values_that_do_not_fit_the_packing_are_not_packed():
    """A state dict may put any quantized values into a model."""
    assert pack(np.array([[9]], np.int8), Packing(4, -8)) is None
    assert pack(np.array([[7, 11]], np.int8), Packing(2, -2, 2)) is None
    assert pack(np.array([[-3, 1]], np.int8), Packing(2, 0, lows=2)) is None


def test_a_packed_weight_of_another_size_is_refused():
    with pytest.raises(ValueError, match="cannot hold 3 numbers of 4 bits"):
        unpack(np.zeros(3, np.uint8), np.zeros(0, np.uint8), Packing(4, -8), (1, 3))
    with pytest.raises(ValueError, match="cannot hold 2 numbers of 8 bits"):
        unpack(np.zeros(2, np.uint8), np.zeros(1, np.uint8), Packing(4, 0, lows=2), (1, 4))
    with pytest.raises(ValueError, match="exceed 8 bits"):
        unpack(np.full(1, 255, np.uint8), np.full(1, 255, np.uint8), Packing(4, 0, lows=2), (1, 2))


ROWS = arrays.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-4, 4, width=32))


@given(ROWS)
@settings(max_examples=2 * settings.default.max_examples)
def test_least_squares_loses_no_more_than_the_largest_value_as_last_step(rows):
    def error(scale):
        return np.square(rows - numerics.dequantize(numerics.quantize(rows, scale, 0, -8, 7), scale, 0)).sum(1)

    ours = error(numerics.least_squares(rows, -8, 7)[:, None])
    theirs = error(numerics.symmetric_scale(np.abs(rows).max(1), 7)[:, None])
    assert (ours <= theirs * (1 + 1e-5) + 1e-12).all()


def test_multiples_are_those_of_least_squared_error():
    """Every multiple tried by hand."""
    weight = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32) * np.repeat([1, 4, 0.2, 9, 2], 8)
    weight = weight.astype(np.float32)
    kind = DATATYPES["s4"]
    scales = np.array([0.05, 0.1, 0.2], np.float32)
    grid = weight_grid(weight, scales, kind, 8)
    for row in range(3):
        for group in range(5):
            part = weight[row, 8 * group : 8 * group + 8]
            errors = []
            for multiple in range(1, 16):
                step = scales[row] * np.float32(multiple)
                errors.append(np.square(part - numerics.quantize(part, step, 0, -8, 7) * step).sum())
            assert errors[grid.multiples[row, group] - 1] == pytest.approx(min(errors))
    exact = grid.as_s8(grid.nearest(weight)).astype(np.float64) * scales[:, None].astype(np.float64)
    np.testing.assert_allclose(exact, grid.nearest(weight) * grid.steps(weight.shape).astype(np.float64), rtol=1e-6)


def test_groups_follow_ranges_that_a_channel_mixes():
    weight = (np.random.default_rng(1).normal(size=(4, 64)) * np.repeat([1, 0.1], 32)).astype(np.float32)
    errors = []
    for kind in ("channel", "group:32"):
        setting = Setting(weights=kind, weights_dtype="s4")
        steps = weight_scales(weight, setting)
        assert np.broadcast_shapes(steps.shape, weight.shape) == weight.shape
        q_values = numerics.quantize(weight, steps, 0, -8, 7)
        errors.append(np.square(weight - q_values * steps)[:, 32:].sum())
    assert errors[1] < errors[0] / 10


def test_a_zero_weight_and_a_zero_group_stay_zero():
    model = Body(lambda m, x: m.a(x), a=nn.Linear(64, 3))
    with torch.no_grad():
        model.a.weight[0] = 0
        model.a.weight[1, :32] = 0
    x = torch.randn(5, 64)
    reference, graph = quantized(model, x, recipe=all_of({"weights_dtype": "s4", "weights": "group:32"}))
    q_values = graph.graph.constants["a_weight"]
    assert not q_values[0].any()
    assert not q_values[1, :32].any()
    assert q_values[1, 32:].any()
    assert_equal_quantized(reference, graph, x)


@pytest.mark.slow(reason="registers a data type and quantizes with it")
def test_six_bits_are_one_record(monkeypatch, tmp_path):
    monkeypatch.setitem(DATATYPES, "s6", Datatype("s6", ("weight",), DType.S8, -32, 31, bits=6, squares=True))
    monkeypatch.setitem(DATATYPES, "u6", Datatype("u6", ("activation",), DType.U8, 0, 63, zero_point=True))
    found = []
    six = {"weights_dtype": "s6"}
    for setting in ({"weights_dtype": "s4"}, six, {**six, "activations_dtype": "u6"}):
        _, graph = lowered(CAPTURED, X, recipe=all_of(setting))
        model = stages.compile(graph)
        assert torch.equal(model(X), graph(X))
        found.append(sqnr(graph(X), MODEL(X)))
    assert found[1] > found[0] + 6
    assert found[2] < found[1]
    stored = file_of(model, tmp_path / "six.intaglio")
    assert any(name.endswith(" levels") for name in stored)
    assert torch.equal(intaglio.load(tmp_path / "six.intaglio")(X), model(X))


# ---- what the reference alone computes with -------------------------------------------------------------------------


@pytest.mark.case("calibration 45")
@pytest.mark.parametrize("setting", slow_params_except(WIDE[1], of=WIDE, reason="other types without kernels"))
def test_types_without_kernels_stay_in_float_and_say_so(setting, tmp_path):
    """Case 45: the program has the reference's results, the report the reason, a file both."""
    reference, graph = lowered(CAPTURED, X, recipe=all_of(setting))
    names = set(setting.values())
    assert all(any(name in skip.reason for name in names) for skip in graph.skipped)
    assert "no kernel computes with" in str(graph.skipped[0])
    assert graph.macs[0] == 0
    model = stages.compile(graph)
    # Without AVX512, oneDNN adds in another order for another memory format: a 16-bit value may then be the next one.
    wide = [q.step for q in reference.qparams.values() if len(q.scales) == 1 and q.qmax > 255]
    step = 0 if HAS_AVX512 else max(wide, default=0)
    torch.testing.assert_close(model(X), reference(X), rtol=1e-5, atol=1e-5 + step)
    model.save(tmp_path / "wide.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "wide.intaglio")(X), model(X))
    assert sqnr(reference(X), MODEL(X)) > (50 if "s16" in names else 20)


@pytest.mark.slow(reason="a type without kernels in one layer; whole models have it above")
def test_one_layer_of_another_type_does_not_affect_the_others():
    reference, graph = lowered(CAPTURED, X, recipe=Recipe.of({"blocks.0": {"activations_dtype": "s16"}}))
    assert {skip.origin.path.split(".")[0] for skip in graph.skipped} == {"blocks"}
    assert 0 < graph.macs[0] < graph.macs[1]
    torch.testing.assert_close(graph(X), reference(X), rtol=1e-2, atol=1e-2)
    assert torch.equal(stages.compile(graph)(X), graph(X))


@pytest.mark.case("calibration 45")
@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("f8e4m3", torch.float8_e4m3fn, 448.0),
        ("f8e5m2", torch.float8_e5m2, 57344.0),
    ],
)
def test_float8_saturates_and_is_never_nan(name, dtype, most):
    """Case 45: a cast alone gives NaN or infinity beyond the largest number."""
    kind = DATATYPES[name]
    x = torch.tensor([0.0, 1.0, -1e9, 1e9, float("inf"), float("-inf"), float("nan"), most * 1.5, 0.3])
    ops = float8()
    q_values = ops.quantize_per_tensor(x, 1.0, 0, kind.qmin, kind.qmax, dtype)
    real = ops.dequantize_per_tensor(q_values, 1.0, 0, kind.qmin, kind.qmax, dtype)
    assert torch.isfinite(real).all()
    assert real.tolist()[:8] == [0.0, 1.0, -most, most, most, -most, 0.0, most]
    assert real[8] == torch.tensor(0.3).to(dtype).float()


@pytest.mark.case("calibration 45")
def test_sixteen_bits_have_no_zero_point():
    """Case 45: int16 activations are symmetric, whatever the range."""
    reference, _ = lowered(CAPTURED, X, recipe=all_of({"activations_dtype": "s16"}))
    found = [q for q in reference.qparams.values() if q.qmax == 32767]
    assert found
    assert all(q.zero_point == (0,) and q.qmin == -32767 for q in found)


@pytest.mark.case("calibration 45")
@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ({"weights_dtype": "u8"}, "weights_dtype = 'u8'; allowed are"),
        ({"activations_dtype": "s4"}, "activations_dtype = 's4'; allowed are"),
        ({"weights": "group:0"}, "weights = 'group:0'"),
        ({"weights": "group:many"}, "weights = 'group:many'"),
        ({"bits": 7, "activations_dtype": "s16"}, "bits = 7 cannot be combined with activations_dtype = 's16'"),
    ],
)
def test_a_type_for_the_wrong_values_is_refused_by_the_recipe(setting, problem):
    """Case 45: before anything is captured."""
    with pytest.raises(SelectorError, match=problem):
        Setting(**setting)


@pytest.mark.case("calibration 45")
@pytest.mark.parametrize(
    ("module", "setting", "problem"),
    [
        (nn.Conv2d(3, 4, 3), {"weights": "group:8"}, "in groups, not s8 weights"),
        (nn.Conv2d(3, 4, 3), {"weights": "group:8", "weights_dtype": "f8e4m3"}, "in groups, not f8e4m3 weights"),
        (nn.ConvTranspose2d(3, 4, 3), {"weights": "group:8", "weights_dtype": "s4"}, "of transposed convolutions"),
    ],
)
def test_a_type_that_an_operator_cannot_have_is_refused_when_prepared(module, setting, problem):
    """Case 45: with the operator's name and what to do, before any data is read."""
    captured = stages.capture(Body(lambda m, x: m.a(x), a=module).eval(), torch.zeros(2, 3, 8, 8))
    with pytest.raises(UnsupportedError, match=problem) as raised:
        stages.prepare(captured, stages.Quantizer(all_of(setting)))
    assert raised.value.where == "a"
    assert "weights =" in raised.value.remedy


def test_bits_and_activation_data_type_agree():
    """The stronger setting answers it, in either key."""
    eight = Setting(bits=8).with_defaults(Setting(activations_dtype="s16"))
    assert eight.activation.name == "u8"
    assert Setting(activations_dtype="s16").with_defaults(Setting(bits=7)).activation.name == "s16"
    assert Setting(bits=7).with_defaults(Setting(method="mse")).activation.name == "u7"


@pytest.mark.slow(reason="one more layer of four bits")
def test_a_transposed_convolution_of_groups_takes_four_bits():
    model = Body(lambda m, x: m.a(x), a=nn.ConvTranspose2d(4, 6, 3, groups=2))
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    reference, graph = quantized(model, x, recipe=all_of({"weights_dtype": "s4"}))
    assert_equal_quantized(reference, graph, x)
    assert torch.equal(stages.compile(graph)(x), graph(x))


@pytest.mark.case("calibration 45")
def test_weights_without_kernel_read_no_bytes_of_an_image():
    """Case 45: the input's range is observed then, and the report says why."""
    model = Body(lambda m, x: m.a(x), a=nn.Conv2d(3, 4, 3)).eval()
    image = intaglio.Image((0.5, 0.4, 0.3), 0.25)
    x = image.normalize(torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8))
    made = intaglio.quantize(model, [x], input=image, recipe={"*": {"weights_dtype": "f8e4m3"}})
    assert sqnr(made(x), model(x)) > 20
    assert any("takes no bytes" in note and "f8e4m3" in note for note in made.coverage.notes)


def test_the_text_of_a_graph_says_how_files_hold_its_weights():
    _, graph = lowered(CAPTURED, X, recipe=all_of({"weights_dtype": "s4", "weights": "group:32"}))
    text = graph.text()
    assert "(4 bits in groups of 32)" in text
