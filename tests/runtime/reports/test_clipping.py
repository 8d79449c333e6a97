"""Values outside of the calibrated range are counted where float values are quantized, and reported."""

import copy
import logging
import pickle
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import numerics, stages
from intaglio.errors import InputError
from intaglio.quant.calibrate.range_methods import METHODS
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.clipping import ClippedValue, Clipping
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize


def images(seed: int = 0, batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(seed))


BATCHES = [images(seed) for seed in range(3)]


def small_net() -> nn.Module:
    return randomize(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(800, 4)))


def compiled(net: nn.Module, *data: Tensor, **options: object) -> QuantizedModel:
    return intaglio.quantize(net.eval(), list(data) or BATCHES, progress=False, **options)


@pytest.fixture(scope="module")
def plain() -> QuantizedModel:
    return stages.compile(quantized(small_net(), torch.cat(BATCHES))[1])


@pytest.fixture
def model(plain: QuantizedModel) -> QuantizedModel:
    return copy.deepcopy(plain)


def test_prometheus_reads_the_report(model):
    assert model.clipping.to_prometheus().count("\n") == 4
    for _ in range(3):
        model(50 * images())
    (value,) = model.clipping.values
    lines = [line for line in model.clipping.to_prometheus().splitlines() if not line.startswith("#")]
    ends = f'low="{value.low:.9g}",high="{value.high:.9g}"'
    labels = f'{{module="{value.path}",value="{value.value}",{ends}}}'
    assert lines == [f"intaglio_clipped_share{labels} {value.share:.9g}", f"intaglio_clipped_calls_total{labels} 3"]


def test_labels_for_prometheus_are_escaped():
    text = Clipping((ClippedValue('a"b', "c\\d\n", 0.0, 1.0, 0.5, 2),)).to_prometheus()
    assert r'{module="a\"b",value="c\\d\n",low="0",high="1"} 0.5' in text


