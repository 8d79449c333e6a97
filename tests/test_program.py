"""Whole generated programs against the interpreter, bit for bit, on every instruction set."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from graphs import H, N, Net, W, sizes
from harness import HERE, SLACK, Memory
from intaglio import build
from intaglio.codegen import EMITTERS, emit
from intaglio.ir import About, Schedule, evaluate
from intaglio.lower import Lowered
from intaglio.ops import OPS
from intaglio.plan import CacheSizes, plan_graph
from intaglio.runtime import Artifact, QuantizedModel
from intaglio.runtime.artifact import Run
from nets import Body, randomize

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
    """Slices, pads and reshapes, read with a halo and without; pointwise levels."""
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
    convolved = [net.conv(y, 8, 3, padding=1) for y in (rows, wide, image, two, clamped)]
    return tuple(map(net.dequantize, (columns, channels, flat, tokens, *convolved)))


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
    """Planes of 1 to 5 channels, one pixel and many, straight to levels and back."""
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
    return build.compile(replace(built(program)[1], about=About(program.__name__)), isa=isa)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_has_the_bits_of_the_interpreter(program, isa):
    """For every batch, thread count and memory format, NaN and infinities included."""
    net, lowered = built(program)
    model = compiled(program, isa)
    assert_bits_of_the_interpreter(net, lowered, model)


@pytest.mark.parametrize("program", FREE, ids=lambda program: program.__name__)
def test_instruction_sets_agree_on_a_large_batch(program):
    inputs = built(program)[0].batch(9, seed=1)
    first, *others = [compiled(program, isa)(*inputs) for isa in HERE]
    for other in others:
        assert_same_bits(other, first)


def test_the_comparison_sees_one_changed_constant():
    net, lowered = built(residual)
    graph = lowered.graph
    bias = next(op.inputs[2] for op in graph.ops if op.kind == "conv2d")
    changed = {**graph.constants, bias: graph.constants[bias] + 40 * np.eye(1, 70, 5, dtype=np.int32)[0]}
    wrong = Lowered(graph.replace(constants=changed), {}, lowered.signature)
    with pytest.raises(AssertionError):
        assert_same_bits(compiled(residual, HERE[0])(*net.batch(2)), wrong(*net.batch(2)))


@pytest.mark.parametrize("isa", HERE)
def test_results_do_not_depend_on_the_schedule(isa):
    net, lowered = built(residual)
    expected = lowered(*net.batch(2))
    tails = [op.output for op in lowered.graph.ops if op.kind in ("requantize", "add")]
    for schedule in (Schedule(1, 1, 0, 1), Schedule(3, 1, 1 << 40, 100)):
        model = build.compile(lowered, isa=isa, schedules=dict.fromkeys(tails, schedule))
        with threads(2):
            assert_same_bits(model(*net.batch(2)), expected)


@pytest.mark.parametrize("isa", HERE)
def test_a_linear_layer_on_four_axes_reads_the_last_one(isa):
    net = Net()
    x = net.quantize(net.input(N, 3, 4, 8))
    lowered = net.lowered(net.linear(x, 5, f32=True), net.dequantize(net.linear(x, 6)))
    assert_same_bits(build.compile(lowered, isa=isa)(*net.batch(2)), lowered(*net.batch(2)))


@pytest.mark.parametrize("isa", HERE)
def test_linear_layers_of_four_axes_meet_image_operators(isa):
    """conv2d -> linear over columns -> clamp -> conv2d, an add across both, a slice: copies between the layouts."""
    model = randomize(Body(_mixed, conv=nn.Conv2d(3, 8, 3, padding=1), mix=nn.Linear(6, 6), out=nn.Conv2d(8, 4, 3)))
    prepared = intaglio.prepare(intaglio.capture(model, torch.randn(2, 3, 5, 6)))
    lowered = intaglio.requantize(intaglio.convert(prepared, intaglio.calibrate(prepared, [torch.randn(8, 3, 5, 6)])))
    assert [op.kind for op in lowered.graph.ops].count("reshape") == 2
    x = torch.randn(3, 3, 5, 6)
    assert_same_bits(build.compile(lowered, isa=isa)(x), lowered(x))


def _mixed(net, x):
    y = net.conv(x)
    return net.out((y + net.mix(y)).relu())[:, :, 1:]


# ---- memory


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("program", FREE, ids=lambda program: program.__name__)
def test_nothing_outside_the_arena_the_constants_and_the_tensors_is_touched(program, isa):
    net, lowered = built(program)
    assert_stays_inside(net, lowered, compiled(program, isa).artifact)


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
        memory.bytes[:] = 0 if external.written else memory.bytes
    start, data = arena.end(layout.bytes).ctypes.data, constants.hold(artifact.constants)
    frame = Run(layout.dims, layout.offsets, start, data, table, (ctypes.c_int64 * len(strides))(*strides))
    for segment in range(artifact.program.segments):
        artifact.run(frame, segment, 2)
    for external, (tensor, memory) in held.items():
        if external.written:
            dense = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 and not external.rows else tensor
            written = memory.end(4 * tensor.numel()).view(np.int32)
            assert np.array_equal(written, dense.contiguous().numpy().view(np.int32).ravel())


@pytest.mark.parametrize("program", FREE, ids=lambda program: program.__name__)
def test_buffers_alive_in_one_phase_never_overlap(program):
    planned, artifact = plan_graph(built(program)[1].graph), compiled(program, HERE[0]).artifact
    for batch in (0, 1, 7):
        layout = artifact.plan(sizes(batch))
        spans = []
        for placement, offset in zip(planned.placements, layout.offsets, strict=False):
            size = evaluate(planned.buffers[placement.value].size(), sizes(batch))
            spans.append((placement, offset, offset + size + SLACK))
        for i, (a, start, end) in enumerate(spans):
            for b, other_start, other_end in spans[:i]:
                together = a.first <= b.last and b.first <= a.last
                assert not together or end <= other_start or other_end <= start, (a, b)


# ---- text


def test_operands_of_a_concatenation_are_written_in_their_place():
    """Those of convolutions and pools that nothing else reads; a concatenation of nothing else has no step."""
    planned = plan_graph(built(joined)[1].graph)
    cats = [op for op in planned.graph.ops if op.kind == "cat"]
    parts = [[planned.buffers[name].part for name in op.inputs] for op in cats]
    assert parts == [[0, 24, 94, 127], [0, 116], [None, None]]
    assert [step.partition.anchor.kind for step in planned.steps].count("cat") == 2  # one of them for its halo


def test_a_product_that_weighs_channels_is_the_head_of_the_convolution_that_reads_it():
    """It has no buffer, and the convolution follows what the product reads at once."""
    planned = plan_graph(built(weighed)[1].graph)
    heads = [step.partition for step in planned.steps if step.partition.head is not None]
    levels, total = ["requantize", "loop"], ["add", "loop"]  # the loops give the caller floats
    tails = (levels, levels, total, levels, levels, ["dequantize"])
    assert [[op.kind for op in partition.ops] for partition in heads] == [["mul", "conv2d", *tail] for tail in tails]
    for partition in heads:
        assert partition.head.output not in planned.buffers
        assert {*partition.head.inputs[:2]} <= {*partition.reads()}
    assert not any(step.partition.anchor.kind == "mul" for step in planned.steps)
    kinds = [step.kinds for step in compiled(weighed, HERE[0]).artifact.program.steps]
    assert [kind for kind in kinds if "mul" in kind] == [" + ".join(["mul", "conv2d", *tail]) for tail in tails]


def test_other_products_are_passes_of_their_own():
    steps = plan_graph(built(unjoined)[1].graph).steps
    assert not any(step.partition.headed for step in steps)
    assert sum(step.partition.anchor.kind == "mul" for step in steps) == 7


def test_every_operator_with_a_kernel_has_an_emitter():
    """A requantize is never an anchor: the accumulator it ends has one. Functions of one value become tables, sums with
    a factor per channel sums."""
    records = {name for name, record in OPS.items() if record.kernel is not None and record.function is None}
    assert set(EMITTERS) == records - {"requantize", "activate", "dequantize_rows", "scaled_add"}


@pytest.mark.parametrize("isa", HERE)
def test_the_same_graph_gives_the_same_text_and_constants(isa):
    first, second = (emit(plan_graph(built(residual)[1].graph), isa, CACHES, "same") for _ in range(2))
    assert first.source == second.source
    assert np.array_equal(first.constants, second.constants)


@pytest.mark.parametrize("isa", HERE)
def test_the_text_of_a_tiny_net_can_be_read(isa, golden):
    """Steps, segment and plan; kernels and checks of layout are left out."""
    net = Net()
    x = net.quantize(net.input(N, 3, 8, 8), 128)
    y = net.conv(x, 16, 3, padding=1, zero_point=0)
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "ceil": False}
    y = net.conv(net.same("max_pool2d", y, **window), 8, 1, f32=True)
    source = emit(plan_graph(net.graph(y)), isa, CACHES, "tiny").source
    golden(source[source.index("// quantize") :])


def callers_levels(net: Net) -> tuple[str, ...]:
    """Levels come in, and levels that leave are read inside too: by convolutions that pad and by what does not."""
    x = net.input_levels(N, 5, H, W)
    plain, padded, deep = net.conv(x, 6, 3), net.conv(x, 6, 3, padding=1), net.conv(x, 5, 3, padding=1, groups=5)
    again = net.conv(padded, 7, (1, 3), padding=(0, 0, 1, 1))
    return plain, padded, net.dequantize(deep), net.dequantize(again), net.dequantize(x)


@pytest.mark.parametrize("isa", HERE)
def test_levels_of_the_caller_are_padded_as_levels_inside_are(isa):
    """Its tensors have no halo: what stood there was whatever lay beside them."""
    net, lowered = built(callers_levels)
    model = build.compile(lowered, isa=isa)
    for size in (1, 2, 5):
        inputs = net.batch(size, seed=size)
        assert all(map(torch.equal, model(*inputs), lowered(*inputs)))
    assert "reshape" not in [op.kind for op in lowered.graph.ops]
