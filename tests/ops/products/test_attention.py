"""int8 attention: the law against float, the kernel against the law, the operator in programs."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from intaglio import build, numerics
from intaglio.ir import DType, Op, TensorType, evaluate
from intaglio.ops import OPS, verify
from intaglio.ops.products.scratch_memory import CACHE_LINE
from intaglio.plan import plan_graph
from intaglio.plan.layouts import separate_layouts
from support.attention_library import kernels
from support.integer_graphs import H, N, Net, W
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS, Memory
from support.programs import assert_bits_of_the_interpreter, assert_stays_inside, built, compiled
from support.slow_params import slow_params

SLACK = 64


# ---- the law


def test_quantized_probabilities_are_within_two_hundredths_of_exact_ones():
    """Before rounding: a degree of three is enough for 255 quantized values. All below 2^-10 are 0."""
    x = np.concatenate([-np.linspace(0, 16, 400001), [0.0]]).astype(np.float32)
    exact = 255 * np.exp2(x.astype(np.float64))
    found = numerics.quantize_probabilities(x)
    assert (np.abs(found - exact) <= 0.52).all()
    assert found[0] == found[-1] == 255
    assert not found[x < -10].any()


def test_masked_scores_have_probability_zero():
    inf, nan = np.inf, np.nan
    rows = np.float32([[0, nan, -inf], [-inf, -inf, -inf], [inf, 0, 1], [nan, nan, nan], [-3e38, -3e38, -inf]])
    expected = [[255, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0], [255, 255, 0]]
    assert np.array_equal(numerics.quantize_probabilities(rows), expected)
    assert numerics.quantize_probabilities(np.zeros((2, 0), np.float32)).shape == (2, 0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(1, 64), st.floats(0.1, 8), st.booleans())
def test_integer_attention_is_close_to_float_attention(seed, keys, depth, spread, causal):
    """Rounding a probability to 1/255 of the largest shifts a mean of values by at most ``absmax * keys / sum(p)``
    quantized values of probability, one half each."""
    draw = np.random.default_rng(seed)
    q, k, v = (draw.integers(-127, 128, (2, 3, n, depth)) for n in (keys, keys, keys))
    factor = np.float32(spread / (127 * 127 * depth**0.5))
    result = numerics.attention(q, k, v, None, causal, factor, np.float32(1))
    quantized = numerics.round_clamp_i32(result, 128, 0, 255)
    real = [torch.from_numpy(x.astype(np.float64)) for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*real, scale=float(factor) * np.log(2), is_causal=causal).numpy()
    scores = numerics.attention_scores(q, k, factor, None, causal)
    sums = np.exp2(scores - scores.max(-1, keepdims=True)).sum(-1, keepdims=True)
    assert (np.abs(quantized - 128 - exact) <= 0.51 + 2 * 127 * (0.52 / 255) * keys / sums).all()


def test_a_query_without_keys_gives_the_zero_point():
    q = np.ones((1, 2, 3, 4), np.int32)
    mask = np.zeros((3, 5), np.bool_)
    mask[1, 2] = True
    k = np.full((1, 1, 5, 4), 7)
    found = numerics.round_clamp_i32(numerics.attention(q, k, k, mask, False, 1.0, 1.0), 9, 0, 255)
    assert np.array_equal(found[0, :, :, 0], [[9, 16, 9]] * 2)
    without_keys = numerics.attention(q, k[:, :, :0], k[:, :, :0], None, False, 1.0, 1.0)
    assert (numerics.round_clamp_i32(without_keys, 9, 0, 255) == 9).all()


# ---- kernels


@dataclass(frozen=True)
class Case:
    """One call: shapes, mask, scales, seed of the quantized values, and whether the results are floats."""

    batch: int = 1
    heads: int = 2
    shared: int = 1
    queries: int = 5
    keys: int = 9
    depth: int = 16
    width: int = 16
    mask: str = ""
    mask_shape: tuple[int, ...] = (1, 1)
    causal: bool = False
    spread: float = 2.0
    zero: int = 100
    seed: int = 0
    extreme: bool = False
    apart: tuple[int, int, int] = (0, 0, 0)
    floats: bool = False
    alike: bool = False


def drawn(case: Case) -> tuple[list[np.ndarray], np.ndarray | None]:
    """q, k, v as quantized values, and the mask."""
    draw, groups = np.random.default_rng(case.seed), case.heads // case.shared
    shapes = [
        (case.batch, case.heads, case.queries, case.depth),
        (case.batch, groups, case.keys, case.depth),
        (case.batch, groups, case.keys, case.width),
    ]
    lows = (0, 1, 1)
    if case.extreme:
        found = [draw.choice([low, 255], shape).astype(np.uint8) for low, shape in zip(lows, shapes, strict=True)]
    else:
        found = [draw.integers(low, 256, shape).astype(np.uint8) for low, shape in zip(lows, shapes, strict=True)]
    if case.alike:  # large scores, whose small differences depend on rounding
        found[0][..., -1], found[1][..., :-1] = 1, 255
    if not case.mask:
        return found, None
    if case.mask == "bool":
        return found, draw.random(case.mask_shape) < 0.6
    if case.mask == "ends":  # no key is allowed behind an end of each row, which may be the first key
        ends = draw.integers(0, case.mask_shape[-1] + 1, (*case.mask_shape[:-1], 1))
        return found, (draw.random(case.mask_shape) < 0.9) & (np.arange(case.mask_shape[-1]) < ends)
    if case.mask == "past":  # each query is allowed the keys up to its own, the last query all
        places = np.arange(case.keys - case.queries, case.keys)[:, None]
        return found, np.broadcast_to(np.arange(case.keys) <= places, case.mask_shape).copy()
    mask = (draw.normal(size=case.mask_shape) * 3).astype(np.float32)
    strange = draw.random(case.mask_shape) < 0.3
    mask[strange] = draw.choice([-np.inf, np.finfo(np.float32).min, 0, -1e9], int(strange.sum()))
    return found, mask


def factors(case: Case) -> tuple[np.float32, np.float32]:
    return np.float32(case.spread / (100 * 100 * case.depth**0.5)), np.float32(1.7)


def expected(case: Case) -> np.ndarray:
    (q, k, v), mask = drawn(case)
    q, k, v = q.astype(np.int32) - case.zero, k.astype(np.int32) - 128, v.astype(np.int32) - 128
    result = numerics.attention(q, k, v, mask, case.causal, *factors(case))
    return result if case.floats else numerics.round_clamp_i32(result, 77, 3, 250).astype(np.uint8)


def strided(array: np.ndarray, apart: int, memory: Memory) -> tuple[np.ndarray, int]:
    """[B, H, S, D] in memory as [B, S, H, D + apart] in the end of guarded bytes, and its address."""
    b, h, s, d = array.shape
    flat = memory.end(max(b * s * h * (d + apart), 1) * array.itemsize, SLACK).view(array.dtype)
    lying = flat[: b * s * h * (d + apart)].reshape(b, s, h, d + apart).transpose(0, 2, 1, 3)[..., :d]
    lying[...] = array
    return lying, flat.ctypes.data


def heads_of(name: str, array: np.ndarray, address: int) -> dict[str, int]:
    batch, head, row, _ = array.strides
    return {f"{name}.base": address, f"{name}.batch": batch, f"{name}.head": head, f"{name}.row": row}


MEMORY = [Memory(1 << 20) for _ in range(5)]


def run(case: Case, isa: str, threads: int) -> np.ndarray:
    (q, k, v), mask = drawn(case)
    out = np.full((*q.shape[:3], case.width), 99, np.float32 if case.floats else np.uint8)
    numbers = {
        "batch": case.batch,
        "heads": case.heads,
        "shared": case.shared,
        "queries": case.queries,
        "keys": case.keys,
        "depth": case.depth,
        "width": case.width,
        "causal": int(case.causal),
        "zero_q": case.zero,
    }
    placed = {}
    for name, array, apart, memory in zip("qkvo", (q, k, v, out), (*case.apart, 3), MEMORY, strict=False):
        placed[name], address = strided(array, apart, memory)
        numbers |= heads_of("out" if name == "o" else name, placed[name], address)
    if mask is not None:
        missing, steps = 4 - mask.ndim, [s if n > 1 else 0 for n, s in zip(mask.shape, mask.strides, strict=True)]
        numbers |= {"mask": MEMORY[4].hold(mask), "mask_bytes": mask.itemsize}
        numbers |= {f"mask_stride[{axis}]": step for axis, step in enumerate([0] * missing + steps)}
    types = {name: TensorType(array.shape, DType.U8) for name, array in zip("qkv", (q, k, v), strict=True)}
    lines = evaluate(OPS["attention"].scratch(Op("attention", tuple("qkv"), ("y",)), types), {})
    bounds, scales = None if case.floats else (77, 3, 250), dict(zip(("factor", "ratio"), factors(case), strict=True))
    kernels(isa).run("Attention", numbers, scales, bounds, threads, lines * CACHE_LINE)
    return placed["o"].copy()


@st.composite
def cases(draw) -> Case:
    groups, shared = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    batch, heads = draw(st.integers(0, 2)), groups * shared
    queries, keys = draw(st.just(1) | st.integers(0, 60)), draw(st.integers(0, 140))
    shape = (batch, heads, queries, keys)[draw(st.integers(0, 2)) :]
    shape = tuple(size if draw(st.booleans()) else 1 for size in shape)
    return Case(
        batch,
        heads,
        shared,
        queries,
        keys,
        draw(st.integers(1, 80)),
        draw(st.integers(1, 80)),
        draw(st.sampled_from(["", "bool", "ends", "f32"])),
        shape,
        draw(st.booleans()),
        draw(st.sampled_from([0.1, 2.0, 30.0, 1e5])),
        draw(st.sampled_from([0, 100, 128, 255])),
        draw(st.integers(0, 2**16)),
        draw(st.booleans()),
        draw(st.tuples(*[st.integers(0, 9)] * 3)),
        draw(st.booleans()),
    )


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@given(case=cases(), threads=st.integers(1, 3))
def test_attention_kernels_are_bit_identical_to_the_reference(isa, case, threads):
    assert np.array_equal(run(case, isa, threads), expected(case))


@st.composite
def cases_of_few_queries(draw) -> Case:
    """Keys and values are read in place for up to 8 queries of a head, or one query of up to 8 heads."""
    groups, shared, keys = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 150))
    queries = draw(st.just(1) | st.integers(1, 9))
    heads = groups * shared
    depth, width = (draw(st.sampled_from([64, 128, 192, 256]) | st.integers(1, 256)) for _ in range(2))
    mask = draw(st.sampled_from(["", "bool", "ends", "f32"]))
    shape = tuple(draw(st.sampled_from([1, size])) for size in (heads, queries, keys))
    case = Case(draw(st.integers(1, 2)), heads, shared, queries, keys, depth, width, mask, shape)
    return replace(
        case,
        causal=draw(st.booleans()),
        spread=draw(st.sampled_from([0.1, 2.0, 30.0])),
        zero=draw(st.sampled_from([0, 100, 127, 128, 255])),
        seed=draw(st.integers(0, 2**16)),
        extreme=draw(st.booleans()),
        apart=draw(st.tuples(*[st.integers(0, 9)] * 3)),
        floats=draw(st.booleans()),
    )


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@given(case=cases_of_few_queries(), threads=st.integers(1, 2))
def test_few_queries_are_bit_identical_to_the_reference(isa, case, threads):
    assert np.array_equal(run(case, isa, threads), expected(case))


NAMED = {
    "bert": Case(queries=128, keys=128, depth=64, width=64, heads=3, mask="bool", mask_shape=(1, 1, 1, 128)),
    "rows past the kept mask": Case(queries=50, keys=130, mask="f32", mask_shape=(50, 130)),
    "causal": Case(queries=200, keys=200, depth=64, width=64, causal=True),
    "causal, fewer keys": Case(queries=70, keys=33, causal=True, mask="f32", mask_shape=(70, 1)),
    "causal, fewer queries": Case(queries=33, keys=170, causal=True),
    "nothing allowed": Case(queries=7, keys=20, mask="f32", mask_shape=(1, 1), seed=3),
    "long": Case(queries=30, keys=3000, depth=32, width=48, heads=1),
    "wide heads": Case(depth=256, width=256, extreme=True, keys=100),
    "one of each": Case(queries=1, keys=1, depth=1, width=1, heads=1),
    "no keys": Case(keys=0, causal=True),
    "one query": Case(2, 14, 7, 1, 513, 64, 64, mask="bool", mask_shape=(2, 1, 1, 513)),
    "one query, a mask for each head": Case(2, 6, 3, 1, 70, mask="f32", mask_shape=(6, 1, 70)),
    "a text": Case(2, 6, 2, 130, 130, 64, 64, mask="past", mask_shape=(2, 1, 130, 130)),
    "a text behind others": Case(1, 4, 2, 70, 300, 32, 32, mask="past", mask_shape=(70, 300)),
    "rows that end early": Case(2, 4, 2, 100, 260, 32, 32, mask="ends", mask_shape=(2, 4, 100, 260)),
    "one query, ends of heads": Case(2, 6, 3, 1, 200, mask="ends", mask_shape=(6, 1, 200)),
    "few queries behind others": Case(2, 6, 3, 5, 200, 64, 64, mask="past", mask_shape=(5, 200)),
    "few queries, causal": Case(1, 4, 2, 8, 90, 128, 80, causal=True),
    "one query of many heads": Case(1, 60, 30, 1, 33, causal=True),
    "one query, wide": Case(2, 4, 2, 1, 77, 256, 256, mask="bool", mask_shape=(2, 1, 1, 77), apart=(0, 64, 64)),
    "one query far from its zero point": Case(1, 8, 8, 1, 70, 128, 128, zero=0, extreme=True),
    "one query, large scores": Case(1, 2, 2, 1, 200, 256, 64, spread=8000.0, zero=0, alike=True),
    "one query below its zero point": Case(1, 5, 5, 1, 70, 64, 100, zero=255, extreme=True),
}


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@pytest.mark.parametrize("name", NAMED)
def test_attention_kernels_handle_named_cases(isa, name):
    for threads, floats in product((1, 2, 3), (False, True)):
        case = replace(NAMED[name], floats=floats)
        assert np.array_equal(run(case, isa, threads), expected(case))


def test_the_comparison_detects_a_wrong_zero_point():
    case = NAMED["bert"]
    numbers = [run(case, RUNNABLE_ISAS[0], 1), expected(Case(**{**case.__dict__, "zero": case.zero + 1}))]
    assert not np.array_equal(*numbers)


# ---- programs


def split(net: Net, x: str, parts: int, heads: int) -> list[str]:
    """[n, rows, parts * heads * D] -> [n, heads, rows, D] of each part, as multi-head attention cuts them."""
    n, rows, wide = net.types[x].shape
    apart = net.same("reshape", x, shape=(n, rows, parts, heads, wide // parts // heads))
    found = []
    for part in range(parts):
        one = net.same("slice", apart, axis=2, start=part, stop=part + 1, step=1)
        one = net.same("reshape", one, shape=(n, rows, heads, wide // parts // heads))
        found.append(net.same("permute", one, order=(0, 2, 1, 3)))
    return found


def joined(net: Net, y: str) -> str:
    n, heads, rows, width = net.types[y].shape
    return net.same("reshape", net.same("permute", y, order=(0, 2, 1, 3)), shape=(n, rows, heads * width))


def encoder(net: Net) -> tuple[str, ...]:
    """Self-attention over a free number of tokens, its parts read where one layer wrote them; masks of every kind."""
    x = net.quantize(net.input(N, H, 48))
    q, k, v = split(net, net.centred(net.linear(x, 3 * 4 * 20, zero_point=128, low=1)), 3, 4)
    masks = [
        None,
        net.input(N, 1, 1, H, dtype=DType.BOOL),
        net.input(H, H),
        net.input(N, 4, H, H),
        net.input(1, 1, H, 1, dtype=DType.BOOL),
        net.constant(np.float32([[[0]], [[-1]], [[-np.inf]], [[2]]])),
    ]
    found = [net.attention(q, k, v, mask) for mask in masks]
    return (*[net.linear(joined(net, y), 9, f32=True) for y in found[1:]], net.dequantize(found[0]))


def decoder(net: Net) -> tuple[str, ...]:
    """Causal, with fewer heads of keys; then keys of another length that is free, too."""
    x, memory = net.quantize(net.input(N, H, 24)), net.quantize(net.input(N, W, 24))
    (q,) = split(net, net.linear(x, 6 * 16), 1, 6)
    k, v = split(net, net.centred(net.linear(x, 2 * 2 * 16, zero_point=128, low=1)), 2, 2)
    y = net.linear(joined(net, net.attention(q, k, v, causal=True)), 24, add=x)
    (q,) = split(net, net.linear(y, 3 * 8), 1, 3)
    k, v = (split(net, net.centred(net.linear(memory, n, zero_point=128, low=1)), 1, 3)[0] for n in (24, 99))
    return net.linear(joined(net, net.attention(q, k, v)), 5, f32=True), net.dequantize(net.attention(q, k, v))


def floats(net: Net) -> tuple[str, ...]:
    """Results that are not rounded: returned as they are, and joined and quantized."""
    x = net.quantize(net.input(N, H, 24))
    q, k, v = split(net, net.centred(net.linear(x, 3 * 3 * 18, zero_point=128, low=1)), 3, 3)
    quantized = net.quantize(joined(net, net.attention(q, k, v, net.input(H, H), f32=True)))
    return net.attention(q, k, v, causal=True, f32=True), net.linear(quantized, 7, f32=True)


def images(net: Net) -> tuple[str, ...]:
    """Channels of an image as heads; the result is an image again."""
    x = net.quantize(net.input(N, 4, 9, 12))
    y = net.centred(net.conv(x, 4, 3, padding=1, zero_point=128, low=1))
    return net.conv(net.attention(x, y, y), 3, 3, padding=1, f32=True), net.dequantize(net.attention(y, y, y))


@pytest.mark.case("problem 12")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
@pytest.mark.parametrize(
    "program",
    [*slow_params(encoder, reason="an encoder has the attention of the decoder"), decoder, floats],
    ids=lambda program: program.__name__,
)
def test_a_program_has_the_bits_of_the_interpreter(program, isa):
    net, lowered = built(program)
    model = compiled(program, isa)
    assert_bits_of_the_interpreter(net, lowered, model)
    assert_stays_inside(net, lowered, model.artifact)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_attention_and_image_operators_work_in_one_model(isa):
    """By copies between the layouts."""
    net, lowered = built(images)
    graph, copies = separate_layouts(lowered.graph)
    lowered = replace(lowered, graph=verify(graph))
    assert copies
    assert_bits_of_the_interpreter(net, lowered, build.compile(lowered, isa=isa))


def test_heads_are_read_where_the_layer_in_front_wrote_them():
    """No step only moves quantized values."""
    planned = plan_graph(built(encoder)[1].graph)
    kinds = {step.partition.anchor.kind for step in planned.steps}
    assert kinds == {"quantize", "linear", "attention", "dequantize"}


def test_products_are_counted():
    steps = compiled(decoder, RUNNABLE_ISAS[0]).artifact.program.steps
    free = {"n": 2, "h": 7, "w": 11}
    counted = [evaluate(step.cost.macs, free) for step in steps if step.kinds == "attention"]
    assert counted == [2 * 6 * 7 * 7 * 32, 2 * 3 * 7 * 11 * (8 + 33), 2 * 3 * 7 * 11 * (8 + 33)]
