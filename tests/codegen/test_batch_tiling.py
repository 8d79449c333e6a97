"""Batch tiling: the first steps run on sub-batches, with the interpreter's bits for any number of images."""

import copy
import os

import pytest
import torch
from torch import Tensor, nn

from intaglio import Image, build, stages
from intaglio.codegen import emit
from intaglio.ir import Dim
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.plan import BatchTiling, CacheSizes, analytic_batch_tiling, plan_graph, schedule_plan, separable_groups
from intaglio.runtime import QuantizedModel, build_artifact
from support.integer_graphs import N, Net, sizes
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize
from support.programs import (
    CACHES,
    FREE,
    assert_bits_of_the_interpreter,
    assert_same_bits,
    assert_stays_inside,
    built,
    compiled,
    fixed,
    residual,
    threads,
)
from support.slow_params import slow_params_except


def with_tiling(lowered: Lowered, model: QuantizedModel, tiling: BatchTiling) -> QuantizedModel:
    """The same model with this batch tiling."""
    isa = ISAS[model.artifact.program.isa]
    program = emit(schedule_plan(plan_graph(lowered.graph), isa, CACHES, batch_tiling=tiling), "tiling").packed()
    changed = copy.deepcopy(model)
    changed.artifact = build_artifact(program)
    return changed


def most(lowered: Lowered) -> int:
    """Barrier groups that can run on sub-batches."""
    return len(list(separable_groups(plan_graph(lowered.graph))))


OTHER_TILINGS = pytest.mark.slow(reason="as many images a sub-batch, and instruction sets, as other programs have here")
LARGE = ("weighed", "depthwise", "moves", "unjoined", "halos", "joined", "pools")
TURNS = [
    pytest.param(
        program,
        RUNNABLE_ISAS[(place + i) % len(RUNNABLE_ISAS)],
        1 + (place + i) % 3,
        marks=[OTHER_TILINGS] * (i > 0 or program.__name__ in LARGE),
    )
    for place, program in enumerate(FREE)
    for i in range(3)
]
"""Program, instruction set, images of a sub-batch: one for each program that compiles fast, the others with `make
slow`."""


@pytest.mark.parametrize(("program", "isa", "images"), TURNS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_batch_tiling_is_bit_identical_to_the_interpreter(program, isa, images):
    """For every batch, thread count and memory format, and a free image size too."""
    net, lowered = built(program)
    tiling = BatchTiling("n", most(lowered), images)
    assert_bits_of_the_interpreter(net, lowered, with_tiling(lowered, compiled(program, isa), tiling))


@pytest.mark.slow(reason="tilings that end elsewhere; every program is tiled above")
@pytest.mark.parametrize("groups", slow_params_except(4, of=range(1, 7), reason="the other groups of the same program"))
def test_batch_tiling_may_end_after_any_barrier_group(groups):
    """A value is read by tiled steps and by later ones, and a residual operand comes from a tiled step."""
    net, lowered = built(residual)
    assert most(lowered) == 6
    tiling = BatchTiling("n", groups, 1)
    assert_bits_of_the_interpreter(net, lowered, with_tiling(lowered, compiled(residual, RUNNABLE_ISAS[-1]), tiling))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_batch_tiling_accesses_only_the_arena_constants_and_tensors(isa):
    net, lowered = built(residual)
    tiling = BatchTiling("n", most(lowered), 1)
    assert_stays_inside(net, lowered, with_tiling(lowered, compiled(residual, isa), tiling).artifact)


def test_uint8_images_are_batch_tiled():
    convolutions = {"a": nn.Conv2d(3, 8, 3, padding=1), "b": nn.Conv2d(8, 4, 3)}
    model = randomize(Body(lambda net, x: net.b(net.a(x).relu()), **convolutions))
    image, pixels = Image(mean=0.5, std=0.25), torch.randint(0, 256, (7, 3, 6, 5), dtype=torch.uint8)
    normal = image.normalize(pixels)
    prepared = stages.prepare(stages.capture(model, normal), stages.Quantizer(input=image))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [normal])))
    (batch,) = lowered.graph.symbols()
    model = with_tiling(lowered, build.compile(lowered), BatchTiling(batch, most(lowered), 2))
    expected = lowered(normal)
    for count in (1, 2, 3):
        with threads(count):
            for x in (pixels, pixels.to(memory_format=torch.channels_last), normal, pixels.flip(0).flip(0)):
                assert_same_bits(model(x), expected)


