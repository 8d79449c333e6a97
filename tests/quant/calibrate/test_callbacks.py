"""Calibration callbacks: what they see, in which order, and what becomes of what they say."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.calibration import (
    AverageMaxCalibrationCallback,
    CalibrationCallback,
    Calibrator,
    DatasetManager,
    GlobalCalibrationCallback,
    KLDivergenceCalibrationCallback,
)
from intaglio.errors import CalibrationError, InputError, IntaglioError
from intaglio.ir import QParams
from intaglio.patterns import builtin
from intaglio.quant.calibrate.float_run import channels_last
from intaglio.stages import Quantizer, Ranges
from support import nets
from support.lowering import sqnr
from support.nets import Body

DRAW = torch.Generator().manual_seed(2)
DATA = [torch.randn(n, 3, 8, 8, generator=DRAW) for n in (4, 2, 3)]


class Watching(CalibrationCallback):
    """Notes what it sees, and says ``found(info)``."""

    def __init__(self, found=lambda info: {}):
        self.found, self.seen = found, []

    def calibrate(self, info):
        inputs = [info.unquantized_inputs(b)[0] for b in range(info.batches)]
        quantized = [info.quantized_inputs(b)[0] for b in range(info.batches)]
        outputs = [(info.unquantized_outputs(b)[0], info.quantized_outputs(b)[0]) for b in range(info.batches)]
        self.seen.append((info.sites, inputs, quantized, outputs, dict(info.known_qparams)))
        return self.found(info)


def two_convs():
    layers = {"c": nn.Conv2d(3, 8, 3, padding=1), "d": nn.Conv2d(8, 4, 3)}
    return nets.randomize(Body(lambda m, x: m.d(F.relu(m.c(x))), **layers))


def prepared(callback, model=None, names=("conv2d",)):
    captured = stages.capture(model or two_convs(), DATA[0])
    return stages.prepare(captured, Quantizer(patterns=builtin(*names, calibration=callback)))


def test_regions_come_producers_first_with_the_names_of_their_sites():
    watching = Watching()
    Calibrator(prepared(watching), DATA).calibrate()
    first, second = (sites for sites, *_ in watching.seen)
    assert tuple(first) == ("#0/input.args_0", "c.weight", "c#0/conv2d.0:bias", "#0/relu.0")
    assert (second.inputs, second.weight, second.output) == (("#0/relu.0",), "d.weight", None)


def test_values_are_those_of_the_float_model_and_of_the_model_quantized_so_far():
    watching, model = Watching(), two_convs()
    Calibrator(prepared(watching, model), DATA).calibrate()
    (_, x, _, y, _), (_, z, z_q, out, _) = watching.seen
    for batch, data in enumerate(DATA):
        assert torch.equal(x[batch], data)
        torch.testing.assert_close(y[batch][0], F.relu(model.c(data)))
        assert torch.equal(z[batch], y[batch][0])
        torch.testing.assert_close(out[batch][0], model(data))
        assert 0 < (z_q[batch] - z[batch]).abs().max() < 0.2, "the error of the region before"


def test_with_its_parameters_a_region_gives_what_the_reference_model_gives():
    ready, found = prepared(Watching()), []
    reference = stages.convert(ready, Calibrator(ready, DATA).calibrate())

    def settle(info):
        if info.sites.output is not None:
            return {}
        trial = info.with_parameters({name: reference.qparams[name] for name in (*info.sites.inputs, "d.weight")})
        info.with_parameters({"d.weight": (0.5, 0)}).quantized_outputs(0)
        found.extend(trial.quantized_outputs(batch)[0] for batch in range(info.batches))
        return {}

    Calibrator(prepared(Watching(settle)), DATA).calibrate()
    images = [channels_last(data) for data in DATA]  # float convolutions round differently in another memory format
    assert all(torch.equal(mine, reference(image)) for mine, image in zip(found, images, strict=True))
    assert len(found) == len(DATA)


def test_the_model_runs_once_a_batch_and_track_however_many_callbacks_ask():
    calls = []
    handle = torch.library.Library("intaglio_tests_count", "DEF")
    handle.define("seen(Tensor x) -> Tensor")
    handle.impl("seen", lambda x: calls.append(len(x)) or x.clone(), "CPU")
    handle.impl("seen", torch.empty_like, "Meta")
    model = nets.randomize(
        Body(
            lambda m, x: m.d(F.relu(m.c(torch.ops.intaglio_tests_count.seen(x)))),
            c=nn.Conv2d(3, 8, 3),
            d=nn.Conv2d(8, 4, 3),
        )
    )
    ready = prepared(Watching(), model)
    calls.clear()
    Calibrator(ready, DATA).calibrate()
    assert len(calls) == 3 * len(DATA), "counting, and both tracks"


@pytest.mark.parametrize(
    ("given", "scale", "zero"),
    [
        ((0.05, 100), 0.05, 100),
        ((-1.0, 1.55), 0.01, 100),
        ((0.0, 2.55), 0.01, 0),
        ((0, 2), 2 / 255, 0),
        ((-1, 1), 2 / 255, 127),
        ((-2.55, -1), 0.01, 255),
        ((-2.55, 0), 0.01, 255),
        (QParams((0.25,), (7,), 0, 255), 0.25, 7),
        ((np.float32(0.05), np.int64(3)), 0.05, 3),
    ],
)
def test_parameters_may_be_given_in_three_forms(given, scale, zero):
    ready = prepared(Watching(lambda info: {info.sites.inputs[0]: given} if info.sites.output else {}))
    ranges = Calibrator(ready, DATA).calibrate()
    q = ranges.parameters["#0/input.args_0"]
    assert (q.step, q.zero) == (pytest.approx(scale), zero)
    assert stages.convert(ready, ranges).qparams["#0/input.args_0"] == q


def test_a_site_keeps_the_annotation_of_its_producer():
    answers = iter([{"#0/relu.0": (0.5, 0)}, {"#0/relu.0": (0.25, 0), "#0/input.args_0": (1.0, 0)}])
    watching = Watching(lambda info: {k: v for k, v in next(answers).items() if k in set(info.sites)})
    ranges = Calibrator(prepared(watching), DATA).calibrate()
    assert {name: q.step for name, q in ranges.parameters.items()} == {"#0/relu.0": 0.5}
    assert watching.seen[1][4]["#0/relu.0"].step == 0.5


def test_sites_without_callback_values_use_their_method():
    ready = prepared(Watching(lambda info: {info.sites.inputs[0]: (0.5, 0)} if info.sites.output else {}))
    asked = stages.convert(ready, Calibrator(ready, DATA).calibrate()).qparams
    plain = stages.prepare(stages.capture(two_convs(), DATA[0]))
    counted = stages.convert(plain, stages.calibrate(plain, DATA)).qparams
    assert asked["#0/relu.0"] == counted["#0/relu.0"]
    assert asked["#0/input.args_0"].step == 0.5


def test_weights_have_one_scale_or_one_per_channel():
    scales = np.linspace(0.01, 0.02, 8, dtype=np.float32)
    ready = prepared(Watching(lambda info: {info.sites.weight: (scales if info.sites.output else 0.125, 0)}))
    reference = stages.convert(ready, Calibrator(ready, DATA).calibrate())
    assert reference.qparams["c.weight"].scales == tuple(map(float, scales))
    assert set(reference.qparams["d.weight"].scales) == {0.125}


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (lambda info: {"elsewhere": (0.0, 1.0)}, "'elsewhere' is not a site of the region"),
        (lambda info: {info.sites.bias: (0.1, 0)}, "is a bias, whose scale follows from its input and weight"),
        (lambda info: {info.sites.weight: (0.1, 3)}, "and zero point 0"),
        (lambda info: {info.sites.inputs[0]: (0.1, 300)}, r"a zero point is outside \[0, 255\]"),
        (lambda info: {info.sites.inputs[0]: (0.0, -1.0)}, "a range must be a low and a high number"),
        (lambda info: {info.sites.inputs[0]: (-1.0, float("nan"))}, "its entries must be finite numbers"),
        (lambda info: {info.sites.inputs[0]: (0.02, 128.0)}, "a zero point must be an integer"),
        (lambda info: {info.sites.inputs[0]: (np.float32(0.02), np.round(127.6))}, "a zero point must be an integer"),
        (lambda info: {info.sites.inputs[0]: (0.02, np.mean([127, 128]))}, "a zero point must be an integer"),
        (lambda info: {info.sites.inputs[0]: (-0.05, 128)}, "a scale must be above 0"),
        (lambda info: {info.sites.inputs[0]: (np.float32(0), np.int64(128))}, "a scale must be above 0"),
        (lambda info: {info.sites.weight: (0.0, 0)}, "a scale must be above 0"),
        (lambda info: {info.sites.weight: (np.full(8, -0.02), 0)}, "a scale must be above 0"),
        (lambda info: {info.sites.inputs[0]: (1.0, 2.55)}, "the low end of a range is at most 0"),
        (lambda info: {info.sites.inputs[0]: QParams((1.0,), (128.0,), 0, 255)}, "a zero point must be an integer"),
        (lambda info: {info.sites.weight: (np.full(3, 0.1), 0.0)}, "a zero point must be an integer"),
        (lambda info: {info.sites.weight: (np.full(3, 0.1), 0)}, "returned 3 scales, but the weight has 8 channels"),
        (lambda info: {info.sites.inputs[0]: 0.1}, "returned 0.1: the parameters of a site are a pair of numbers"),
        (lambda info: {info.sites.inputs[0]: (0.1, 3, 5)}, "are a pair of numbers"),
        (lambda info: {info.sites.inputs[0]: ("a", 3)}, "its entries must be finite numbers"),
        (lambda info: {info.sites.inputs[0]: None}, "returned None: the parameters of a site are a pair"),
        (lambda info: None, "returned None; it must return a dictionary from site name to parameters"),
        (lambda info: [("a", 1)], "it must return a dictionary from site name to parameters"),
        (lambda info: {info.sites.inputs[0]: QParams((1.0,), (0,), -128, 127)}, "do not fit the site"),
    ],
)
def test_callback_values_that_a_site_cannot_have_are_refused(found, problem):
    with pytest.raises(CalibrationError, match=problem):
        Calibrator(prepared(Watching(found)), DATA).calibrate()


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda info: info.unquantized_inputs(3), "there is no batch 3; 3 are cached"),
        (lambda info: info.unquantized_outputs(-1), "there is no batch -1"),
        (lambda info: info.quantized_inputs(99), "there is no batch 99"),
        (lambda info: info.quantized_outputs(3), "there is no batch 3"),
        (lambda info: info.integer_inputs(3), "there is no batch 3"),
        (lambda info: info.values_for(torch.randn(2, 3, 8)), r"its shape is \[2, 3, 8\]; the model takes"),
        (lambda info: info.values_for(torch.randn(2, 3, 8, 8).double()), "torch.float64"),
        (lambda info: info.with_parameters({"elsewhere": (1, 2)}), "'elsewhere' is not a site of the region"),
        (lambda info: info.with_parameters({info.sites.bias: (0.1, 0)}), "is a bias"),
    ],
)
def test_what_a_callback_asks_for_and_is_not_there_is_an_error(use, problem):
    with pytest.raises(IntaglioError, match=problem):
        Calibrator(prepared(Watching(lambda info: use(info) and {})), DATA).calibrate()


@pytest.mark.parametrize("given", [{"scale": 0.0}, {"scale": -0.05}, {"scale": 0.1, "weight": 0.0}])
def test_scales_of_the_global_callback_are_above_zero(given):
    with pytest.raises(InputError, match="a scale must be a finite number above 0"):
        GlobalCalibrationCallback(**given)


def test_a_callback_without_its_method_names_the_method_to_define():
    class OfTheDocument(CalibrationCallback):
        def calibrate_pattern(self, info):
            return {}

    with pytest.raises(
        CalibrationError, match=r"OfTheDocument: .*calibrate \(it defines calibrate_pattern\)"
    ) as raised:
        Calibrator(prepared(OfTheDocument()), DATA).calibrate()
    assert raised.value.remedy.startswith("define calibrate(self, info)")


def test_parameters_are_saved_with_the_ranges_and_never_merged(tmp_path):
    scales = np.linspace(0.01, 0.02, 8, dtype=np.float32)
    ranges = Calibrator(
        prepared(Watching(lambda info: {info.sites.weight: (scales, 0)} if info.sites.output else {})), DATA
    ).calibrate()
    ranges.save(tmp_path / "ranges.json")
    assert Ranges.load(tmp_path / "ranges.json").parameters == ranges.parameters
    assert "c.weight: q(scale=0.01..0.02, axis=0), chosen by a callback" in ranges.text()
    with pytest.raises(CalibrationError, match="cannot be merged"):
        ranges.merge(ranges)


def test_callbacks_that_were_not_asked_are_an_error():
    ready = prepared(GlobalCalibrationCallback(0.05))
    for batch in DATA:
        ready(batch)
    with pytest.raises(CalibrationError, match=r"(?s)callback was not called.*calibrate\(prepared, data\)"):
        stages.convert(ready)


def test_calibrate_asks_callbacks_as_the_calibrator_does():
    ready, other = prepared(GlobalCalibrationCallback(0.05)), prepared(GlobalCalibrationCallback(0.05))
    assert stages.calibrate(ready, DATA).to_json() == Calibrator(other, DATA).calibrate().to_json()


def test_callbacks_need_batches():
    with pytest.raises(CalibrationError, match="callbacks need batches"):
        Calibrator(prepared(Watching()), lambda model: model(DATA[0])).calibrate()


def test_samples_bound_what_callbacks_see():
    watching = Watching()
    Calibrator(prepared(watching), iter(DATA), samples=5, progress=False).calibrate()
    assert [len(values) for _, values, *_ in watching.seen] == [2, 2]


def test_choices_can_be_compared_before_one_is_made():
    """A search over the input's range by the error of the output, which is what the quantized outputs are for."""

    def least(info):
        name, found = info.sites.inputs[0], []
        for high in (0.1, 1.0, 4.0):
            trial = info.with_parameters({name: (-high, high)})
            found.append(
                (
                    sum(
                        float(F.mse_loss(trial.quantized_outputs(b)[0], info.unquantized_outputs(b)[0]))
                        for b in range(info.batches)
                    ),
                    high,
                )
            )
        return {name: (-min(found)[1], min(found)[1])} if name not in info.known_qparams else {}

    ranges = Calibrator(prepared(Watching(least)), DATA).calibrate()
    assert ranges.parameters["#0/input.args_0"].step == pytest.approx(8 / 255)


