"""Pointwise and pooling kernels on their own against the operators' references, on memory that ends at a guard page."""

import ctypes
from dataclasses import astuple, dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intaglio.codegen.context import limits
from intaglio.codegen.emitters.emit_steps import WIDEST
from intaglio.ir import DType, Op, QParams, TensorType
from intaglio.native.compile import build, load
from intaglio.native.native_library import parallel_address
from intaglio.ops import OPS
from intaglio.ops.images.pool import adaptive_counts, pool_shape, window_counts
from support.matmul_library import CPP_ISA_PARAMS, EXPORT, SLACK, Image, Memory

IMAGES = ("a", "b", "out")
NUMBERS = (
    "kind",
    "zero",
    "first",
    "second",
    "limits",
    "depth",
    "include_pad",
    "fixed_divisor",
    "adaptive",
    "sums",
    "shares",
    "y.kernel",
    "y.stride",
    "y.before",
    "y.dilation",
    "x.kernel",
    "x.stride",
    "x.before",
    "x.dilation",
    "each",
)
KINDS = (
    "add",
    "mul",
    "affine",
    "prelu",
    "layer_norm",
    "clamp",
    "table",
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
)
CANARY = 0xA5
EPS = np.float32(1e-5)
FACTORS = (1e-42, 1e-20, 1e-3, 0.02, 0.5, 1.0, 3.0, 1e4, 3e6, 1e10, 1e34)
"""From denormal to far beyond what converts to an integer."""

TEXT = f"""
#include "elementwise/lookup.h"
#include "elementwise/pair.h"
#include "elementwise/pointwise.h"
#include "images/pooling.h"
struct Call {{
    struct Pair pair;
    struct Pool pool;
    const float *first, *second;
    int64_t kind;
    struct IntaglioBarrier barrier;
}};
static void body(void* context, int thread, int threads) {{
    struct Call* c = (struct Call*)context;
    const struct Pair* p = &c->pair;
    const struct Image *in = &p->a, *out = &p->out;
    switch (c->kind) {{
    case 0: case 1: add_or_mul_u8(p, c->kind == 0, thread, threads); break;
    case 2: affine_u8(in, out, p->zero_a, c->first, c->second, p->limits, thread, threads); break;
    case 3: prelu_u8(in, out, p->zero_a, c->first, c->second, p->limits, thread, threads); break;
    case 4: layer_norm_u8(in, out, p->zero_a, c->first, c->second, {float(EPS)!r}f, p->limits, thread, threads);
        break;
    case 5: clamp_u8(in, out, p->limits, thread, threads); break;
    case 6: look_up(in, out, (const uint8_t*)c->first, thread, threads); break;
    case 7: max_pool(&c->pool, thread, threads); break;
    default: avg_pool(&c->pool, &c->barrier, thread, threads);
    }}
}}
{EXPORT} void run_levels(const int64_t* v, int threads, IntaglioParallel parallel) {{
    struct Call c = {{}};
    struct Image* images[] = {{&c.pair.a, &c.pair.b, &c.pair.out}};
    for (int i = 0; i < 3; ++i, v += 6) *images[i] = image((uint8_t*)v[0], v[1], v[2], v[3], v[4], v[5], v[5]);
    c.kind = v[0], c.pair.zero_a = c.pool.zero_in = (int32_t)v[1], c.pair.each = (int32_t)v[19];
    c.first = c.pair.factor_a = c.pool.factors = (const float*)v[2], c.second = c.pair.factor_b = (const float*)v[3];
    c.pair.limits = c.pool.limits = (const struct Limits*)v[4];
    c.pool.in = c.pair.a, c.pool.out = c.pair.out, c.pool.depth_in = c.pool.depth_out = v[5];
    c.pool.include_pad = v[6], c.pool.fixed_divisor = v[7], c.pool.adaptive = v[8];
    c.pool.sums = (int32_t*)v[9], c.pool.shares = v[10];
    c.pool.z = (struct PoolAxis){{1, 1, 0, 1}};
    c.pool.y = (struct PoolAxis){{v[11], v[12], v[13], v[14]}};
    c.pool.x = (struct PoolAxis){{v[15], v[16], v[17], v[18]}};
    parallel(body, &c, threads);
}}
"""


