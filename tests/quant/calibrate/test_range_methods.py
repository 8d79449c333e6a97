"""Methods give ranges around zero, within min-max, and never lose more than min-max does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from intaglio import numerics
from intaglio.quant.calibrate.range_methods import METHODS, minmax, mse
from intaglio.quant.calibrate.tensor_statistics import Statistics

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LEVELS = [(0, 255), (0, 127), (-128, 127), (0, 15)]
COUNT = 20_000


def of(array) -> Statistics:
    made = Statistics()
    made.update(np.asarray(array, np.float32))
    return made


def squared_error(x, low, high, qmin, qmax) -> float:
    scale, zero_point = numerics.affine_qparams(low, high, qmin, qmax)
    back = numerics.dequantize(numerics.quantize(x, scale, zero_point, qmin, qmax), scale, zero_point)
    return float(((back.astype(np.float64) - x) ** 2).sum())


def draws() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(COUNT)
    made = {
        "normal": normal,
        "relu": np.maximum(normal, 0),
        "shifted": normal + 5,
        "negative": -np.abs(normal),
        "laplace": rng.laplace(size=COUNT),
        "student": rng.standard_t(3, COUNT),
        "lognormal": np.exp(1.5 * normal),
        "uniform": rng.random(COUNT),
        "outlier": np.append(normal, 100),
        "lopsided": np.where(normal > 1, 30 * normal, 0.1 * normal),
        "tiny": normal * 1e-30,
        "large": normal * 1e30,
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


DRAWS = draws()


@pytest.mark.parametrize("method", METHODS)
@given(hnp.arrays(np.float32, st.integers(0, 40), elements=FINITE))
def test_a_range_holds_zero_and_stays_within_min_max(method, array):
    low, high = METHODS[method](of(array), 0, 255)
    assert min(0.0, array.min(initial=0)) <= low <= 0 <= high <= max(0.0, array.max(initial=0))


@pytest.mark.case("calibration 52")
@pytest.mark.parametrize("bounds", LEVELS)
@pytest.mark.parametrize("name", DRAWS)
def test_mse_never_loses_more_than_min_max(name, bounds):
    x = DRAWS[name]
    made = of(x)
    assert squared_error(x, *mse(made, *bounds), *bounds) <= 1.0001 * squared_error(x, *minmax(made), *bounds)


@pytest.mark.parametrize("name", ["normal", "laplace", "student", "outlier"])
def test_mse_gains_where_there_are_tails(name):
    x, bounds = DRAWS[name], (0, 15)
    made = of(x)
    assert squared_error(x, *mse(made, *bounds), *bounds) < 0.7 * squared_error(x, *minmax(made), *bounds)


@pytest.mark.parametrize("name", ["normal", "relu", "laplace", "lopsided"])
def test_mse_is_near_the_best_of_an_exhaustive_search_over_the_data(name):
    x, bounds = DRAWS[name][:4000], (0, 15)
    made = of(x)
    shrink = 0.5 ** np.arange(0, 6, 1 / 8)
    full = minmax(made)
    best = min(squared_error(x, full[0] * a, full[1] * b, *bounds) for a in shrink for b in shrink)
    assert squared_error(x, *mse(made, *bounds), *bounds) < 1.05 * best


@given(st.lists(FINITE, min_size=1, max_size=2), st.integers(1, 50))
def test_constant_and_two_valued_tensors_keep_min_max(values, repeats):
    made = of(values * repeats)
    assert mse(made, 0, 255) == minmax(made)


def test_zeros_do_not_change_the_best_range():
    made, with_zeros = of(DRAWS["laplace"]), of(np.concatenate([DRAWS["laplace"], np.zeros(100_000, np.float32)]))
    assert mse(made, 0, 255) == mse(with_zeros, 0, 255)


def test_steps_finer_than_the_bins_keep_min_max():
    made = of(DRAWS["uniform"])
    assert mse(made, 0, 65535) == minmax(made)


def test_a_tensor_and_its_negative_have_mirrored_ranges():
    x = DRAWS["lognormal"]
    low, high = mse(of(-x), 0, 255)
    assert (low, high) == pytest.approx((-mse(of(x), 0, 255)[1], 0.0))
