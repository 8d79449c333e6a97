"""Statistics are exact: any order, split, merge, thread count, instruction set or float mode gives the same state."""

import dataclasses
import json
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from intaglio.errors import BuildError
from intaglio.native import cpu as machine
from intaglio.native import native_library as library
from intaglio.native import statistics as native
from intaglio.native.statistics import HALF_BINS
from intaglio.quant.calibrate.range_methods import METHODS, minmax, mse
from intaglio.quant.calibrate.tensor_statistics import (
    LOWEST_BINARY_EXPONENT,
    UNIT,
    Statistics,
    exponent_of,
    sketch_end,
    widen,
)

ANY_FLOAT = hnp.from_dtype(np.dtype(np.float32))
ARRAYS = hnp.arrays(np.float32, st.integers(0, 60), elements=ANY_FLOAT)
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1e-42,
        1.2e-38,
        -1.0,
        4096.0,
        -4096.0,
        4095.99,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
    ],
    np.float32,
)


def of(*arrays, threads: int = 1) -> Statistics:
    made = Statistics()
    for array in arrays:
        made.update(np.asarray(array, np.float32), threads)
    return made


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# ---- counting kernels


@pytest.fixture(params=machine.isas())
def kernels(request, monkeypatch):
    """The kernels of one instruction set in place of this machine's best."""
    opened = library.open_library(request.param)
    monkeypatch.setattr(library, "runtime_if_built", lambda: opened)


LENGTHS = [0, 1, 15, 16, 17, 1023, 1024, 1025, 5000, 300_001]


def wild(count: int) -> np.ndarray:
    """Magnitudes from denormal to huge, both signs, with every special value among them if there is room."""
    rng = np.random.default_rng(count)
    x = (rng.standard_normal(count) * 10.0 ** rng.integers(-44, 38, count)).astype(np.float32)
    x[rng.permutation(count)[: SPECIAL.size]] = SPECIAL[:count]
    return x


def assert_same(found: native.Counts, expected: native.Counts) -> None:
    for field in dataclasses.fields(expected):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name), field.name)


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("count", LENGTHS)
def test_compiled_counts_equal_numpys(kernels, count, rows):
    x = wild(count)[: count // rows * rows]
    expected = native.count_numpy(x, rows)
    for threads in (1, 2, 5):
        assert_same(native.count(x, rows, threads), expected)


def test_compiled_counts_of_one_value_many_times_do_not_overflow_their_packed_sums(kernels):
    """A bin's counter and the sum beside it share 64 bits, and are emptied in time."""
    count, value = 9_000_000, np.nextafter(np.float32(1), np.float32(0))
    found = native.count(np.full(count, value), 1, 1)
    assert Fraction(found.total, 2**UNIT) == count * Fraction(float(value))
    assert (found.sketch.max(), found.bins.max()) == (count, count)


@given(ARRAYS)
def test_the_total_is_the_exact_sum(x):
    exact = sum((Fraction(float(value)) for value in x[np.isfinite(x)]), Fraction(0))
    assert Fraction(native.count(x).total, 2**UNIT) == exact
    assert Fraction(native.exact_sum(x[np.isfinite(x)]), 2**UNIT) == exact


@given(ARRAYS)
def test_a_bin_of_the_sketch_ends_at_its_largest_value(x):
    sketch = native.count(x).sketch
    counted = x[np.isfinite(x) & (x != 0)]
    positive, negative = sketch.reshape(2, -1)
    for half, values in ((positive, counted[counted > 0]), (negative, counted[counted < 0])):
        magnitudes = np.abs(values)
        ends = [sketch_end(index) for index in np.flatnonzero(half).tolist()]
        assert half.sum() == len(magnitudes)
        if ends:
            assert ends[-1] >= magnitudes.max() >= ends[-1] * (1 - 2.0**-5) - 2.0**-131


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 1), (2, 40, 1), (3, 5, 19), (0, 4, 3), (1, 3, 0), (50, 33, 100)])
def test_compiled_channel_extrema_equal_numpys(kernels, shape):
    x = wild(math.prod(shape)).reshape(shape)
    low, high = native.channel_extrema_numpy(x)
    for threads in (1, 3):
        found = native.channel_extrema(x, *shape, threads)
        np.testing.assert_array_equal(found[0], low)
        np.testing.assert_array_equal(found[1], high)
        assert not np.signbit(found[0][found[0] == 0]).any()


