"""Blocks of transformers, models in half precision, and parts that no kernel computes."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import Recipe, stages
from intaglio.lower import Lowered
from intaglio.plan import plan_graph
from support.int8_models import assert_same
from support.lowering import assert_equal_quantized, quantized, sqnr
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.partition_text import shown
from support.slow_params import slow_params, slow_params_except

IMAGE, TOKENS = torch.randn(4, 3, 7, 9), torch.randn(4, 5, 16)
LEVELS = Recipe.of({"*": {"residual": "int8", "functions": "table", "method": "minmax", "results": "int8"}})


def partitions(lowered: Lowered) -> list[str]:
    """Of the program but for the quantize of its input, in order; kinds of their operators, all loops alike."""
    found = [shown(step.partition).partition("(")[0] for step in plan_graph(lowered.graph).steps]
    return [kinds for kinds in found if kinds != "quantize"]


def ffn() -> nn.Module:
    parts = {"norm": nn.LayerNorm(16), "wide": nn.Linear(16, 32), "narrow": nn.Linear(32, 16)}
    return randomize(Body(lambda m, x: x + m.narrow(F.gelu(m.wide(m.norm(x)))), **parts))


def attention() -> nn.Module:
    """Written out, with a mask that is added."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (m.q, m.k, m.v))
        scores = torch.matmul(q, k.transpose(2, 3)) / 8**0.5 + m.mask
        return m.out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2))

    model = randomize(Body(body, **{name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}))
    model.register_buffer("mask", torch.full((5, 5), -torch.inf).triu(1))
    return model


FFN = ["loop", "linear + requantize + table", "linear + add + loop"]
ATTENTION = [*["linear + requantize"] * 3, "attention", "linear + dequantize"]


@pytest.mark.case("backend 11", "frontends C3")
def test_a_feed_forward_block_is_three_partitions():
    """Cases 11 and C3: the norm and its quantize; the wide layer and its function; the narrow one and the sum."""
    reference, lowered = quantized(ffn(), TOKENS, recipe=LEVELS)
    assert partitions(lowered) == FFN
    assert_equal_quantized(reference, lowered, TOKENS)
    assert_same(stages.compile(lowered)(TOKENS), lowered(TOKENS))


@pytest.mark.slow(reason="compiles a block again with a float stream; transformer recipes run in test_transformers.py")
@pytest.mark.case("backend 11")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_residual_stream_in_float_is_read_as_float(isa):
    """Case 11 as the recipe for transformers has it: the sum is not rounded, and still in the kernel."""
    recipe = Recipe.of({"*": {"residual": "float", "functions": "precise"}})
    reference, lowered = quantized(ffn(), TOKENS, recipe=recipe)
    assert partitions(lowered) == ["loop", "linear + activate", "linear + dequantize + loop"]
    assert_equal_quantized(reference, lowered, TOKENS)
    assert_same(stages.compile(lowered, isa=isa)(TOKENS), lowered(TOKENS))


@pytest.mark.case("backend 12", "backend 8", "frontends A10")
def test_attention_is_int8_between_its_layers():
    """Cases 8, 12 and A10: the input is quantized once, quantized values are lifted over views and permutations."""
    reference, lowered = quantized(attention(), TOKENS, recipe=LEVELS)
    assert partitions(lowered) == ATTENTION
    assert_equal_quantized(reference, lowered, TOKENS)
    assert_same(stages.compile(lowered)(TOKENS), lowered(TOKENS))


@pytest.mark.slow(reason="quantizes attention again; partitions of attention are listed above")
def test_attention_returns_floats_to_layers_with_scales_per_token():
    recipe = Recipe.of({"op:aten.linear": {"activations": "token"}})
    reference, lowered = quantized(attention(), TOKENS, recipe=recipe)
    steps = partitions(lowered)
    after = steps[steps.index("attention") + 1 :]
    assert after == ["quantize_rows", "linear + dequantize_rows"]
    found, expected = lowered(TOKENS), reference(TOKENS)
    assert (found - expected).square().sum() < 1e-5 * expected.square().sum()
    assert_same(stages.compile(lowered)(TOKENS), found)


