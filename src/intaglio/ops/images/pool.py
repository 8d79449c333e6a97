"""Max, average and adaptive average pooling over one to three axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

import numpy as np

from intaglio import numerics
from intaglio.ir import Attrs, Dim, Graph, Op, QParams, Shape, TensorType, evaluate, numel
from intaglio.ir.types import F32, U8
from intaglio.ir.verify import TypeRule
from intaglio.ops.loop_ops import loop_bodies as bodies
from intaglio.ops.loop_ops.float_loop import FloatLoop
from intaglio.ops.opdef import (
    Call,
    KernelConstants,
    Layout,
    ModelConstants,
    OpDef,
    first_reason,
    numbers,
    rank,
    require_fixed_channels,
    require_float_operands,
)

MAX_WINDOW_PIXELS = (2**31 - 1) // 255
"""Maximum number of uint8 values whose sum fits into int32."""


@dataclass(frozen=True)
class Window:
    """Indices start..stop along an axis that one output reads, and the number of values by which the mean divides."""

    start: int
    stop: int
    count: int


def bind_pool(call: Call) -> Attrs:
    """Return window, stride, padding and mode of a max or average pooling, one number per axis."""
    given, axes = call.arguments, len(call.shape()) - 2
    kernel = numbers(given["kernel_size"], axes)
    attrs = {
        "kernel": kernel,
        "stride": numbers(given["stride"], axes) if given.get("stride") else kernel,
        "padding": numbers(given.get("padding", 0), axes),
        "ceil": bool(given.get("ceil_mode", False)),
    }
    if "max_pool" in call.target:
        return {**attrs, "dilation": numbers(given.get("dilation", 1), axes)}
    divisor = given.get("divisor_override")
    return {**attrs, "include_pad": bool(given.get("count_include_pad", True)), "divisor": divisor}


def require_positive_divisor(call: Call) -> str | None:
    """Return why average pooling is refused: a divisor must be at least 1."""
    divisor = call.arguments.get("divisor_override")
    return f"divisor_override is {divisor}, but must be at least 1" if divisor is not None and divisor < 1 else None


def pooled(size: Dim, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Dim:
    """Return the output size of torch's pooling along an axis.

    In ceil mode the last window must start inside of the input or its left padding.
    """
    span = size + (2 * padding - dilation * (kernel - 1) - 1)
    if not ceil:
        return span // stride + 1
    out = (span + (stride - 1)) // stride + 1
    if isinstance(out, int) and isinstance(size, int) and (out - 1) * stride >= size + padding:
        return out - 1
    return out


def require_complete_windows(call: Call) -> str | None:
    """Return why pooling is refused: with a free size, ceil mode must never drop the last window."""
    attrs = bind_pool(call)
    dilation = attrs.get("dilation", (1,) * len(attrs["kernel"]))
    for size, kernel, stride, padding, apart in zip(
        call.shape()[2:], attrs["kernel"], attrs["stride"], attrs["padding"], dilation, strict=True
    ):
        if attrs["ceil"] and not isinstance(size, int) and stride + padding > apart * (kernel - 1) + 1:
            return f"with ceil_mode over the dynamic size {size}, windows may begin after the end of the axis"
    return None


def require_fixed_size(call: Call) -> str | None:
    """Return why adaptive pooling is refused: its result must have a fixed size."""
    free = [size for size in call.result[2:] if not isinstance(size, int)]
    return f"the size of the result, {free[0]}, is dynamic" if free else None


def pool_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the pooled image."""
    n, c, *image = shapes[0]
    dilation = attrs.get("dilation", (1,) * len(image))
    given = zip(image, attrs["kernel"], attrs["stride"], attrs["padding"], dilation, strict=True)
    return n, c, *(pooled(*one, attrs["ceil"]) for one in given)


def windows(attrs: Attrs, axis: int, size: int, outputs: int) -> list[Window]:
    """Return the windows of average pooling along one axis; counts include padding with ``include_pad``."""
    kernel, stride, padding = attrs["kernel"][axis], attrs["stride"][axis], attrs["padding"][axis]
    found = []
    for index in range(outputs):
        start = index * stride - padding
        stop = min(start + kernel, size + padding)
        clipped = max(start, 0), min(stop, size)
        count = stop - start if attrs["include_pad"] else clipped[1] - clipped[0]
        found.append(Window(clipped[0], max(clipped), count))
    return found


def adaptive_windows(size: int, outputs: int) -> list[Window]:
    """Return the windows of adaptive pooling: floor(i * size / outputs) .. ceil((i + 1) * size / outputs)."""
    bounds = [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]
    return [Window(start, stop, stop - start) for start, stop in bounds]


