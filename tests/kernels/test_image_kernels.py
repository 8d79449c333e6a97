"""What reads the caller's images, on its own against `numerics`, on memory that ends at a guard page."""

import ctypes
from functools import cache

import numpy as np
import pytest

from intaglio import numerics
from intaglio.codegen.emitters.emit_steps import affine_bytes
from intaglio.native.compile import build, load
from intaglio.native.native_library import parallel_address
from support.matmul_library import CPP_ISA_PARAMS, EXPORT, Memory

CANARY = 0xA5
WIDTHS = (*range(1, 36), 47, 48, 49, 224, *range(70, 85), 130, 144, 145, 200)
"""From less than a vector of any instruction set to several, with any rest, and several blocks of many channels."""
CHANNELS = (1, 2, 3, 4, 5, 6, 9, 19)
ORDERS = {"planes": (0, 1, 2, 3), "channels last": (0, 2, 3, 1)}
ODD = (np.nan, np.inf, -np.inf, 0.5, -0.5, 1.5, 1e30, -1e30, -0.0)

TEXT = f"""
#include "elementwise/border.h"
struct Call {{
    const int64_t* strides;
    struct Image out;
    const float* floats;
    const uint8_t* bytes;
    const struct Affine* q;
    int64_t stride;
    int64_t* counts;
}};
static void body(void* context, int thread, int threads) {{
    const struct Call* c = (const struct Call*)context;
    if (c->floats)
        quantize_image(c->floats, c->strides, &c->out, c->q, c->stride, c->counts, 1, thread, threads);
    else
        copy_image(c->bytes, c->strides, &c->out, thread, threads);
}}
{EXPORT} void run_border(const int64_t* v, int threads, IntaglioParallel parallel) {{
    const struct Call c = {{v + 10, image((uint8_t*)v[0], v[1], v[2], v[3], v[4], v[5], v[5]), (const float*)v[6],
                           (const uint8_t*)v[7], (const struct Affine*)v[8], v[9], (int64_t*)v[14]}};
    parallel(body, (void*)&c, threads);
}}
"""


@cache
def library(isa: str) -> ctypes.CDLL:
    return load(build(TEXT, name="borders", isa=isa))


@cache
def memory(role: str) -> Memory:
    return Memory()


def quantized(
    isa: str,
    x: np.ndarray,
    order: tuple[int, ...],
    parameters: bytes = b"",
    stride: int = 0,
    clipped: int | None = None,
) -> np.ndarray:
    """Quantized values in NCHW of an image that lies in ``order``; around them there is a halo, which stays as it
    was. ``clipped`` is the number of values that must be counted as outside of the range."""
    counts = (ctypes.c_int64 * 2)()
    n, c, h, w = x.shape
    lying = np.ascontiguousarray(x.transpose(order))
    strides = [0] * 4
    for axis, step in zip(order, lying.strides, strict=True):
        strides[axis] = step // x.itemsize
    out = memory("out").end(n * (h + 2) * (w + 2) * c)
    out[:] = CANARY
    given, floats = memory("in").hold(lying), x.dtype == np.float32
    q = memory("q").hold(np.frombuffer(parameters, np.uint8)) if floats else 0
    values = [
        out.ctypes.data,
        n,
        h,
        w,
        c,
        1,
        given * floats,
        given * (not floats),
        q,
        stride,
        *strides,
        ctypes.addressof(counts),
    ]
    library(isa).run_border((ctypes.c_int64 * len(values))(*values), 2, ctypes.c_void_p(parallel_address()))
    assert clipped is None or list(counts) == [clipped, clipped]
    framed = out.reshape(n, h + 2, w + 2, c)
    inside = framed[:, 1:-1, 1:-1].copy()
    framed[:, 1:-1, 1:-1] = CANARY
    assert (out == CANARY).all()
    return inside.transpose(0, 3, 1, 2)


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_float_rows_of_any_width_are_quantized(isa, order):
    for seed, width in enumerate(WIDTHS):
        draw = np.random.default_rng(seed)
        x = draw.normal(0, 2, (2, CHANNELS[seed % 8], 3, width)).astype(np.float32)
        x.flat[draw.integers(0, x.size, len(ODD))] = ODD
        scale, zero_point, low, high = 0.03 * (1 + seed % 3), int(draw.integers(3, 100)), seed % 4, 255 - seed % 7
        inverse = numerics.reciprocal(scale)
        given = affine_bytes(inverse, 0, scale, zero_point, low, high).tobytes()
        expected = numerics.quantize(x, scale, zero_point, low, high)
        clipped = numerics.count_clipped(x, scale, zero_point, low, high)
        assert 0 < clipped < x.size / 2
        np.testing.assert_array_equal(quantized(isa, x, order, given, 0, clipped), expected, f"width {width}")


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_channel_has_parameters_of_its_own(isa, order):
    for seed, width in enumerate(WIDTHS):
        draw = np.random.default_rng(seed)
        channels = CHANNELS[seed % 8]
        x = draw.normal(0, 1, (1, channels, 2, width)).astype(np.float32)
        x.flat[draw.integers(0, x.size, len(ODD))] = ODD
        gain, shift = (draw.uniform(20, 90, channels).astype(np.float32) for _ in range(2))
        zeros = draw.integers(0, 256, channels)
        parts = [affine_bytes(g, s, 1, z, 0, 255) for g, s, z in zip(gain, shift, zeros, strict=True)]
        with np.errstate(over="ignore", invalid="ignore"):
            steps = x * gain[:, None, None] + shift[:, None, None]
        expected = numerics.quantize(steps, 1.0, zeros[:, None, None], 0, 255)
        np.testing.assert_array_equal(
            quantized(isa, x, order, np.concatenate(parts).tobytes(), 1), expected, str(width)
        )


@pytest.mark.parametrize("isa", CPP_ISA_PARAMS)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_bytes_of_any_width_are_moved(isa, order):
    for seed, width in enumerate(WIDTHS):
        x = np.random.default_rng(seed).integers(0, 256, (2, CHANNELS[seed % 8], 3, width)).astype(np.uint8)
        np.testing.assert_array_equal(quantized(isa, x, order), x, f"width {width}")