class Autocast(nn.Module):
    """A float32 model in a region of automatic casts."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


BLOCKS = {
    "conv": (lambda: randomize(nn.Conv2d(3, 20, 3, padding=1)), IMAGE, ["conv2d + dequantize"]),
    "ffn": (ffn, TOKENS, FFN),
    "attention": (attention, TOKENS, ATTENTION),
}
HALVES = {
    "bfloat16": (nn.Module.bfloat16, torch.bfloat16),
    "float16": (nn.Module.half, torch.float16),
    "autocast": (Autocast, torch.float32),
}


@pytest.mark.case("backend 26", "frontends C12")
@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("conv", "bfloat16"),
        *slow_params(("ffn", "float16"), reason="a feed-forward block in the other half type"),
        *slow_params(
            ("attention", "autocast"), reason="attention under autocast; the other blocks have both half types"
        ),
        *slow_params(
            ("attention", "bfloat16"),
            ("conv", "float16"),
            ("conv", "autocast"),
            ("ffn", "bfloat16"),
            ("ffn", "autocast"),
            ("attention", "float16"),
            reason="each block and each half runs beside another",
        ),
    ],
)
def test_float16_models_have_the_partitions_of_float32_models(name, half):
    """Cases 26 and C12: as many, the result of the model's type, the same bits as the interpreter, near the model."""
    make, x, expected = BLOCKS[name]
    change, given = HALVES[half]
    model = change(copy.deepcopy(make()))
    x = x.to(given)
    reference, lowered = quantized(model, x, recipe=LEVELS)
    casts = ("loop", "island")
    native = [kinds.removesuffix(" + loop") for kinds in partitions(lowered) if kinds not in casts]
    assert native == [kinds.removesuffix(" + loop") for kinds in expected if kinds not in casts]
    found = stages.compile(lowered)(x)
    assert found.dtype is model(x).dtype
    assert torch.equal(found, lowered(x))
    assert_equal_quantized(reference, lowered, x)
    assert sqnr(found.float(), model(x).float()) > 25
    assert "computed as float32" in "".join(reference.notes)
    if half == "bfloat16":
        assert len(partitions(lowered)) == len(expected) + (name != "ffn")  # the cast of the input
        assert not lowered.islands


def test_float16_values_that_no_product_reads_stay_float16():
    """What a float32 model rounds to bfloat16 on the way is rounded."""
    model = randomize(Body(lambda m, x: m.b(m.a(x).bfloat16().float()), a=nn.Linear(16, 8), b=nn.Linear(8, 4)))
    captured = stages.capture(model, (TOKENS,))
    assert "bfloat16" in str(captured.module.graph)
    assert torch.equal(captured(TOKENS), model(TOKENS))


STRANGE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "complex": lambda m, x: m.d(torch.fft.fft(m.c(x)).abs()),
    "double": lambda m, x: m.d((m.c(x).double() * 3).cumsum(-1).float()),
    "a number": lambda m, x: m.d(m.c(x)) * (x.shape[-1] // 2 + 1),
    "a product of doubles": lambda m, x: m.c(x) + F.conv2d(x.double(), m.d.weight[:, :3].double(), padding=1).float(),
}


@pytest.mark.case("backend 31")
@pytest.mark.parametrize("name", slow_params_except("complex", of=STRANGE, reason="other operators of these types"))
def test_complex_and_double_parts_stay_outside_the_program(name):
    """Case 31: complex and double parts are islands between partitions, or nothing at all."""
    parts = {"c": nn.Conv2d(3, 4, 3, padding=1), "d": nn.Conv2d(4, 4, 3, padding=1)}
    model = randomize(Body(STRANGE[name], **parts))
    reference, lowered = quantized(model, IMAGE)
    strange = {str(kind.dtype) for kind in lowered.graph.types.values()} - {"f32", "u8", "s8", "i32"}
    assert not strange
    assert_equal_quantized(reference, lowered, IMAGE)
    assert_same(stages.compile(lowered)(IMAGE), lowered(IMAGE))
    assert sqnr(lowered(IMAGE), model(IMAGE)) > 20


