"""int8 activations: kernels read them as uint8 values that are 128 more, so all results are those of uint8."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import eager, stages
from intaglio.backends.inductor.inductor_graph import graph_for_inductor
from intaglio.calibration import Calibrator, GlobalCalibrationCallback
from intaglio.ir import DType
from intaglio.patterns import builtin
from intaglio.quant.recipes.datatypes import DATATYPES, Datatype
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import sqnr
from support.nets import randomize

SIGNED = Recipe.of({"*": {"activations_dtype": "s8"}})
DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


class Net(nn.Module):
    """Convolution, relu, pool, product of activations, concatenation and linear layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(2), nn.Linear(16, 5)

    def forward(self, x):
        y = self.pool(torch.relu(self.conv(x)))
        y = torch.cat([y, torch.sigmoid(y) * y], 1).flatten(2)
        return self.head((y @ y.transpose(1, 2)).flatten(0, 1))


def model() -> nn.Module:
    return randomize(Net()).eval()


def converted(recipe=SIGNED, callback=None):
    patterns = {"patterns": builtin(calibration=callback)} if callback else {}
    prepared = stages.prepare(stages.capture(model(), DATA[0]), stages.Quantizer(recipe, **patterns))
    return stages.convert(prepared, Calibrator(prepared, DATA).calibrate())


def test_all_stages_give_the_bits_of_uint8_activations(tmp_path):
    reference, unsigned = converted(), converted(Recipe())
    assert "torch.uint8" not in reference.text()
    for name, q in reference.qparams.items():
        other = unsigned.qparams[name]
        if (other.qmin, other.qmax) != (q.qmin, q.qmax):
            assert other == q.with_offset(128)
    lowered = stages.requantize(reference)
    program, same = stages.compile(lowered), stages.compile(unsigned)
    assert program.coverage.macs == 1
    assert not program.coverage.islands
    x = DATA[1]
    assert torch.equal(reference(x), unsigned(x))
    for result in (lowered(x), program(x)):
        assert torch.equal(result, same(x))
    program.save(tmp_path / "signed.intaglio")
    assert torch.equal(intaglio.load(tmp_path / "signed.intaglio")(x), same(x))


@pytest.mark.slow(reason="quantizes twice with corrections; all stages have the bits of uint8 above")
def test_corrections_and_parameters_work_as_for_uint8():
    program, unsigned = intaglio.quantize(model(), DATA, recipe=SIGNED), intaglio.quantize(model(), DATA)
    wanted = model()(DATA[0])
    assert sqnr(program(DATA[0]), wanted) > sqnr(unsigned(DATA[0]), wanted) - 3
    parameters = converted().parameters
    again = intaglio.quantize(model(), DATA[:1], recipe=SIGNED.with_parameters(parameters))
    assert torch.equal(again(DATA[0]), stages.compile(converted())(DATA[0]))
    kept = parameters.without_weights().entries
    assert kept.keys() == {name for name in parameters.entries if not name.endswith(".weight")}


@pytest.mark.slow(reason="quantizes with a callback; test_callbacks.py has their scales")
def test_a_callback_gives_int8_scales_and_zero_points():
    reference = converted(callback=GlobalCalibrationCallback(1 / 64, 0))
    found = {q for q in reference.qparams.values() if q.axis is None and q.qmin == -128}
    assert {(q.step, q.zero) for q in found} == {(1 / 64, 0)}
    lowered = stages.requantize(reference)
    assert "zp=128" in lowered.text()
    assert torch.equal(stages.compile(lowered)(DATA[0]), lowered(DATA[0]))


def test_define_by_run_models_have_int8_activations():
    prepared = eager.prepare(model(), DATA[0], SIGNED)
    for x in DATA:
        prepared(x)
    signed = eager.convert(prepared)
    assert "torch.qint8" in str(signed._auto_quant_state)
    assert torch.equal(signed(DATA[1]), stages.compile(eager.rewrite(signed))(DATA[1]))
    eager.assert_int8(signed)


def test_a_signed_type_of_ones_own_runs_in_kernels(monkeypatch):
    monkeypatch.setitem(DATATYPES, "s6", Datatype("s6", ("activation",), DType.S8, -32, 31, zero_point=True))
    reference = converted(Recipe.of({"*": {"activations_dtype": "s6"}}))
    program = stages.compile(reference)
    assert torch.equal(program(DATA[0]), stages.requantize(reference)(DATA[0]))
    assert program.coverage.macs == 1
    assert sqnr(program(DATA[0]), model()(DATA[0])) > 15


@pytest.mark.slow(reason="quantizes for a report of simulated types")
def test_a_simulated_signed_type_lists_every_operator(monkeypatch):
    simulated = Datatype("s8x", ("activation",), DType.S8, -128, 127, zero_point=True, native=False)
    monkeypatch.setitem(DATATYPES, "s8x", simulated)
    program = intaglio.quantize(model(), DATA, recipe={"*": {"activations_dtype": "s8x"}})
    lines = str(program.coverage).splitlines()
    for operator in ("aten.conv2d.default", "aten.linear.default"):
        assert any(line.startswith(f"  {operator}") and "no kernel computes with s8x" in line for line in lines)
    assert not any(line.lstrip().startswith(":") for line in lines)


def test_an_lstm_refuses_int8_activations_with_the_reason():
    lstm, x = randomize(nn.LSTM(8, 8, batch_first=True)).eval(), torch.randn(2, 5, 8)
    prepared = stages.prepare(
        stages.capture(nn.Sequential(nn.Linear(8, 8), Last(lstm)).eval(), x), stages.Quantizer(SIGNED)
    )
    (reason,) = [skip.reason for skip in prepared.annotations.skipped if "lstm" in skip.origin.operator]
    assert "the recipe has s8 activations" in reason


class Last(nn.Module):
    def __init__(self, lstm):
        super().__init__()
        self.lstm = lstm

    def forward(self, x):
        return self.lstm(x)[0]


def test_inductor_gets_uint8_activations():
    reference = converted()
    legalized = graph_for_inductor(reference)
    assert all(
        node.args[5] is torch.uint8 for node in legalized.graph.nodes if "quantize_per_tensor" in str(node.target)
    )
    (found,) = legalized(DATA[0])
    torch.testing.assert_close(found, reference(DATA[0]))
