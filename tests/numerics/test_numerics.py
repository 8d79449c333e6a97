"""The law of numbers: the C++ twin bit for bit, torch's quantize, and what the parameters promise."""

import ctypes

import numpy as np
import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from intaglio import numerics as nm
from intaglio.native import cpu as machine
from intaglio.native.compile import build, load

U8, S8 = (0, 255), (-128, 127)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALES = st.floats(2.0**-100, 2.0**100, width=32)

TWIN = """
#include "base/numerics.h"
#define LOOP extern "C" __attribute__((visibility("default"))) void
#define EACH for (int64_t i = 0; i < n; ++i)

LOOP each_quantize(int64_t n, const float* x, float inverse, int zp, int low, int high, int32_t* y) {
    EACH y[i] = quantize(x[i], inverse, zp, low, high);
}
LOOP each_dequantize(int64_t n, const int32_t* q, int zp, float scale, float* y) {
    EACH y[i] = dequantize(q[i], zp, scale);
}
LOOP each_requantize(int64_t n, const int32_t* a, const float* f, int zp, int low, int high, int32_t* y) {
    EACH y[i] = requantize(a[i], f[i], zp, low, high);
}
LOOP each_add_requantize(int64_t n, const int32_t* a, const float* f, const int32_t* b, const float* g,
                         int zp, int low, int high, int32_t* y) {
    EACH y[i] = add_requantize(a[i], f[i], b[i], g[i], zp, low, high);
}
"""


@pytest.fixture(scope="module", params=machine.isas())
def twin(request):
    library = load(build(TWIN, name="numerics_twin", isa=request.param))

    def call(name, dtype, *arguments):
        arrays = [a for a in arguments if isinstance(a, np.ndarray)]
        out = np.empty(arrays[0].size, dtype)
        values = [ctypes.c_float(a) if isinstance(a, float) else a for a in arguments]
        values = [ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else a for a in values]
        getattr(library, f"each_{name}")(ctypes.c_int64(out.size), *values, ctypes.c_void_p(out.ctypes.data))
        return out

    return call


def adversarial(scale: float, seed: int = 0) -> np.ndarray:
    """Ties and their neighbours, saturating, huge, denormal and special values, and random ones around the range."""
    rng = np.random.default_rng(seed)
    ties = ((np.arange(-600, 600) + 0.5) * scale).astype(np.float32)
    edge = np.array([2.0**22, 2.0**23, 2.0**24, 2.0**31, 1e9, 3e38, 1e-45, 1e-38, 0.0, np.inf], np.float32)
    with np.errstate(over="ignore"):
        edge = np.concatenate([edge, edge * np.float32(scale), np.nextafter(edge, np.float32(0))])
    parts = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), edge, -edge]
    bits = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    return np.concatenate([*parts, rng.standard_normal(2000).astype(np.float32) * np.float32(100 * scale), bits])


