"""Kernels and loop schedules are chosen by the plan, which says why; code generation prints what it finds there."""

import pytest

from intaglio.ir import Dim, Graph, TensorType, symbol
from intaglio.kernels import ISAS
from intaglio.plan import CacheSizes, Plan, plan_graph, schedule_plan
from intaglio.plan.kernel_records import (
    ActivationTiles,
    DepthwiseKernel,
    DepthwiseLoops,
    Kernel,
    Movement,
    MovementKernel,
    TiledKernel,
)
from support.float_loops import F32, LoopGraph
from support.integer_graphs import Net

N = symbol("n")


def scheduled(graph: Graph, isa: str = "avx512vnni") -> Plan:
    return schedule_plan(plan_graph(graph), ISAS[isa], CacheSizes())


def only_kernel(plan: Plan, name: str) -> Kernel:
    (kernel,) = plan.kernels[name]
    return kernel


def depthwise(net: Net, channels: int = 32, **attrs: object) -> str:
    x = net.quantize(net.input(N, channels, 9, 9), zero_point=0)
    return net.conv(x, channels, 3, groups=channels, **attrs)


@pytest.mark.parametrize(("isa", "kind"), [("avx512vnni", DepthwiseKernel), ("avx2", DepthwiseLoops)])
def test_a_depthwise_convolution_runs_in_tiles_where_the_instruction_set_has_them(isa, kind):
    net = Net()
    y = depthwise(net)
    kernel = only_kernel(scheduled(net.graph(y), isa), y)
    assert isinstance(kernel, kind)
    if isinstance(kernel, DepthwiseKernel):
        assert (kernel.tile.rows, kernel.tile.columns, kernel.last.channels) == (2, 2, 32)


def test_dilated_columns_run_in_loops_on_every_instruction_set():
    net = Net()
    y = depthwise(net, dilation=2)
    plan = scheduled(net.graph(y))
    assert isinstance(only_kernel(plan, y), DepthwiseLoops)
    assert "of depthwise tiles, dilated columns have none" in plan.text()


WIDENED, WINOGRAD = ", input widened to 16 bits", ", Winograd's method"


@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "attrs", "ends"),
    [
        (32, 32, 16, {}, WINOGRAD),
        (64, 40, 190, {}, WINOGRAD),
        (32, 32, 8, {}, WIDENED),
        (24, 32, 16, {}, WIDENED),
        (32, 32, 16, {"stride": 2}, WIDENED),
        (32, 32, 16, {"dilation": 2}, WIDENED),
        (512, 512, 14, {}, WIDENED),
        (64, 64, 600, {}, WINOGRAD),
        (64, 64, symbol("h"), {}, WINOGRAD),
        (6, 32, 16, {}, ""),
        (32, 16, 16, {}, ""),
    ],
)
def test_convolutions_with_avx2_use_winograds_method_or_widen_their_input(inputs, outputs, size, attrs, ends):
    """Too few pixels, channels of no whole vector, a stride, a dilation, too many weights, long lines, free sizes; then
    channels of no whole step, and a single panel."""
    net = Net()
    height = min(size, 16) if isinstance(size, int) else size
    x = net.quantize(net.input(N, inputs, height, size), zero_point=0)
    y = net.conv(x, outputs, 3, padding=1, **attrs)
    graph = net.graph(y)
    text = only_kernel(scheduled(graph, "avx2"), y).text()
    assert text == f"tile_6x1_u8{ends}"
    assert WINOGRAD not in only_kernel(scheduled(graph), y).text()


def test_convolutions_of_few_groups_use_tiles_of_all_channels():
    net = Net()
    y = depthwise(net, 4)
    assert isinstance(only_kernel(scheduled(net.graph(y)), y), TiledKernel)


def test_a_product_uses_the_tile_of_its_schedule_and_its_guard():
    net = Net()
    y = net.conv(net.quantize(net.input(N, 16, 9, 9), zero_point=0), 40, 3)
    for isa in ISAS:
        plan = scheduled(net.graph(y), isa)
        kernel, schedule = only_kernel(plan, y), plan.schedules[y]
        assert isinstance(kernel, TiledKernel)
        assert (kernel.tile.rows, kernel.tile.blocks) == (schedule.tile_rows, schedule.tile_columns)
        assert kernel.tile.clamps_float == (y in plan.guarded)
        assert f"runs {kernel.tile.name}" in plan.text()


@pytest.mark.parametrize(("queries", "widths"), [(N, {1, 2, 3, 4}), (40, {1, 3})])
def test_panels_of_free_width_have_kernels_of_every_width(queries: Dim, widths: set[int]):
    net = Net()
    q, k, v = (net.centred(net.quantize(net.input(2, 2, queries, 16), 128)) for _ in range(3))
    y = net.attention(q, k, v)
    kernel = only_kernel(scheduled(net.graph(y)), y)
    assert isinstance(kernel, ActivationTiles)
    assert kernel.widths == widths


@pytest.mark.parametrize(
    ("shape", "movement"), [((N, 4, 2, 36), Movement.COPY), ((N, 48, 6), Movement.COPY), ((N, 32, 9), Movement.RESHAPE)]
)
def test_a_reshape_is_a_copy_if_both_shapes_can_be_divided_into_the_same_axes(shape, movement):
    """The operand has 6 rows and columns, of which 9 are no whole number."""
    net = Net()
    x = net.quantize(net.input(N, 8, 8, 8), zero_point=0)
    y = net.same("reshape", net.conv(x, 8, 3), shape=shape)
    plan = scheduled(net.graph(y))
    kernel = only_kernel(plan, y)
    assert isinstance(kernel, MovementKernel)
    assert kernel.movement is movement


def softmax(size: Dim) -> Plan:
    """Return the plan of a loop of two reductions along rows of so many elements."""
    net = LoopGraph(x=TensorType((N, size), F32))

    def write(body):
        exponential = body("exp", body("sub", "x", body("max", "x", axis=1)))
        return body("div", exponential, body("sum", exponential, axis=1))

    net.add(write)
    return plan_graph(net.lowered().graph)


@pytest.mark.parametrize(("size", "longest"), [(1000, [1000]), (5000, [0]), (symbol("c"), [4096, 0])])
def test_short_rows_keep_values_between_passes(size: Dim, longest: list[int]):
    plan = softmax(size)
    (loop,) = plan.loops.values()
    assert [variant.longest for variant in loop.variants] == longest
    assert [bool(variant.kept) for variant in loop.variants] == [limit > 0 for limit in longest]
    assert ("kept between passes" in plan.text()) == (longest != [0])


def test_differences_from_the_row_maximum_are_recognized():
    (loop,) = softmax(8).loops.values()
    assert len(loop.nonpositive) == 1


def test_large_float_results_use_streaming_stores():
    for rows, streamed in ((1 << 12, False), (1 << 13, True), (N, True)):
        net = LoopGraph(x=TensorType((rows, 512), F32))
        (y,) = net.add(lambda body: body("neg", "x"))
        (loop,) = plan_graph(net.lowered().graph).loops.values()
        assert loop.streamed == ({y} if streamed else set())
