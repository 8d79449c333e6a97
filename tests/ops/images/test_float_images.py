"""Pooling, resizing and sampling between floats: in the program, without an island."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import intaglio
from intaglio import stages
from support.lowering import quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_bits_compiled_and_loaded

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(2, 35, 6, generator=DRAW)


def tokens(m, x):
    """The residual stream of a vision transformer, which its recipe leaves in float, as an image of 5 by 7 pixels."""
    return (m.a(x) + x).transpose(1, 2).reshape(x.shape[0], 6, 5, 7)


def pools(m, x):
    image = tokens(m, x)
    line, volume = image.flatten(2), image[:, :, None].expand(-1, -1, 3, -1, -1) * 2
    return (
        F.max_pool2d(image, 3, 2, 1),
        F.max_pool2d(image, (2, 3), 1, (0, 1), (3, 2), ceil_mode=True),
        F.avg_pool2d(image, 3, 1, 1, count_include_pad=False),
        F.avg_pool2d(image, 2, 2, 1, ceil_mode=True),
        F.avg_pool2d(image, 3, divisor_override=5),
        F.adaptive_avg_pool2d(image, (3, 2)),
        F.max_pool1d(line, 4, 3),
        F.avg_pool3d(volume, 2, 1, 1),
        m.b(x),
    )


def resizes(m, x):
    image = tokens(m, x)
    return (
        F.interpolate(image, scale_factor=2),
        F.interpolate(image, (3, 9), mode="bilinear"),
        F.interpolate(image, (9, 4), mode="bilinear", align_corners=True),
        F.interpolate(image, (8, 3), mode="bicubic"),
        F.interpolate(image, (3, 1), mode="bicubic", align_corners=True),
        F.interpolate(image, scale_factor=1.7, mode="bicubic"),
        F.interpolate(image.flatten(2), 50, mode="linear"),
        F.interpolate(image[:, :, None], (2, 4, 9), mode="trilinear"),
        m.b(x),
    )


def wide_resizes(m, x):
    """Images with their channels last, more results in a line than are computed together, and more channels."""
    values = m.a(x) + x
    last, image = values.reshape(x.shape[0], 5, 7, 6).permute(0, 3, 1, 2), tokens(m, x)
    many = values.repeat(1, 1, 180).reshape(x.shape[0], 5, 7, 1080).permute(0, 3, 1, 2)
    return (
        F.interpolate(last, (8, 300), mode="bilinear"),
        F.interpolate(last, (11, 3), mode="bicubic"),
        F.interpolate(image, (4, 530), mode="bicubic"),
        F.interpolate(image, (13, 258)),
        F.interpolate(many, (7, 9), mode="bilinear", align_corners=True),
        F.interpolate(many, (3, 15)),
        m.b(x),
    )


def samples(m, x):
    """Bilinear interpolation at computed places, some of which are outside of the image."""
    image = tokens(m, x)
    grid = torch.tanh(image[:, :2].permute(0, 2, 3, 1)) * 1.3
    return (
        F.grid_sample(image, grid, align_corners=True),
        F.grid_sample(image, grid, align_corners=False),
        F.grid_sample(image, grid * 2, padding_mode="border", align_corners=False),
        m.b(x),
    )


@pytest.fixture(scope="module")
def models():
    found = {}
    for body in (pools, resizes, wide_resizes, samples):
        model = randomize(Body(body, a=nn.Linear(6, 6), b=nn.Linear(6, 4)))
        found[body.__name__] = model, *quantized(model, X, recipe=intaglio.Recipe.named("transformer"))
    return found


BODIES = pytest.mark.parametrize("name", ["pools", "resizes", "wide_resizes", "samples"])


@BODIES
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_have_the_bits_of_the_interpreter(name, isa, models, tmp_path):
    assert_bits_compiled_and_loaded(models[name][2], isa, (X, X[:1]), tmp_path)


@BODIES
def test_the_interpreter_computes_what_pytorch_does(name, models):
    _, reference, lowered = models[name]
    for found, expected in zip(lowered(X), reference(X), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def windows(m, x):
    image = torch.tanh(m.a(x)) + x
    return (
        F.avg_pool2d(image, 3, 2, 1),
        F.max_pool2d(image, 3, 2, 1),
        F.interpolate(image, scale_factor=2, mode="bilinear"),
        m.b(x),
    )


@pytest.mark.slow(reason="a program with free sizes; programs of fixed sizes are compared above")
def test_images_of_floats_may_have_free_sizes():
    """The sizes and windows of a call are computed in the program."""
    image = torch.randn(2, 4, 6, 6, generator=DRAW)
    model = randomize(Body(windows, a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 3, 1)))
    recipe = intaglio.Recipe.named("transformer")
    shapes = {"args": ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)}
    compiled = intaglio.quantize(model, [image], recipe=recipe, dynamic_shapes=shapes, progress=False)
    assert compiled.coverage.islands == 0
    for size in ((5, 8), (9, 4)):
        wide = torch.randn(1, 4, *size, generator=DRAW)
        assert compiled(wide)[0].shape == model(wide)[0].shape
        torch.testing.assert_close(compiled(wide)[0], model(wide)[0], rtol=0, atol=0.1)


def test_a_maximum_keeps_nan(models):
    broken = X.clone()
    broken[0, 3] = np.nan
    compiled = stages.compile(models["pools"][2])
    found, expected = compiled(broken)[0], models["pools"][0](broken)[0]
    assert torch.equal(found.isnan(), expected.isnan())
