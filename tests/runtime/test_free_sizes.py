"""Free batch, sequence length and image size: one program for all of them, equal to the interpreter at each."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.ir import evaluate, symbol
from intaglio.lower import Lowered
from intaglio.ops import Call, needs
from intaglio.ops.images.pool import bind_pool, pool_shape, require_complete_windows
from intaglio.ops.interpret import sizes_of
from intaglio.quant.qdq.convert import Reference
from intaglio.runtime import QuantizedModel
from support.lowering import assert_equal_quantized, tensors
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS
from support.nets import Body, randomize
from support.slow_params import slow_params_except

AUTO = Dim.AUTO
IMAGE, SEQUENCE = {0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO, 1: AUTO}
conv = nn.Conv2d


def weighed(m, x):
    """Residual sum, squeeze and excite, pools of every kind, upsampling by sizes of another value and by a factor."""
    y = F.relu(m.first(x))
    y = F.relu(m.second(y) + y)
    low = F.avg_pool2d(F.max_pool2d(y, 3, 2, 1), 3, 1, 1)
    low = low * torch.sigmoid(m.excite(F.relu(m.squeeze(F.adaptive_avg_pool2d(low, 1)))))
    wide = F.interpolate(low, size=y.shape[2:]), F.interpolate(low, size=y.shape[2:], mode="bilinear")
    tail = F.adaptive_avg_pool2d(low, (2, 3)).flatten(1)
    return m.last(torch.cat([*wide, y], 1)), m.up(F.interpolate(low, scale_factor=2)), m.head(tail)


def moved(m, x):
    """Every move beside and along free axes, in rows and in images."""
    y = F.leaky_relu(m.first(x))
    tall = torch.cat([y[:, :, 1:], y[:, :, -2:-1], y[:, :, ::2]], 2)
    framed = F.pad(F.pad(tall, (2, 1, 0, 3)), (1, 2, 1, 1), mode="reflect")
    pixels = F.pixel_shuffle(framed, 2)
    rows = F.channel_shuffle(y, 2).flatten(2).transpose(1, 2)
    return m.second(pixels), m.rows(rows), m.rows(rows[:, -1]), m.rows(y[:, :, 0].permute(2, 0, 1))


def lines(m, x):
    """Of [n, channels, length]: sums of halves, a mean, every second value."""
    y = F.relu(m.first(x))
    return m.last(F.avg_pool1d(y, 3, 2)), m.last(F.interpolate(y, scale_factor=2)[:, :, 1::2])


def wide(m, x):
    """A layer that AVX2 computes by Winograd's method in images of 128 pixels and more."""
    return m.second(F.relu(m.first(x)))


def tokens(m, x):
    """The parts of attention around its products: heads split and joined, the batch moved back and forth."""
    n, t, _ = x.shape
    parts = m.wide(x).view(n, t, 3, 4, 6).permute(2, 0, 3, 1, 4)
    mixed = (parts[0] + parts[1]).permute(2, 0, 1, 3).reshape(t, n, 24).transpose(0, 1)
    x = m.norm(x + m.narrow(mixed))
    return m.narrow(x[:, 1:]), m.narrow(x[:, 0]), m.narrow(F.gelu(x[:, -1]))


def images(draw: Callable[..., int]) -> tuple[int, ...]:
    return draw(0, 4), 3, draw(5, 40), draw(5, 40)


