"""Early steps of a large batch in turns of a few images: the interpreter's bits, whatever the turn."""

import copy

import numpy as np
import pytest
import torch

import intaglio
from graphs import N, Net, sizes
from harness import HERE, Memory
from intaglio import build
from intaglio.codegen import CacheSizes, Turns, analytic_turns, emit, separable
from intaglio.lower import Lowered, plan
from intaglio.quant import Image
from intaglio.runtime import QuantizedModel, build_artifact
from nets import Body, conv, randomize
from test_program import CACHES, FREE, assert_same_bits, built, compiled, fixed, moves, residual, sized, threads

SMALL = CacheSizes(l1=1 << 10, l2=1 << 14)
"""Caches that the activations of the smallest nets fill."""


def in_turns(lowered: Lowered, model: QuantizedModel, turns: Turns) -> QuantizedModel:
    """The same model with these turns."""
    program = emit(plan(lowered.graph), model.artifact.program.isa, CACHES, "turns", turns=turns)
    changed = copy.deepcopy(model)
    changed.artifact = build_artifact(program)
    return changed


def most(lowered: Lowered) -> int:
    """Phases that can run in turns."""
    return len(list(separable(plan(lowered.graph))))


def assert_bits_of_the_interpreter(net: Net, lowered: Lowered, model: QuantizedModel) -> None:
    for batch in range(6):
        inputs = net.batch(batch, seed=batch)
        expected = lowered(*inputs)
        for count in (1, 2, 3):
            with threads(count):
                assert_same_bits(model(*inputs), expected)
        last = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
        assert_same_bits(model(*last), expected)


@pytest.mark.parametrize("images, isa", [(1 + i, HERE[i % len(HERE)]) for i in range(3)])
@pytest.mark.parametrize("program", FREE, ids=lambda program: program.__name__)
def test_turns_of_a_few_images_have_the_bits_of_the_interpreter(program, isa, images):
    """For every batch, thread count and memory format, and a free image size too."""
    net, lowered = built(program)
    turns = Turns("n", most(lowered), images)
    assert_bits_of_the_interpreter(net, lowered, in_turns(lowered, compiled(program, isa), turns))


@pytest.mark.parametrize("phases", range(1, 7))
def test_turns_may_end_behind_any_phase(phases):
    """A value is read by the turns and behind them, a residual operand comes from before their end."""
    net, lowered = built(residual)
    assert most(lowered) == 6
    turns = Turns("n", phases, 1)
    assert_bits_of_the_interpreter(net, lowered, in_turns(lowered, compiled(residual, HERE[-1]), turns))


def test_images_of_bytes_are_taken_in_turns():
    model = randomize(Body(lambda m, x: m.b(m.a(x).relu()), a=conv(3, 8), b=conv(8, 4)))
    pixels = torch.randint(0, 256, (7, 3, 6, 5), dtype=torch.uint8)
    image = Image(mean=0.5, std=0.25)
    prepared = intaglio.prepare(intaglio.capture(model, (image.normalize(pixels),)), intaglio.Quantizer(input=image))
    ranges = intaglio.calibrate(prepared, [image.normalize(pixels)])
    lowered = intaglio.requantize(intaglio.convert(prepared, ranges))
    plain = build.compile(lowered, isa=HERE[0])
    batch = next(iter(plain.artifact.program.symbols))
    turns = in_turns(lowered, plain, Turns(batch, most(lowered), 2))
    for x in (pixels, pixels.to(memory_format=torch.channels_last), image.normalize(pixels)):
        for count in (1, 2):
            with threads(count):
                assert torch.equal(turns(x), plain(x))
    assert not torch.equal(plain(pixels)[0], plain(pixels)[1])


def test_the_mean_of_an_image_is_summed_in_turns():
    """Threads that take turns alone leave their sums in places of their own."""
    net = Net()
    x = net.quantize(net.input(N, 32, 24, 20), 40)
    y = net.conv(net.mean("adaptive_avg_pool2d", x, size=(1, 1)), 32, 1)
    lowered = net.lowered(net.dequantize(net.add(y, net.conv(x, 32, 24, stride=(24)) if False else y)))
    model = in_turns(lowered, build.compile(lowered, isa=HERE[0]), Turns("n", most(lowered), 1))
    assert_bits_of_the_interpreter(net, lowered, model)