def view_in_a_loop(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(torch.exp(x[:, :, 1:].transpose(2, 3)) * 0.5)


def views_that_are_concatenated(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(torch.cat([x[:, :2, 1:], x[:, 2:, :-1]], 1))


def operand_of_a_fused_sum(m: nn.Module, x: Tensor) -> Tensor:
    return m.c(torch.exp(m.c(x) + x))


def two_results_of_a_loop(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.exp(x)
    return y, m.c(y)


TENSORS_OF_THE_CALLER = (
    view_in_a_loop,
    views_that_are_concatenated,
    operand_of_a_fused_sum,
    two_results_of_a_loop,
)


@pytest.mark.parametrize(
    "body",
    slow_params_except(
        views_that_are_concatenated,
        operand_of_a_fused_sum,
        of=TENSORS_OF_THE_CALLER,
        reason="tensors of loops, which sub-batches read in the same way",
    ),
)
def test_every_sub_batch_reads_its_own_images_of_the_callers_tensors(body):
    """Also through views, and operands that are fused behind a product."""
    x = torch.randn(7, 3, 9, 10)
    _, lowered = quantized(randomize(Body(body, c=nn.Conv2d(3, 3, 3, padding=1))), x)
    expected = lowered(x)
    tiled = with_tiling(lowered, build.compile(lowered), BatchTiling("n", most(lowered), 2))
    for count in (1, 2, 3):
        with threads(count):
            assert_same_bits(tiled(x), expected)


def test_threads_that_sum_one_image_each_have_places_of_their_own():
    net = Net()
    x = net.quantize(net.input(N, 32, 64, 40), 40)
    mean = net.mean("adaptive_avg_pool2d", x, size=(1, 1))
    lowered = net.lowered(net.conv(net.conv(mean, 32, 1), 5, 1, f32=True))
    assert any(name.endswith(".sums") for name in plan_graph(lowered.graph).buffers)
    model = with_tiling(lowered, build.compile(lowered), BatchTiling("n", most(lowered), 1))
    assert_bits_of_the_interpreter(net, lowered, model)


# ---- the choice


def tower(net: Net, batch: Dim = N) -> str:
    """Large activations first, then small ones."""
    x = net.conv(net.quantize(net.input(batch, 3, 40, 40)), 16, 3, padding=1)
    x = net.conv(net.conv(x, 16, 3, stride=2, padding=1), 16, 3, stride=2, padding=1)
    return net.conv(net.conv(x, 16, 3, stride=2), 16, 3, f32=True)


def test_batch_tiling_ends_where_activations_get_small():
    """Of float and u8 inputs, convolutions to 16 channels of 40, 20 and 10 rows, the first three steps are large."""
    net = Net()
    planned = plan_graph(net.graph(tower(net)))
    assert analytic_batch_tiling(planned, CacheSizes(l2=1 << 16))[0] == BatchTiling("n", 3, 2)
    assert analytic_batch_tiling(planned, CacheSizes(l2=1 << 17))[0] == BatchTiling("n", 3, 4)
    assert analytic_batch_tiling(planned, CacheSizes())[0] is None


def test_batch_tiling_ends_at_weights_larger_than_activations():
    """The third convolution has 230400 bytes of weights, for 100672 of activations."""
    net = Net()
    x = net.conv(net.quantize(net.input(N, 8, 22, 22)), 8, 3, padding=1)
    x = net.conv(net.conv(x, 64, 3, padding=1), 144, 5, padding=2)
    planned = plan_graph(net.graph(net.conv(x, 8, 1, f32=True)))
    assert len(list(separable_groups(planned))) == 4
    assert analytic_batch_tiling(planned, CacheSizes(l2=1 << 14))[0] == BatchTiling("n", 3, 1)


def test_a_batch_of_one_tile_has_static_offsets():
    planned = schedule_plan(
        plan_graph(built(residual)[1].graph), ISAS[RUNNABLE_ISAS[0]], CACHES, batch_tiling=BatchTiling("n", 4, 2)
    )
    arena, layout = planned.arena(), build_artifact(emit(planned, "offsets").packed()).plan(sizes(2))
    assert arena.tile
    assert arena.outside
    offsets = arena.offsets(planned.buffers, sizes(2))
    assert offsets == {name: layout.offsets[index] for name, index in arena.positions().items()}


def test_a_static_batch_is_not_tiled():
    net = Net()
    assert analytic_batch_tiling(plan_graph(net.graph(tower(net, 16))), CacheSizes(l2=1 << 14))[0] is None
    assert most(built(fixed)[1]) == 0


def test_batch_tiling_needs_less_memory():
    """For a batch of 16 images a core."""
    net = Net()
    planned = plan_graph(net.graph(tower(net)))
    programs = [
        emit(schedule_plan(planned, ISAS[RUNNABLE_ISAS[0]], caches), "tower").packed()
        for caches in (CacheSizes(l2=1 << 16), CacheSizes())
    ]
    batch = sizes(16 * len(os.sched_getaffinity(0)))
    tiled, plain = [build_artifact(program).plan(batch).bytes for program in programs]
    assert tiled < plain / 2


def test_step_times_of_all_batch_tiles_are_added():
    net, lowered = built(residual)
    model = with_tiling(lowered, compiled(residual, RUNNABLE_ISAS[0]), BatchTiling("n", most(lowered), 1))
    for count in (1, 2):
        with threads(count):
            assert all(nanoseconds > 0 for nanoseconds in model.step_times(*net.batch(5)))


def test_the_text_of_a_plan_shows_batch_tiling(golden):
    net = Net()
    plan = schedule_plan(plan_graph(net.graph(tower(net))), ISAS["portable"], CacheSizes(l2=1 << 16))
    source = emit(plan, "tower").text.source
    golden(source[source.index("// Steps of the first") :])