def test_without_a_compiler_numpy_counts_and_says_so(monkeypatch):
    def refuse():
        raise BuildError("runtime", None, "no C++ compiler")

    expected = of(wild(5000))
    monkeypatch.setattr(library, "runtime", refuse)
    library.runtime_if_built.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
            assert of(wild(5000)) == expected
    finally:
        library.runtime_if_built.cache_clear()


def test_a_bin_is_the_floor_of_the_scaled_value(kernels):
    found = native.count(np.array([0.5, 1.0, 1.5, -0.5, -1.0, -1.5, -1e-30, 4095.9], np.float32))
    assert found.exponent == 0
    occupied = {int(i) - HALF_BINS: int(found.bins[i]) for i in np.flatnonzero(found.bins)}
    assert occupied == {0: 1, 1: 2, -1: 3, -2: 1, 4095: 1}


def test_wrong_dtypes_and_shapes_are_refused():
    with pytest.raises(TypeError, match="float64"):
        native.count(np.zeros(3))
    with pytest.raises(ValueError, match=r"\[2, 2, 2\]"):
        native.channel_extrema(np.zeros(3, np.float32), 2, 2, 2)
    with pytest.raises(ValueError, match="2 rows"):
        native.count(np.zeros(3, np.float32), 2)
    with pytest.raises(TypeError, match="int64"):
        Statistics().update(np.zeros(3, np.int64))


# ---- the state


@pytest.mark.case("calibration 25", "calibration 26")
@given(st.lists(ARRAYS, max_size=5), st.randoms(use_true_random=False))
def test_any_split_and_order_of_batches_give_the_state_of_one_update(arrays, order):
    whole = of(np.concatenate([np.zeros(0, np.float32), *arrays]))
    assert of(*arrays) == whole
    order.shuffle(arrays)
    assert of(*arrays, threads=2) == whole


@given(ARRAYS, ARRAYS, ARRAYS)
def test_merging_is_associative_and_commutative_with_an_empty_identity(a, b, c):
    x, y, z = of(a), of(b), of(c)
    assert x.merge(y) == y.merge(x)
    assert x.merge(y).merge(z) == x.merge(y.merge(z)) == of(a, b, c)
    assert x.merge(Statistics()) == x == Statistics().merge(x)


@pytest.mark.case("calibration 27")
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_uneven_shards_one_of_them_empty_merge_to_the_single_process_state(shards):
    batches = [normal(n, seed=n) * np.float32(2.0**n) for n in range(1, 20)]
    rng = random.Random(shards)
    split: list[list[np.ndarray]] = [[] for _ in range(shards)]
    for batch in batches:
        split[rng.randrange(max(1, shards - 1))].append(batch)
    merged = Statistics()
    for shard in split:
        merged = merged.merge(of(*shard))
    assert merged == of(*batches)
    assert [method(merged, 0, 255) for method in METHODS.values()] == [
        method(of(*batches), 0, 255) for method in METHODS.values()
    ]


@given(ARRAYS)
@example(SPECIAL)
def test_saved_statistics_are_loaded_unchanged(array):
    made = of(array)
    assert Statistics.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_damaged_statistics_are_refused():
    saved = of(normal(10)).to_dict()
    for broken in ({"zeros": 3}, {"exponent": 0}, {"bins": [[9000, 1]]}):
        with pytest.raises(ValueError, match=r"add up|outside"):
            Statistics.from_dict({**saved, **broken})


def test_a_copy_does_not_share_its_bins():
    made = of(normal(10))
    copied = made.copy()
    copied.update(normal(10))
    assert made == of(normal(10)) != copied


@given(ANY_FLOAT)
def test_the_exponent_is_the_smallest_that_holds_the_magnitude(x):
    if not math.isfinite(x):
        return
    k = exponent_of(abs(x))
    assert math.ldexp(abs(x), -k) < HALF_BINS
    assert k == LOWEST_BINARY_EXPONENT or math.ldexp(abs(x), 1 - k) >= HALF_BINS