NETS = {
    "weighed": (
        Body(
            weighed,
            first=conv(3, 16, 3, 2, 1),
            second=conv(16, 16, 3, padding=1),
            squeeze=conv(16, 4, 1),
            excite=conv(4, 16, 1),
            last=conv(48, 5, 3, padding=1),
            up=conv(16, 3, 3, padding=1),
            head=nn.Linear(96, 7),
        ),
        ((IMAGE,),),
        (2, 3, 24, 20),
        images,
    ),
    "moved": (
        Body(moved, first=conv(3, 8, 3, padding=1), second=conv(2, 4, 3), rows=nn.Linear(8, 6)),
        ((IMAGE,),),
        (2, 3, 10, 12),
        images,
    ),
    "lines": (
        Body(lines, first=nn.Conv1d(6, 8, 3), last=nn.Conv1d(8, 4, 3, padding=1)),
        (({0: AUTO, 2: AUTO},),),
        (2, 6, 16),
        lambda draw: (draw(0, 4), 6, draw(6, 60)),
    ),
    "wide": (
        Body(wide, first=conv(3, 16, 3, padding=1), second=conv(16, 40, 3, padding=1)),
        ((IMAGE,),),
        (2, 3, 12, 10),
        images,
    ),
    "tokens": (
        Body(tokens, wide=nn.Linear(24, 72), narrow=nn.Linear(24, 24), norm=nn.LayerNorm(24)),
        ((SEQUENCE,),),
        (3, 9, 24),
        lambda draw: (draw(0, 4), draw(3, 40), 24),
    ),
}


@functools.cache
def all_stages(name: str) -> tuple[Reference, Lowered]:
    model, shapes, example, _ = NETS[name]
    x = torch.randn(example, generator=torch.Generator().manual_seed(1))
    captured = stages.capture(randomize(model), (x,), dynamic_shapes=shapes)
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [x]))
    return reference, stages.requantize(reference)


@functools.cache
def program(name: str, isa: str) -> QuantizedModel:
    return stages.compile(all_stages(name)[1], isa=isa)


def same(found, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(expected), strict=True))


@pytest.mark.parametrize("name", slow_params_except("tokens", of=NETS, reason="other layers of the same sizes"))
def test_dynamic_sizes_leave_no_operator_in_float(name):
    """And the interpreter is within one step of the reference at sizes it was not calibrated with."""
    reference, lowered = all_stages(name)
    assert not lowered.islands, lowered.skipped
    sizes = iter([3, 17, 26])
    x = torch.randn(NETS[name][3](lambda low, high: next(sizes)), generator=torch.Generator().manual_seed(2))
    assert_equal_quantized(reference, lowered, x)


@pytest.mark.parametrize("name", slow_params_except("tokens", of=NETS, reason="other layers of the same sizes"))
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@settings(max_examples=12)
@given(data=st.data())
def test_programs_have_the_bits_of_the_interpreter_at_any_size(name, isa, data):
    """Zero images among them; the shapes of results are the float model's."""
    x = torch.randn(NETS[name][3](lambda low, high: data.draw(st.integers(low, high))))
    expected = all_stages(name)[1](x)
    with torch.no_grad():
        floats = NETS[name][0](x) if x.shape[0] else None
    if floats is not None:
        assert [t.shape for t in tensors(floats)] == [t.shape for t in tensors(expected)]
    assert same(program(name, isa)(x), expected), (isa, x.shape)


@pytest.mark.skipif("avx2" not in RUNNABLE_ISAS, reason="Winograd's method is used with AVX2 only")
@pytest.mark.parametrize("size", [(9, 9), (14, 31), (6, 300)])
def test_images_of_few_and_of_many_pixels_have_the_bits_of_the_interpreter(size):
    """The second and the third by Winograd's method, the last in parts of lines."""
    compiled = program("wide", "avx2")
    assert "if (m.out.height * m.out.width < 128) m.transformed = 0;" in compiled.text("program")
    x = torch.randn(2, 3, *size)
    assert same(compiled(x), all_stages("wide")[1](x))


def test_the_comparison_detects_another_size():
    x = torch.randn(2, 3, 9, 11)
    assert not same(program("weighed", RUNNABLE_ISAS[0])(x[..., :10]), all_stages("weighed")[1](x[..., 1:]))


