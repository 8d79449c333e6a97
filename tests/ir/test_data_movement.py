"""Moves: the strided copies of `ir/moves.py` against NumPy, in every layout; then in whole models."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from torch import nn

from intaglio import stages
from intaglio.ir import DType, Op, QParams, TensorType
from intaglio.ops import OPS, check_graph
from intaglio.ops.movement.data_movement import Box
from intaglio.plan import Buffer, plan_graph
from intaglio.plan.buffers import boxes, is_identity_copy, strides
from support.integer_graphs import N, Net
from support.lowering import assert_equal_quantized, kinds, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.slow_params import slow_params_except

ZERO = 77
Q = QParams((0.5,), (ZERO,), 0, 255)
EMPTY = 251


# -- by strides, in NumPy ---------------------------------------------------------------------------------------------


def memory(buffer: Buffer) -> np.ndarray:
    return np.full(buffer.size(), EMPTY, np.uint8)


def inside(buffer: Buffer) -> int:
    """Where the first element lies, behind the halo."""
    (down, right), (_, _, width, pixel) = buffer.halo, buffer.nhwc_sizes()
    return (down * (width + 2 * right) + right) * pixel


def logical(buffer: Buffer, held: np.ndarray) -> np.ndarray:
    """The tensor in a buffer's memory, as a view."""
    return as_strided(held[inside(buffer) :], buffer.shape, strides(buffer))


def box_view(held: np.ndarray, buffer: Buffer, start: int, sizes: list[int], steps: list[int]) -> np.ndarray:
    """What a box reads or writes; an index outside the memory is an error."""
    first = inside(buffer) + start
    ends = [(n - 1) * step for n, step in zip(sizes, steps, strict=True)]
    assert first + sum(min(end, 0) for end in ends) >= 0
    assert first + sum(max(end, 0) for end in ends) < held.size
    return as_strided(held[first:], sizes, steps)


def run(op: Op, sources: list[Buffer], result: Buffer, found: tuple[Box, ...], held: list[np.ndarray]) -> np.ndarray:
    """What the copies leave in the result's memory."""
    written = memory(result)
    for box in found:
        sizes = [run.size for run in box.runs]
        to = box_view(written, result, box.result, sizes, [run.result for run in box.runs])
        assert (to == EMPTY).all(), "no element is written twice"
        if box.fill:
            to[...] = ZERO
        else:
            steps = [run.source for run in box.runs]
            to[...] = box_view(held[box.operand], sources[box.operand], box.source, sizes, steps)
    return written


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], widest: int = 2) -> Buffer:
    """Channels last with a halo or without, or row-major."""
    rows, sides = draw(st.booleans()), st.integers(0, widest)
    halo = draw(st.tuples(sides, sides)) if len(shape) in (3, 4, 5) and not rows else (0, 0)
    return Buffer("x", shape, DType.U8, halo=halo if len(shape) > 3 else (0, halo[1]), row_major=rows)


def shapes(least: int = 1, most: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, 5), min_size=least, max_size=most).map(tuple)