@pytest.mark.parametrize("cache", [0, 1 << 30])
def test_the_cache_of_values_does_not_change_parameters(cache):
    ready = prepared(AverageMaxCalibrationCallback())
    assert Calibrator(ready, DATA, cache=cache).calibrate().parameters == Calibrator(ready, DATA).calibrate().parameters


def test_global_parameters_are_every_activations():
    ready = prepared(GlobalCalibrationCallback(0.05, 10, weight=0.01))
    found = Calibrator(ready, DATA).calibrate().parameters
    assert {(q.step, q.zero) for name, q in found.items() if "weight" not in name} == {(float(np.float32(0.05)), 10)}
    assert {q.step for name, q in found.items() if "weight" in name} == {float(np.float32(0.01))}


def test_the_kl_callback_chooses_what_the_method_kl_chooses():
    model = two_convs()
    asked, plain = prepared(KLDivergenceCalibrationCallback(), model), prepared(None, model).with_method("kl")
    found = stages.convert(asked, Calibrator(asked, DATA).calibrate())
    wanted = stages.convert(plain, stages.calibrate(plain, DATA))
    assert found.qparams == wanted.qparams
    assert found.qparams != stages.convert(plain.with_method("minmax"), stages.calibrate(plain, DATA)).qparams
    one_scale = prepared(KLDivergenceCalibrationCallback(per_channel=False), model)
    reference = stages.convert(one_scale, Calibrator(one_scale, DATA).calibrate())
    assert len(set(reference.qparams["d.weight"].scales)) == 1


