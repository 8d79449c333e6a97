"""The int8 patterns of document 001, and those its peers have for the same anchors: each is one partition of the
program, and gives the bits of the interpreter on every instruction set."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intaglio import Recipe, stages
from intaglio.lower import Lowered
from intaglio.plan import Partition, plan_graph
from intaglio.quant.qdq.convert import Reference
from support.lowering import assert_equal_quantized, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.partition_text import shown
from support.side_by_side import SideBySide
from support.slow_params import slow_params

IMAGE, OTHER = torch.randn(4, 3, 7, 9), torch.randn(4, 20, 7, 9)
TOKENS, BESIDE = torch.randn(4, 5, 16), torch.randn(4, 5, 20)
MASK, HIDDEN = torch.randn(4, 5, 5), torch.rand(4, 5, 5) > 0.5


@dataclass(frozen=True)
class Row:
    """A chain, what it reads, and the partition it becomes.

    ``body(m, x, ...)``: ``m.c`` is the anchor, ``m.q`` and ``m.k`` make factors of a product. ``before``: partitions in
    front of it besides the quantize of inputs. ``floats``: operators that the recipe leaves in float, so that nothing
    is rounded between the accumulator and the float result.
    """

    name: str
    body: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    partition: str
    before: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def model(self, tail: nn.Module | None) -> nn.Module:
        """With a layer behind that reads quantized values, or without."""
        size = (3, 20, 3) if self.inputs[0].dim() == 4 else (16, 20)
        anchor = nn.Conv2d(*size, padding=1) if len(size) == 3 else nn.Linear(*size)
        body = (lambda m, *args: m.tail(self.body(m, *args))) if tail is not None else self.body
        parts = {} if tail is None else {"tail": tail}
        return randomize(Body(body, c=anchor, q=nn.Linear(16, 8), k=nn.Linear(16, 8), **parts))


@dataclass(frozen=True)
class Expected:
    """A row with a layer behind that reads quantized values, or without, and the partitions of that layer."""

    row: Row
    tail: nn.Module | None = None
    behind: tuple[str, ...] = ()


def lower(
    rows: Sequence[Expected], floats: Sequence[str], results: str = "int8"
) -> tuple[SideBySide, Reference, Lowered]:
    """One integer graph for all rows. ``floats``: operators that stay float in every row."""
    entries = {f"op:aten.{name}": {"quantize": False} for name in floats}
    recipe = Recipe.of({"*": {"functions": "table", "residual": "int8", "results": results}, **entries})
    model = SideBySide({f"{i} {case.row}": (case.row.model(case.tail), case.row.inputs) for i, case in enumerate(rows)})
    return model, *quantized(model, *model.inputs, recipe=recipe)


def partitions(lowered: Lowered, row: int) -> list[Partition]:
    """Partitions of one row in order, without the quantize of inputs, which rows share."""
    steps = [step.partition for step in plan_graph(lowered.graph).steps]
    own = [p for p in steps if re.match(rf"models\.{row}(\.|$)", p.anchor.origin.path)]
    return [partition for partition in own if shown(partition) != "quantize"]


def check(subtests: pytest.Subtests, rows: Sequence[Expected], isa: str, results: str = "int8") -> None:
    """The partitions of every row; the contract with the reference; the bits, at other batches too."""
    floats = sorted({name for case in rows for name in case.row.floats})
    model, reference, lowered = lower(rows, floats, results)
    for number, case in enumerate(rows):
        with subtests.test("partitions", row=case.row.name):
            found = [shown(partition) for partition in partitions(lowered, number)]
            assert found == [*case.row.before, case.row.partition, *case.behind]
    assert_equal_quantized(reference, lowered, *model.inputs)
    assert_bits(subtests, model, lowered, isa)


def assert_bits(subtests: pytest.Subtests, model: SideBySide, lowered: Lowered, isa: str) -> None:
    program = stages.compile(lowered, isa=isa)
    for batch in (4, 1, 3):
        some = [value[:batch] for value in model.inputs]
        found, expected = program(*some), lowered(*some)
        for name in model.reads:
            with subtests.test("bits", row=name, isa=isa, batch=batch):
                assert torch.equal(found[name], expected[name])
                assert expected[name].dtype is torch.float32


FACTORS = ("linear + requantize", "linear + requantize")


def product(m: nn.Module, x: Tensor) -> Tensor:
    return m.q(x) @ m.k(x).transpose(1, 2)


TO_FLOAT = (
    Row("conv", lambda m, x: m.c(x), (IMAGE,), "conv2d + dequantize"),
    Row("linear", lambda m, x: m.c(x), (TOKENS,), "linear + dequantize"),
    Row("conv relu", lambda m, x: F.relu(m.c(x)), (IMAGE,), "conv2d + dequantize + loop(relu)"),
    Row("conv sum", lambda m, x, y: m.c(x) + y, (IMAGE, OTHER), "conv2d + dequantize + loop(add)"),
    Row("conv sum relu", lambda m, x, y: F.relu(m.c(x) + y), (IMAGE, OTHER), "conv2d + dequantize + loop(add relu)"),
    Row("linear relu", lambda m, x: F.relu(m.c(x)), (TOKENS,), "linear + dequantize + loop(relu)"),
    Row("linear gelu", lambda m, x: F.gelu(m.c(x)), (TOKENS,), "linear + dequantize + loop(gelu)"),
    Row("linear sigmoid", lambda m, x: m.c(x).sigmoid(), (TOKENS,), "linear + dequantize + loop(sigmoid)"),
    Row("linear sum", lambda m, x, y: y + m.c(x), (TOKENS, BESIDE), "linear + dequantize + loop(add)"),
    Row("bmm", product, (TOKENS,), "bmm + dequantize", FACTORS),
    Row("bmm div", lambda m, x: product(m, x) / 3, (TOKENS,), "bmm + dequantize", FACTORS),
)
"""Document 001, list 1: int8 in, float32 out; the operand of a sum is float, too."""
TAILS = tuple(row for row in TO_FLOAT if "loop" in row.partition)


@pytest.mark.slow(reason="rows of fusions to floats; those to quantized values run below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_int8_operands_give_a_float32_result(isa, subtests):
    check(subtests, [Expected(row) for row in TO_FLOAT], isa, results="float")


@pytest.mark.slow(reason="rows with both results; test_float_tails.py has kernels with two")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_result_that_is_quantized_leaves_as_float_from_the_same_partition(isa, subtests):
    """With results that the recipe rounds, one kernel stores floats from the quantized values that it computes."""
    rows = TAILS
    model, reference, lowered = lower([Expected(row) for row in rows], floats=())
    for number, row in enumerate(rows):
        with subtests.test("partitions", row=row.name):
            partition = partitions(lowered, number)[-1]
            assert partition.anchor.kind == row.partition.partition(" ")[0]
            assert shown(partition).endswith("+ loop(dequantize)")
    assert_equal_quantized(reference, lowered, *model.inputs)
    assert_bits(subtests, model, lowered, isa)


TO_LEVELS = (
    Row("conv", lambda m, x: m.c(x), (IMAGE,), "conv2d + requantize"),
    Row("linear", lambda m, x: m.c(x), (TOKENS,), "linear + requantize"),
    Row("conv relu", lambda m, x: F.relu(m.c(x)), (IMAGE,), "conv2d + requantize"),
    Row("conv sum", lambda m, x, y: m.c(x) + y, (IMAGE, OTHER), "conv2d + add"),
    Row("conv sum relu", lambda m, x, y: F.relu(y + m.c(x)), (IMAGE, OTHER), "conv2d + add"),
    Row("linear relu", lambda m, x: F.relu(m.c(x)), (TOKENS,), "linear + requantize"),
    Row("linear gelu", lambda m, x: F.gelu(m.c(x)), (TOKENS,), "linear + requantize + table"),
    Row("linear sigmoid", lambda m, x: m.c(x).sigmoid(), (TOKENS,), "linear + requantize + table"),
    Row("linear sum", lambda m, x, y: m.c(x) + y, (TOKENS, BESIDE), "linear + add"),
    Row("bmm", product, (TOKENS,), "bmm + requantize", FACTORS),
    Row("bmm div", lambda m, x: product(m, x) / 3, (TOKENS,), "bmm + requantize", FACTORS),
    Row("max_pool2d", lambda m, x: F.max_pool2d(m.c(x), 2), (IMAGE,), "max_pool2d", ("conv2d + requantize",)),
)
"""Document 001, list 2: int8 in, int8 out."""


def before_a_layer(row: Row) -> Expected:
    """The row with a layer behind that reads quantized values."""
    if row.inputs[0].dim() == 4:
        return Expected(row, nn.Conv2d(20, 4, 1), ("conv2d + dequantize",))
    return Expected(row, nn.Linear(5 if row.before == FACTORS else 20, 4), ("linear + dequantize",))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_int8_operands_give_an_int8_result(isa, subtests):
    check(subtests, [before_a_layer(row) for row in TO_LEVELS], isa)


UNARY = {
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "x * sigmoid": lambda x: x * torch.sigmoid(x),
    "x * hardsigmoid": lambda x: F.hardsigmoid(x) * x,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "leaky_relu": F.leaky_relu,
    "abs": torch.abs,
    "square": torch.square,
    "exp": torch.exp,
    "round": torch.round,
    "hardsigmoid": F.hardsigmoid,
    "softplus": F.softplus,
}
"""Table of peers, rows 3 to 7 and 18 to 21."""
BOUNDS = ("relu6", "clamp")
FEW_UNARY = ("clamp", "x * sigmoid", "gelu")


@pytest.mark.slow(reason="a program of several functions; test_layers.py fuses functions with layers")
@pytest.mark.parametrize(
    "anchor", ["conv2d", *slow_params("linear", reason="tails of linear layers have tests among the partitions below")]
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "names",
    [FEW_UNARY, *slow_params((tuple(UNARY),), reason="functions that become tables or bounds as those few do")],
    ids=["few", "all"],
)
def test_every_unary_function_can_follow_a_layer(anchor, isa, names, subtests):
    """Behind a convolution or linear layer, to quantized values and to floats."""
    inputs = (IMAGE,) if anchor == "conv2d" else (TOKENS,)
    rows = []
    for name in names:
        function = UNARY[name]
        kinds = f"{anchor} + requantize" + " + table" * (name not in BOUNDS)
        row = Row(name, lambda m, x, f=function: f(m.c(x)), inputs, kinds)
        rows += [before_a_layer(row), Expected(replace(row, partition=f"{kinds} + loop(dequantize)"))]
    check(subtests, rows, isa)


BINARY = {
    "mul": ("mul", torch.mul),
    "maximum": ("maximum", torch.maximum),
    "minimum": ("minimum", torch.minimum),
    "div": ("div", lambda x, y: x / (y.abs() + 1)),
    "sub": ("sub", torch.sub),
    "other sub": ("sub", lambda x, y: y - x),
}


@pytest.mark.slow(reason="functions of two operands behind a layer; test_residual_sums.py has sums")
@pytest.mark.case("patterns row 12")
@pytest.mark.parametrize(
    "anchor", ["linear", *slow_params("conv2d", reason="tails of convolutions have tests among the partitions above")]
)
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "names",
    [("mul", "div", "other sub"), *slow_params((tuple(BINARY),), reason="functions of two operands, as those few")],
    ids=["few", "all"],
)
def test_epilogues_may_read_another_tensor(anchor, isa, names, subtests):
    """To floats, and to quantized values: the loop quantizes what it makes."""
    inputs = (IMAGE, OTHER) if anchor == "conv2d" else (TOKENS, BESIDE)
    rows = []
    for name in names:
        kind, function = BINARY[name]
        loop = "abs add div" if kind == "div" else kind
        floats = () if kind in ("maximum", "minimum") else ("div", "abs", "add") if kind == "div" else (kind,)
        partition = f"{anchor} + dequantize + loop({loop})"
        row = Row(name, lambda m, x, y, f=function: f(m.c(x), y), inputs, partition, (), floats)
        rows += [Expected(row), before_a_layer(replace(row, partition=f"{partition[:-1]} quantize)"))]
    check(subtests, rows, isa)


def gated(m: nn.Module, x: Tensor) -> Tensor:
    return F.silu(m.q(x)) * m.k(x)


def swapped(m: nn.Module, x: Tensor) -> Tensor:
    """Heads in front, then tokens again."""
    q, k = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.q, m.k))
    return (q @ k.transpose(2, 3)).transpose(1, 2).flatten(2)


MORE = (
    Row(
        "26 torch.bmm",
        lambda m, x, mask: torch.bmm(m.q(x), m.k(x).mT) - mask,
        (TOKENS, MASK),
        "bmm + dequantize + loop(sub)",
        FACTORS,
        ("sub",),
    ),
    Row(
        "24 gated MLP",
        gated,
        (TOKENS,),
        "linear + dequantize + loop(silu mul)",
        ("linear + dequantize",),
        ("silu", "mul"),
    ),
    Row(
        "27 bmm times a number plus mask",
        lambda m, x, mask: product(m, x) * 0.3 + mask,
        (TOKENS, MASK),
        "bmm + dequantize + loop(add)",
        FACTORS,
        ("add",),
    ),
    Row(
        "28 masked bmm",
        lambda m, x, mask: product(m, x).masked_fill(mask, -5.0),
        (TOKENS, HIDDEN),
        "bmm + dequantize + loop(where)",
        FACTORS,
    ),
    Row(
        "28 selected bmm",
        lambda m, x, mask: torch.where(mask, product(m, x) / 2, -5.0),
        (TOKENS, HIDDEN),
        "bmm + dequantize + loop(where)",
        FACTORS,
    ),
)


@pytest.mark.parametrize("gated", [*slow_params(False, reason="many rows; the gated one runs always"), True])
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_further_fusion_rows_of_other_engines_give_one_partition(gated, isa, subtests):
    """To floats, and to quantized values: the loop quantizes what it makes. The gated row alone keeps its product
    float."""
    rows = []
    for row in (row for row in MORE if ("mul" in row.floats) is gated):
        quantizing = replace(row, partition=f"{row.partition[:-1]} quantize)")
        layer = nn.Linear(8 if gated else 5, 4)
        rows += [Expected(row), Expected(quantizing, layer, ("linear + dequantize",))]
    check(subtests, rows, isa)


@pytest.mark.slow(reason="compiles attention, which is one partition in test_transformer_blocks.py")
@pytest.mark.case("patterns row 29", "patterns row 30")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_moved_products_softmax_and_attention_are_one_partition_each(isa, subtests):
    """A product is written where a transpose and a reshape put it; a softmax and its quantize are one loop; queries,
    keys and values are factors of attention, and what comes behind reads its quantized values."""

    def attend(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (m.q, m.k, m.c))
        scores = q @ k.transpose(2, 3) / 2
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    softmax = "loop(max sub exp sum reciprocal mul quantize)"
    rows = (
        (Row("product", swapped, (TOKENS,), "bmm + requantize", FACTORS), 10),
        (Row("softmax", lambda m, x: m.c(x).softmax(-1), (TOKENS,), softmax, ("linear + dequantize",)), 20),
        (Row("attention", attend, (TOKENS,), "attention", ("linear + requantize",) * 3), 20),
    )
    check(subtests, [Expected(row, nn.Linear(size, 4), ("linear + dequantize",)) for row, size in rows], isa)


@pytest.mark.case("patterns row 31")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_norm_and_its_quantize_are_one_loop(isa):
    reference, lowered = quantized(randomize(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))), TOKENS)
    found = [shown(step.partition) for step in plan_graph(lowered.graph).steps]
    assert found == ["loop(mean sub mul mean add sqrt reciprocal mul mul add quantize)", "linear + dequantize"]
    assert_equal_quantized(reference, lowered, TOKENS)
    assert torch.equal(stages.compile(lowered, isa=isa)(TOKENS), lowered(TOKENS))


@pytest.mark.slow(reason="compiles one more product; a mask is added in attention, too")
@pytest.mark.case("patterns row 27")
@pytest.mark.parametrize("alpha", [0.3, *slow_params(1, reason="a factor of one")])
def test_the_kernel_adds_the_input_of_baddbmm(alpha):
    def body(m, x, mask):
        return torch.baddbmm(mask, m.q(x), m.k(x).mT, alpha=alpha)

    model = randomize(Body(body, q=nn.Linear(16, 8), k=nn.Linear(16, 8)))
    reference, lowered = quantized(model, TOKENS, MASK, recipe=Recipe.of({"*": {"residual": "float"}}))
    assert shown(plan_graph(lowered.graph).steps[-1].partition) == "bmm + dequantize + loop(add)"
    assert_equal_quantized(reference, lowered, TOKENS, MASK)
    assert torch.equal(stages.compile(lowered)(TOKENS, MASK), lowered(TOKENS, MASK))