def accumulators(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    edge = np.array([0, 1, -1, 2**24, 2**24 + 1, 2**30, 2**31 - 1, -(2**31), -(2**31) + 1], np.int32)
    wide = rng.integers(-(2**31), 2**31, 3000, dtype=np.int64).astype(np.int32)
    return np.concatenate([edge, wide, wide >> 8, wide >> 16, np.arange(-1000, 1000, dtype=np.int32)])


def factors(count: int, seed: int = 1) -> np.ndarray:
    """Halves (every second product is a tie), powers of two, ordinary multipliers, and huge ones."""
    rng = np.random.default_rng(seed)
    kinds = [
        np.full(count, 0.5),
        2.0 ** rng.integers(-30, 5, count),
        rng.random(count) * 1e-2,
        rng.random(count) * 1e30,
    ]
    return np.choose(rng.integers(0, len(kinds), count), kinds).astype(np.float32)


@pytest.mark.parametrize(
    ("zero_point", "bounds"), [(0, U8), (255, U8), (7, U8), (128, U8), (0, S8), (-128, S8), (3, (0, 15))]
)
@pytest.mark.parametrize("scale", [1.0, 0.25, 0.1, 3.7e-5, 1e-30, 1e30, 2.0**-126])
def test_cpp_quantize_and_dequantize_are_bit_identical(twin, scale, zero_point, bounds):
    x = adversarial(scale)
    expected = nm.quantize(x, scale, zero_point, *bounds)
    found = twin("quantize", np.int32, x, float(nm.reciprocal(scale)), zero_point, *bounds)
    np.testing.assert_array_equal(found, expected)
    back = twin("dequantize", np.float32, expected, zero_point, scale)
    np.testing.assert_array_equal(back.view(np.int32), nm.dequantize(expected, scale, zero_point).view(np.int32))


@pytest.mark.parametrize(("zero_point", "bounds"), [(0, U8), (255, U8), (19, U8), (-128, S8), (4, (4, 100))])
def test_cpp_requantize_is_bit_identical(twin, zero_point, bounds):
    acc = accumulators()
    factor = factors(acc.size)
    with np.errstate(over="ignore"):
        expected = nm.requantize(acc, factor, zero_point, *bounds)
    np.testing.assert_array_equal(twin("requantize", np.int32, acc, factor, zero_point, *bounds), expected)
    assert {bounds[0], bounds[1]} <= set(expected.tolist())


@pytest.mark.parametrize(("zero_point", "bounds"), [(0, U8), (255, U8), (19, U8), (-128, S8)])
def test_cpp_addition_is_bit_identical_without_fused_multiply_add(twin, zero_point, bounds):
    a = accumulators()
    b = np.random.default_rng(2).integers(-255, 256, a.size, dtype=np.int32)
    f, g = factors(a.size), factors(a.size, seed=3)
    with np.errstate(over="ignore"):
        expected = nm.add_requantize(a, f, b, g, zero_point, *bounds)
    np.testing.assert_array_equal(twin("add_requantize", np.int32, a, f, b, g, zero_point, *bounds), expected)


def test_cpp_does_not_contract_a_product_and_a_sum(twin):
    """Quantized values above 2^24 show the last bit of the sum, which a fused multiply-add changes for some of
    these."""
    rng = np.random.default_rng(5)
    a, b = rng.integers(-(2**28), 2**28, (2, 10_000)).astype(np.int32)
    f, g = (0.5 + rng.random((2, 10_000))).astype(np.float32)
    bounds = (-(2**30), 2**30)
    product = b.astype(np.float32) * g
    fused = (a.astype(np.float32).astype(np.float64) * f + product).astype(np.float32)
    expected = nm.add_requantize(a, f, b, g, 0, *bounds)
    assert (fused.astype(np.int64) != expected).any()
    np.testing.assert_array_equal(twin("add_requantize", np.int32, a, f, b, g, 0, *bounds), expected)


@pytest.mark.parametrize(
    ("zero_point", "bounds", "dtype"),
    [(0, U8, torch.uint8), (113, U8, torch.uint8), (255, U8, torch.uint8), (-5, S8, torch.int8)],
)
@pytest.mark.parametrize("scale", [0.25, 0.1, 3.7e-5, 12.0])
def test_quantize_is_torchs_except_for_nan(scale, zero_point, bounds, dtype):
    scale = float(np.float32(scale))
    x = adversarial(scale)
    x = x[~np.isnan(x)]
    quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default
    expected = quantize(torch.from_numpy(x), scale, zero_point, *bounds, dtype).numpy()
    np.testing.assert_array_equal(nm.quantize(x, scale, zero_point, *bounds), expected)


def test_nan_becomes_the_zero_point():
    assert nm.quantize(np.float32(np.nan), 0.1, 77, *U8) == 77


@pytest.mark.case("calibration 22")
@pytest.mark.parametrize("zero_point", [4, 5])
def test_ties_round_to_even_before_the_zero_point(zero_point):
    k = np.arange(-3, 4)
    steps = np.array([-2, -2, 0, 0, 2, 2, 4])
    np.testing.assert_array_equal(nm.quantize((k + 0.5) * 0.25, 0.25, zero_point, *U8), steps + zero_point)
    np.testing.assert_array_equal(nm.requantize(2 * k + 1, 0.5, zero_point, *U8), steps + zero_point)
    np.testing.assert_array_equal(nm.add_requantize(2 * k, 0.5, k * 0 + 1, 0.5, zero_point, *U8), steps + zero_point)


@pytest.mark.case("calibration 23")
@pytest.mark.parametrize("zero_point", [0, 128, 255])
def test_both_ends_saturate_and_never_wrap(zero_point):
    for size in (1e9, 1e30, np.inf):
        np.testing.assert_array_equal(nm.quantize([size, -size], 0.5, zero_point, *U8), [255, 0])
    ends = np.array([2**31 - 1, -(2**31)])
    for factor in (1.0, 1e3, 1e28):
        np.testing.assert_array_equal(nm.requantize(ends, factor, zero_point, *U8), [255, 0])


@given(FINITE, FINITE, st.sampled_from([U8, S8, (0, 127), (0, 15)]))
def test_affine_represents_zero_exactly_and_the_range_to_half_a_step(low, high, bounds):
    low, high = min(low, high), max(low, high)
    scale, zero_point = nm.affine_qparams(low, high, *bounds)
    assert scale >= nm.MIN_SCALE
    assert scale == float(np.float32(scale))
    assert bounds[0] <= zero_point <= bounds[1]
    assert nm.dequantize(nm.quantize(0.0, scale, zero_point, *bounds), scale, zero_point) == 0
    for end in (min(low, 0.0), max(high, 0.0)):
        level = np.clip(np.rint(end / scale) + zero_point, *bounds)
        assert abs((level - zero_point) * scale - end) <= scale * 1.0001


@pytest.mark.parametrize(("bounds", "zero_point"), [(U8, 0), (S8, 0), ((1, 15), 1), ((-9, -2), -2)])
def test_an_all_zero_range_has_scale_one(bounds, zero_point):
    assert nm.affine_qparams(0.0, 0.0, *bounds) == (1.0, zero_point)


@given(st.floats(0, 1e30), st.sampled_from([U8, S8, (1, 255), (-127, 127), (0, 15)]))
@example(0.0, (1, 255))
@example(1e-41, (1, 255))
def test_a_symmetric_range_has_the_zero_point_in_the_middle(most, bounds):
    scale, zero_point = nm.symmetric_qparams(most, *bounds)
    assert abs(zero_point - (bounds[0] + bounds[1]) / 2) <= 0.5
    assert scale == nm.affine_qparams(-most, most, *bounds).scale
    if scale > nm.MIN_SCALE and most and sum(bounds) % 2 == 0:
        assert (scale, zero_point) == nm.affine_qparams(-most, most, *bounds)


def test_an_infinite_or_nan_range_is_refused():
    for low, high in ((0, np.inf), (-np.inf, 0), (np.nan, np.nan)):
        with pytest.raises(ValueError, match="finite"):
            nm.affine_qparams(low, high, *U8)


@given(hnp.arrays(np.float32, 5, elements=st.floats(-1e4, 1e4, width=32)), SCALES)
def test_bias_steps_round_the_bias_to_the_nearest_accumulator_step(bias, scale_x):
    scale_w = nm.fit_weight_scale(np.full(5, 0.01, np.float32), np.ones(5), bias, scale_x)
    steps = nm.quantize_bias(bias, scale_x, scale_w)
    assert (np.abs(steps.astype(np.int64)) <= nm.BIAS_LIMIT).all()
    unit = nm.accumulator_scale(scale_x, scale_w)
    assert (np.abs(steps * unit - bias) <= unit * (0.5 + 1e-6)).all()


def test_a_bias_beyond_the_limit_is_refused():
    with pytest.raises(OverflowError, match=r"2\^30"):
        nm.quantize_bias([1.0], 1e-6, 1e-6)


@given(
    st.floats(2.0**-20, 2.0**20, width=32),
    st.floats(2.0**-20, 2.0**20, width=32),
    st.floats(2.0**-20, 2.0**20, width=32),
)
def test_a_weight_scale_grows_only_as_far_as_its_bias_needs(bias, scale_x, scale_w):
    (fitted,) = nm.fit_weight_scale([scale_w], [1.0], [bias], scale_x).astype(np.float64)
    if bias / (scale_x * scale_w) < nm.BIAS_LIMIT:
        assert fitted == scale_w
        return
    assert abs(bias) / (scale_x * fitted) < nm.BIAS_LIMIT
    shrunk = np.nextafter(np.nextafter(np.float32(fitted), np.float32(0)), np.float32(0))
    assert abs(bias) / (scale_x * float(shrunk)) > nm.BIAS_LIMIT - 1


@pytest.mark.case("calibration 2")
@given(FINITE, st.floats(2.0**-60, 2.0**60, width=32))
def test_an_all_zero_channel_keeps_its_bias_and_does_not_affect_others(bias, scale_x):
    assume(bias == 0 or 2.0**-40 < abs(bias) < 2.0**40)
    scale = nm.fit_weight_scale([1.0, 0.5], [0.0, 3.0], [bias, 0.0], scale_x)
    assert scale[1] == np.float32(0.5)
    if bias == 0:
        assert scale[0] == 1
    else:
        assert abs(int(nm.quantize_bias([bias], scale_x, scale[:1])[0])) == nm.ZERO_WEIGHT_STEPS


def test_without_a_bias_the_scales_stay():
    np.testing.assert_array_equal(nm.fit_weight_scale([1.0, 2.0], [0.0, 1.0], None, 0.1), [1.0, 2.0])
