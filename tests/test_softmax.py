"""softmax in float32 by a stated sum and polynomial: its accuracy, its bits, and no island around it."""

import ctypes

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import intaglio
from compare import assert_equal_levels, kinds, quantized, tensors
from harness import HERE
from intaglio import numerics
from intaglio.native.compile import build, load
from nets import Body, randomize

TWIN = """
#include "program.h"
#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void each_exp(int64_t n, const float* x, float* y) { for (int64_t i = 0; i < n; ++i) y[i] = exp_negative(x[i]); }
EXPORT void all_softmax(int64_t n, int64_t size, int64_t apart, const float* x, float* y) {
    for (int thread = 0; thread < 3; ++thread) softmax(x, y, n, size, apart, thread, 3);
}
"""


@pytest.fixture(scope="module", params=HERE)
def twin(request):
    return load(build(TWIN, name="softmax_twin", isa=request.param))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def below_zero() -> np.ndarray:
    """Every power of two's range down to where the result is 0, ends included."""
    draw = np.random.default_rng(0)
    spread = -np.exp(draw.uniform(-20, 5, 20000)).astype(np.float32)
    ties = (-np.log(2) * (np.arange(253) / 2)).astype(np.float32)
    edge = np.float32([0.0, -0.0, -1e-30, -86.99999, -87, np.nextafter(np.float32(-87), -100), -88, -1e30])
    return np.concatenate([spread, ties, np.nextafter(ties, np.float32(-100)), np.nextafter(ties, np.float32(0)), edge])


def test_powers_are_within_a_ten_millionth():
    x = below_zero()
    x = x[x >= -87]
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(numerics.exp_negative(x) - exact) / exact).max() < 1e-7


def test_the_twin_takes_powers_bit_for_bit(twin):
    x = below_zero()
    found = np.empty_like(x)
    twin.each_exp(ctypes.c_int64(x.size), pointer(x), pointer(found))
    assert np.array_equal(found.view(np.int32), numerics.exp_negative(x).view(np.int32))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33, 1000])
def test_the_twin_sums_in_the_same_order(twin, size):
    """Along the last axis, and along one whose elements lie apart."""
    x = (np.random.default_rng(size).standard_normal((2, size, 3)) * 5).astype(np.float32)
    found = np.empty_like(x)
    twin.all_softmax(*map(ctypes.c_int64, (x.size, size, 3)), pointer(x), pointer(found))
    expected = np.moveaxis(numerics.softmax(np.moveaxis(x, 1, 2)), 2, 1)
    assert np.array_equal(found.view(np.int32), np.ascontiguousarray(expected).view(np.int32))
    flat, dense = np.ascontiguousarray(x.transpose(0, 2, 1)), np.empty((2, 3, size), np.float32)
    twin.all_softmax(*map(ctypes.c_int64, (x.size, size, 1)), pointer(flat), pointer(dense))
    assert np.array_equal(dense.view(np.int32), numerics.softmax(flat).view(np.int32))


@given(st.integers(1, 200), st.floats(0.01, 30))
def test_it_is_the_exact_softmax_to_half_a_millionth(size, spread):
    """Beside what rounding the distance from the largest value to float32 costs, here and in torch."""
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * spread
    exact, distance = torch.softmax(x.double(), 1).numpy(), (x.amax(1, keepdim=True) - x).numpy()
    error, seen = np.abs(numerics.softmax(x.numpy()) - exact), distance < 80
    assert (error[seen] <= (5e-7 + 2.0**-24 * distance[seen]) * exact[seen]).all()
    assert (error[~seen] < 1e-30).all()


def test_the_order_of_the_sum_shows_in_the_bits():
    """What the comparisons above can see."""
    x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    powers = numerics.exp_negative(x - x.max(1, keepdims=True))
    other = powers / np.cumsum(powers, 1, dtype=np.float32)[:, -1:]
    assert not np.array_equal(numerics.softmax(x), other)


def attention_over_pixels(m, x):
    """The probabilities are levels again behind it."""
    y = m.conv(x)
    return m.last(torch.softmax(m.scores(y), 1)), m.last(y)


BODIES = {
    "a classifier": lambda m, x: torch.softmax(m.fc(F.relu(m.conv(x)).mean((2, 3))), -1),
    "of levels": lambda m, x: torch.softmax(F.relu(m.fc(m.conv(x).mean((2, 3)))), 1),
    "pixels": lambda m, x: F.softmax(m.scores(m.conv(x)), 1),
    "rows of pixels": lambda m, x: F.softmax(m.scores(m.conv(x)), dim=-1),
    "rows": lambda m, x: F.softmax(m.mix(m.conv(x).flatten(2)), -1),
    "channels of rows": lambda m, x: F.softmax(m.mix(m.conv(x).flatten(2)), 1),
    "in the middle": attention_over_pixels,
    "in the middle of rows": lambda m, x: m.fc(F.softmax(m.fc(m.conv(x).mean((2, 3))), 1)),
}


def test_it_runs_in_the_program():
    """No island, no float operator in the report; every instruction set equal to the interpreter."""
    layers = {"scores": nn.Conv2d(20, 20, 1), "last": nn.Conv2d(20, 4, 3, padding=1), "mix": nn.Linear(30, 21)}
    layers |= {"conv": nn.Conv2d(3, 20, 3, padding=1), "fc": nn.Linear(20, 20)}
    model = randomize(Body(lambda m, x: [body(m, x) for body in BODIES.values()], **layers))
    x = torch.randn(3, 3, 5, 6, generator=torch.Generator().manual_seed(3))
    reference, lowered = quantized(model, x)
    assert not lowered.islands
    assert not lowered.skipped
    assert kinds(lowered).count("softmax") == len(BODIES)
    assert_equal_levels(reference, lowered, x)
    for isa in HERE:
        compiled = intaglio.compile(lowered, isa=isa)
        assert compiled.coverage.islands == 0
        assert compiled.coverage.floats == ()
        for batch in (x, x[:1], x[:0]):
            pairs = zip(tensors(compiled(batch)), tensors(lowered(batch)), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)


def test_it_is_the_float_models_softmax_of_the_quantized_scores():
    model = randomize(Body(BODIES["a classifier"], conv=nn.Conv2d(3, 20, 3, padding=1), fc=nn.Linear(20, 20)))
    x = torch.randn(3, 3, 5, 6)
    reference, lowered = quantized(model, x)
    torch.testing.assert_close(intaglio.compile(lowered)(x), reference(x), rtol=1e-5, atol=1e-7)


def test_behind_a_float_operator_it_stays_there():
    body = lambda m, x: torch.softmax(torch.erf(m.conv(x)), 1)  # noqa: E731
    _, lowered = quantized(randomize(Body(body, conv=nn.Conv2d(3, 5, 3))), torch.randn(2, 3, 5, 6))
    assert kinds(lowered).count("softmax") == 0
    assert len(lowered.islands) == 1
    assert any("softmax" in skip.origin.operator for skip in lowered.skipped)