@st.composite
def slices(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    shape = draw(shapes())
    axis = draw(st.integers(0, len(shape) - 1))
    start = draw(st.integers(0, shape[axis] - 1))
    stop, step = draw(st.integers(start + 1, shape[axis])), draw(st.integers(1, 3))
    attrs = {"axis": axis, "start": start, "stop": stop, "step": step}
    return Op("slice", ("a",), ("y",), attrs), [shape]


@st.composite
def flips(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    shape = draw(shapes())
    return Op("flip", ("a",), ("y",), {"axis": draw(st.integers(0, len(shape) - 1))}), [shape]


@st.composite
def pads(draw: st.DrawFn, mode: str) -> tuple[Op, list[tuple[int, ...]]]:
    shape = draw(shapes())
    most = {"constant": [2] * len(shape), "reflect": [n - 1 for n in shape], "replicate": [3] * len(shape)}
    limits = most.get(mode, shape)
    sides = {side: tuple(draw(st.integers(0, limit)) for limit in limits) for side in ("before", "after")}
    attrs = {**sides, "mode": mode}
    if mode == "constant" and len(shape) <= 4 and draw(st.booleans()):
        attrs["between"] = tuple(draw(st.integers(0, 2)) for _ in shape)
    return Op("pad", ("a",), ("y",), attrs), [shape]


@st.composite
def permutations(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    shape = draw(shapes())
    order = tuple(draw(st.permutations(range(len(shape)))))
    return Op("permute", ("a",), ("y",), {"order": order}), [shape]


@st.composite
def concatenations(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    shape = draw(shapes())
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    found = [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    return Op("cat", tuple("abc"[: len(found)]), ("y",), {"axis": axis}), found


@st.composite
def expansions(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    wide = draw(shapes())
    return Op("expand", ("a",), ("y",), {"shape": wide}), [tuple(draw(st.sampled_from([1, n])) for n in wide)]


@st.composite
def shuffles(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    groups, (n, each, *image) = draw(st.integers(1, 4)), draw(shapes(3, 5))
    return Op("shuffle", ("a",), ("y",), {"groups": groups}), [(n, groups * each, *image)]


@st.composite
def pixel_shuffles(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    (n, c, h, w), r = draw(shapes(4, 4)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        return Op("pixel_shuffle", ("a",), ("y",), {"factor": r}), [(n, c * r * r, h, w)]
    return Op("pixel_unshuffle", ("a",), ("y",), {"factor": r}), [(n, c, h * r, w * r)]


@st.composite
def depths(draw: st.DrawFn) -> tuple[Op, list[tuple[int, ...]]]:
    (n, c, d, h, w), groups = draw(shapes(5, 5)), draw(st.integers(1, 2))
    taps, stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    attrs = {"groups": groups, "taps": taps, "stride": stride, "dilation": dilation}
    return Op("unfold_depth", ("a",), ("y",), attrs), [(n, c * groups, d + dilation * (taps - 1), h, w)]


MOVES = {
    "slice": slices(),
    "flip": flips(),
    **{f"pad, {mode}": pads(mode) for mode in ("constant", "reflect", "replicate", "circular")},
    "permute": permutations(),
    "cat": concatenations(),
    "expand": expansions(),
    "shuffle": shuffles(),
    "pixel shuffles": pixel_shuffles(),
    "unfold depth": depths(),
}


def outcome(op: Op, given_shapes: list[tuple[int, ...]], sources: list[Buffer], result: Buffer):
    """What NumPy says, and the tensors held in memory."""
    draw = np.random.default_rng(0)
    held = [memory(buffer) for buffer in sources]
    for buffer, kept in zip(sources, held, strict=True):
        logical(buffer, kept)[...] = draw.integers(0, 250, buffer.shape)
    arrays = [logical(buffer, kept).copy() for buffer, kept in zip(sources, held, strict=True)]
    types = [TensorType(shape, DType.U8, Q) for shape in given_shapes]
    return OPS[op.kind].reference(op, arrays, types, TensorType(result.shape, DType.U8, Q)), held


@pytest.mark.parametrize("name", MOVES)
@given(st.data())
def test_copies_of_data_movement_match_numpy(name, data):
    """Every element of the result is written once, nothing else is, and nothing outside a buffer is read."""
    op, given_shapes = data.draw(MOVES[name])
    sources = [data.draw(layouts(shape)) for shape in given_shapes]
    result = data.draw(layouts(tuple(OPS[op.kind].infer(op.attrs, given_shapes))))
    expected, held = outcome(op, given_shapes, sources, result)
    written = run(op, sources, result, boxes(op, sources, result), held)
    assert np.array_equal(logical(result, written), expected)
    assert (written != EMPTY).sum() == prod(result.shape)


def test_the_comparison_detects_a_copy_of_another_element():
    op, shape = Op("slice", ("a",), ("y",), {"axis": 1, "start": 1, "stop": 3, "step": 1}), (1, 4, 2, 2)
    source, result = Buffer("x", shape, DType.U8), Buffer("y", (1, 2, 2, 2), DType.U8)
    expected, held = outcome(op, [shape], [source], result)
    (box,) = boxes(op, [source], result)
    written = run(op, [source], result, (replace(box, source=box.source + 1),), held)
    assert not np.array_equal(logical(result, written), expected)


@given(st.one_of(*MOVES.values()), st.data())
def test_a_view_shares_the_memory_of_its_input(move, data):
    op, given_shapes = move
    source = data.draw(layouts(given_shapes[0], widest=0))
    result = data.draw(layouts(tuple(OPS[op.kind].infer(op.attrs, given_shapes)), widest=0))
    if len(given_shapes) == 1 and is_identity_copy(op, source, result):
        expected, (held,) = outcome(op, given_shapes, [source], result)
        assert np.array_equal(logical(result, held), expected)


@given(shapes(3, 5), st.data())
def test_a_reshape_in_logical_order_moves_no_data(shape, data):
    """Where `is_identity_copy` says so, and it says so for row-major tensors."""
    total, wanted = prod(shape), []
    while total > 1 and len(wanted) < 5:
        wanted.append(data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0])))
        total //= wanted[-1]
    op = Op("reshape", ("a",), ("y",), {"shape": (*wanted, total)})
    source, result = data.draw(layouts(shape, widest=0)), data.draw(layouts((*wanted, total), widest=0))
    if is_identity_copy(op, source, result):
        expected, (held,) = outcome(op, [shape], [source], result)
        assert np.array_equal(logical(result, held), expected)
    assert is_identity_copy(op, replace(source, row_major=True), replace(result, row_major=True))


# -- whole models -----------------------------------------------------------------------------------------------------


def padded(conv: type[nn.Module], axes: int) -> Body:
    """A convolution of every padding mode, and pads on their own, uneven."""
    one, two, three = ((1, 2) * axes, (2, 0) * axes, (0, 1) * axes)

    def body(m, x):
        y = m.circular(m.replicate(m.reflect(x)))
        wide = F.pad(F.pad(y, one, mode="reflect"), two, mode="replicate")
        return m.first(F.pad(wide, three, mode="circular")), m.second(F.pad(y, (3, 1)))

    modes = {mode: conv(6, 6, 3, padding=2, padding_mode=mode) for mode in ("reflect", "replicate", "circular")}
    return Body(body, **modes, first=conv(6, 4, 3, padding=1), second=conv(6, 4, 3))


def windows(m, x):
    """Windows of 3 x 3 as in a Swin transformer: shifted, cut, mixed along each, put back."""
    n, y = x.shape[0], m.conv(x).permute(0, 2, 3, 1)
    y = torch.roll(y, (-1, -1), (1, 2))
    cut = y.view(n, 2, 3, 2, 3, 12).permute(0, 1, 3, 2, 4, 5).reshape(n * 4, 9, 12)
    mixed = m.mix(cut).transpose(1, 2).reshape(n, 2, 2, 12, 3, 3)
    return m.last(mixed.permute(0, 3, 1, 4, 2, 5).reshape(n, 12, 6, 6)), m.rows(cut.transpose(1, 2))


def pyramid(m, x):
    """Parts along every axis, a pixel spread over an image, all joined."""
    y = m.conv(x)
    pixel = F.relu(m.point(F.adaptive_avg_pool2d(y, 1))).expand(-1, -1, 6, 6)
    high = torch.cat([y[:, 2:11:3], pixel[:, :4]], 1)
    tall = torch.cat([high, high[:, :, ::2]], 2)
    wide = torch.cat([tall[:, :, :, 4:], tall, tall[..., 1:3]], 3)
    parts = torch.stack([wide[:, 0], wide[:, -1], *wide[:, 2:4].unbind(1)], 1)
    line = m.line(y.mean((2, 3), keepdim=True).repeat(1, 1, 1, 7))
    return m.joined(parts.repeat(1, 3, 1, 1)), m.rows(y.flatten(2)), line


def shuffled(m, x):
    y = F.pixel_shuffle(m.conv(x), 2)
    return m.up(y), m.down(F.pixel_unshuffle(y, 3)), m.groups(F.channel_shuffle(y, 3))


conv = nn.Conv2d
MODELS = {
    "padded lines": (padded(nn.Conv1d, 1), (6, 9)),
    "padded images": (padded(nn.Conv2d, 2), (6, 7, 9)),
    "padded volumes": (padded(nn.Conv3d, 3), (6, 3, 4, 5)),
    "windows": (
        Body(
            windows, conv=conv(3, 12, 3, 1, 1), mix=nn.Linear(12, 12), last=conv(12, 4, 3, 1, 1), rows=nn.Linear(9, 5)
        ),
        (3, 6, 6),
    ),
    "pyramid": (
        Body(
            pyramid,
            conv=conv(3, 12, 3, 1, 1),
            point=conv(12, 5, 1),
            joined=conv(12, 4, 3),
            rows=nn.Linear(36, 7),
            line=conv(12, 3, (1, 3)),
        ),
        (3, 6, 6),
    ),
    "shuffled": (
        Body(shuffled, conv=conv(3, 12, 3, 1, 1), up=conv(3, 5, 3), down=conv(27, 5, 1), groups=conv(3, 4, 1)),
        (3, 6, 6),
    ),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("windows", of=MODELS, reason="every move is compared with numpy, too"),
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_models_of_data_movement_run_in_int8(name, isa):
    """No island, the interpreter within one step of the reference, every instruction set equal to the interpreter."""
    model, shape = MODELS[name]
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    reference, lowered = quantized(randomize(model), x)
    assert not lowered.islands, lowered.skipped
    check_graph(lowered.graph)
    assert_equal_quantized(reference, lowered, x)
    compiled = stages.compile(lowered, isa=isa)
    for batch in (x, x[:1], x[:0]):
        for found, expected in zip(compiled(batch), lowered(batch), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.slow(reason="quantizes a block for two aliases; a view shares the memory of its input above")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_channels_last_and_back_moves_no_byte(isa):
    """A block of ConvNeXt without its norm: two permutations around linear layers, both aliases."""

    def body(m, x):
        x = m.stem(x)
        y = F.gelu(m.wide(m.deep(x).permute(0, 2, 3, 1)))
        return m.last(x + m.scale * m.narrow(y).permute(0, 3, 1, 2))

    layers = {"stem": nn.Conv2d(8, 8, 1), "wide": nn.Linear(8, 32), "narrow": nn.Linear(32, 8)}
    layers |= {"deep": nn.Conv2d(8, 8, 3, padding=1, groups=8), "last": nn.Conv2d(8, 3, 1)}
    model = Body(body, scale=nn.Parameter(torch.ones(8, 1, 1)), **layers)
    x = torch.randn(3, 8, 5, 6)
    reference, lowered = quantized(randomize(model), x)
    assert not lowered.islands
    assert kinds(lowered).count("permute") == 2
    assert not [
        step for step in plan_graph(lowered.graph).steps if step.partition.anchor.kind in ("permute", "reshape")
    ]
    assert_equal_quantized(reference, lowered, x)
    assert torch.equal(stages.compile(lowered, isa=isa)(x), lowered(x))


LEAVING = {
    "a slice from behind the end": ("slice", {"axis": 1, "start": 5, "stop": 8, "step": 1}),
    "a slice beyond the end": ("slice", {"axis": 2, "start": 0, "stop": 9, "step": 4}),
    "a reflection as wide as the tensor": ("pad", {"before": (0, 0, 0, 6), "after": (0, 0, 0, 0), "mode": "reflect"}),
    "a round trip": ("pad", {"before": (0, 0, 0, 0), "after": (0, 0, 7, 0), "mode": "circular"}),
    "a wider axis that does not repeat": ("expand", {"shape": (N, 6, 7, 9)}),
}


@pytest.mark.parametrize("name", LEAVING)
def test_a_graph_with_out_of_bounds_data_movement_is_refused(name):
    """No model gives one, a changed file may."""
    net, (kind, attrs) = Net(), LEAVING[name]
    x = net.quantize(net.input(N, 6, 6, 6))
    net.types["y"] = TensorType(OPS[kind].infer(attrs, [net.types[x].shape]), DType.U8, net.types[x].q)
    net.ops.append(Op(kind, (x,), ("y",), attrs))
    with pytest.raises(ValueError, match="accesses elements outside"):
        check_graph(net.graph("y"))
