"""Unusual data in statistics, range methods and data checks: constants, infinities, outliers, masks, empty batches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

import intaglio
from intaglio import numerics, stages
from intaglio.errors import CalibrationError, SelectorError
from intaglio.quant.calibrate.batches import log_once
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.observer import Observer
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.range_methods import (
    METHODS,
    average,
    channel_ranges,
    ema,
    kl,
    method_of,
    minmax,
    mse,
    percentile,
)
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.tracing import capture
from support import nets
from support.lowering import ROUNDED, assert_equal_quantized, captured_net, quantized
from support.nets import Body
from support.programs import assert_same_bits

MODEL, CAPTURED = captured_net(nets.MaxPoolNet)
X = nets.example(MODEL, 40, seed=4)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
EVERY = [*METHODS, "percentile:99", "ema:0.5"]


def of(*arrays) -> Statistics:
    """Of one batch after the other."""
    made = Statistics()
    for index, array in enumerate(arrays):
        made.update(np.asarray(array, np.float32), batch=index)
    return made


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def scale_of(method: str, statistics: Statistics) -> float:
    low, high = method_of(method)(statistics, 0, 255)
    return numerics.affine_qparams(low, high, 0, 255).scale


def kinds(ranges: Ranges) -> list[str]:
    return [finding.kind for finding in ranges.findings]


def found(ranges: Ranges, kind: str) -> str:
    (finding,) = [finding for finding in ranges.findings if finding.kind == kind]
    return str(finding)


# ---- values


@pytest.mark.case("calibration 1")
@pytest.mark.parametrize("method", EVERY)
def test_all_zero_has_scale_one_and_an_exact_zero(method):
    low, high = method_of(method)(of(np.zeros((4, 5))), 0, 255)
    assert numerics.affine_qparams(low, high, 0, 255) == (1.0, 0)


@pytest.mark.case("calibration 4", "calibration 5", "calibration 6")
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize(("constant", "zero_point"), [(5.0, 0), (-5.0, 255)])
def test_a_constant_tensor_is_quantized_within_half_a_step(method, constant, zero_point):
    low, high = method_of(method)(of(np.full((10, 100), constant)), 0, 255)
    scale, zero = numerics.affine_qparams(low, high, 0, 255)
    assert zero == zero_point
    back = numerics.dequantize(numerics.quantize(constant, scale, zero, 0, 255), scale, zero)
    assert abs(float(back) - constant) <= scale / 2


@pytest.mark.case("calibration 7")
@pytest.mark.parametrize("method", EVERY)
def test_one_channel_has_the_range_of_the_tensor(method):
    x = normal(4000).reshape(10, 1, 400)
    made = Statistics.of(x, channels=1)
    assert channel_ranges(made, method_of(method)) == [method_of(method)(Statistics.of(x), 0, 255)]


@pytest.mark.case("calibration 8")
@pytest.mark.parametrize("method", EVERY)
def test_empty_statistics_give_the_range_zero(method):
    assert method_of(method)(Statistics(), 0, 255) == (0.0, 0.0)


@pytest.mark.case("calibration 16")
def test_only_minmax_keeps_one_huge_value():
    made = of(np.append(normal(200_000), np.float32(1e30)))
    assert scale_of("minmax", made) > 1e27
    for method in ("mse", "kl", "percentile", "percentile:99.9"):
        assert 2 / 255 < scale_of(method, made) < 10 / 255, method


@pytest.mark.case("calibration 16")
def test_data_checks_name_sites_with_outliers_and_a_better_method():
    x = torch.from_numpy(normal(40 * 3 * 13 * 13)).reshape(40, 3, 13, 13)
    x[3, 1, 2, 3] = 1e6
    for method, remedy in (("minmax", "choose 'mse', 'kl' or 'percentile'"), ("mse", "")):
        prepared = prepare(CAPTURED, Quantizer(Recipe(default=Setting(method=method))))
        text = found(calibrate(prepared, [x]), "outliers")
        assert "#0/input.x" in text
        assert "values up to 1e+06, where all but 1 of 10,000 stay below" in text
        assert remedy in text


@pytest.mark.case("calibration 17")
@pytest.mark.parametrize("method", EVERY)
@pytest.mark.parametrize("tiny", [1e-42, 1e-45])
def test_denormals_have_a_finite_scale(method, tiny):
    scale = scale_of(method, of(np.full((4, 4), tiny)))
    assert scale == numerics.MIN_SCALE
    assert np.isfinite(np.float32(1) / np.float32(scale))


@pytest.mark.case("calibration 18")
@pytest.mark.parametrize("method", EVERY)
def test_values_over_forty_orders_have_a_finite_scale_and_reciprocal(method):
    x = 10.0 ** np.linspace(-20, 20, 4000).reshape(40, 100)
    scale = scale_of(method, of(x, -x))
    assert np.isfinite(scale)
    assert np.isfinite(np.float32(1) / np.float32(scale))


@pytest.mark.case("calibration 19")
def test_negative_zero_does_not_make_a_tensor_signed():
    made = of([[-0.0, 1.0]])
    for method in EVERY:
        low, _ = method_of(method)(made, 0, 255)
        assert math.copysign(1, low) == 1, method


@pytest.mark.case("calibration 20")
@pytest.mark.parametrize("method", EVERY)
def test_nonnegative_tensors_use_all_quantized_values(method):
    x = np.abs(normal(4000)).reshape(40, 100)
    for made in (of(x), of(x[::-1]), of(x[20:], x[:20])):
        low, high = method_of(method)(made, 0, 255)
        assert numerics.affine_qparams(low, high, 0, 255).zero_point == 0
        assert low == 0.0 < high


@pytest.mark.case("calibration 21")
@pytest.mark.parametrize("method", EVERY)
def test_a_range_without_zero_is_widened_to_hold_it(method):
    low, high = method_of(method)(of(np.linspace(5, 6, 1000).reshape(10, 100)), 0, 255)
    assert low == 0.0
    assert 5 < high <= 6


@pytest.mark.case("calibration 25", "calibration 26")
@given(hnp.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 4)), elements=FINITE), st.data())
def test_any_batches_in_any_order_give_the_same_parameters(x, data):
    """All methods but the moving average, which is defined by its batches."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(x)), max_size=4)))
    parts = np.split(data.draw(st.permutations(list(x))), cuts)
    for name in EVERY:
        if not name.startswith("ema"):
            assert method_of(name)(of(*parts), 0, 255) == method_of(name)(of(x), 0, 255), name


