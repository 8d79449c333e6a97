"""Kernels of products that return float32: each tail behind each anchor, with the bits of the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from intaglio import stages
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.plan import CacheSizes, plan_graph, schedule_plan
from intaglio.plan.kernel_records import DepthwiseKernel, DepthwiseLoops
from support.int8_models import assert_program_matches
from support.lowering import assert_equal_quantized, lowered, quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize
from support.slow_params import slow_params

TAILS = {
    "relu": lambda x, y: F.relu(x),
    "clamp": lambda x, y: x.clamp(-0.5, 0.7),
    "gelu": lambda x, y: F.gelu(x),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "tanh": lambda x, y: x.tanh(),
    "hardswish": lambda x, y: F.hardswish(x),
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.1),
    "sum": lambda x, y: x + y,
    "sum, relu": lambda x, y: F.relu(y + x),
    "weighted sum": lambda x, y: torch.add(x, y, alpha=0.5),
    "nothing": lambda x, y: x,
}
IMAGE_ANCHORS = {
    "conv": lambda: nn.Conv2d(20, 20, 3, padding=1),
    "grouped": lambda: nn.Conv2d(20, 20, 3, padding=1, groups=2),
    "depthwise": lambda: nn.Conv2d(20, 20, 3, padding=1, groups=20),
    "dilated depthwise": lambda: nn.Conv2d(20, 20, 3, padding=2, dilation=2, groups=20),
}
ROW_ANCHORS = ("linear", "matmul")
SOME_TAILS = {
    "conv": ("relu", "gelu", "sum"),
    "grouped": ("clamp", "sigmoid", "sum, relu"),
    "depthwise": ("silu", "tanh", "weighted sum", "nothing"),
    "dilated depthwise": ("hardswish", "leaky_relu", "sum", "nothing"),
    "linear": ("relu", "gelu", "silu", "hardswish", "sum", "weighted sum"),
    "matmul": ("clamp", "sigmoid", "tanh", "leaky_relu", "sum", "sum, relu"),
}
"""Every tail behind an anchor of images and behind one of rows."""
ALL_TAILS = dict.fromkeys([*IMAGE_ANCHORS, *ROW_ANCHORS], tuple(TAILS))


def images_body(m: nn.Module, x: Tensor) -> list[Tensor]:
    pairs = [pair for anchor, layers in m.anchors.items() for pair in zip(layers, m.tails[anchor], strict=True)]
    return [TAILS[tail](layer(x), x) for layer, tail in pairs]


def rows_body(m: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    found = [TAILS[tail](layer(x), x) for layer, tail in zip(m.layers, m.tails["linear"], strict=True)]
    return found + [TAILS[tail](torch.matmul(x, y), x) for tail in m.tails["matmul"]]


def image_model(tails: dict[str, tuple[str, ...]]) -> nn.Module:
    layers = {name: nn.ModuleList(make() for _ in tails[name]) for name, make in IMAGE_ANCHORS.items()}
    return randomize(Body(images_body, anchors=nn.ModuleDict(layers), tails=tails))


def row_model(tails: dict[str, tuple[str, ...]]) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(24, 24) for _ in tails["linear"])
    return randomize(Body(rows_body, layers=layers, tails=tails))


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def shown(graph: Lowered) -> list[str]:
    return [" + ".join(op.kind for op in step.partition.ops) for step in plan_graph(graph.graph).steps]


@pytest.fixture(
    scope="module",
    params=[
        SOME_TAILS,
        *slow_params(ALL_TAILS, reason="every anchor and every tail runs with some others"),
    ],
    ids=["some", "all"],
)
def tails(request):
    return request.param


@pytest.fixture(scope="module")
def images(tails):
    return quantized(image_model(tails), *drawn(0, (4, 20, 7, 9)))


@pytest.fixture(scope="module")
def image_programs(images):
    return {isa: stages.compile(images[1], isa=isa) for isa in RUNNABLE_ISAS}


@pytest.fixture(scope="module")
def rows(tails):
    """With a free number of tokens."""
    inputs, free = drawn(0, (4, 7, 24), (4, 24, 24)), torch.export.Dim.AUTO
    sizes = ({0: free, 1: free}, {0: free})
    captured = stages.capture(row_model(tails).eval(), tuple(inputs), dynamic_shapes=(sizes,))
    return lowered(captured, *inputs)


@pytest.fixture(scope="module")
def row_programs(rows):
    return {isa: stages.compile(rows[1], isa=isa) for isa in RUNNABLE_ISAS}


def test_every_tail_is_in_the_kernel_of_its_product(images, rows):
    for _, graph in (images, rows):
        assert "loop" not in shown(graph)
        assert not {"requantize", "table", "activate"}.intersection(op.kind for op in graph.graph.ops)


@pytest.mark.parametrize("isa", ["avx2", "avx512vnni"])
def test_depthwise_tails_run_in_depthwise_kernels(isa, images):
    plan = schedule_plan(plan_graph(images[1].graph), ISAS[isa], CacheSizes())
    anchors = [step.partition for step in plan.steps if step.partition.anchor.attrs.get("groups") == 20]
    assert len(anchors) >= 8
    for partition in anchors:
        assert isinstance(plan.kernels[partition.output][0], DepthwiseKernel | DepthwiseLoops)


def test_results_are_those_of_the_reference(images, rows):
    assert_equal_quantized(*images, *drawn(0, (4, 20, 7, 9)))
    assert_equal_quantized(*rows, *drawn(0, (4, 7, 24), (4, 24, 24)))


@given(batch=st.integers(1, 5), seed=st.integers(0, 99), threads=st.integers(1, 4), isa=st.sampled_from(RUNNABLE_ISAS))
def test_images_match_the_interpreter(images, image_programs, batch, seed, threads, isa):
    inputs = drawn(seed, (batch, 20, 7, 9))
    assert_program_matches(image_programs[isa], images[1], inputs, threads)


@pytest.mark.slow(reason="the same tails behind linear layers")
@given(
    batch=st.integers(1, 9),
    tokens=st.integers(2, 40),
    seed=st.integers(0, 99),
    threads=st.integers(1, 4),
    isa=st.sampled_from(RUNNABLE_ISAS),
)
def test_rows_match_the_interpreter(rows, row_programs, batch, tokens, seed, threads, isa):
    inputs = drawn(seed, (batch, tokens, 24), (batch, 24, 24))
    assert_program_matches(row_programs[isa], rows[1], inputs, threads)


def twice_body(m: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    image, own, row, plain = F.gelu(m.image(x)), F.relu(m.own(x) + x), m.row(y).sigmoid(), m.plain(y)
    return [image, m.image(image), own, m.own(own), row, m.row(row), plain, m.plain(plain)]


@pytest.fixture(scope="module")
def twice():
    layers = {"image": nn.Conv2d(20, 20, 3, padding=1), "own": nn.Conv2d(20, 20, 3, padding=1, groups=20)}
    layers |= {"row": nn.Linear(24, 24), "plain": nn.Linear(24, 24)}
    return quantized(randomize(Body(twice_body, **layers)), *drawn(0, (4, 20, 7, 9), (4, 5, 24)))


@pytest.fixture(scope="module")
def twice_programs(twice):
    return {isa: stages.compile(twice[1], isa=isa) for isa in RUNNABLE_ISAS}


def test_a_kernel_stores_floats_for_the_caller_and_quantized_values_for_the_next_layer(twice):
    steps = [step.partition for step in plan_graph(twice[1].graph).steps]
    both = [partition for partition in steps if len(partition.ops[-1].outputs) == 2]
    assert [" + ".join(op.kind for op in partition.ops) for partition in both] == [
        "conv2d + dequantize + loop",
        "conv2d + dequantize + loop",
        "linear + dequantize + loop",
    ]


@pytest.mark.slow(reason="a further program; kernels with one result are compared above")
@given(batch=st.integers(1, 5), seed=st.integers(0, 99), threads=st.integers(1, 4), isa=st.sampled_from(RUNNABLE_ISAS))
def test_kernels_with_two_results_match_the_interpreter(twice, twice_programs, batch, seed, threads, isa):
    assert_program_matches(twice_programs[isa], twice[1], drawn(seed, (batch, 20, 7, 9), (batch, 5, 24)), threads)