def max_pool_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute max pooling; padding is the quantized value 0, the smallest, and never wins."""
    kernel, stride, padding, dilation = (op.attrs[k] for k in ("kernel", "stride", "padding", "dilation"))
    image = args[0].shape[2:]
    sizes = [evaluate(dim, {}) for dim in pool_shape(op.attrs, [args[0].shape])[2:]]
    reach = [(o - 1) * s + d * (k - 1) + 1 for o, s, d, k in zip(sizes, stride, dilation, kernel, strict=True)]
    behind = [max(0, r - i - p) for r, i, p in zip(reach, image, padding, strict=True)]
    padded = np.pad(args[0], [(0, 0), (0, 0), *zip(padding, behind, strict=True)])
    result = np.zeros((*args[0].shape[:2], *sizes), np.uint8)
    for tap in product(*map(range, kernel)):
        starts = [t * d for t, d in zip(tap, dilation, strict=True)]
        window = tuple(slice(a, a + s * (o - 1) + 1, s) for a, s, o in zip(starts, stride, sizes, strict=True))
        np.maximum(result, padded[(slice(None), slice(None), *window)], out=result)
    return result


def mean_over(
    x: np.ndarray,
    factors: np.ndarray,
    q_in: QParams,
    out: TensorType,
    axes: Sequence[list[Window]],
    divisor: int | None = None,
) -> np.ndarray:
    """Return ``clamp(rne(float32(sum(q) - n*zp) * factors[count - 1]) + zp)``, the means over n values.

    The divisor ``count`` of a mean selects its factor; a ``divisor`` override has only one.
    """
    centred = x.astype(np.int64) - q_in.zero
    result = np.empty((*x.shape[:2], *map(len, axes)), np.uint8)
    q, summed = out.qparams, tuple(range(2, x.ndim))
    batch_and_channels = (slice(None), slice(None))
    for place in np.ndindex(*map(len, axes)):
        chosen = [found[index] for found, index in zip(axes, place, strict=True)]
        acc = centred[batch_and_channels + tuple(slice(one.start, one.stop) for one in chosen)].sum(summed)
        factor = factors[0 if divisor else prod(one.count for one in chosen) - 1]
        result[batch_and_channels + place] = numerics.requantize(acc, factor, q.zero, q.qmin, q.qmax)
    return result


def avg_pool_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute average pooling."""
    sizes = [evaluate(dim, {}) for dim in pool_shape(op.attrs, [args[0].shape])[2:]]
    axes = [windows(op.attrs, i, args[0].shape[2 + i], size) for i, size in enumerate(sizes)]
    return mean_over(args[0], args[1], types[0].qparams, out, axes, op.attrs["divisor"])


def adaptive_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Compute adaptive average pooling."""
    axes = [adaptive_windows(*one) for one in zip(args[0].shape[2:], op.attrs["size"], strict=True)]
    factors = args[1]
    if has_free_windows(types[0].shape):
        most = prod(max(one.count for one in axis) for axis in axes)
        factors = numerics.pool_multipliers(types[0].qparams.step, out.qparams.step, range(1, most + 1))
    return mean_over(args[0], factors, types[0].qparams, out, axes)


def bind_adaptive(call: Call) -> Attrs:
    """Return the size of the result."""
    return {"size": tuple(call.result[2:])}


def window_counts(attrs: Attrs) -> Sequence[int]:
    """Return all divisors of a mean over windows, in the order of their factors."""
    return [attrs["divisor"]] if attrs["divisor"] else range(1, prod(attrs["kernel"]) + 1)


def adaptive_counts(attrs: Attrs, shape: Shape) -> Sequence[int]:
    """Return all divisors of adaptive windows.

    If windows grow with a free size, this is only 1, whose factor is then divided by the count in each call.
    """
    if has_free_windows(shape):
        return [1]
    sizes = [evaluate(size, {}) for size in shape[2:]]
    return range(1, prod(_longest_window(*one) for one in zip(sizes, attrs["size"], strict=True)) + 1)


def _longest_window(size: int, outputs: int) -> int:
    """Return the most pixels of an adaptive window along one axis, in constant time.

    A window starts ``r / outputs`` behind a pixel, where r is a multiple of the greatest common divisor.
    """
    rest = size % outputs
    return size // outputs + (0 if rest == 0 else 1 if rest == gcd(size, outputs) else 2)


def window_factors(
    attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float
) -> KernelConstants:
    """Return the factors of average pooling, one for every divisor."""
    return {"factors": numerics.pool_multipliers(scale_x, scale_y, window_counts(attrs))}, attrs


def adaptive_factors(
    attrs: Attrs, shape: Shape, given: ModelConstants, scale_x: float, scale_y: float
) -> KernelConstants:
    """Return the factors of adaptive average pooling, one for every divisor."""
    return {"factors": numerics.pool_multipliers(scale_x, scale_y, adaptive_counts(attrs, shape))}, attrs


def has_free_windows(shape: Shape) -> bool:
    """Return whether the windows of adaptive pooling depend on free sizes."""
    return not all(isinstance(size, int) for size in shape[2:])


def pixels_to_read(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield the requirements that no axis of the image is empty and that an int32 sum can hold all of its pixels."""
    pixels = graph.types[op.inputs[0]].shape[2:]
    for size in pixels:
        yield size - 1, "it has no pixel to read"
    yield (
        numel(pixels) * -1 + MAX_WINDOW_PIXELS,
        f"{numel(pixels)} pixels; sums of more than {MAX_WINDOW_PIXELS} leave int32",
    )