def test_widening_past_every_bin_keeps_signs_and_counts():
    bins = np.ones(2 * HALF_BINS, np.int64)
    wide = widen(bins, 400)
    assert (wide[HALF_BINS - 1], wide[HALF_BINS], wide.sum()) == (HALF_BINS, HALF_BINS, 2 * HALF_BINS)


def test_every_value_is_in_a_bin_or_counted_as_special():
    made = of(SPECIAL, wild(5000))
    assert made.count == made.zeros + made.nans + made.infinities + made.bins.sum()
    assert made.finite == made.zeros + made.bins.sum()


# ---- conformance cases


@pytest.mark.case("calibration 4")
def test_a_positive_constant_has_the_range_from_zero():
    assert minmax(of([5.0] * 100)) == mse(of([5.0] * 100), 0, 255) == (0.0, 5.0)


@pytest.mark.case("calibration 5")
def test_a_negative_constant_has_the_range_up_to_zero():
    assert minmax(of([-5.0] * 100)) == mse(of([-5.0] * 100), 0, 255) == (-5.0, 0.0)


@pytest.mark.case("calibration 6")
def test_a_constant_has_one_bin_and_the_histogram_method_gives_min_max():
    made = of(np.full(1000, 0.3, np.float32))
    assert np.flatnonzero(made.bins).size == 1
    assert mse(made, 0, 255) == minmax(made)


@pytest.mark.case("calibration 7")
def test_scalars_and_single_elements_count_once():
    assert of(np.float32(3.0)) == of(np.array([[3.0]], np.float32)) == of([3.0])


@pytest.mark.case("calibration 8")
def test_an_empty_array_changes_nothing():
    assert of(np.zeros((0, 4), np.float32)) == Statistics()
    assert of(normal(5), []) == of(normal(5))
    assert minmax(Statistics()) == mse(Statistics(), 0, 255) == (0.0, 0.0)


@pytest.mark.case("calibration 12")
def test_nans_are_counted_and_do_not_change_statistics():
    made = of([1.0, np.nan, -2.0, np.nan])
    assert (made.nans, made.low, made.high, made.finite) == (2, -2.0, 1.0, 2)
    assert made.merge(of([4.0])).high == 4.0
    assert of([np.nan, np.inf]).merge(of([1.0])).low == 1.0


@pytest.mark.case("calibration 13")
def test_infinities_are_counted_and_set_no_range():
    made = of([np.inf, 1.0, -np.inf])
    assert (made.infinities, made.low, made.high) == (2, 1.0, 1.0)


@pytest.mark.case("calibration 16")
def test_a_huge_outlier_costs_only_resolution():
    made = of(normal(10_000), [1e30])
    assert made.high == float(np.float32(1e30))
    assert made.bins.sum() == 10_001
    assert made.sketch.sum() == 10_001
    low, high = mse(made, 0, 255)
    assert made.low <= low <= 0 <= high <= made.high


@pytest.mark.case("calibration 17")
def test_denormals_are_counted_the_same_when_the_float_mode_flushes_them():
    x = np.concatenate([np.array([1e-42, -1e-45, 0.0], np.float32), wild(5000)])
    expected, tiny = of(x), of([1e-42])
    assert (tiny.zeros, tiny.bins.sum()) == (0, 1)
    assert torch.set_flush_denormal(True)
    try:
        flushed, flushed_tiny = of(x, threads=2), of(np.array([0xD6], np.uint32).view(np.float32))
        in_numpy = native.count_numpy(x, 1)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == expected
    assert_same(in_numpy, native.count(x))
    assert flushed_tiny.low > 0


@pytest.mark.case("calibration 19")
def test_negative_zero_is_zero():
    made = of([-0.0, 1.0])
    assert made.low.hex() == "0x0.0p+0"
    assert made == of([0.0, 1.0])


@pytest.mark.case("calibration 24")
def test_half_and_double_are_counted_as_float32():
    half = normal(100).astype(np.float16)
    made, double = Statistics(), Statistics()
    made.update(half)
    double.update(half.astype(np.float64))
    assert made == double == of(half.astype(np.float32))