@pytest.mark.parametrize("weights", ["channel", "group:8"])
@pytest.mark.parametrize("dtype", ["s8", "s4", "s3", "s2"])
@pytest.mark.parametrize("callback", [AverageMaxCalibrationCallback(), KLDivergenceCalibrationCallback()])
def test_callbacks_give_weights_of_fewer_bits_the_scales_that_they_have_without_a_callback(callback, dtype, weights):
    if dtype == "s8" and weights != "channel":
        pytest.skip("weights of 8 bits have no groups")
    captured = stages.capture(two_convs(), DATA[0])
    recipe = intaglio.Recipe.of({"*": {"weights_dtype": dtype, "weights": weights}})
    plain = stages.prepare(captured, Quantizer(recipe))
    asked = stages.prepare(captured, Quantizer(recipe, patterns=builtin("conv2d", calibration=callback)))
    found = stages.convert(asked, Calibrator(asked, DATA).calibrate()).qparams
    wanted = stages.convert(plain, stages.calibrate(plain, DATA)).qparams
    assert [found[name] for name in ("c.weight", "d.weight")] == [wanted[name] for name in ("c.weight", "d.weight")]


def with_values(look, data=DATA):
    """Calibrate the two convolutions; ``look(info)`` is called for each."""
    seen = []
    ready = prepared(Watching(lambda info: seen.append(look(info)) or {}))
    reference = stages.convert(ready, Calibrator(ready, data).calibrate())
    return seen, reference