@pytest.mark.case("calibration 25")
def test_batch_sizes_and_ragged_batches_do_not_change_statistics():
    parts = [X.split(40), X.split(1), X.split([7, 33])]
    prepared = [prepare(CAPTURED) for _ in parts]
    for one, batches in zip(prepared, parts, strict=True):
        calibrate(one, batches)
    for name in ("mse", "average", "percentile:99"):  # the input's: a layer's own sums round with the size of its batch
        first, *others = (convert(one.with_method(name)).qparams["#0/input.x"] for one in prepared)
        assert all(other == first for other in others)


@pytest.mark.case("calibration 25")
def test_a_moving_average_is_that_of_the_batches_in_the_order_of_their_indices():
    made = Statistics()
    for index, high in ((2, 3.0), (0, 1.0), (1, 2.0)):
        made.update(np.array([high, -1.0], np.float32), batch=index)
    low, high = 1.0, 1.0
    for value in (2.0, 3.0):
        high += 0.5 * (value - high)
    assert ema(made, weight=0.5) == (-low, high)
    shuffled = Statistics.from_dict(made.to_dict())
    assert ema(shuffled) == ema(made) != minmax(made)


def test_the_average_method_averages_the_range_of_each_sample():
    x = np.array([[1, -2], [3, -4], [5, 0]], np.float32)
    assert average(of(x)) == (-2.0, 3.0)
    assert average(of(x[:1], x[1:])) == (-2.0, 3.0)


