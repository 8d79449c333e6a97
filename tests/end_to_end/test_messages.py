"""Nothing happens unsaid: float parts, slow parts, simulations, missing data."""

import inspect
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import CalibrationError
from support import nets
from support.int8_models import compiled, picture
from support.lowering import captured_net, kinds, lowered, quantized
from support.nets import Body
from support.slow_params import slow_params


@pytest.mark.case("problem 5")
def test_an_operator_without_a_kernel_is_named_with_module_operator_and_line():
    """Problem 5: no operator fails for want of a kernel; it runs in float and is reported."""
    model, _ = compiled(nets.ConvThenUnsupported)
    (part,) = model.coverage.floats
    line = inspect.getsourcelines(nets.ConvThenUnsupported.forward)[1] + 1
    assert (part.operator, part.reason) == ("aten.erf.default", "no int8 kernel for this operator")
    assert part.source.endswith(f"nets.py:{line}, in forward")
    assert part.location in str(model.coverage)


@pytest.mark.slow(reason="lowers a residual network in several modes")
@pytest.mark.case("problem 20")
def test_modes_and_environment_do_not_decide_what_runs_in_int8(monkeypatch):
    """Problem 20: no flag has to be set for the fast path."""
    monkeypatch.delenv("TORCHINDUCTOR_FREEZING", raising=False)
    monkeypatch.setenv("PYTORCH_JIT", "0")
    _, captured = captured_net(nets.Residual)
    texts = set()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            texts.add(lowered(captured, picture())[1].text())
    assert len(texts) == 1


@pytest.mark.case("problem 21")
def test_reference_and_program_are_different_types_with_own_texts():
    """Problem 21."""
    model, integer = compiled(nets.Linears)
    reference, _ = quantized(nets.randomize(nets.Linears()), torch.randn(4, 16))
    assert "a simulation in float, slower than the float model" in repr(reference)
    assert repr(model).startswith("QuantizedModel(Linears: 100.0 % of MACs in int8")
    assert not isinstance(reference, nn.Module)
    assert len({type(reference), type(integer), type(model)}) == 3


@pytest.mark.case("problem 25")
@pytest.mark.parametrize(
    "net",
    [
        nets.Residual,
        *slow_params(nets.OptionA, reason="a larger residual network"),
        nets.MaxPoolNet,
        nets.Grouped,
        nets.SharedConv,
    ],
    ids=lambda net: net.__name__,
)
def test_quantized_values_pass_between_layers_without_float(net):
    """Problem 25: one quantize at the input, one dequantize at the result."""
    model, captured = captured_net(net)
    _, graph = lowered(captured, nets.example(model, 4))
    assert kinds(graph)[0] == "quantize"
    assert kinds(graph)[-1] == "dequantize"
    assert [kinds(graph).count(kind) for kind in ("quantize", "dequantize", "island")] == [1, 1, 0]


@pytest.mark.slow(reason="lowers a residual network four times")
@pytest.mark.case("problem 24")
def test_accuracy_settings_add_no_operator_to_the_program():
    """Problem 24: scales per tensor, seven bits and other range methods run in the same kernels."""
    model, captured = captured_net(nets.Residual)
    settings = ({}, {"weights": "tensor"}, {"bits": 7}, {"method": "minmax"})
    found = [lowered(captured, nets.example(model, 4), recipe=intaglio.Recipe.of({"*": s}))[1] for s in settings]
    assert all(kinds(graph) == kinds(found[0]) for graph in found)


@pytest.mark.case("problem 19")
def test_a_float_layer_in_the_middle_costs_one_border_each_way_and_is_listed():
    """Problem 19: what makes int8 slow is in the report, by name."""

    def body(m, x):
        return m.e(F.relu(m.d(F.relu(m.c(x)))))

    parts = {"c": nn.Conv2d(3, 4, 3), "d": nn.Conv2d(4, 4, 3), "e": nn.Conv2d(4, 4, 1)}
    recipe = intaglio.Recipe().with_selection(skip="d")
    _, graph = quantized(nets.randomize(Body(body, **parts)), picture(), recipe=recipe)
    assert kinds(graph).count("island") == 1
    assert str(graph.skipped[0]) == "d (aten.conv2d.default): the recipe leaves it in float"


@pytest.mark.case("problem 40")
def test_quantize_prints_and_warns_nothing(capfd):
    """Problem 40: a library is silent; what it has to say goes to a logger without handlers."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = intaglio.quantize(nets.randomize(nets.ConvBnRelu()), [picture()])
        model(picture())
    assert capfd.readouterr() == ("", "")
    logger = logging.getLogger("intaglio")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)


@pytest.mark.case("problem 18", "calibration 11")
def test_too_little_data_is_reported_with_both_numbers():
    """Problem 18, calibration case 11."""
    model, captured = captured_net(nets.MaxPoolNet)
    prepared = stages.prepare(captured)
    with pytest.warns(UserWarning, match="calibrated on 6 samples in 2 batches, which is all data; samples=100"):
        ranges = stages.calibrate(prepared, [nets.example(model, 4), nets.example(model, 2)], samples=100)
    assert (ranges.batches, ranges.samples) == (2, 6)
    assert stages.convert(prepared, ranges).qparams


@pytest.mark.case("problem 18")
def test_an_uncalibrated_model_is_an_error_not_garbage():
    """Problem 18: also when only a part has seen no data."""
    _, captured = captured_net(nets.MaxPoolNet)
    prepared = stages.prepare(captured)
    with pytest.raises(CalibrationError, match="have seen no data"):
        stages.requantize(stages.convert(prepared))
    site, observer = next(iter(prepared.observers.items()))
    observer(nets.example(nets.MaxPoolNet(), 2))
    with pytest.raises(CalibrationError, match=r"have seen no data") as raised:
        stages.convert(prepared)
    assert site not in raised.value.where


@pytest.mark.slow(reason="quantizes three models for the reasons of their float parts")
@pytest.mark.case("problem 5")
def test_every_float_part_has_a_reason_also_where_it_makes_no_floats():
    """Problem 5: a mask, an index, a count."""
    bodies = (
        lambda m, x: (m.c(x), x.count_nonzero((1, 2, 3))),
        lambda m, x: (m.c(x), torch.bucketize(m.c(x), torch.tensor([0.0]))),
    )
    for body in bodies:
        _, graph = quantized(nets.randomize(Body(body, c=nn.Conv2d(3, 4, 3))), picture())
        assert len(graph.islands) == 1
        assert "computes integers or booleans" in str(graph.skipped[0])
