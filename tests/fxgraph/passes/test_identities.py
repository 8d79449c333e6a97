"""Padding with minus infinity in front of max pooling, which is no value to quantize."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import stages
from intaglio.fxgraph.nodes import arguments, operator
from intaglio.quant.calibrate.prepare import prepare
from support.lowering import assert_equal_quantized, quantized, sqnr
from support.nets import Body, randomize
from support.programs import assert_same_bits

X = torch.randn(4, 3, 11, 9, generator=torch.Generator().manual_seed(0))


def pooled(ends, value, size=3, stride=2, **options) -> nn.Module:
    """A pool of a padded convolution, and a layer behind it."""

    def body(m, x):
        return m.b(F.max_pool2d(F.pad(m.a(x), ends, value=value), size, stride, **options))

    return randomize(Body(body, a=nn.Conv2d(3, 6, 3, padding=1), b=nn.Conv2d(6, 4, 1))).eval()


def pads(model: nn.Module) -> list[str]:
    """Modes of the padding that `prepare` leaves."""
    nodes = prepare(stages.capture(model, X)).module.graph.nodes
    return [arguments(node).get("mode", "constant") for node in nodes if "pad" in operator(node)]


@pytest.mark.parametrize(
    ("value", "ends", "left"),
    [
        (-math.inf, (1, 1, 1, 1), []),
        (-math.inf, (0, 1, 0, 1), ["replicate"]),
        (-1e9, (2, 2), ["replicate"]),
        (torch.finfo(torch.float16).min, (1, 1, 1, 1), []),
    ],
)
def test_the_data_keep_their_scale(value, ends, left):
    """It was an error of calibration with infinity, and 0 dB with a large number."""
    model = pooled(ends, value)
    assert pads(model) == left
    reference, lowered = quantized(model, X)
    assert not lowered.islands
    assert sqnr(reference(X), model(X)) > 30
    assert_equal_quantized(reference, lowered, X)
    assert_same_bits(stages.compile(lowered)(X), lowered(X))


ENDS = st.lists(st.integers(0, 3), min_size=4, max_size=4)


@given(ENDS, st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=settings.default.max_examples // 5 + 1)
def test_the_result_does_not_change(ends, size, stride):
    model = pooled(ends, -math.inf, size, stride)
    if max(ends) >= size:  # some window may have no data
        assert pads(model) == ["constant"]
    else:
        assert torch.equal(prepare(stages.capture(model, X)).module(X)[0], model(X))


@pytest.mark.parametrize(
    "model",
    [
        pooled((1, 1, 1, 1), 0.0),
        pooled((1, 1, 1, 1), -100.0),
        pooled((3, 0, 0, 0), -1e9),
        pooled((1, 1, 1, 1), -1e9, dilation=2),
        pooled((1, 1, 1, 1), -1e9, ceil_mode=True),
        pooled((1, -1, 1, 1), -1e9),
    ],
)
def test_other_padding_stays(model):
    assert "constant" in pads(model)


def test_padding_that_something_else_reads_stays():
    def body(m, x):
        padded = F.pad(m.a(x), (1, 1, 1, 1), value=-1e9)
        return m.b(F.max_pool2d(padded, 3, 2)), padded

    assert "constant" in pads(randomize(Body(body, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 4, 1))))


@pytest.mark.slow(reason="compiles a pool of free sizes; its values are compared above")
def test_free_sizes():
    model = pooled((0, 1, 0, 1), -math.inf)
    dim = torch.export.Dim.DYNAMIC
    int8 = intaglio.quantize(model, [X], dynamic_shapes={"args": ({0: dim, 2: dim, 3: dim},)}, progress=False)
    for size in ((7, 12), (16, 5)):
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        assert sqnr(int8(x), model(x)) > 25