# ---- methods


@pytest.mark.case("calibration 50")
@given(hnp.arrays(np.float32, st.integers(1, 60), elements=FINITE))
def test_the_hundredth_percentile_and_short_tails_are_min_max(x):
    assert percentile(of(x), percent=100) == percentile(of(x)) == minmax(of(x))


@pytest.mark.case("calibration 50")
@pytest.mark.parametrize("percent", ["0", "-1", "100.001", "nan", "inf", "x", "", "1/0"])
def test_an_impossible_percentile_is_refused(percent):
    with pytest.raises(ValueError, match="percentile"):
        method_of(f"percentile:{percent}")
    with pytest.raises(SelectorError, match="percentile"):
        Setting(method=f"percentile:{percent}")
    with pytest.raises(SelectorError, match="method: "):
        prepare(CAPTURED).with_method(f"percentile:{percent}")


@pytest.mark.case("calibration 50")
@given(hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-100, 100, width=32)), st.integers(1, 100))
def test_a_percentile_is_the_nearest_rank_to_the_width_of_a_bin(x, percent):
    made, k = of(x), math.ceil(percent / 100 * len(x))
    low, high = percentile(made, percent=percent)
    exact_high, exact_low = max(0.0, float(np.sort(x)[k - 1])), min(0.0, float(np.sort(x)[len(x) - k]))
    width, denormal = 2.0**made.exponent, 2.0 ** (-126 - 5)  # bins of bit patterns are that wide next to zero
    assert exact_high <= high <= min(exact_high + width, exact_high * (1 + 2.0**-5) + denormal)
    assert exact_low >= low >= max(exact_low - width, exact_low * (1 + 2.0**-5) - denormal)


def divergence(x: np.ndarray, low: float, high: float) -> float:
    """Kullback-Leibler, over as many bins as the histogram of these values has."""
    bins = np.bincount((np.floor(np.ldexp(x.astype(np.float64), -of(x).exponent))).astype(int) + 4096, minlength=8192)
    index = np.flatnonzero(bins)
    ends = of(x).low, of(x).high
    unit = 2.0 ** of(x).exponent
    centres = np.clip((index - 4096) * unit, *ends) / 2 + np.clip((index - 4095) * unit, *ends) / 2
    scale, zero = numerics.affine_qparams(low, high, 0, 255)
    quantized = np.rint(centres / scale) + zero
    inside = (quantized >= 0) & (quantized <= 255)
    shown, told = bins[index].astype(float), np.zeros(len(index))
    for level in np.unique(quantized[inside]):
        chosen = quantized == level
        told[chosen] = shown[chosen].mean()
    shown[np.flatnonzero(inside)[0]] += shown[quantized < 0].sum()
    shown[np.flatnonzero(inside)[-1]] += shown[quantized > 255].sum()
    p, q = shown[inside] / shown[inside].sum(), told[inside] / bins.sum()
    return float((p * np.log(p / q)).sum())


@pytest.mark.case("calibration 52")
@pytest.mark.parametrize("name", ["normal", "laplace", "relu", "student"])
def test_the_kl_method_never_has_a_larger_divergence_than_min_max(name):
    rng = np.random.default_rng(1)
    draws = {
        "normal": normal(20_000),
        "laplace": rng.laplace(size=20_000),
        "relu": np.maximum(normal(20_000), 0),
        "student": rng.standard_t(3, 20_000),
    }
    x = draws[name].astype(np.float32)
    x = x[x != 0]
    chosen, full = kl(of(x)), minmax(of(x))
    assert divergence(x, *chosen) < divergence(x, *full)
    assert chosen != full