@pytest.mark.slow(reason="stress of threads in many shapes; test_quantized_model.py has eight threads")
@pytest.mark.case("backend 6", "backend 33")
def test_concurrent_calls_of_fused_products_match_in_many_shapes():
    """Cases 6 and 33: batches and lengths back and forth, from several threads."""
    model = randomize(
        Body(
            lambda m, x, y: (m.a(x) @ m.b(x).transpose(1, 2) / 4).relu() @ (m.c(x) * y),
            a=nn.Linear(16, 8),
            b=nn.Linear(16, 8),
            c=nn.Linear(16, 20),
        )
    )
    _, lowered = quantized(model, TOKENS, torch.randn(4, 5, 20))
    compiled = stages.compile(lowered)
    calls = [(TOKENS[: 1 + i % 4], torch.randn(1 + i % 4, 5, 20)) for i in range(24)]
    expected = [lowered(*call) for call in calls]
    assert_same([compiled(*call) for call in calls], expected)
    with ThreadPoolExecutor(6) as pool:
        assert_same(list(pool.map(lambda call: compiled(*call), calls)), expected)


@pytest.mark.parametrize(
    "zero",
    [
        *slow_params("q", reason="the same range without a middle in another operand"),
        "k",
        *slow_params("v", reason="the same range without a middle in another operand"),
    ],
)
@pytest.mark.parametrize("factor", [0, 1e-41])
def test_attention_with_queries_keys_or_values_of_zeros_runs_in_int8(zero, factor):
    """Decoder queries of detectors begin as zeros, and pruned heads stay zeros: their range has no middle. That of
    values below the smallest scale has one."""

    def forward(m, x):
        q, k, v = (layer(x).view(*x.shape[:2], 4, 8).transpose(1, 2) for layer in (m.q, m.k, m.v))
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    model = randomize(Body(forward, **{name: nn.Linear(32, 32) for name in "qkvo"}))
    for parameter in getattr(model, zero).parameters():
        parameter.data.mul_(factor)
    x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(1))
    program = intaglio.quantize(model, [x], progress=False)
    assert program.coverage.macs == 1
    assert sqnr(program(x), model(x)) > 25


MIXERS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a sum": lambda m, x: m.c(m.a(x) + x),
    "a sum and padding": lambda m, x: m.c(F.pad(m.a(x) + x, (2, 1), mode="circular")),
    "an activation": lambda m, x: m.c(F.silu(m.a(x)) * x),
    "both": lambda m, x: m.c(m.a(x) + x).mean(1, keepdim=True) + m.b(m.a(x) + x),
}


@torch.no_grad()
@pytest.mark.parametrize("name", slow_params_except("both", of=MIXERS, reason="parts of what the others read"))
def test_a_convolution_over_time_reads_channels_that_a_linear_layer_mixed(name):
    """The linear layer reads the last axis and the convolution the second one, with a float residual stream between."""
    model = randomize(Body(MIXERS[name], a=nn.Linear(8, 8), b=nn.Linear(8, 7), c=nn.Conv1d(17, 15, 2)))
    x = torch.randn(3, 17, 8, generator=torch.Generator().manual_seed(1))
    reference, lowered = quantized(model, x, recipe=Recipe.named("transformer"))
    program = stages.compile(lowered)
    for batch in (x, x[:1]):
        assert_same(program(batch), lowered(batch))
    assert sqnr(program(x), model(x)) > 25
    assert_equal_quantized(reference, lowered, x)