def test_inputs_and_weights_are_seen_as_floats_and_as_integers():
    def look(info):
        own = info.with_parameters({name: (0.03, 128) for name in info.sites.inputs if name not in info.known_qparams})
        return (
            info.unquantized_inputs(1, weights=True),
            own.quantized_inputs(1, weights=True),
            own.integer_inputs(1, weights=True),
        )

    (first, second), reference = with_values(look)
    for (real, weight), (near, near_weight), (bytes_, integers) in (first, second):
        assert (bytes_.dtype, integers.dtype) == (torch.uint8, torch.int8)
        assert (weight - near_weight).abs().max() < 0.01 * weight.abs().max()
        assert near_weight.shape == integers.shape
        assert (real - near).abs().max() < 1.5
        assert torch.equal(near, (bytes_.float() - 128) * 0.03)
    scales = torch.tensor(reference.qparams["d.weight"].scales).reshape(-1, 1, 1, 1)
    assert torch.equal(second[1][1], second[2][1].float() * scales)


def test_integers_of_an_input_without_parameters_are_an_error():
    with pytest.raises(CalibrationError, match=r"#0/input.args_0: it has no parameters yet") as caught:
        with_values(lambda info: info.integer_inputs())
    assert "info.with_parameters" in caught.value.remedy
    assert with_values(lambda info: info.integer_weight())[0][0] is None