@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(1, 500, width=32)), st.booleans())
def test_the_kl_method_clips_no_larger_share_than_the_divergence_of_min_max_allows(x, alternating):
    x = x * (-1) ** np.arange(len(x)) if alternating else x
    low, high = kl(of(x))
    full, margin = divergence(x, *minmax(of(x))), (high - low) / 255 + 2.0 ** of(x).exponent
    assert np.mean((x < low - margin) | (x > high + margin)) <= 1 - np.exp(-full) + 1e-9


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("low", [-3, 0])
def test_the_kl_method_does_not_shrink_ranges_onto_a_single_bin(low, seed):
    few = of(np.random.default_rng(seed).uniform(low, 3, 512))
    assert kl(few) == minmax(few)


@pytest.mark.case("calibration 52")
@pytest.mark.parametrize("method", ["kl", "mse"])
@given(hnp.arrays(np.float32, st.integers(0, 50), elements=FINITE))
def test_searches_end_after_a_hundred_ranges_and_none_is_worse_than_the_start(method, x):
    from intaglio.quant.calibrate import range_methods as methods

    tried, made = [], of(x)
    histogram = methods._Histogram.of(made)
    error = histogram.divergence if method == "kl" else histogram.squared_error
    search = methods._Search(lambda low, high: tried.append(error(low, high, 0, 255)) or tried[-1], histogram.full)
    search.run()
    assert len(tried) <= 100
    assert search.error == min(tried) <= tried[0]


@pytest.mark.parametrize("method", EVERY)
def test_changing_the_method_needs_no_new_data(method, tmp_path):
    calibrated = prepare(CAPTURED)
    calibrate(calibrated, X.split(8)).save(tmp_path / "ranges.json")
    ranges = Ranges.load(tmp_path / "ranges.json")
    by_recipe = prepare(CAPTURED, Quantizer(Recipe(default=Setting(method=method))))
    calibrate(by_recipe, X.split(8))
    expected = convert(by_recipe).qparams
    assert convert(calibrated.with_method(method), ranges).qparams == expected
    assert convert(prepare(CAPTURED).with_method(method), ranges).qparams == expected


def test_extrema_per_channel_are_kept_where_they_are_asked_for():
    prepared = prepare(CAPTURED)
    prepared.observers["#0/input.x"].channels = 1
    for memory_format in (torch.contiguous_format, torch.channels_last):
        ranges = calibrate(prepared, [x.contiguous(memory_format=memory_format) for x in X.split(7)])
        channels = ranges.statistics["#0/input.x"].channels
        np.testing.assert_array_equal(channels.low, X.amin((0, 2, 3)).numpy())
        np.testing.assert_array_equal(channels.high, X.amax((0, 2, 3)).numpy())
        assert Ranges.from_json(ranges.to_json()).to_json() == ranges.to_json()
    assert channel_ranges(ranges.statistics["#0/input.x"], minmax) == list(
        zip(channels.low.tolist(), channels.high.tolist(), strict=True)
    )


def test_the_mean_of_all_values_is_rounded_once():
    x = np.array([1e30, 1.0, -1e30, 1e-30], np.float32)
    assert of(x).mean == 0.25


def test_the_sample_axis_is_the_one_as_long_as_the_batch():
    model = nets.randomize(Body(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(4, 3)))
    prepared = prepare(capture(model, torch.randn(2, 5, 4)))
    assert {observer.samples for observer in prepared.observers.values()} <= {0, 1}
    x = torch.randn(6, 5, 4)
    whole, parts = (calibrate(prepare(capture(model, x[:2])), data) for data in ([x], x.split(2)))
    assert whole.statistics == parts.statistics
    assert all(statistics.samples == 6 for statistics in whole.statistics.values())


# ---- data