def test_values_of_one_name_have_series_of_their_own():
    values = tuple(ClippedValue("body", "x", 0.0, high, 0.5, 1) for high in (1.0, 2.0))
    lines = Clipping(values).to_prometheus().splitlines()
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series)) == 4


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the model, without those about the data of its calibration."""
    found = [record for record in caplog.records if record.levelno == logging.WARNING]
    return [record.getMessage() for record in found if record.name == "intaglio"]


def shares(model: QuantizedModel) -> list[float]:
    return [value.share for value in model.clipping.values]


def expected_share(model: QuantizedModel, x: Tensor) -> float:
    (op,) = [op for op in model.graph.ops if op.kind == "quantize"]
    q = model.graph.types[op.output].qparams
    return numerics.count_clipped(x.numpy(), q.step, q.zero, q.qmin, q.qmax) / x.numel()


def test_a_call_with_values_outside_of_the_range_warns_once_with_module_share_range_and_remedy(model, caplog):
    x = 10 * images(5)
    for _ in range(3):
        model(x)
    (text,) = warnings_in(caplog)
    (found,) = model.clipping.values
    assert found.path == "0"
    assert found.calls == 3
    assert found.share == expected_share(model, x) > 0.5
    assert text.startswith(f"0: {100 * found.share:.1f} % of the values of its operand")
    assert f"range {found.low:.4g} to {found.high:.4g}" in text
    assert "calibrate with data like that of this call" in text


def test_calibration_data_and_similar_data_do_not_warn(model, caplog):
    for x in (*BATCHES, images(5), images(6, 1)):
        model(x)
    assert warnings_in(caplog) == []
    assert all(share < 0.01 for share in shares(model))


def test_inputs_with_parameters_per_channel_are_counted_too(caplog):
    model = compiled(small_net())
    assert any(op.kind == "pixels" for op in model.graph.ops)
    model(images(5))
    model(10 * images(5))
    (found,) = model.clipping.values
    x = 10 * images(5)
    assert found.share == pytest.approx(((x < found.low) | (x > found.high)).float().mean().item(), abs=0.02)
    assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize("method", METHODS)
def test_no_range_method_clips_so_much_that_its_own_data_warns(method, caplog):
    generator = torch.Generator().manual_seed(0)
    heavy = [torch.empty(256, 16).cauchy_(generator=generator).clamp(-1e4, 1e4) for _ in range(2)]
    found = compiled(randomize(nn.Linear(16, 8)), *heavy, recipe={"*": {"method": method}})
    for x in heavy:
        found(x)
    assert warnings_in(caplog) == []


@cache
def of_channels(channels: int, isa: str) -> QuantizedModel:
    x = torch.randn(2, channels, 9, 37, generator=torch.Generator().manual_seed(1))
    return stages.compile(quantized(randomize(nn.Conv2d(channels, 4, 3)), x)[1], isa=isa)


@pytest.mark.parametrize("place", ["same", "channels last", "strided", "wide"])
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_the_count_is_exact_for_every_layout_instruction_set_and_number_of_threads(place, isa, many_threads):
    x = 1.7 * torch.randn(2, 7 if place == "wide" else 3, 9, 37, generator=torch.Generator().manual_seed(2))
    x.view(-1)[::50] = float("nan")
    x.view(-1)[1::50] = float("inf")
    x.view(-1)[2::50] = -1e9
    if place == "channels last":
        x = x.to(memory_format=torch.channels_last)
    if place == "strided":
        x = x.repeat_interleave(2, 3)[..., ::2]
    for threads in (1, 3):
        many_threads(threads)
        model = copy.deepcopy(of_channels(x.shape[1], isa))
        model(x)
        assert shares(model) == [expected_share(model, x)]


def scaled(m: Body, x: Tensor) -> Tensor:
    return m.c(torch.exp(x / 4) + 3 * x)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_values_of_float_loops_are_counted_in_whole_vectors_and_remainders(isa, many_threads, caplog):
    draw = torch.Generator().manual_seed(0)
    net = randomize(Body(scaled, c=nn.Linear(77, 3)))
    model = stages.compile(quantized(net, torch.randn(64, 77, generator=draw))[1], isa=isa)
    assert model.coverage.islands == 0
    model(torch.randn(64, 77, generator=draw))
    assert warnings_in(caplog) == []
    x = 10 * torch.randn(64, 77, generator=draw)
    x.view(-1)[::50] = float("nan")
    for threads in (1, 3):
        many_threads(threads)
        again = copy.deepcopy(model)
        again(x)
        (found,) = again.clipping.values
        computed, half = torch.exp(x / 4) + 3 * x, (found.high - found.low) / 510
        inside = (computed >= found.low - half) & (computed <= found.high + half)
        assert found.path == "c"
        assert found.share == pytest.approx(1 - inside.float().mean().item(), abs=1e-4)
    assert len(warnings_in(caplog)) == 2


def normalized(m: Body, x: Tensor) -> Tensor:
    return m.c(x.mean(1, keepdim=True).exp())


def test_values_of_one_number_per_row_are_counted():
    draw = torch.Generator().manual_seed(0)
    net = randomize(Body(normalized, c=nn.Linear(1, 3)))
    model = stages.compile(quantized(net, torch.randn(64, 77, generator=draw))[1])
    model(torch.randn(64, 77, generator=draw) + 9)
    assert shares(model) == [1.0]


def softened(m: Body, x: Tensor) -> Tensor:
    return m.c(torch.fft.ifft(torch.fft.fft(x)).real)


def test_results_of_islands_are_counted(caplog):
    model = compiled(randomize(Body(softened, c=nn.Conv2d(3, 3, 3, padding=1))))
    assert model.coverage.islands
    model(10 * images(5))
    assert [value.path for value in model.clipping.values] == ["c"]
    assert len(warnings_in(caplog)) == 1


def test_masked_values_are_not_counted():
    q = 0.1, 100, 0, 255
    x = np.array([-1e9, -np.inf, -9984, -300, 0, 15.54, 15.56, np.nan, np.inf], np.float32)
    assert [numerics.count_clipped(value, *q) for value in x] == [0, 0, 0, 1, 0, 0, 1, 1, 1]


def test_as_errors_the_first_such_call_raises_and_names_the_remedy(model):
    model.on_clipping = "error"
    model(BATCHES[0])
    with pytest.raises(InputError, match=r"0: .* % of the values .* calibrated range"):
        model(10 * images(5))
    assert torch.equal(copy.deepcopy(model)(BATCHES[1]), model(BATCHES[1]))
    wider = stages.compile(quantized(small_net(), torch.cat([*BATCHES, 10 * images(5)]))[1])
    wider.on_clipping = "error"
    wider(10 * images(5))


def test_it_can_be_ignored_and_other_policies_are_refused(model, caplog):
    model.on_clipping = "ignore"
    model(10 * images(5))
    assert warnings_in(caplog) == []
    assert len(model.clipping.values) == 1
    with pytest.raises(InputError, match="'raise' is not a policy; allowed are warn, error, ignore"):
        model.on_clipping = "raise"


def test_the_report_says_what_was_clipped_or_that_nothing_was(model):
    assert str(model.clipping) == "no values outside of their calibrated ranges"
    model(10 * images(5))
    (found,) = model.clipping.values
    lines = str(model.clipping).splitlines()
    assert lines[0] == "values outside of their calibrated ranges:"
    assert lines[1].startswith(f"  0 (%{found.value}): up to {100 * found.share:.1f} % of a call, in 1 call")


def test_copies_and_pickles_keep_policy_and_counts(model):
    model.on_clipping = "ignore"
    model(10 * images(5))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.on_clipping == "ignore"
        assert str(other.clipping) == str(model.clipping)


def test_counting_changes_no_bits():
    lowered = quantized(small_net(), BATCHES[0])[1]
    model = stages.compile(lowered)
    for x in (images(5), 10 * images(6)):
        assert torch.equal(model(x), lowered(x))