def _valid_factors(op: Op, graph: Graph, divisors: Sequence[int]) -> None:
    """Check that there is a factor for every divisor."""
    kind = graph.types[op.inputs[1]]
    if kind.shape != (len(divisors),):
        raise ValueError(f"%{op.inputs[1]}: {op.kind} expects {len(divisors)} factors, one per divisor, but got {kind}")


def valid_windows(op: Op, graph: Graph) -> None:
    """Check the factors of average pooling."""
    _valid_factors(op, graph, window_counts(op.attrs))


def valid_adaptive(op: Op, graph: Graph) -> None:
    """Check the factors of adaptive average pooling."""
    _valid_factors(op, graph, adaptive_counts(op.attrs, graph.types[op.inputs[0]].shape))


def adaptive_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the pooled image."""
    return (*shapes[0][:2], *attrs["size"])


def _max_pool(axes: int) -> OpDef:
    return OpDef(
        name=f"max_pool{axes}d",
        passes_factors=axes == 2,
        targets=(f"aten.max_pool{axes}d.default",),
        shares_qparams=True,
        bind=bind_pool,
        check=first_reason(_poolable(axes), require_complete_windows),
        infer=pool_shape,
        reference=max_pool_reference,
        types=TypeRule(((U8,),), (U8,)),
        layout=Layout.CHANNELS_LAST,
        batch_separable=True,
        window=True,
        min_pixels=1,
        in_float=lambda attrs: ("pool_f32", attrs),
        kernel="pool",
    )


def _avg_pool(axes: int) -> OpDef:
    return OpDef(
        name=f"avg_pool{axes}d",
        passes_factors=axes == 2,
        targets=(f"aten.avg_pool{axes}d.default",),
        bind=bind_pool,
        check=first_reason(_poolable(axes), require_positive_divisor, require_complete_windows),
        infer=pool_shape,
        reference=avg_pool_reference,
        constants=window_factors,
        types=TypeRule(((U8,), (F32,)), (U8,)),
        validate=valid_windows,
        layout=Layout.CHANNELS_LAST,
        batch_separable=True,
        window=True,
        min_pixels=1,
        in_float=lambda attrs: ("pool_f32", attrs),
        kernel="pool",
    )


def _adaptive_avg_pool(axes: int) -> OpDef:
    return OpDef(
        name=f"adaptive_avg_pool{axes}d",
        passes_factors=axes == 2,
        targets=(f"aten.adaptive_avg_pool{axes}d.default",),
        bind=bind_adaptive,
        check=first_reason(_poolable(axes), require_fixed_size),
        infer=adaptive_shape,
        reference=adaptive_reference,
        constants=adaptive_factors,
        types=TypeRule(((U8,), (F32,)), (U8,)),
        validate=valid_adaptive,
        sums_image=axes < 3,
        needs=pixels_to_read,
        loop=FloatLoop(bodies.average_image, bodies.require_whole_image) if axes < 3 else None,
        layout=Layout.CHANNELS_LAST,
        batch_separable=True,
        window=True,
        min_pixels=1,
        in_float=lambda attrs: ("pool_f32", attrs),
        kernel="pool",
    )


def _poolable(axes: int) -> Callable[[Call], str | None]:
    return first_reason(require_float_operands, rank(axes + 2), require_fixed_channels)


POOL_OPS = tuple(make(axes) for axes in (1, 2, 3) for make in (_max_pool, _avg_pool, _adaptive_avg_pool))