@pytest.mark.case("calibration 9")
def test_sites_without_data_are_found_when_calibrating():
    parts = {"c": nn.Conv2d(3, 4, 3), "expert": nn.Conv2d(4, 4, 1), "last": nn.Conv2d(4, 2, 1)}
    model = nets.randomize(Body(lambda m, x: (m.last(m.c(x)), m.expert(m.c(x)[:0])), **parts))
    prepared = prepare(capture(model, X[:, :, :8, :8]))
    ranges = calibrate(prepared, [X[:, :, :8, :8]])
    assert "convert raises an error" in found(ranges, "never_hit")
    with pytest.raises(CalibrationError, match="seen no data"):
        convert(prepared, ranges)


@pytest.mark.case("calibration 11")
def test_fewer_samples_than_asked_for_are_warned_of():
    with pytest.warns(UserWarning, match="calibrated on 40 samples in 1 batches, which is all data; samples=64"):
        calibrate(prepare(CAPTURED), [X], samples=64)


@pytest.mark.case("calibration 12", "calibration 13")
def test_equalization_leaves_nan_to_calibration_which_names_the_site():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises(CalibrationError, match=r"batch 0, .*input.*NaN"):
        intaglio.quantize(model, [torch.full((2, 3, 8, 8), math.nan)])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_can_be_left_out(poison):
    bad = X.clone()
    bad[3, 1, 2, 3:5] = poison
    prepared = prepare(CAPTURED)
    ranges = calibrate(prepared, [bad], nonfinite="ignore")
    assert "NaN or infinite values were left out" in found(ranges, "not_finite")
    finite = bad[torch.isfinite(bad)]
    seen = ranges.statistics["#0/input.x"]
    assert (seen.low, seen.high) == (finite.min().item(), finite.max().item())
    assert all(math.isfinite(scale) for q in convert(prepared).qparams.values() for scale in q.scales)
    with pytest.raises(CalibrationError, match="infinite values"):
        calibrate(prepared, [bad])


@pytest.mark.case("calibration 14")
def test_data_without_any_finite_value_is_an_error():
    with pytest.raises(CalibrationError, match=r"batch 1, #0/input\.x: 20280 NaN"):
        calibrate(prepare(CAPTURED), [X, X * float("nan")], nonfinite="ignore")
    with pytest.raises(CalibrationError, match="'drop'; allowed are"):
        calibrate(prepare(CAPTURED), [X], nonfinite="drop")


