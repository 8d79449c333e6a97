"""Convolutions of one to three axes, plain and transposed, and linear layers: u8 times s8 with int32 accumulators."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from intaglio.ir import Attrs, Dim, DType, Op, Shape, TensorType, numel
from intaglio.ir.verify import TypeRule
from intaglio.ops.opdef import (
    Call,
    Layout,
    OpDef,
    Roles,
    first_reason,
    numbers,
    rank,
    require_fixed_channels,
    require_float_operands,
)
from intaglio.ops.products.int4_linear import int4_scratch, why_not_int4

MAX_ACCUMULATED_PRODUCTS = (2**31 - 2**30) // (255 * 127)
"""Maximum number of products per output that fit into an int32 accumulator with a bias of 2^30, for all data."""


def require_constant_weight(call: Call) -> str | None:
    """Return why a call is refused: weight and bias must be constant, and the weight must have elements."""
    if not call.constant[1]:
        return "the weight is computed while the model runs"
    if not all(call.sizes(1)):
        return f"the weight has no elements: its shape is {list(call.shape(1))}"
    return "the bias is computed while the model runs" if call.constant[2] is False else None


def require_bounded_accumulator(call: Call) -> str | None:
    """Return why a call is refused: so many products may overflow an int32 accumulator."""
    products = prod(call.sizes(1)[1:])
    if products <= MAX_ACCUMULATED_PRODUCTS:
        return None
    return f"an output sums {products} products; at most {MAX_ACCUMULATED_PRODUCTS} fit an int32 accumulator"


def padding_sides(padding: object, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before and after each axis, alternating; ``"same"`` puts odd padding at the end."""
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple(amount for t in total for amount in (t // 2, t - t // 2))
    each = (0,) * len(kernel) if padding == "valid" else numbers(padding, len(kernel))
    return tuple(amount for one in each for amount in (one, one))


def bind_conv(call: Call) -> Attrs:
    """Return stride, padding, dilation and groups, one number per axis (two for padding)."""
    given, kernel = call.arguments, call.sizes(1)[2:]
    dilation = numbers(given.get("dilation", 1), len(kernel))
    return {
        "stride": numbers(given.get("stride", 1), len(kernel)),
        "padding": padding_sides(given.get("padding", 0), kernel, dilation),
        "dilation": dilation,
        "groups": int(given.get("groups", 1)),
    }


def conv_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    (n, _, *image), (channels, _, *kernel) = shapes[0], shapes[1]
    padding = attrs["padding"]
    sizes: list[Dim] = []
    for axis, (size, taps, step, apart) in enumerate(
        zip(image, kernel, attrs["stride"], attrs["dilation"], strict=True)
    ):
        sizes.append((size + (padding[2 * axis] + padding[2 * axis + 1] - apart * (taps - 1) - 1)) // step + 1)
    return n, channels, *sizes


def conv_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute the int32 accumulator of a convolution.

    It is the sum over taps of exact float64 matrix products of ``x - zero_point``, zero padded, plus the int32 bias.
    """
    x, weight, bias = args
    stride, dilation, groups, padding = (op.attrs[name] for name in ("stride", "dilation", "groups", "padding"))
    centred = x.astype(np.float64) - np.array(types[0].qparams.zeros).reshape(-1, *[1] * (x.ndim - 2))
    centred = np.pad(centred, [(0, 0), (0, 0), *zip(padding[::2], padding[1::2], strict=True)])
    kernel, (n, channels, *image) = weight.shape[2:], centred.shape
    sizes = [(i - d * (k - 1) - 1) // s + 1 for i, k, s, d in zip(image, kernel, stride, dilation, strict=True)]
    grouped = weight.astype(np.float64).reshape(groups, -1, channels // groups, *kernel)
    acc = np.zeros((n, groups, grouped.shape[1], prod(sizes)))
    for tap in product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        window = tuple(slice(a, a + s * (o - 1) + 1, s) for a, s, o in zip(starts, stride, sizes, strict=True))
        seen = centred[(slice(None), slice(None), *window)]
        acc += grouped[(None, ..., *tap)] @ seen.reshape(n, groups, channels // groups, prod(sizes))
    acc_i32 = acc.reshape(n, len(weight), *sizes).astype(np.int64).astype(np.int32)
    return acc_i32 + bias.reshape(1, -1, *[1] * len(kernel))


def bind_transposed(call: Call) -> Attrs:
    """Return stride, padding, output padding, dilation and groups, one number per axis."""
    given, axes = call.arguments, len(call.shape()) - 2
    names = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}
    found = {name: numbers(given.get(name, default), axes) for name, default in names.items()}
    return {**found, "groups": int(given.get("groups", 1))}


def transposed_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the result's shape; the weight is [outputs, inputs per group, taps...], as for a plain convolution."""
    (n, _, *image), (channels, _, *kernel) = shapes[0], shapes[1]
    names = ("stride", "padding", "dilation", "output_padding")
    sizes = [
        (size - 1) * step + (apart * (taps - 1) + extra + 1 - 2 * pad)
        for size, taps, step, pad, apart, extra in zip(image, kernel, *(attrs[name] for name in names), strict=True)
    ]
    return n, channels, *sizes


def transposed_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Compute the int32 accumulator of a transposed convolution by scattering the products of each input to the
    outputs.
    """
    x, weight, bias = args
    stride, dilation, groups, padding = (op.attrs[name] for name in ("stride", "dilation", "groups", "padding"))
    centred = x.astype(np.float64) - types[0].qparams.zero
    kernel, (n, channels, *image) = weight.shape[2:], centred.shape
    sizes = transposed_shape(op.attrs, [x.shape, weight.shape])[2:]
    extent = [(i - 1) * s + d * (k - 1) + 1 for i, k, s, d in zip(image, kernel, stride, dilation, strict=True)]
    extent = [max(e, p + o) for e, p, o in zip(extent, padding, sizes, strict=True)]
    grouped = weight.astype(np.float64).reshape(groups, -1, channels // groups, *kernel)
    acc = np.zeros((n, len(weight), *extent))
    seen = centred.reshape(n, groups, channels // groups, prod(image))
    for tap in product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        window = tuple(slice(a, a + s * (i - 1) + 1, s) for a, s, i in zip(starts, stride, image, strict=True))
        acc[(slice(None), slice(None), *window)] += (grouped[(None, ..., *tap)] @ seen).reshape(n, len(weight), *image)
    kept = acc[(slice(None), slice(None), *(slice(p, p + o) for p, o in zip(padding, sizes, strict=True)))]
    return kept.astype(np.int64).astype(np.int32) + bias.reshape(1, -1, *[1] * len(kernel))


def output_axis(name: str, axes: int) -> int:
    """Return the channel axis of an anchor's result with ``axes`` axes."""
    return axes - 1 if name == "linear" else 1


def outputs_first(weight: np.ndarray, groups: int) -> np.ndarray:
    """Transpose a weight [inputs, outputs per group, taps...] to [outputs, inputs per group, taps...]."""
    split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).swapaxes(1, 2)
    return split.reshape(-1, *split.shape[2:])


def require_bounded_transposed_accumulator(call: Call) -> str | None:
    """Check as `require_bounded_accumulator` does, for a weight whose first axis is the inputs."""
    sizes = call.sizes(1)
    products = sizes[0] // int(call.arguments.get("groups", 1)) * prod(sizes[2:])
    if products <= MAX_ACCUMULATED_PRODUCTS:
        return None
    return f"an output sums {products} products; at most {MAX_ACCUMULATED_PRODUCTS} fit an int32 accumulator"


def linear_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    return (*shapes[0][:-1], shapes[1][0])


def linear_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute the exact int32 accumulator of a linear layer."""
    x, weight, bias = args
    centred = x.astype(np.float64) - types[0].qparams.zero
    return (centred @ weight.astype(np.float64).T).astype(np.int64).astype(np.int32) + bias


def require_fixed_last_axis(call: Call) -> str | None:
    """Return why a linear layer is refused: the reduced axis must have a fixed size."""
    dim = call.shape()[-1]
    return None if isinstance(dim, int) else f"the size of the reduced axis, {dim}, is dynamic"


def require_fixed_depth(call: Call) -> str | None:
    """Return why a call is refused: taps along depth become channels, whose number must not be free."""
    shape = call.shape()
    return f"the depth, {shape[2]}, is dynamic" if len(shape) == 5 and not isinstance(shape[2], int) else None


def require_padding_within_taps(call: Call) -> str | None:
    """Return why a transposed convolution is refused: its depth padding must not exceed the reach of its taps."""
    attrs, taps = bind_transposed(call), call.sizes(1)[2:]
    if len(taps) < 3 or attrs["padding"][0] <= attrs["dilation"][0] * (taps[0] - 1):
        return None
    return f"the depth padding, {attrs['padding'][0]}, exceeds the extent of the kernel"


def conv_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a convolution."""
    return numel(result) * numel(shapes[1][1:])


def transposed_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a transposed convolution, for either order of the weight's first two axes."""
    x, weight = shapes[:2]
    axes = len(weight) - 2
    return numel(x[: -axes - 1]) * numel(x[-axes:]) * numel(weight)


def linear_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a linear layer."""
    return numel(result) * shapes[1][-1]


ACCUMULATED = TypeRule(((DType.U8,), (DType.S8,), (DType.I32,)), (DType.I32,))
CONV_ROLES = Roles(x=(0,), weight=1, bias=2)
TRANSPOSED_ROLES = Roles(x=(0,), weight=1, bias=2, outputs=1)


def _conv(axes: int) -> OpDef:
    return OpDef(
        name=f"conv{axes}d",
        targets=(f"aten.conv{axes}d.default", f"aten.conv{axes}d.padding"),
        operands=("input", "weight", "bias"),
        roles=CONV_ROLES,
        anchor=True,
        bind=bind_conv,
        check=first_reason(
            require_float_operands,
            rank(axes + 2),
            require_fixed_depth,
            require_constant_weight,
            require_bounded_accumulator,
        ),
        infer=conv_shape,
        reference=conv_reference,
        types=ACCUMULATED,
        accumulates=True,
        batch_separable=True,
        window=True,
        macs=conv_macs,
        computed_in_float32=True,
        min_pixels=1,
        layout=Layout.CHANNELS_LAST,
        kernel="matmul",
    )


def _conv_transpose(axes: int) -> OpDef:
    overload = "default" if axes == 1 else "input"
    return OpDef(
        name=f"conv_transpose{axes}d",
        targets=(f"aten.conv_transpose{axes}d.{overload}",),
        operands=("input", "weight", "bias"),
        roles=TRANSPOSED_ROLES,
        anchor=True,
        bind=bind_transposed,
        check=first_reason(
            require_float_operands,
            rank(axes + 2),
            require_fixed_channels,
            require_constant_weight,
            require_bounded_transposed_accumulator,
            require_padding_within_taps,
        ),
        infer=transposed_shape,
        reference=transposed_reference,
        types=ACCUMULATED,
        accumulates=True,
        batch_separable=True,
        window=True,
        macs=transposed_macs,
        computed_in_float32=True,
        min_pixels=1,
        layout=Layout.CHANNELS_LAST,
        kernel="matmul",
    )


LINEAR = OpDef(
    name="linear",
    targets=("aten.linear.default",),
    operands=("input", "weight", "bias"),
    roles=CONV_ROLES,
    anchor=True,
    check=first_reason(
        require_float_operands,
        rank(*range(1, 9)),
        require_constant_weight,
        require_fixed_last_axis,
        require_bounded_accumulator,
    ),
    infer=linear_shape,
    reference=linear_reference,
    types=ACCUMULATED,
    accumulates=True,
    batch_separable=True,
    window=True,
    macs=linear_macs,
    computed_in_float32=True,
    layout=Layout.ROW_MAJOR,
    scratch=int4_scratch,
    why_not_int4=why_not_int4,
    kernel="matmul",
)
CONVOLUTION_OPS = (*map(_conv, (1, 2, 3)), *map(_conv_transpose, (1, 2, 3)), LINEAR)
