"""Layer norm of quantized values: exact sums, then a stated order of float32 operations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from intaglio import numerics, stages
from support.lowering import assert_equal_quantized, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params


@given(st.integers(0, 2**32 - 1), st.integers(1, 300), st.floats(1e-4, 1e4))
def test_quantized_bytes_match_the_normalized_real_values(seed, count, spread):
    """Within rounding of float64, for rows of any length and scale; a constant row is all offset."""
    draw = np.random.default_rng(seed)
    x = draw.integers(-255, 256, (4, count)).astype(np.int32)
    x[0] = x[0, 0]
    factor, offset = draw.normal(0, spread, (2, count)).astype(np.float32)
    found = numerics.layer_norm(x, factor, offset, np.float32(1e-3), 7, -(2**20), 2**20)
    real = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-3)
    steps = real * factor.astype(np.float64) + offset.astype(np.float64)
    assert np.all(np.abs(found - 7 - np.clip(steps, -(2**20) - 7, 2**20 - 7)) <= 0.5 + 1e-3 + 1e-5 * np.abs(steps))
    same = numerics.layer_norm(np.zeros_like(x[:1]), factor, offset, np.float32(1e-3), 7, -(2**20), 2**20)
    assert np.array_equal(found[:1], same)


def convnext_block(m, x):
    """Depthwise convolution, then rows: norm, two linear layers, layer scale; back, and the shortcut."""
    x = m.stem(x)
    y = m.norm(m.depthwise(x).permute(0, 2, 3, 1))
    y = m.shrink(F.gelu(m.widen(y))) * m.scale
    return m.last(x + y.permute(0, 3, 1, 2)), m.plain(m.flat(x.mean((2, 3))))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_convnext_block_is_one_program(isa):
    parts = {"stem": nn.Conv2d(3, 40, 2, stride=2), "depthwise": nn.Conv2d(40, 40, 7, padding=3, groups=40)}
    parts |= {"norm": nn.LayerNorm(40), "widen": nn.Linear(40, 80), "shrink": nn.Linear(80, 40)}
    parts |= {"last": nn.Conv2d(40, 3, 1), "flat": nn.Linear(40, 9), "plain": nn.LayerNorm(9, elementwise_affine=False)}
    net = randomize(Body(convnext_block, scale=nn.Parameter(torch.rand(40)), **parts))
    x = torch.randn(3, 3, 14, 12, generator=torch.Generator().manual_seed(0))
    reference, lowered = quantized(net, x)
    assert not lowered.islands
    assert_equal_quantized(reference, lowered, x)
    model = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1]):
        assert all(map(torch.equal, model(batch), lowered(batch)))


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.LayerNorm((8, 4097)), "the last axis has 32776 values"),
        *slow_params((nn.LayerNorm(2**15 + 1), "the last axis has 32769 values"), reason="a layer of 32,769 results"),
    ],
)
def test_other_layer_norms_stay_in_float_and_say_why(norm, reason):
    width = norm.normalized_shape[-1]
    net = Body(lambda m, x: m.norm(m.first(x)), first=nn.Linear(4, width), norm=norm).eval()
    _, lowered = quantized(net, torch.randn(2, 8, 4))
    assert any(reason in skip.reason for skip in lowered.skipped)