def test_a_callback_brings_a_batch_of_its_own():
    own = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(9))

    def look(info):
        values = info.values_for(own)
        return values.batches, values.unquantized_inputs()[0], values.quantized_inputs()[0], info.quantized_inputs()[0]

    (first, second), _ = with_values(look)
    assert first[0] == second[0] == 1
    assert torch.equal(first[1], own)
    assert 0 < (second[1] - second[2]).abs().max() < 0.2
    assert len(second[3]) == len(DATA[0]), "the batches of calibration are still there"


def test_the_batches_of_a_callback_have_their_labels():
    labelled = [(x, torch.arange(len(x))) for x in DATA]
    (first, _), _ = with_values(
        lambda info: [info.dataset_manager.get_next_batch(), list(info.dataset_manager)], labelled
    )
    assert torch.equal(first[0][1], labelled[0][1])
    assert [len(labels) for _, labels in first[1]] == [len(x) for x in DATA]
    (first, _), _ = with_values(lambda info: info.dataset_manager.num_batches(), DatasetManager(labelled))
    assert first == len(DATA)


@pytest.mark.parametrize("name", ["Conv2DPattern", "DenseBiasAddPattern", "MultiplyPattern", "mul", "multiply"])
def test_patterns_have_the_names_of_their_classes_too(name):
    assert [pattern.name for pattern in builtin(name)] == [name]


def test_a_declared_image_input_keeps_its_parameters():
    model, image = two_convs(), intaglio.Image((0.5,) * 3, (0.25,) * 3)
    quantizer = Quantizer(input=image, patterns=builtin("conv2d", calibration=AverageMaxCalibrationCallback()))
    ready = stages.prepare(stages.capture(model, DATA[0]), quantizer)
    ranges = Calibrator(ready, DATA).calibrate()
    assert set(ranges.parameters) == {"#0/relu.0", "c.weight", "d.weight"}
    assert stages.convert(ready, ranges).qparams["#0/relu.0"] == ranges.parameters["#0/relu.0"]


def test_quantize_asks_callbacks_with_and_without_corrections():
    model, callback = two_convs(), AverageMaxCalibrationCallback()
    quantized = intaglio.quantize(
        model, DATA, quantizer=stages.Quantizer(patterns=builtin("conv2d", calibration=callback))
    )
    exact = model(DATA[0])
    assert F.mse_loss(quantized(DATA[0]), exact) < 0.003 * exact.var()