@pytest.mark.case("backend 6")
@pytest.mark.parametrize(
    "name", slow_params_except("tokens", "weighed", of=NETS, reason="other layers of the same sizes")
)
def test_changing_shapes_needs_one_compilation(name, counting_compiler):
    """Case 6: batch 1, 3, 1, another size, and the first again: equal each time, and nothing is compiled for it."""
    model, lowered = program(name, RUNNABLE_ISAS[0]), all_stages(name)[1]
    before, first = counting_compiler.read_text(), NETS[name][2]
    calls = [(1, *first[1:]), (3, *first[1:]), (1, *first[1:]), NETS[name][3](lambda low, high: 7), (1, *first[1:])]
    xs = {shape: torch.randn(shape) for shape in calls}
    results = [model(xs[shape]) for shape in calls]
    assert all(same(found, lowered(xs[shape])) for found, shape in zip(results, calls, strict=True))
    assert same(results[0], results[2])
    assert same(results[0], results[-1])
    assert counting_compiler.read_text() == before


@pytest.mark.parametrize(
    "name", slow_params_except("tokens", of=NETS, reason="compiles other layers of the same sizes")
)
def test_a_saved_model_keeps_its_free_sizes(name, tmp_path):
    model, shape = program(name, RUNNABLE_ISAS[0]), NETS[name][3](lambda low, high: 8)
    model.save(tmp_path / "model.intaglio")
    x = torch.randn(shape)
    assert same(intaglio.load(tmp_path / "model.intaglio", isa=RUNNABLE_ISAS[0])(x), model(x))


SMALL = {"weighed": (1, 3, 0, 9), "lines": (1, 6, 2), "moved": (1, 3, 9, 0)}


@pytest.mark.parametrize("name", slow_params_except("weighed", "lines", of=SMALL, reason="takes seconds to compile"))
def test_sizes_that_give_empty_results_are_refused_like_in_the_float_model(name):
    """By the traced range; and where there is none, as in a graph of another making, by what operators need."""
    x, own = torch.randn(SMALL[name]), all_stages(name)[1]
    with pytest.raises(RuntimeError):
        NETS[name][0](x)
    with pytest.raises(InputError, match=r"of at least|a size below 1"):
        program(name, RUNNABLE_ISAS[0])(x)
    found = [need for need in needs(own.graph) if evaluate(need.value, sizes_of(own.graph, [x.numpy()])) < 0]
    assert any("a size below 1" in need.problem for need in found)


@pytest.mark.parametrize(
    ("kernel", "padding", "ceil", "taken"), [(3, 1, True, True), (2, 1, True, False), (2, 1, False, True)]
)
def test_ceil_mode_windows_start_inside_a_dynamic_size(kernel, padding, ceil, taken):
    """Else torch drops the last one of some sizes and not of others."""
    given = {"kernel_size": kernel, "stride": 2, "padding": padding, "ceil_mode": ceil}
    size = symbol("n")
    call = Call("aten.max_pool1d.default", given, ((2, 3, size),), (True,), (False,), (2, 3, size))
    assert (require_complete_windows(call) is None) == taken
    if taken and ceil:
        shape = pool_shape(bind_pool(call), [(2, 3, size)])
        for length in range(2, 40):
            found = F.max_pool1d(torch.zeros(2, 3, length), **given)
            assert found.shape[-1] == evaluate(shape[-1], {"n": length})


STRIDES = {
    "transposed": lambda x: x.transpose(2, 3),
    "every second": lambda x: x.repeat(1, 1, 2, 1)[:, :, ::2],
    "expanded": lambda x: x[:1, :, :1].expand(3, -1, 12, -1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "flipped twice": lambda x: x.flip(3).flip(3),
    "a part of a larger one": lambda x: torch.cat([x, x], 3)[..., 3:15],
    "needing gradients": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_inputs_with_dynamic_sizes_are_read_with_any_strides(name, isa):
    x = STRIDES[name](torch.randn(2, 3, 12, 14))
    model = program("weighed", isa)
    plain = x.detach().contiguous()
    assert same(model(x), model(plain))
    assert same(model(plain), all_stages("weighed")[1](plain))


def test_the_comparison_detects_an_index_of_a_wrong_pixel():
    """Means of an adaptive pool divide by what a call has: of another size they differ."""
    x = torch.randn(1, 3, 30, 22)
    assert not np.array_equal(
        tensors(program("weighed", RUNNABLE_ISAS[0])(x))[2], tensors(all_stages("weighed")[1](x * 0.5))[2]
    )
