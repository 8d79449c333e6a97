"""What calibration promises: the model is left alone, runs repeat, ranges belong to their graph."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from intaglio import numerics, stages
from intaglio.errors import ArtifactError, CalibrationError
from intaglio.lower.lowering import requantize
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.observer import Observer
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import convert
from intaglio.torch_private import quantized_decomposed
from intaglio.tracing import capture
from support import nets
from support.lowering import assert_equal_quantized, captured_net, kinds, quantized, sqnr
from support.nets import Body

MODEL, CAPTURED = captured_net(nets.MaxPoolNet)
X = nets.example(MODEL, 12, seed=4)
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.case("calibration 44")
@pytest.mark.parametrize("change", [0.0, 0.5])
def test_a_requantize_to_the_same_scale_vanishes_and_another_is_one_table(change):
    """Case 44: quantized values of x quantized again under their own parameters, or others."""
    model = nets.randomize(Body(lambda m, x: m.c(x), c=nn.Conv2d(3, 4, 3, bias=False)))
    reference, plain = quantized(model, IMAGES)
    graph, ops = reference.module.graph, quantized_decomposed()
    first = next(node for node in graph.nodes if "dequantize_per_tensor" in str(node.target))
    parameters = (first.args[1] * (1 + change), *first.args[2:])
    (reader,) = first.users
    with graph.inserting_after(first):
        again = graph.call_function(ops.quantize_per_tensor.default, (first, *parameters))
    with graph.inserting_after(again):
        real = graph.call_function(ops.dequantize_per_tensor.default, (again, *parameters))
    again.meta = real.meta = first.meta
    reader.replace_input_with(first, real)
    reference.module.recompile()
    twice = requantize(reference)
    if change:
        assert kinds(twice).count("table") == 1 + kinds(plain).count("table")
        assert_equal_quantized(reference, twice, IMAGES)
    else:
        assert kinds(twice) == kinds(plain)
        assert torch.equal(twice(IMAGES), plain(IMAGES))


@pytest.mark.case("calibration 44")
def test_a_requantize_between_equal_parameters_is_the_identity():
    """Case 44: why the identity may be removed."""
    for scale, zero in ((0.1, 0), (3e-5, 200), (7.0, 255)):
        table = numerics.requantize_lut(scale, zero, scale, zero, 0, 255)
        np.testing.assert_array_equal(table, np.arange(256, dtype=np.uint8))


@pytest.mark.case("calibration 51")
def test_the_longest_sum_without_overflow_is_exact():
    """Case 51: 255 * 127 for each of as many inputs as an accumulator takes beside a bias."""
    inputs = 33_155
    model = Body(lambda m, x: m.a(x), a=nn.Linear(inputs, 1, bias=False))
    nn.init.ones_(model.a.weight)
    x = torch.ones(2, inputs)
    _, lowered = quantized(model, x)
    (acc,) = [op.output for op in lowered.graph.ops if op.kind == "linear"]
    exact = np.float32(255 * 127 * inputs) * np.float32(lowered.graph.types[acc].q.step)
    np.testing.assert_array_equal(lowered(x).numpy(), np.full((2, 1), exact, np.float32))
    assert torch.equal(stages.compile(lowered)(x), lowered(x))


@pytest.mark.case("calibration 51")
def test_a_sum_that_could_overflow_stays_in_float_by_name():
    """Case 51: 70,000 inputs are known not to fit before any data is read; the rest of the model is quantized."""
    model = Body(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(70_000, 4), b=nn.Linear(4, 2))
    _, lowered = quantized(nets.randomize(model), torch.ones(2, 70_000))
    (skip,) = [skip for skip in lowered.skipped if skip.origin.path == "a"]
    assert skip.reason == "an output sums 70000 products; at most 33155 fit an int32 accumulator"
    assert "linear" in kinds(lowered)


@pytest.mark.case("calibration 24")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_values_of_other_types_are_counted_as_float32(dtype):
    """Case 24: a cast inside the model changes what is counted only by what the cast itself rounds."""
    model = nets.randomize(Body(lambda m, x: m.c(x.to(dtype).float()), c=nn.Conv2d(3, 4, 3)))
    prepared = prepare(capture(model, IMAGES))
    statistics = calibrate(prepared, [IMAGES]).statistics
    direct = Statistics()
    direct.update(IMAGES.to(dtype).float().numpy())
    assert direct in statistics.values()


@pytest.mark.case("calibration 24")
def test_a_double_model_is_not_downcast_in_silence():
    """Case 24: a batch of doubles for a float model, and the other way round, is an error that names both."""
    with pytest.raises(CalibrationError, match=r"data type is torch\.float64; the model takes torch\.float32"):
        calibrate(prepare(CAPTURED), [X.double()])


@pytest.mark.case("calibration 38")
def test_scales_per_channel_end_at_the_requantize():
    """Case 38: what moves values across the channel axis reads quantized values of one scale, whatever the weights
    have."""

    def body(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(m.c(x))
        y = torch.cat([y[:, 2:5], y[:, :3]], 1)
        z = m.a(y.reshape(y.shape[0], 12, -1)).reshape(y.shape[0], 3, 8, 4)
        z = m.d(z).permute(0, 2, 3, 1)
        return m.b(z.transpose(1, 3).flatten(1))

    parts = {"c": nn.Conv2d(3, 6, 3, padding=1), "a": nn.Linear(32, 8), "d": nn.Conv2d(3, 4, 3), "b": nn.Linear(48, 5)}
    model = nets.randomize(Body(body, **parts))
    with torch.no_grad():
        for part in parts.values():
            part.weight *= torch.logspace(-1, 1, len(part.weight)).reshape(-1, *[1] * (part.weight.dim() - 1))
    reference, lowered = quantized(model, IMAGES)
    assert not lowered.islands
    types = lowered.graph.types
    for op in lowered.graph.ops:
        read = [types[name].q for name in op.inputs if name not in lowered.graph.constants]
        one_scale = all(q is None or q.axis is None for q in read)
        assert one_scale or op.kind in ("requantize", "dequantize", "add"), op.kind
    assert {"reshape", "slice", "cat", "permute"} <= set(kinds(lowered))
    assert_equal_quantized(reference, lowered, IMAGES)


class Statless(nn.Module):
    """A batch norm without running statistics normalises by the batch, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.c(x))


