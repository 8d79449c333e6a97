"""Loops that run behind the tiles of a product: operands of every shape, borders, panels, threads; what stays apart."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from intaglio import Recipe, stages
from intaglio.lower import Lowered
from intaglio.plan import plan_graph
from support.int8_models import assert_program_matches, assert_same
from support.lowering import quantized
from support.matmul_library import RUNNABLE_ISAS
from support.nets import Body, randomize
from support.slow_params import slow_params_except

FLOAT = Recipe.of({"*": {"residual": "float", "functions": "precise", "method": "minmax"}})


def kinds(lowered: Lowered) -> list[str]:
    return [" + ".join(op.kind for op in step.partition.ops) for step in plan_graph(lowered.graph).steps]


def branches():
    """Operands that broadcast along every axis, behind convolutions of every rank; one result has a border."""

    def body(m, x, y, rows, line):
        image = m.c(x)
        summed = F.relu(image + y)
        return (
            m.d(summed),
            summed,
            m.c(x) * m.scale + rows,
            m.far(x) - y[:, :, :1],
            m.grouped(y) / (y * y + 1),
            m.line(line).tanh() * line[:, :1],
            m.volume(x.unflatten(2, (2, -1))).neg() + 1.5,
        )

    model = Body(
        body,
        c=nn.Conv2d(3, 70, 3, padding=1),
        d=nn.Conv2d(70, 5, 3, padding=1),
        far=nn.Conv2d(3, 70, 1),
        grouped=nn.Conv2d(70, 70, 3, padding=1, groups=2),
        line=nn.Conv1d(5, 33, 3, padding=1),
        volume=nn.Conv3d(3, 17, (1, 3, 3), padding=(0, 1, 1)),
    )
    model.scale = nn.Parameter(torch.ones(70, 1, 1))
    return randomize(model)


@pytest.fixture(scope="module")
def images():
    lowered = quantized(branches(), *drawn_images(4, 0), recipe=FLOAT)[1]
    return lowered, stages.compile(lowered, isa=RUNNABLE_ISAS[0])


def drawn_images(batch: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (3, 8, 9), (70, 8, 9), (1, 8, 1), (5, 37)
    return [torch.randn(batch, *shape, generator=draw) for shape in shapes]


def test_every_loop_after_a_convolution_is_fused_into_it(images):
    found = kinds(images[0])
    assert "loop" not in found, found
    assert sum(partition.endswith("+ loop") for partition in found) == 6


@given(batch=st.integers(1, 9), seed=st.integers(0, 99), threads=st.integers(1, 4), last=st.booleans())
def test_images_match_in_every_batch_and_layout(images, batch, seed, threads, last):
    lowered, model = images
    inputs = drawn_images(batch, seed)
    if last:
        inputs = [x.to(memory_format=torch.channels_last) if x.dim() == 4 else x for x in inputs]
    assert_program_matches(model, lowered, inputs, threads)


def rows():
    """Of tokens: more channels than a panel has, a single one, numbers per token and per channel, products, masks."""

    def body(m, x, y, mask):
        wide, one = m.wide(x), m.one(x)
        scores = m.q(x) @ m.k(x).transpose(1, 2)
        hidden = torch.where(mask, scores * 0.3, -1e4)
        gates = F.silu(m.gate(x)) * m.up(x)
        return (
            m.down(gates),
            wide + y,
            one.sigmoid() * y[:, :, :1],
            m.back(wide * y.mean(-1, keepdim=True)).exp(),
            scores.masked_fill(mask[:, :1], 0.5) + y[:, :, :1],
            hidden,
            F.gelu(m.q(x) @ m.k(x).transpose(1, 2)),
        )

    sizes = {
        "wide": (24, 150),
        "one": (24, 1),
        "q": (24, 20),
        "k": (24, 20),
        "gate": (24, 33),
        "up": (24, 33),
        "down": (33, 7),
        "back": (150, 40),
    }
    return randomize(Body(body, **{name: nn.Linear(*size) for name, size in sizes.items()}))


def drawn_rows(batch: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(batch, 13, size, generator=draw) for size in (24, 150))
    return [x, y, torch.rand(batch, 13, 13, generator=draw) > 0.4]


@pytest.fixture(scope="module")
def tokens():
    return quantized(rows(), *drawn_rows(3, 0), recipe=FLOAT)[1]


@pytest.fixture(scope="module")
def token_program(tokens):
    return stages.compile(tokens, isa="portable")


@pytest.mark.slow(reason="compiles a second program; epilogues of images are compared above")
@given(batch=st.integers(1, 40), seed=st.integers(0, 99), threads=st.integers(1, 4))
def test_token_epilogues_match_the_interpreter_for_every_batch(tokens, token_program, batch, seed, threads):
    assert_program_matches(token_program, tokens, drawn_rows(batch, seed), threads)


def test_a_loop_is_fused_into_the_last_of_two_products_it_reads(tokens):
    """The quantized values of the other are stored."""
    found = {step.partition.name: step.partition for step in plan_graph(tokens.graph).steps}
    assert [found[name].epilogue is not None for name in ("gate", "up")] == [False, True]


APART = {
    "a reader beside the loop": lambda m, x: (lambda y: (y.sin(), y.exp()))(m.c(x)),
    "a result of the model": lambda m, x: (lambda y: (y, y.exp()))(m.c(x)),
    "a row at a time": lambda m, x: m.c(x).softmax(-1),
    "a transposed convolution": lambda m, x: m.t(x).exp() + 1,
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("a reader beside the loop", of=APART, reason="other conditions of the same rule"),
)
def test_loops_that_cannot_be_epilogues_stay_separate_steps(name):
    model = randomize(
        Body(
            APART[name],
            c=nn.Conv2d(8, 8, 3, padding=1),
            t=nn.ConvTranspose2d(8, 8, 2, 2),
        )
    )
    x = torch.randn(2, 8, 5, 6)
    lowered = quantized(model, x, recipe=FLOAT)[1]
    assert not any(partition.endswith("dequantize + loop") for partition in kinds(lowered)[:-1])
    assert_same(stages.compile(lowered, isa=RUNNABLE_ISAS[0])(x), lowered(x))
