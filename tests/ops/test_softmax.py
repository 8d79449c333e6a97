"""softmax in float32 by a stated sum and polynomial: its accuracy, its bits, and no island around it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from intaglio import numerics, stages
from intaglio.numerics import float_math
from support.lowering import assert_equal_quantized, quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize


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


def softmax(x: np.ndarray) -> np.ndarray:
    """What a loop computes, one primitive after the other."""
    with np.errstate(invalid="ignore"):
        powers = float_math.exp(x - float_math.reduce_max(x))
    return powers * (np.float32(1) / float_math.reduce_sum(powers))


@given(st.integers(1, 200), st.floats(0.01, 30))
def test_float_softmax_is_within_half_a_millionth_of_the_exact_one(size, spread):
    """Beside what rounding the distance from the largest value to float32 costs, here and in torch."""
    x = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * spread
    exact, distance = torch.softmax(x.double(), 1).numpy(), (x.amax(1, keepdim=True) - x).numpy()
    error, seen = np.abs(softmax(x.numpy()) - exact), distance < 80
    assert (error[seen] <= (5e-7 + 2.0**-24 * distance[seen]) * exact[seen]).all()
    assert (error[~seen] < 1e-30).all()


def test_the_order_of_summation_changes_bits():
    """What comparisons with kernels can see."""
    x = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    powers = numerics.exp_negative(x - x.max(1, keepdims=True))
    assert not np.array_equal(softmax(x), powers * (np.float32(1) / np.cumsum(powers, 1, dtype=np.float32)[:, -1:]))
    assert np.array_equal(softmax(x), powers * (np.float32(1) / float_math.reduce_sum(powers)))


def attention_over_pixels(m, x):
    """The probabilities are quantized values again behind it."""
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


@pytest.mark.slow(reason="a program with each softmax; softmax of scores runs below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_softmax_runs_in_the_program_without_an_island(isa):
    """No island, no float operator in the report; every instruction set equal to the interpreter."""
    layers = {"scores": nn.Conv2d(20, 20, 1), "last": nn.Conv2d(20, 4, 3, padding=1), "mix": nn.Linear(30, 21)}
    layers |= {"conv": nn.Conv2d(3, 20, 3, padding=1), "fc": nn.Linear(20, 20)}
    model = randomize(Body(lambda m, x: [body(m, x) for body in BODIES.values()], **layers))
    x = torch.randn(3, 3, 5, 6, generator=torch.Generator().manual_seed(3))
    reference, lowered = quantized(model, x)
    assert not lowered.islands
    assert [skip.origin.operator for skip in lowered.skipped if skip.node not in lowered.native] == []
    assert sum(op.kind == "loop" for op in lowered.graph.ops) == len(BODIES)
    assert_equal_quantized(reference, lowered, x)
    compiled = stages.compile(lowered, isa=isa)
    assert compiled.coverage.islands == 0
    assert compiled.coverage.floats == ()
    for batch in (x, x[:1], x[:0]):
        pairs = zip(tensors(compiled(batch)), tensors(lowered(batch)), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_softmax_of_quantized_scores_matches_the_float_model():
    model = randomize(Body(BODIES["a classifier"], conv=nn.Conv2d(3, 20, 3, padding=1), fc=nn.Linear(20, 20)))
    x = torch.randn(3, 3, 5, 6)
    reference, lowered = quantized(model, x)
    torch.testing.assert_close(stages.compile(lowered)(x), reference(x), rtol=1e-5, atol=1e-7)


def test_softmax_of_rows_without_finite_values_matches_torch():
    """NaN where all is masked, zeros where some is."""
    x = torch.randn(3, 5)
    x[1], x[2, :3] = -torch.inf, -torch.inf
    found = softmax(x.numpy())
    assert np.isnan(found[1]).all()
    torch.testing.assert_close(torch.from_numpy(found), torch.softmax(x, 1), equal_nan=True)


def test_float_operators_after_an_island_run_in_the_program():
    def body(m, x):
        return torch.softmax(torch.erf(m.conv(x)), 1)

    _, lowered = quantized(randomize(Body(body, conv=nn.Conv2d(3, 5, 3))), torch.randn(2, 3, 5, 6))
    assert [op.kind for op in lowered.graph.ops][-2:] == ["island", "loop"]
    assert [s.origin.operator for s in lowered.skipped if s.node not in lowered.native] == ["aten.erf.default"]
