"""Integer graphs as whole programs, and what holds of each: the interpreter's bits, inside its memory."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

import intaglio
from intaglio import build, stages
from intaglio.ir import ModelInfo
from intaglio.lower import Lowered
from intaglio.plan import CacheSizes
from intaglio.runtime import Artifact, QuantizedModel
from intaglio.runtime.artifact import RunArguments
from support.integer_graphs import H, N, Net, W, sizes
from support.matmul_library import Memory

CACHES = CacheSizes()


def residual(net: Net) -> tuple[str, ...]:
    """A basic block with its shortcut and head; the last pool's result is reshaped without moving."""
    x = net.conv(net.quantize(net.input(N, 3, 13, 11)), 70, 3, stride=2, padding=1)
    y = net.conv(x, 70, 3, padding=1, low=20)
    y = net.conv(y, 70, 3, padding=1, add=x, low=3, high=250)
    y = net.conv(y, 128, 1, stride=2, add=net.conv(x, 128, 1, stride=2))
    y = net.mean("adaptive_avg_pool2d", y, size=(1, 1))
    flat = net.same("reshape", y, shape=(N, 128))
    return net.linear(flat, 10, f32=True), net.linear(net.linear(flat, 33), 129, f32=True)


def halos(net: Net) -> tuple[str, ...]:
    """One value read with paddings 0 to 3, uneven ones, groups of one and of several channels, dilation."""
    x = net.quantize(net.input(N, 12, 9, 14), 255)
    results = [
        net.conv(x, 12, 7, padding=3, groups=12),
        net.conv(x, 12, 4, padding=(1, 2, 1, 2), zero_point=0),
        net.conv(x, 30, 3, padding=2, dilation=2, groups=6),
        net.conv(x, 5, (1, 3), stride=2),
        net.conv(x, 100, 1),
    ]
    deep = net.conv(results[0], 12, 5, padding=2, groups=12, add=x)
    return tuple(net.dequantize(y) for y in (*results, deep))


def pools(net: Net) -> tuple[str, ...]:
    """Every option of every pool; 70 channels are one whole vector and a rest."""
    x = net.quantize(net.input(N, 70, 11, 8))
    window = {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 1)}
    deep = net.same("max_pool2d", x, kernel=(3, 3), stride=(2, 2), padding=(1, 1), dilation=(1, 1), ceil=False)
    found = [net.same("max_pool2d", x, **window, dilation=(2, 1), ceil=ceil) for ceil in (False, True)]
    for ceil, include_pad, divisor in ((False, True, None), (True, True, None), (True, False, None), (False, False, 5)):
        found.append(net.mean("avg_pool2d", x, **window, ceil=ceil, include_pad=include_pad, divisor=divisor))
    found += [net.mean("adaptive_avg_pool2d", x, size=size) for size in ((1, 1), (4, 3), (11, 16))]
    return (*map(net.dequantize, found), net.conv(deep, 3, 3, padding=1, f32=True))


def moves(net: Net) -> tuple[str, ...]:
    """Slices, flips, pads and reshapes, read with a halo and without; pointwise quantized values."""
    x = net.quantize(net.input(N, 10, 7, 9), 77)
    rows = net.same("slice", x, axis=2, start=1, stop=7, step=3)
    columns = net.same("slice", x, axis=3, start=2, stop=9, step=2)
    channels = net.same("slice", x, axis=1, start=3, stop=10, step=2)
    wide = net.same("pad", x, before=(0, 2, 0, 3), after=(0, 4, 1, 0))
    flat = net.same("reshape", x, shape=(N, 630))
    image = net.same("reshape", flat, shape=(N, 6, 7, 15))
    tokens = net.same("reshape", x, shape=(N, 10, 63))
    two = net.add(x, net.table(x), low=9, high=240)
    clamped = net.same("clamp", x, low=60, high=200)
    reversed_rows, reversed_channels = net.same("flip", x, axis=2), net.same("flip", x, axis=1)
    convolved = [net.conv(y, 8, 3, padding=1) for y in (rows, wide, image, two, clamped, reversed_rows)]
    return tuple(map(net.dequantize, (columns, channels, flat, tokens, reversed_channels, *convolved)))


def tokens(net: Net) -> tuple[str, ...]:
    """Linear layers on one to five axes but four, residual sums of them, a result as wide as two panels."""
    x = net.quantize(net.input(N, 5, 24))
    y = net.linear(x, 24, add=x)
    y = net.linear(net.linear(y, 130, low=128, zero_point=128), 24, add=y)
    deep = net.same("reshape", y, shape=(N, 5, 2, 3, 4))
    alone = net.quantize(net.input(24))
    return (
        net.linear(y, 17, f32=True),
        net.dequantize(y),
        net.linear(deep, 3, f32=True),
        net.dequantize(net.add(deep, net.linear(deep, 4))),
        net.linear(alone, 40, f32=True),
    )


