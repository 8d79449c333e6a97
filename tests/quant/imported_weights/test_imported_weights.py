"""Weights that another tool quantized: what stays as it is, what is rounded again, and what is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import Recipe, Setting, annotation, stages
from intaglio.errors import InputError
from intaglio.numerics import float_math
from support.nets import Body, randomize
from support.recipes import UNCORRECTED
from support.slow_params import slow_params

DATA = [torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
pytestmark = pytest.mark.usefixtures("without_avx512")

STATIC, FLOAT = Recipe.of({"*": {"activations": "static"}}), Recipe.of({"*": {"activations": "float"}})
NOTHING_ELSE = Recipe.of({}, Setting(quantize=False))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


def grouped(outputs: int, inputs: int, group: int = 32, offsets: bool = False, seed: int = 0) -> stages.QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    integers = torch.randint(-8, 8, (outputs, inputs), generator=draw).to(torch.int8)
    shape = outputs, -(-inputs // group)
    scales = torch.rand(shape, generator=draw) * 0.02 + 0.001
    return stages.QuantizedWeight.of(
        integers, scales, torch.randn(shape, generator=draw) * 0.01 if offsets else None, group=group
    )


def per_channel(outputs: int, *inputs: int, seed: int = 0) -> stages.QuantizedWeight:
    draw = torch.Generator().manual_seed(seed)
    integers = torch.randint(-128, 128, (outputs, *inputs), generator=draw).to(torch.int8)
    integers[0].view(-1)[0] = -128
    return stages.QuantizedWeight.of(integers, torch.rand(outputs, generator=draw) * 0.002 + 0.0001)


def constants(model, *words: str) -> list[np.ndarray]:
    """The integers in the program whose names contain the words."""
    graph = model.graph
    return [
        array
        for name, array in graph.constants.items()
        if array.dtype == np.int8 and all(word in name for word in words)
    ]


def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(20 * torch.log10(exact.norm() / (found - exact).norm()).detach())


def test_a_copy_of_the_model_computes_with_the_dequantized_weight():
    model, weight = network(), grouped(48, 64, offsets=True)
    before = copy.deepcopy(model.state_dict())
    own = stages.with_weights(model, {"0": weight})
    wanted = float_math.dequantize_groups(weight.quantized.numpy(), weight.steps.numpy(), 32)
    np.testing.assert_array_equal(own[0].weight.numpy(), wanted)
    np.testing.assert_array_equal(weight.dequantized().numpy(), wanted)
    rest = model[1:]
    assert torch.equal(own(DATA[0]), rest(F.linear(DATA[0], torch.from_numpy(wanted), model[0].bias)))
    assert own[2].weight is model[2].weight
    assert isinstance(own[0], nn.Linear)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_share_integers_and_steps():
    own = stages.with_weights(network(), {"0": grouped(48, 64)})
    again = copy.deepcopy(own)
    assert again[0].weight_quantized is own[0].weight_quantized
    assert again[0].weight_steps is own[0].weight_steps
    assert again[0].bias is not own[0].bias
    assert torch.equal(again(DATA[0]), own(DATA[0]))


@pytest.mark.parametrize(
    "offsets", [True, *slow_params(False, reason="steps alone; checkpoints of compressed-tensors have no offsets")]
)
@pytest.mark.parametrize(
    "recipe", [None, *slow_params(NOTHING_ELSE, FLOAT, reason="other recipes keep the same integers")]
)
def test_weights_of_groups_stay_as_they_are(recipe, offsets, tmp_path):
    weight = grouped(48, 64, offsets=offsets)
    own = stages.with_weights(network(), {"0": weight})
    model = intaglio.quantize(own, DATA, recipe=recipe)
    (held,) = constants(model, "0_weight")
    np.testing.assert_array_equal(held, weight.quantized.numpy())
    assert [op.kind for op in model.graph.ops].count("linear_groups_f32") == 1
    assert decibels(model(DATA[0]), own(DATA[0])) > (100 if recipe is NOTHING_ELSE else 30)
    assert "weight-only quantization (s8 in groups of 32, as imported)" in str(model.coverage)
    model.save(tmp_path / "model.intaglio", library=False)
    loaded = intaglio.load(tmp_path / "model.intaglio")
    assert torch.equal(loaded(DATA[0]), model(DATA[0]))
    assert np.array_equal(constants(loaded, "0_weight")[0], held)


def test_the_first_layer_has_the_bits_of_the_reference_arithmetic():
    weight = grouped(48, 64, offsets=True)
    own = stages.with_weights(nn.Sequential(nn.Linear(64, 48)), {"0": weight})
    model = intaglio.quantize(own, DATA)
    wanted = float_math.linear(DATA[0].numpy(), weight.dequantized().numpy(), None, own[0].bias.detach().numpy())
    np.testing.assert_array_equal(model(DATA[0]).numpy(), wanted)


@pytest.mark.parametrize(
    "recipe", [*slow_params(None, reason="the default recipe has the scales of the static one"), STATIC, "int8_dynamic"]
)
def test_integers_with_a_scale_per_channel_go_unchanged_into_int8_products(recipe):
    weights = {"0": per_channel(48, 64), "2": per_channel(32, 48, seed=1)}
    own = stages.with_weights(network(), weights)
    model = intaglio.quantize(own, DATA, recipe=recipe)
    for path, weight in weights.items():
        (held,) = constants(model, f"{path}_weight")
        np.testing.assert_array_equal(held, weight.quantized.numpy())
        (kind,) = [t for name, t in model.graph.types.items() if name == f"{path}_weight"]
        assert kind.qparams.scales == tuple(weight.steps[0, :, 0].tolist())
    model.assert_int8(macs=1.0)
    assert decibels(model(DATA[0]), own(DATA[0])) > 30
    assert "rounded again" not in str(model.coverage)


def test_the_other_layers_are_equalized_and_imported_ones_are_not():
    """The second layer's integers would change with the first layer's factors."""
    own = stages.with_weights(network(), {"2": per_channel(32, 48)})
    own[0].weight.data[:24] *= 30  # channels of different size
    model = intaglio.quantize(own, DATA)
    np.testing.assert_array_equal(constants(model, "2_weight")[0], own[2].weight_quantized.numpy())
    assert decibels(model(DATA[0]), own(DATA[0])) > 25


@pytest.mark.slow(reason="smooths attention; other layers beside imported ones are equalized above")
def test_layers_of_attention_models_are_not_smoothed_when_their_integers_are_kept():
    def body(m, x):
        x = x[:, None]
        y = m.norm(x)
        q, k, v = m.q(y), m.k(y), m.v(y)
        return x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]

    parts = {name: nn.Linear(64, 64) for name in "qkv"}
    model = randomize(Body(body, norm=nn.LayerNorm(64), **parts))
    with torch.no_grad():
        model.norm.weight[0] = 50  # an outlier that SmoothQuant would reduce
    weights = {name: per_channel(64, 64, seed=index) for index, name in enumerate("qkv")}
    quantized = intaglio.quantize(stages.with_weights(model, weights), DATA)
    for name, weight in weights.items():
        np.testing.assert_array_equal(constants(quantized, f"{name}_weight")[0], weight.quantized.numpy())


@pytest.mark.slow(reason="the same choice as for weights of groups")
def test_weights_with_a_scale_per_channel_may_be_computed_in_float():
    weight = per_channel(48, 64)
    model = intaglio.quantize(stages.with_weights(network(), {"0": weight}), DATA, recipe=FLOAT)
    np.testing.assert_array_equal(constants(model, "0_weight")[0], weight.quantized.numpy())
    assert [op.kind for op in model.graph.ops].count("linear_f32") == 3


@pytest.mark.parametrize(
    ("recipe", "least", "results"),
    [
        (STATIC, 40, True),
        ("int8_dynamic", 40, False),
        *slow_params(
            (Recipe.of({"*": {"activations": "static", "weights_dtype": "s4", "weights": "group:32"}}), 15, True),
            reason="fewer bits, rounded by the same rule",
        ),
    ],
)
def test_a_recipe_rounds_weights_of_groups_again_and_says_what_it_costs(recipe, least, results):
    own = stages.with_weights(network(), {"0": grouped(48, 64, offsets=True)})
    model = intaglio.quantize(own, DATA, recipe=recipe)
    model.assert_int8(macs=1.0)
    (note,) = [note for note in model.coverage.notes if "rounded again" in note]
    assert note.startswith("imported weights rounded again: 1 layer, signal to noise of weights ")
    assert ("of results" in note) is results
    assert all(float(word) > least for word in note.split() if word.replace(".", "").isdigit() and "." in word)
    assert decibels(model(DATA[0]), own(DATA[0])) > 15


def test_the_cost_of_rounding_again_is_that_of_the_weights():
    weight = grouped(48, 64)
    own = stages.with_weights(nn.Sequential(nn.Linear(64, 48, bias=False)), {"0": weight})
    model = intaglio.quantize(own, DATA, recipe=Recipe.of({"*": {"activations": "static", "rounding": "nearest"}}))
    (held,) = constants(model, "0_weight")
    scales = np.array(model.graph.types["0_weight"].qparams.scales, np.float32)
    exact = weight.dequantized()
    cost = decibels(torch.from_numpy(held.astype(np.float32) * scales[:, None]), exact)
    (note,) = [note for note in model.coverage.notes if "rounded again" in note]
    assert f"of weights {cost:.1f} dB" in note


def test_a_bias_that_needs_larger_scales_rounds_the_weight_again():
    weight = stages.QuantizedWeight.of(torch.ones(8, 64, dtype=torch.int8), torch.full((8,), 1e-9))
    model = nn.Sequential(nn.Linear(64, 8))
    with torch.no_grad():
        model[0].bias.fill_(100)
    own = stages.with_weights(model, {"0": weight})
    quantized = intaglio.quantize(own, DATA)
    assert any("its bias needs larger scales" in note for note in quantized.coverage.notes)
    torch.testing.assert_close(quantized(DATA[0]), own(DATA[0]), rtol=1e-2, atol=1e-2)


def test_channels_of_zeros_keep_the_other_integers():
    weight = per_channel(48, 64)
    weight.quantized[3] = 0
    own = stages.with_weights(network(), {"0": weight})
    model = intaglio.quantize(own, DATA)
    np.testing.assert_array_equal(constants(model, "0_weight")[0], weight.quantized.numpy())


@pytest.mark.slow(reason="quantizes a further model; a recipe rounds weights again above")
def test_a_batch_norm_behind_the_layer_rounds_its_weight_again_with_a_note():
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))
    randomize(model).eval()
    own = stages.with_weights(model, {"0": per_channel(48, 64)})
    quantized = intaglio.quantize(own, DATA)
    assert any("rounded again: 1 layer" in note for note in quantized.coverage.notes)
    assert decibels(quantized(DATA[0]), own(DATA[0])) > 30


@pytest.mark.slow(reason="linear layers take the same way above")
def test_convolutions_keep_integers_and_are_float_otherwise(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    data = [torch.randn(2, 3, 12, 12) for _ in range(3)]
    own = stages.with_weights(model, {"2": per_channel(8, 16, 3, 3)})
    quantized = intaglio.quantize(own, data)
    np.testing.assert_array_equal(constants(quantized, "2_weight")[0], own[2].weight_quantized.numpy())
    float_weight = stages.QuantizedWeight.of(
        torch.randint(-8, 8, (8, 16, 3, 3)).to(torch.int8), torch.rand(8, 9), group=16
    )
    own = stages.with_weights(model, {"0": per_channel(16, 3, 3, 3), "2": float_weight})
    quantized = intaglio.quantize(own, data, recipe=FLOAT)
    quantized.save(tmp_path / "m", library=False)
    assert torch.equal(intaglio.load(tmp_path / "m")(data[0]), quantized(data[0]))
    assert decibels(quantized(data[0]), own(data[0])) > 30


@pytest.mark.slow(reason="quantizes twice for a weight with other readers; plain layers keep theirs above")
def test_a_module_that_is_called_twice_and_other_readers_of_a_weight():
    def body(m, x):
        y = m.a(F.relu(m.a(x)))
        return y, x @ m.a.weight.T, m.e(x[:, :2].abs().long().clamp(max=9))

    model = Body(body, a=nn.Linear(64, 64), e=nn.Embedding(10, 64))
    own = stages.with_weights(randomize(model), {"a": grouped(64, 64), "e": grouped(10, 64)})
    quantized = intaglio.quantize(own, DATA)
    for found, wanted in zip(quantized(DATA[0]), own(DATA[0]), strict=True):
        assert decibels(found, wanted) > 30
    twice = stages.with_weights(Body(lambda m, x: m.a(F.relu(m.a(x))), a=nn.Linear(64, 64)), {"a": per_channel(64, 64)})
    quantized = intaglio.quantize(twice, DATA)
    assert len(constants(quantized, "a_weight")) == 1


@pytest.mark.slow(reason="quantizes for scales that few files have; invalid weights are refused below")
@pytest.mark.parametrize("scale", [*slow_params(-0.01, reason="the same rule as for zero"), 0.0])
def test_scales_that_are_not_positive_stay_in_float(scale):
    weight = per_channel(48, 64)
    weight.steps[0, 5, 0] = scale
    own = stages.with_weights(network(), {"0": weight})
    model = intaglio.quantize(own, DATA)
    np.testing.assert_array_equal(constants(model, "0_weight")[0], weight.quantized.numpy())
    assert decibels(model(DATA[0]), own(DATA[0])) > 30


def test_equal_scales_of_groups_are_a_scale_of_the_channel():
    integers = torch.randint(-8, 8, (4, 64)).to(torch.int8)
    scales = torch.rand(4, 1).half()
    weight = stages.QuantizedWeight.of(integers, scales.expand(4, 2))
    assert weight.group == 64
    assert torch.equal(weight.steps, scales.float()[None])
    assert weight.int8_refusal is None
    assert stages.QuantizedWeight.of(integers, torch.tensor(0.5)).steps.tolist() == [[[0.5]] * 4]


@pytest.mark.parametrize(
    ("paths", "problem"),
    [
        ({"9": grouped(48, 64)}, "9: the model has no module with this path"),
        ({"1": grouped(48, 64)}, "1: this ReLU has no parameter weight"),
        ({"0": grouped(64, 48)}, r"0: its weight has shape \[48, 64\], but the quantized one \[64, 48\]"),
    ],
)
def test_weights_that_do_not_fit_a_module_are_refused(paths, problem):
    with pytest.raises(InputError, match=problem):
        stages.with_weights(network(), paths)


def test_models_of_other_types_and_weights_that_are_set_twice_are_refused():
    with pytest.raises(InputError, match=r"bfloat16[^\n]*\n *remedy: call model.float\(\) first"):
        stages.with_weights(network().bfloat16(), {"0": grouped(48, 64)})
    own = stages.with_weights(network(), {"0": grouped(48, 64)})
    with pytest.raises(InputError, match="its weight is quantized already"):
        stages.with_weights(own, {"0": grouped(48, 64)})


INTEGERS = torch.zeros(4, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ((INTEGERS.float(), torch.ones(1, 4, 1), 8), "quantized is float32"),
        ((INTEGERS[0], torch.ones(1, 4, 1), 8), r"quantized is int8\[8\]"),
        ((INTEGERS, torch.ones(1, 4, 1), 4), r"steps is float32\[1, 4, 1\]; it must be float32 of shape"),
        ((INTEGERS, torch.ones(4, 1), 8), "steps is float32"),
        ((INTEGERS, torch.ones(3, 4, 1), 8), "steps must be finite scales, and perhaps offsets"),
        ((INTEGERS, torch.full((1, 4, 1), torch.inf), 8), "steps must be finite"),
        ((INTEGERS, torch.ones(1, 4, 1), 0), "group is 0"),
        ((INTEGERS, torch.ones(1, 4, 1), 8, "int8"), "activations = 'int8'"),
    ],
)
def test_invalid_quantized_weights_are_refused(fields, problem):
    with pytest.raises(InputError, match=problem):
        stages.QuantizedWeight(*fields)


# ---- other ways to quantize and to look at such models


@pytest.mark.slow(reason="a whole search beside a comparison; both have tests of their own")
def test_comparison_search_and_parameters_know_imported_weights(untimed_searches):
    own = stages.with_weights(network(), {"0": grouped(48, 64), "2": per_channel(32, 48)})
    plain = Recipe.of(UNCORRECTED)
    model = intaglio.quantize(own, DATA, recipe=plain)
    compared = intaglio.compare(own, model, DATA)
    assert "made again" not in str(compared)
    prepared = stages.prepare(stages.capture(own, DATA[0]))
    reference = stages.convert(prepared, stages.calibrate(prepared, DATA))
    known = intaglio.quantize(own, DATA[0], recipe=Recipe().with_parameters(reference.parameters))
    assert torch.equal(known(DATA[0]), stages.compile(reference)(DATA[0]))
    found = intaglio.search(
        own,
        DATA,
        lambda model: -float((model(DATA[0]) - own(DATA[0])).norm().detach()),
        minimize="size",
        candidates={"float": None},
        max_drop=0,
        quantizer=stages.Quantizer(plain),
    )
    assert len(found.trials) > 1


@pytest.mark.slow(reason="trains and records a model for weights that captured models have above")
def test_training_and_define_by_run_take_imported_weights():
    own = stages.with_weights(network(), {"0": grouped(48, 64), "2": per_channel(32, 48)})
    prepared = stages.prepare(stages.capture(own, DATA[0], train=True), qat=True)
    stages.calibrate(prepared, DATA)
    trained = stages.compile(stages.convert(prepared))
    assert decibels(trained(DATA[0]), own(DATA[0])) > 30
    eager = intaglio.eager.prepare(own, DATA[0])
    eager(DATA[0])
    assert decibels(intaglio.eager.convert(eager)(DATA[0]), own(DATA[0])) > 30


def test_models_with_imported_weights_are_pickled():
    own = stages.with_weights(network(), {"0": grouped(48, 64)})
    assert torch.equal(pickle.loads(pickle.dumps(own))(DATA[0]), own(DATA[0]))


def test_an_annotator_gets_float_weights():
    own = stages.with_weights(network(), {"0": grouped(48, 64), "2": per_channel(32, 48)})
    quantizer = annotation.X86Quantizer().set_global(annotation.get_default_x86_inductor_quantization_config())
    prepared = stages.prepare(stages.capture(own, DATA[0]), quantizer)
    model = stages.compile(stages.convert(prepared, stages.calibrate(prepared, DATA)))
    model.assert_int8(macs=1.0)
    assert decibels(model(DATA[0]), own(DATA[0])) > 25
    assert any("rounded again: 1 layer" in note for note in model.coverage.notes)