class Attention(nn.Module):
    """Scores of every token for every other, and a mask that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.out = nn.Linear(8, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.out(F.softmax(self.scores(x) + mask, -1))


@pytest.mark.case("calibration 15")
@pytest.mark.parametrize("masked", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_mask_added_to_logits_sets_no_scale(masked):
    model = nets.randomize(Attention())
    x, hidden = torch.randn(40, 6, 8), torch.ones(40, 6, 6).tril() == 0
    mask = torch.zeros(40, 6, 6).masked_fill(hidden, masked)
    prepared = prepare(capture(model, (x, mask)), Quantizer(ROUNDED))
    ranges = calibrate(prepared, [(x, mask)])
    assert "a mask's large negative numbers" in found(ranges, "masks")
    reference = convert(prepared, ranges)
    logits = model.scores(x)
    for name, statistics in ranges.statistics.items():
        if statistics.low <= -1e4:
            (scale,) = reference.qparams[name].scales
            assert scale < (1024 if name == "#0/input.mask" else 20 + 3 * logits.abs().max().item()) / 200
    exact = model(x, mask).detach()
    assert (reference(x, mask) - exact).norm() < 0.1 * exact.norm()


@pytest.mark.case("calibration 15")
def test_infinite_masks_are_left_out_or_an_error():
    x, mask = torch.randn(40, 6, 8), torch.zeros(40, 6, 6).masked_fill(torch.ones(6, 6).tril() == 0, -math.inf)
    captured = capture(nets.randomize(Attention()), (x, mask))
    with pytest.raises(CalibrationError, match=r"batch 0, .*infinite values"):
        calibrate(prepare(captured, Quantizer(ROUNDED)), [(x, mask)])
    ranges = calibrate(prepare(captured, Quantizer(ROUNDED)), [(x, mask)], nonfinite="ignore")
    assert ranges.statistics["#0/input.mask"].low == 0


@pytest.mark.parametrize("masked", [-1e9, -math.inf])
def test_a_mask_of_a_softmax_in_float_may_be_infinite(masked):
    """By default the logits are only read by a softmax between floats, so they are not rounded and need no range."""
    model = nets.randomize(Attention())
    x, mask = torch.randn(40, 6, 8), torch.zeros(40, 6, 6).masked_fill(torch.ones(6, 6).tril() == 0, masked)
    reference, lowered = quantized(model, x, mask)
    exact = model(x, mask).detach()
    assert (reference(x, mask) - exact).norm() < 0.02 * exact.norm()
    assert_equal_quantized(reference, lowered, x, mask)
    assert_same_bits(stages.compile(lowered)(x, mask), lowered(x, mask))


# ---- the lint


def test_good_data_has_no_findings():
    assert calibrate(prepare(CAPTURED), X.split(8)).findings == ()


def test_few_samples_constants_and_equal_batches_are_found(caplog):
    ranges = calibrate(prepare(CAPTURED), [torch.zeros(2, *X.shape[1:]), X[:3], X[:3], X[:4]])
    assert found(ranges, "few_samples").startswith("data: 12 samples")
    assert found(ranges, "constant_batches").startswith("batch 0: ")
    assert found(ranges, "duplicate_batches").startswith("batches 1, 2: ")
    assert [record.message for record in caplog.records if record.name == "intaglio.lint"] == [
        str(finding) for finding in ranges.findings
    ]


def test_parts_of_a_model_log_equal_findings_once(caplog):
    with log_once():
        first, second = (calibrate(prepare(CAPTURED), [X[:size]]) for size in (3, 3))
        calibrate(prepare(CAPTURED), [X[:4]])
    assert first.findings == second.findings
    few = ["data: 3 samples are few", "data: 4 samples are few"]
    assert [text.partition(";")[0] for text in caplog.messages] == few


def test_images_that_were_not_normalised_are_found():
    pixels = torch.randint(0, 256, X.shape, dtype=torch.uint8)
    assert "look like bytes" in found(calibrate(prepare(CAPTURED), [pixels.float()]), "pixels_as_bytes")
    image = Image(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    declared = prepare(CAPTURED, Quantizer(input=image))
    assert "image.normalize(pixels)" in found(calibrate(declared, [pixels.float()]), "pixels_as_bytes")
    assert "pixels_as_bytes" not in kinds(calibrate(declared, [image.normalize(pixels)]))


def test_ranges_that_still_grow_are_found():
    assert "growing_ranges" in kinds(calibrate(prepare(CAPTURED), [x * (1 + n) for n, x in enumerate(X.split(4))]))
    assert "growing_ranges" not in kinds(calibrate(prepare(CAPTURED), [*(2 * X).split(8), *X.split(8)]))


# ---- files


@pytest.mark.slow(reason="calibrates a model in parts; merged statistics are compared in test_distributed.py")
@pytest.mark.case("calibration 46", "calibration 47")
def test_files_of_parts_merge_to_the_file_of_the_whole(tmp_path):
    prepared = prepare(CAPTURED)
    whole = calibrate(prepared, X.split(5))
    for part, first in ((X.split(5)[:3], 0), (X.split(5)[3:], 3)):
        calibrate(prepare(CAPTURED), part, first_batch=first).save(tmp_path / f"{first}.json")
    files = sorted(tmp_path.glob("*.json"))
    for order in (files, files[::-1]):
        merged = Ranges.merge_files(order)
        assert merged.to_json() == whole.to_json()
    for method in EVERY:
        chosen = prepared.with_method(method)
        assert convert(chosen, merged).qparams == convert(chosen).qparams
    with pytest.raises(intaglio.errors.ArtifactError, match="no file"):
        Ranges.merge_files([])


@pytest.mark.case("calibration 47")
def test_a_graph_with_the_same_sites_and_other_operators_is_refused():
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 4)}
    x = torch.randn(40, 8)
    one, two = (
        prepare(capture(nets.randomize(Body(forward, **parts)), x))
        for forward in (lambda m, x: m.b(F.relu(m.a(x))), lambda m, x: m.b(F.relu(m.a(x) + 0.0 * m.a(x))))
    )
    ranges = calibrate(one, [x])
    assert ranges.graph == one.fingerprint != two.fingerprint
    renamed = Ranges({name: next(iter(ranges.statistics.values())) for name in two.observers}, graph=ranges.graph)
    with pytest.raises(CalibrationError, match="they belong to another model, with other operators"):
        convert(two, renamed)


@pytest.mark.case("calibration 49")
def test_ragged_lengths_need_no_memory_of_their_own():
    model = nets.randomize(Body(lambda m, x: m.b(F.relu(m.a(x))), a=nn.Linear(8, 8), b=nn.Linear(8, 4)))
    length = torch.export.Dim("length", min=2, max=64)
    captured = capture(model, torch.randn(2, 6, 8), dynamic_shapes=(({0: torch.export.Dim.AUTO, 1: length},),))
    prepared = prepare(captured)
    data = [torch.randn(n, 5 + n, 8) for n in (1, 4, 9, 2)]
    ranges = calibrate(prepared, data)
    assert ranges.samples == 16
    assert all(s.bins.size + s.sketch.size == 8192 + 16384 for s in ranges.statistics.values())
    direct = Statistics()
    for x in data:
        direct.update(x.numpy())
    (seen,) = (statistics for name, statistics in ranges.statistics.items() if name.startswith("#0/input"))
    assert seen == direct


# ---- sharing


@pytest.mark.case("calibration 28")
def test_a_module_that_is_called_twice_has_a_range_for_each_call():
    parts = {"a": nn.Linear(8, 8), "r": nn.ReLU(), "b": nn.Linear(8, 8), "c": nn.Linear(8, 4)}
    model = nets.randomize(Body(lambda m, x: m.c(m.r(m.b(m.r(m.a(x))))), **parts))
    with torch.no_grad():
        model.b.weight *= 20
    ranges = calibrate(prepare(capture(model, torch.randn(40, 8))), [torch.randn(40, 8)])
    first, second = (ranges.statistics[name] for name in sorted(ranges.statistics) if "relu" in name)
    assert second.high > 5 * first.high


@pytest.mark.case("calibration 31")
def test_a_value_used_twice_has_one_observer():
    model = nets.randomize(
        Body(
            lambda m, x: m.b(torch.cat([y := m.a(x), y], -1) + (y + y).repeat(1, 2)),
            a=nn.Linear(8, 8),
            b=nn.Linear(16, 4),
        )
    )
    prepared = prepare(capture(model, torch.randn(40, 8)))
    values = [site.value for site in prepared.annotations.sites if site.role == "activation"]
    assert len(values) == len(set(values))
    assert torch.isfinite(convert(prepared, calibrate(prepared, [torch.randn(40, 8)]))(torch.randn(2, 8))).all()


@pytest.mark.case("calibration 3")
def test_one_expert_without_data_leaves_the_statistics_of_others_alone():
    observer = Observer(prepare(CAPTURED).annotations.sites[0])
    observer(torch.zeros(0, 3, 13, 13))
    assert observer.statistics == Statistics()
    assert observer.statistics.history == {}


@pytest.mark.case("calibration 52")
def test_every_search_keeps_min_max_of_a_constant():
    assert mse(of(np.full(1000, 0.3))) == kl(of(np.full(1000, 0.3))) == minmax(of(np.full(1000, 0.3)))