def borders(net: Net) -> tuple[str, ...]:
    """Planes of 1 to 5 channels, one pixel and many, straight to quantized values and back."""
    shapes = ((1, 50), (2, 65), (3, 33), (4, 31), (5, 40), (40, 1))
    images = [net.input(N, channels, 3, width) for channels, width in shapes]
    last = net.conv(net.quantize(images[2]), 3, 3, padding=1, f32=True)
    return (*[net.dequantize(net.quantize(image)) for image in images], last, net.dequantize(net.quantize(net.input())))


def sized(net: Net) -> tuple[str, ...]:
    """Rows and columns are free, too."""
    x = net.conv(net.quantize(net.input(N, 3, H, W)), 20, 3, stride=2, padding=1)
    y = net.conv(x, 5, 3, padding=1, add=net.conv(x, 5, 1))
    return net.dequantize(y), net.conv(y, 6, 2, stride=2, f32=True)


def fixed(net: Net) -> tuple[str, ...]:
    """No free dimension: images are selected and added, too."""
    x = net.conv(net.quantize(net.input(5, 3, 6, 6)), 8, 3)
    x = net.same("slice", x, axis=0, start=1, stop=5, step=2)
    return (net.conv(net.same("pad", x, before=(1, 0, 0, 0), after=(2, 0, 0, 0)), 4, 3, padding=1, f32=True),)


def depthwise(net: Net) -> tuple[str, ...]:
    """Each channel for itself: every part of a vector, taps and strides that make other tiles, one row or column."""
    found = []
    for channels, kernel, stride, padding in (
        (16, 3, 1, 1),
        (24, 5, 1, 2),
        (40, 3, 2, 1),
        (70, 7, 1, 3),
        (96, 5, 2, 2),
        (130, 2, 1, 0),
        (64, (9, 1), 1, 0),
        (64, (1, 5), 2, 0),
    ):
        x = net.quantize(net.input(N, channels, 11, 9))
        found.append(net.conv(x, channels, kernel, stride=stride, padding=padding, groups=channels, low=3))
    small = net.quantize(net.input(N, 72, 1, 1))
    found.append(net.conv(small, 72, 3, padding=1, groups=72))
    tall = net.quantize(net.input(N, 20, 13, 7))
    found.append(net.conv(tall, 20, 3, padding=2, dilation=2, groups=20))
    down = net.conv(net.conv(tall, 20, 3, padding=(2, 0, 1, 1), groups=20), 20, 3, padding=1, groups=20, f32=True)
    return (*map(net.dequantize, found), down)


