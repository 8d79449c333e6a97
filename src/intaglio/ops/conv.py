"""conv2d and linear: u8 activations times s8 weights into int32 accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from intaglio.ir import Op, Shape, TensorType
from intaglio.ops.opdef import Attrs, Call, OpDef, Roles, first_reason, float_activations, pair, rank

MOST_PRODUCTS = (2**31 - 2**30) // (255 * 127)
"""Products per output that fit an int32 accumulator beside a bias of 2^30, whatever the data."""


def constant_weight(call: Call) -> str | None:
    if not call.constant[1]:
        return "the weight is computed while the model runs"
    return "the bias is computed while the model runs" if call.constant[2] is False else None


def short_reduction(call: Call) -> str | None:
    """The accumulator proof must have a chance before the data is known."""
    products = prod(call.sizes(1)[1:])
    if products <= MOST_PRODUCTS:
        return None
    return f"{products} products per output; {MOST_PRODUCTS} fit an int32 accumulator"


def sides(padding: object, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, int, int, int]:
    """Padding as (top, bottom, left, right); ``"same"`` puts the odd one at the end, as torch does."""
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return total[0] // 2, total[0] - total[0] // 2, total[1] // 2, total[1] - total[1] // 2
    if padding == "valid":
        return 0, 0, 0, 0
    y, x = pair(padding)
    return y, y, x, x


def bind_conv(call: Call) -> Attrs:
    given, kernel = call.arguments, call.sizes(1)[2:]
    dilation = pair(given.get("dilation", 1))
    return {
        "stride": pair(given.get("stride", 1)),
        "padding": sides(given.get("padding", 0), kernel, dilation),
        "dilation": dilation,
        "groups": int(given.get("groups", 1)),
    }


def conv_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    (n, _, h, w), (channels, _, kh, kw) = shapes[0], shapes[1]
    top, bottom, left, right = attrs["padding"]
    (sy, sx), (dy, dx) = attrs["stride"], attrs["dilation"]
    rows = (h + (top + bottom - dy * (kh - 1) - 1)) // sy + 1
    columns = (w + (left + right - dx * (kw - 1) - 1)) // sx + 1
    return n, channels, rows, columns


def conv_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Sum over taps of exact float64 matrix products of ``x - zero_point``, zero padded, plus the int32 bias."""
    x, weight, bias = args
    (sy, sx), (dy, dx), groups = op.attrs["stride"], op.attrs["dilation"], op.attrs["groups"]
    top, bottom, left, right = op.attrs["padding"]
    centred = x.astype(np.float64) - types[0].levels.zero
    centred = np.pad(centred, ((0, 0), (0, 0), (top, bottom), (left, right)))
    n, channels, height, width = centred.shape
    kh, kw = weight.shape[2:]
    rows, columns = (height - dy * (kh - 1) - 1) // sy + 1, (width - dx * (kw - 1) - 1) // sx + 1
    grouped = weight.astype(np.float64).reshape(groups, -1, channels // groups, kh, kw)
    acc = np.zeros((n, groups, grouped.shape[1], rows * columns))
    for ky in range(kh):
        for kx in range(kw):
            y0, x0 = ky * dy, kx * dx
            tap = centred[:, :, y0 : y0 + sy * (rows - 1) + 1 : sy, x0 : x0 + sx * (columns - 1) + 1 : sx]
            acc += grouped[None, :, :, :, ky, kx] @ tap.reshape(n, groups, channels // groups, rows * columns)
    return acc.reshape(n, len(weight), rows, columns).astype(np.int64).astype(np.int32) + bias.reshape(1, -1, 1, 1)


def linear_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return (*shapes[0][:-1], shapes[1][0])


def linear_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    x, weight, bias = args
    centred = x.astype(np.float64) - types[0].levels.zero
    return (centred @ weight.astype(np.float64).T).astype(np.int64).astype(np.int32) + bias


def last_axis_fixed(call: Call) -> str | None:
    dim = call.shape()[-1]
    return None if isinstance(dim, int) else f"free dimension {dim} is the one reduced"


CONV2D = OpDef(
    name="conv2d",
    targets=("aten.conv2d.default", "aten.conv2d.padding"),
    operands=("input", "weight", "bias"),
    roles=Roles(x=(0,), weight=1, bias=2),
    anchor=True,
    bind=bind_conv,
    check=first_reason(float_activations, rank(4), constant_weight, short_reduction),
    infer=conv_shape,
    meaning=conv_meaning,
    kernel="matmul",
)
LINEAR = OpDef(
    name="linear",
    targets=("aten.linear.default",),
    operands=("input", "weight", "bias"),
    roles=Roles(x=(0,), weight=1, bias=2),
    anchor=True,
    check=first_reason(float_activations, rank(*range(1, 9)), constant_weight, last_axis_fixed, short_reduction),
    infer=linear_shape,
    meaning=linear_meaning,
    kernel="matmul",
)
OPS = (CONV2D, LINEAR)