@pytest.mark.parametrize(("layer", "results"), [(nn.LSTM, 3), (nn.GRU, 2)])
def test_outputs_of_recurrent_layers_are_their_results_and_states(layer, results):
    def found(info):
        outputs = [*info.unquantized_outputs(), *info.quantized_outputs()]
        assert [value.shape[-1] for value in outputs] == [4] * 2 * results
        return AverageMaxCalibrationCallback().calibrate(info)

    model = nets.randomize(Body(lambda m, x: m.layer(x)[0], layer=layer(5, 4, batch_first=True)))
    x = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(3))
    patterns = builtin("lstm", "gru", calibration=Watching(found))
    ready = stages.prepare(stages.capture(model, x), Quantizer(patterns=patterns))
    (site,) = [site for site in ready.annotations.sites if site.role == "activation"]
    reference = stages.convert(ready, stages.calibrate(ready, [x]))
    q = reference.qparams[site.name]
    assert q.scales == pytest.approx(((x.max() - x.min()).item() / 255,))


def attention_calibrated_by(given):
    """Return the integer graph of an attention whose keys and values have parameters by a callback."""
    model = Body(lambda m, x: F.scaled_dot_product_attention(x, m.k(x), m.v(x)), k=nn.Linear(4, 4), v=nn.Linear(4, 4))
    x = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(3))
    captured = stages.capture(nets.randomize(model), x)
    callback = Watching(lambda info: dict.fromkeys(info.sites.inputs[1:], given))
    ready = stages.prepare(captured, Quantizer(patterns=builtin("attention", calibration=callback)))
    return stages.requantize(stages.convert(ready, stages.calibrate(ready, [x]))).graph


def test_a_range_for_a_symmetric_site_becomes_symmetric():
    graph = attention_calibrated_by((-1.0, 3.0))
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    for operand in attention.inputs[1:3]:
        q = graph.types[operand].qparams
        assert (q.scales, q.zeros) == ((float(np.float32(3 / 127)),), (128,))


def test_a_zero_point_that_a_symmetric_site_cannot_have_is_an_error():
    with pytest.raises(CalibrationError, match="do not fit the site") as caught:
        attention_calibrated_by((0.05, 100))
    assert caught.value.remedy == "return a pair of scale and zero point 128, or a range"
    attention_calibrated_by((0.05, 128))


class OwnData(CalibrationCallback):
    """Brings its own inputs, as callbacks that hold a data set do."""

    def calibrate(self, info):
        assert info.dataset_manager is None
        assert info.batches == 0
        own = info.values_for(DATA[0])
        names, found = (*info.sites.inputs, info.sites.output), (*own.quantized_inputs(), *own.unquantized_outputs())
        values = zip(names, found, strict=True)
        return {name: (float(v.min().clamp(max=0)), float(v.max())) for name, v in values if name is not None}


@pytest.mark.parametrize(
    "callback", [GlobalCalibrationCallback(0.05, 128, 0.01), OwnData()], ids=["global", "own data"]
)
def test_callbacks_that_need_no_data_calibrate_without_it(callback):
    model = two_convs()
    made = prepared(callback, model)
    ranges = Calibrator(made).calibrate()
    assert (ranges.batches, ranges.samples) == (0, 0)
    int8 = stages.compile(stages.requantize(stages.convert(made, ranges)))
    assert int8.coverage.macs == 1
    assert sqnr(int8(DATA[0]), model(DATA[0])) > 15
    assert set(Ranges.from_json(ranges.to_json()).parameters) == set(ranges.parameters)


def test_sites_that_no_callback_decides_without_data_are_an_error():
    for callback in (None, CalibrationOfOutputs()):
        with pytest.raises(
            CalibrationError, match=r"there is no data, and no callback decides \d of \d sites: #0/input"
        ):
            Calibrator(prepared(callback)).calibrate()


class CalibrationOfOutputs(CalibrationCallback):
    def calibrate(self, info):
        return {} if info.sites.output is None else {info.sites.output: (0.0, 1.0)}


@pytest.mark.parametrize("callback", [AverageMaxCalibrationCallback(), KLDivergenceCalibrationCallback(), Watching(
    lambda info: info.unquantized_inputs(0)
)], ids=["average", "kl", "reads batch 0"])  # fmt: skip
def test_callbacks_that_read_batches_say_so_without_data(callback):
    with pytest.raises(IntaglioError, match=r"reads batches, but there is no data|there is no batch 0; 0 are cached"):
        Calibrator(prepared(callback)).calibrate()


def failing(info):
    raise ZeroDivisionError


def test_an_error_of_a_callback_leaves_gradients_enabled_while_it_is_kept():
    with pytest.raises(ZeroDivisionError) as kept:
        Calibrator(prepared(Watching(failing)), DATA).calibrate()
    assert torch.is_grad_enabled()
    assert kept.tb is not None