def joined(net: Net) -> tuple[str, ...]:
    """Concatenations whose operands are written in their place, copied, or both; read with a halo and without."""
    x = net.quantize(net.input(N, 24, 9, 8), 90)
    q = net.types[x].q
    window = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "ceil": False}
    pooled = net.same("max_pool2d", x, **window)
    parts = [net.conv(x, outputs, kernel, padding=kernel // 2, zero_point=90) for outputs, kernel in ((70, 1), (33, 3))]
    apart = net.conv(x, 24, 3, padding=1, groups=24, zero_point=90)
    net.types |= {name: replace(net.types[name], q=q) for name in (*parts, apart)}
    wide = net.join([pooled, *parts, apart])
    again = net.join([net.conv(wide, 116, 1), net.conv(wide, 58, 1)])
    halves = net.join([net.same("clamp", x, low=80, high=99), net.same("shuffle", x, groups=2)])
    mixed = net.same("shuffle", net.conv(wide, 116, 1), groups=2)
    return (*map(net.dequantize, (again, halves, mixed)), net.conv(wide, 5, 3, padding=1, f32=True))


def weighed(net: Net) -> tuple[str, ...]:
    """Squeeze and excite in front of convolutions of single pixels: channels that fill vectors and not, the pixel on
    either side, a residual operand, threads that share pixels or panels, more pixels than are weighed at once."""
    found, sizes = [], ((32, 7, (9, 7)), (33, 70, (5, 3)), (144, 24, (3, 5)), (260, 20, (9, 11)), (8, 8, (1, 1)))
    for channels, outputs, size in sizes:
        x = net.quantize(net.input(N, channels, *size))
        y = net.conv(x, channels, 3, padding=1, groups=channels)
        pixel = net.conv(net.mean("adaptive_avg_pool2d", y, size=(1, 1)), channels, 1)
        product = net.mul(y, pixel) if channels % 2 else net.mul(pixel, y, low=9, high=240)
        found.append(net.conv(product, outputs, 1, add=net.conv(y, outputs, 1) if outputs == 24 else None))
    return (*map(net.dequantize, found), net.conv(net.mul(y, pixel), 40, 1, f32=True))


def unjoined(net: Net) -> tuple[str, ...]:
    """Products that are passes of their own: read twice, by other convolutions, or of an image with a halo."""
    x = net.quantize(net.input(N, 24, 7, 6))
    pixel = net.conv(net.mean("adaptive_avg_pool2d", x, size=(1, 1)), 24, 1)
    twice, two = net.mul(x, pixel), net.mul(x, net.table(x))
    framed = net.conv(x, 24, 1)
    found = [
        net.conv(net.mul(pixel, x), 9, 1, stride=2),
        net.conv(net.mul(x, pixel), 9, 1, groups=3),
        net.conv(two, 9, 1),
        net.conv(twice, 9, 1),
        net.add(twice, x),
        net.conv(framed, 5, 3, padding=1),
        net.conv(net.mul(framed, pixel), 9, 1),
        net.conv(net.mul(x, pixel), 24, 1, padding=1, groups=24),
        net.conv(net.mul(x, pixel), 9, 3),
    ]
    return tuple(map(net.dequantize, found))


PROGRAMS = (residual, weighed, unjoined, joined, depthwise, halos, pools, moves, tokens, borders, sized, fixed)


FREE = [program for program in PROGRAMS if program is not fixed]


@cache
def built(program: Callable[[Net], tuple[str, ...]]) -> tuple[Net, Lowered]:
    net = Net()
    return net, net.lowered(*program(net))


@cache
def compiled(program: Callable[[Net], tuple[str, ...]], isa: str) -> QuantizedModel:
    return build.compile(replace(built(program)[1], model_info=ModelInfo(program.__name__)), isa=isa)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_bits_compiled_and_loaded(lowered: Lowered, isa: str, batches: Sequence[torch.Tensor], folder: Path) -> None:
    """Check that a program has the interpreter's bits on an instruction set, compiled and loaded from a file."""
    assert not lowered.islands
    compiled = stages.compile(lowered, isa=isa)
    compiled.save(folder / "m")
    for run in (compiled, intaglio.load(folder / "m", isa=isa)):
        for batch in batches:
            assert_same_bits(run(batch), lowered(batch))


def assert_same_bits(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert np.array_equal(a.numpy().view(np.int32), b.numpy().view(np.int32))


def assert_bits_of_the_interpreter(net: Net, lowered: Lowered, model: QuantizedModel) -> None:
    for batch in range(6):
        inputs = net.batch(batch, seed=batch)
        expected = lowered(*inputs)
        for count in (1, 2, 3):
            with threads(count):
                assert_same_bits(model(*inputs), expected)
        last = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
        assert_same_bits(model(*last), expected)


def assert_stays_inside(net: Net, lowered: Lowered, artifact: Artifact) -> None:
    """Each ends where a page begins that cannot be read."""
    inputs, expected = net.batch(3), lowered(*net.batch(3))
    layout = artifact.plan(sizes(3))
    arena, constants = Memory(layout.bytes), Memory(artifact.constants.nbytes)
    arena.bytes[:] = 0xA5
    known = dict(zip(lowered.graph.inputs + lowered.graph.outputs, (*inputs, *expected), strict=True))
    held = {external: (known[external.value], Memory(1 << 20)) for external in artifact.program.externals}
    table = (ctypes.c_void_p * len(held))(*[memory.hold(tensor.numpy()) for tensor, memory in held.values()])
    strides = [n for tensor, _ in held.values() for n in (*tensor.stride(), 0, 0, 0, 0, 0)[:5]]
    for external, (_, memory) in held.items():
        memory.bytes[:] = 0 if external.is_output else memory.bytes
    start, data = arena.end(layout.bytes).ctypes.data, constants.hold(artifact.constants)
    frame = RunArguments(layout.dims, layout.offsets, start, data, table, (ctypes.c_int64 * len(strides))(*strides))
    for segment in range(artifact.program.segments):
        artifact.run(frame, segment, 2)
    for external, (tensor, memory) in held.items():
        if external.is_output:
            dense = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 and not external.row_major else tensor
            written = memory.end(4 * tensor.numel()).view(np.int32)
            assert np.array_equal(written, dense.contiguous().numpy().view(np.int32).ravel())