@pytest.mark.case("calibration 41")
def test_a_norm_without_statistics_stays_in_float_and_is_reported():
    """Case 41: it is not folded with statistics it does not have."""
    model = Statless().eval()
    reference, lowered = quantized(model, IMAGES)
    assert any("norm" in str(skip) for skip in lowered.skipped)
    assert sqnr(reference(IMAGES), model(IMAGES)) > 30


def checksum(model: nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        total.update(name.encode() + tensor.detach().numpy().tobytes())
    return total.hexdigest() + str([module.training for module in model.modules()])


@pytest.mark.case("calibration 41")
def test_calibrating_changes_no_buffer_mode_generator_or_grad_mode():
    """Case 41: batch norms in training mode count no batch, dropout draws nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.ReLU())
    model.train()
    before, rng = checksum(model), torch.get_rng_state()
    prepared = prepare(capture(model, IMAGES))
    calibrate(prepared, [IMAGES, 2 * IMAGES])
    assert checksum(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.is_grad_enabled()
    assert torch.equal(prepared(IMAGES), prepared(IMAGES))


@pytest.mark.case("calibration 42")
def test_a_failure_in_the_middle_leaves_what_was_there_and_can_be_resumed():
    """Case 42: after an exception of the caller's own loop the next data counts as if it had not been."""
    prepared, undisturbed = prepare(CAPTURED), prepare(CAPTURED)

    def interrupted(run) -> None:
        run(X[:4])
        raise KeyboardInterrupt

    first = calibrate(prepared, [X[:6]])
    with pytest.raises(KeyboardInterrupt):
        calibrate(prepared, interrupted)
    calibrate(prepared, [X[6:]])
    calibrate(undisturbed, [X[:6]])
    calibrate(undisturbed, [X[6:]])
    assert first.samples == 6
    assert convert(prepared).text() == convert(undisturbed).text()
    assert all(not module._forward_hooks for module in prepared.module.modules())


@pytest.mark.case("calibration 46")
def test_two_runs_write_the_same_bytes(tmp_path):
    """Case 46: from capture to the file; sorted keys and hexadecimal floats."""
    contents = set()
    for run in ("a", "b"):
        torch.manual_seed(7)
        model = nets.randomize(nets.Residual())
        prepared = prepare(capture(model, nets.example(model)))
        calibrate(prepared, [nets.example(model, 8, seed=3)]).save(tmp_path / run)
        contents.add((tmp_path / run).read_bytes())
    (content,) = contents
    assert b"0x1." in content


@pytest.mark.case("calibration 46")
def test_the_number_of_threads_changes_no_bit_of_the_statistics():
    """Case 46."""
    site = prepare(CAPTURED).annotations.sites[0]
    x, before, found = torch.randn(64, 3, 33, 31), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 16):
            torch.set_num_threads(threads)
            observer = Observer(site)
            observer(x)
            found.append(observer.statistics.to_dict())
    finally:
        torch.set_num_threads(before)
    assert all(one == found[0] for one in found)


@pytest.mark.case("calibration 47")
def test_ranges_of_another_graph_list_what_is_missing():
    """Case 47: the names are those of the operators, so that a changed model is recognised."""
    ranges = calibrate(prepare(CAPTURED), [X])
    some = Ranges(dict(list(ranges.statistics.items())[1:]), 1, 12)
    with pytest.raises(
        CalibrationError, match=r"they belong to another model: only one of the two has the sites #0/input\.x"
    ):
        convert(prepare(CAPTURED), some)
    with pytest.raises(ArtifactError, match="version 1; this intaglio reads version 2"):
        Ranges.from_json(ranges.to_json().replace('"version": 2', '"version": 1'))


@pytest.mark.case("calibration 48")
def test_calibrating_twice_adds_and_converting_twice_repeats():
    """Case 48: neither puts a second quantize into the graph."""
    prepared = stages.prepare(CAPTURED)
    calibrate(prepared, [X])
    first = convert(prepared)
    calibrate(prepared, [X])
    assert convert(prepared).text() == first.text()