@cache
def library(isa: str) -> ctypes.CDLL:
    return load(build(TEXT, name="levels", isa=isa))


@cache
def memory(role: str) -> Memory:
    return Memory()


@dataclass(frozen=True)
class Quantization:
    """What an operator's result may be, and how the images lie."""

    zeros: tuple[int, int, int] = (0, 0, 0)
    bounds: tuple[int, int] = (0, 255)
    halos: tuple[int, int, int] = (0, 0, 0)
    threads: int = 1
    pixel_sums: int = 0

    def types(self) -> tuple[list[TensorType], TensorType]:
        kinds = [
            TensorType((), DType.U8, QParams((1.0,), (zero,), *ends))
            for zero, ends in zip(self.zeros, ((0, 255), (0, 255), self.bounds), strict=True)
        ]
        return kinds[:2], kinds[2]


def check(
    isa: str, kind: str, arrays: list[np.ndarray], constants: list[np.ndarray], how: Quantization, **attrs
) -> None:
    """Run a kernel on one or two images in NCHW; the result is the reference's, and nothing around it changes."""
    types, result = how.types()
    op = Op(kind, (), ("y",), attrs | {"low": how.bounds[0], "high": how.bounds[1]})
    logical = [np.moveaxis(array, 1, -1) for array in arrays] if kind == "layer_norm" else arrays
    expected = OPS[kind].reference(op, [*logical, *constants, *([EPS] if kind == "layer_norm" else [])], types, result)
    expected = expected if kind == "layer_norm" else expected.transpose(0, 2, 3, 1)
    pools, halo = kind.endswith("pool2d"), how.halos[2]
    images = {"a": stored("a", arrays[0], how.halos[0], SLACK * pools)}
    if len(arrays) > 1:
        images["b"] = stored("b", arrays[1], how.halos[1], 0)
    n, h, w, c = expected.shape
    framed = memory("out").end(n * (h + 2 * halo) * (w + 2 * halo) * c).reshape(n, h + 2 * halo, w + 2 * halo, c)
    memory("out").bytes[-framed.size - 256 :] = CANARY
    images["out"] = Image(framed.ctypes.data, n, h, w, c, halo)
    numbers = {
        "kind": KINDS.index(kind),
        "zero": how.zeros[0],
        "depth": 1,
        "fixed_divisor": bool(attrs.get("divisor")),
        "limits": memory("limits").hold(limits(how.zeros[2], *how.bounds, how.zeros[1])),
        "include_pad": bool(attrs.get("include_pad")),
        "adaptive": "size" in attrs,
    }
    numbers["each"] = kind == "add" and "axis" in attrs
    repeated = kind in ("affine", "layer_norm"), kind in ("affine", "layer_norm", "prelu") or numbers["each"]
    for role, values, more in zip(("first", "second"), constants, repeated, strict=False):
        longer = np.resize(values, values.size + WIDEST - 1) if more else values
        numbers[role] = memory(role).hold(longer)
    for axis, letter in enumerate("yx"):
        for key, default in (("kernel", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            name = "before" if key == "padding" else key
            numbers[f"{letter}.{name}"] = attrs[key][axis] if key in attrs else default
    if how.pixel_sums:
        numbers["shares"] = how.pixel_sums
        numbers["sums"] = memory("sums").hold(np.full((how.pixel_sums, c), 12345, np.int32), SLACK)
    given = [value for name in IMAGES for value in astuple(images.get(name, Image()))]
    given += [int(numbers.get(name, 0)) for name in NUMBERS]
    library(isa).run_levels((ctypes.c_int64 * len(given))(*given), how.threads, ctypes.c_void_p(parallel_address()))
    inside = framed[:, halo : halo + h, halo : halo + w]
    assert np.array_equal(inside, expected)
    inside[:] = CANARY
    assert (memory("out").bytes[-framed.size - 256 :] == CANARY).all()


def stored(role: str, array: np.ndarray, halo: int, slack: int) -> Image:
    """Channels last, with garbage for a halo."""
    n, c, h, w = array.shape
    padded = np.pad(array.transpose(0, 2, 3, 1), ((0, 0), (halo, halo), (halo, halo), (0, 0)), constant_values=99)
    return Image(memory(role).hold(padded, slack), n, h, w, c, halo)


LEVEL = st.sampled_from([0, 255, *range(1, 255)])


@st.composite
def ways(draw) -> Quantization:
    bounds = draw(st.just((0, 255)) | st.tuples(LEVEL, LEVEL).filter(lambda b: b[0] < b[1]))
    few = st.sampled_from([0, 0, 1, 2])
    return Quantization(
        draw(st.tuples(LEVEL, LEVEL, LEVEL)), bounds, draw(st.tuples(few, few, few)), draw(st.integers(1, 3))
    )


def factors(data, draw: np.random.Generator, count: int) -> np.ndarray:
    size = data.draw(st.sampled_from(FACTORS))
    return (draw.choice([-1, 1], count) * draw.uniform(0.5, 1.5, count) * size).astype(np.float32)


def drawn(data, *shapes: tuple[int, ...]) -> tuple[np.random.Generator, list[np.ndarray]]:
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    return draw, [draw.integers(0, 256, shape).astype(np.uint8) for shape in shapes]


SIZE = st.integers(1, 9)
CHANNELS = st.integers(1, 200)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@settings(max_examples=3 * settings.default.max_examples)
@given(st.data(), st.sampled_from(["add", "mul"]), st.sampled_from([0, 1, 2]), CHANNELS, ways())
def test_pair_kernels_take_two_images_or_an_image_and_a_pixel(isa, data, kind, one, channels, how):
    shape = (data.draw(st.integers(1, 3)), channels, data.draw(SIZE), data.draw(SIZE))
    pixel = (*shape[:2], 1, 1)
    draw, arrays = drawn(data, pixel if one == 1 else shape, pixel if one == 2 else shape)
    check(isa, kind, arrays, [factors(data, draw, 1) for _ in range(2 if kind == "add" else 1)], how)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@settings(max_examples=2 * settings.default.max_examples)
@given(st.data(), CHANNELS, ways())
def test_sums_may_have_a_factor_per_channel(isa, data, channels, how):
    shape = (data.draw(st.integers(1, 3)), channels, data.draw(SIZE), data.draw(SIZE))
    draw, arrays = drawn(data, shape, shape)
    check(isa, "add", arrays, [factors(data, draw, 1), factors(data, draw, channels)], how, axis=1)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("kind", ["add", "mul"])
@pytest.mark.parametrize("channels", [4095, 4096, 4097, 8200])
def test_a_pixel_of_more_channels_than_there_are_terms(isa, kind, channels):
    draw = np.random.default_rng(channels)
    arrays = [draw.integers(0, 256, (2, channels, *size)).astype(np.uint8) for size in ((2, 3), (1, 1))]
    constants = [np.float32([value]) for value in (0.004, 0.7)[: 2 if kind == "add" else 1]]
    check(isa, kind, arrays, constants, Quantization((3, 200, 100), threads=2))


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@settings(max_examples=3 * settings.default.max_examples)
@given(st.data(), st.sampled_from(["affine", "prelu", "layer_norm", "clamp", "table"]), CHANNELS, ways())
def test_one_image_may_have_constants_per_channel(isa, data, kind, channels, how):
    draw, arrays = drawn(data, (data.draw(st.integers(1, 3)), channels, data.draw(SIZE), data.draw(SIZE)))
    constants = {
        "prelu": lambda: [factors(data, draw, 1), factors(data, draw, channels)],
        "clamp": list,
        "table": lambda: [draw.permutation(256).astype(np.uint8)],
    }.get(kind, lambda: [factors(data, draw, channels), factors(data, draw, channels)])()
    check(isa, kind, arrays, constants, how, **({"axis": 1} if kind == "affine" else {}))


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("kind", ["mul", "affine", "prelu"])
def test_a_vector_may_begin_at_any_channel(isa, kind):
    """Constants go on behind the last channel, and end where a page does."""
    draw = np.random.default_rng(0)
    for channels in range(1, 201):
        image, pixel = (draw.integers(0, 256, (1, channels, *size)).astype(np.uint8) for size in ((1, 9), (1, 1)))
        several = draw.uniform(-1, 1, (2, channels)).astype(np.float32)
        given = {"mul": [np.float32([0.01])], "affine": list(several), "prelu": [np.float32([0.7]), several[0]]}[kind]
        check(isa, kind, [image, pixel][: 2 if kind == "mul" else 1], given, Quantization((90, 40, 120)), axis=1)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@settings(max_examples=3 * settings.default.max_examples)
@given(st.data(), st.sampled_from(["max_pool2d", "avg_pool2d"]), CHANNELS, ways())
def test_pools_of_windows_that_leave_the_image_on_any_side(isa, data, kind, channels, how):
    pair = st.tuples(st.integers(1, 4), st.integers(1, 4))
    kernel, stride = data.draw(pair), data.draw(pair)
    padding = tuple(data.draw(st.integers(0, k // 2)) for k in kernel)
    attrs = {"kernel": kernel, "stride": stride, "padding": padding, "ceil": data.draw(st.booleans())}
    attrs |= (
        {"dilation": data.draw(st.tuples(*[st.integers(1, 3)] * 2))}
        if kind == "max_pool2d"
        else {"include_pad": data.draw(st.booleans()), "divisor": data.draw(st.sampled_from([None, 5]))}
    )
    reach = [d * (k - 1) + 1 - 2 * p for k, p, d in zip(kernel, padding, attrs.get("dilation", (1, 1)), strict=True)]
    image = tuple(max(least, 1) + data.draw(st.integers(0, 9)) for least in reach)
    draw, arrays = drawn(data, (data.draw(st.integers(1, 3)), channels, *image))
    assert min(pool_shape(attrs, [arrays[0].shape])[2:]) > 0
    table = [factors(data, draw, len(window_counts(attrs)))] if kind == "avg_pool2d" else []
    check(isa, kind, arrays, table, how, **attrs)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@settings(max_examples=3 * settings.default.max_examples)
@given(st.data(), CHANNELS, ways())
def test_means_over_parts_of_an_image_run_in_int8(isa, data, channels, how):
    size = data.draw(st.sampled_from([(1, 1), (1, 1), data.draw(st.tuples(SIZE, SIZE))]))
    shape = (data.draw(st.integers(1, 2)), channels, *data.draw(st.tuples(*[st.integers(1, 24)] * 2)))
    draw, arrays = drawn(data, shape)
    table = factors(data, draw, max(adaptive_counts({"size": size}, shape)))
    check(isa, "adaptive_avg_pool2d", arrays, [table], how, size=size)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("channels", [1, 3, 8, 16, 24, 32, 48, 64, 65, 96, 144, 192])
@pytest.mark.parametrize("value", [None, 255])
def test_threads_sum_one_large_image_together(isa, channels, value):
    """More quantized values to a word of sums than it holds, where all are 255."""
    height = width = 2 * int(np.ceil(np.sqrt(70000 / channels) / 2))
    draw = np.random.default_rng(channels)
    for extra, halo in ((0, 0), (1, 2)):
        image = draw.integers(0, 256, (1, channels, height + extra, width + extra)).astype(np.uint8)
        image = image if value is None else np.full_like(image, value)
        factor = (1 / np.arange(1, image[0, 0].size + 1)).astype(np.float32)
        for threads, shares in ((1, 8), (2, 8), (3, 2)):
            how = Quantization((40, 0, 21), halos=(halo, 0, 0), threads=threads, pixel_sums=shares)
            check(isa, "adaptive_avg_pool2d", [image], [factor], how, size=(1, 1))
