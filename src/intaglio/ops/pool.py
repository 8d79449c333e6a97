"""max, average and adaptive average pooling over rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from intaglio import numerics
from intaglio.ir import Dim, Op, QParams, Shape, TensorType, evaluate
from intaglio.ops.opdef import Attrs, Call, OpDef, first_reason, fixed_channels, float_activations, pair, rank


@dataclass(frozen=True)
class Window:
    """Rows (or columns) start..stop of the input that one output reads, and how many the mean divides by."""

    start: int
    stop: int
    count: int


def bind_pool(call: Call) -> Attrs:
    given = call.arguments
    kernel = pair(given["kernel_size"])
    attrs = {
        "kernel": kernel,
        "stride": pair(given["stride"]) if given.get("stride") else kernel,
        "padding": pair(given.get("padding", 0)),
        "ceil": bool(given.get("ceil_mode", False)),
    }
    if "max_pool" in call.target:
        return {**attrs, "dilation": pair(given.get("dilation", 1))}
    divisor = given.get("divisor_override")
    return {**attrs, "include_pad": bool(given.get("count_include_pad", True)), "divisor": divisor}


def positive_divisor(call: Call) -> str | None:
    divisor = call.arguments.get("divisor_override")
    return f"divisor_override {divisor}" if divisor is not None and divisor < 1 else None


def pooled(size: Dim, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> Dim:
    """Output rows of torch's pooling; in ceil mode the last window must start inside the input or its left padding."""
    span = size + (2 * padding - dilation * (kernel - 1) - 1)
    if not ceil:
        return span // stride + 1
    out = (span + (stride - 1)) // stride + 1
    if isinstance(out, int) and isinstance(size, int) and (out - 1) * stride >= size + padding:
        return out - 1
    return out


def pool_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    n, c, *image = shapes[0]
    dilation = attrs.get("dilation", (1, 1))
    sizes = [
        pooled(image[i], attrs["kernel"][i], attrs["stride"][i], attrs["padding"][i], dilation[i], attrs["ceil"])
        for i in (0, 1)
    ]
    return n, c, *sizes


def windows(attrs: Attrs, axis: int, size: int, outputs: int) -> list[Window]:
    """Windows of average pooling along one axis; the count includes padding, as torch counts it, if asked."""
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
    """Window i of adaptive pooling: floor(i * size / outputs) .. ceil((i + 1) * size / outputs)."""
    bounds = [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]
    return [Window(start, stop, stop - start) for start, stop in bounds]


def max_pool_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Padding never wins: it holds level 0, the least there is."""
    (kh, kw), (sy, sx), (py, px), (dy, dx) = (op.attrs[k] for k in ("kernel", "stride", "padding", "dilation"))
    n, c, h, w = args[0].shape
    rows, columns = (evaluate(dim, {}) for dim in pool_shape(op.attrs, [args[0].shape])[2:])
    below, right = (rows - 1) * sy + dy * (kh - 1) + 1, (columns - 1) * sx + dx * (kw - 1) + 1
    padded = np.zeros((n, c, max(below, h + py), max(right, w + px)), np.uint8)
    padded[:, :, py : py + h, px : px + w] = args[0]
    result = np.zeros((n, c, rows, columns), np.uint8)
    for ky in range(kh):
        for kx in range(kw):
            tap = padded[:, :, ky * dy :: sy, kx * dx :: sx][:, :, :rows, :columns]
            np.maximum(result, tap, out=result)
    return result


def mean_over(
    x: np.ndarray,
    factors: np.ndarray,
    q_in: QParams,
    out: TensorType,
    rows: list[Window],
    columns: list[Window],
    divisor: int | None = None,
) -> np.ndarray:
    """``clamp(rne(float32(sum(q) - n*zp) * factors[count - 1]) + zp)``; n values, count the divisor."""
    centred = x.astype(np.int64) - q_in.zero
    result = np.empty((*x.shape[:2], len(rows), len(columns)), np.uint8)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            acc = centred[:, :, row.start : row.stop, column.start : column.stop].sum((2, 3))
            factor = factors[0 if divisor else row.count * column.count - 1]
            q = out.levels
            result[:, :, i, j] = numerics.requantize(acc, factor, q.zero, q.qmin, q.qmax)
    return result


def avg_pool_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    h, w = args[0].shape[2:]
    oh, ow = (evaluate(dim, {}) for dim in pool_shape(op.attrs, [args[0].shape])[2:])
    rows, columns = windows(op.attrs, 0, h, oh), windows(op.attrs, 1, w, ow)
    return mean_over(args[0], args[1], types[0].levels, out, rows, columns, op.attrs["divisor"])


def adaptive_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    (h, w), (oh, ow) = args[0].shape[2:], op.attrs["size"]
    return mean_over(args[0], args[1], types[0].levels, out, adaptive_windows(h, oh), adaptive_windows(w, ow))


def bind_adaptive(call: Call) -> Attrs:
    return {"size": tuple(call.result[2:])}


def counts(op_name: str, attrs: Attrs, shape: Shape) -> list[int]:
    """Every divisor a mean may need, in the order its table of factors has them."""
    if op_name == "avg_pool2d":
        return [attrs["divisor"]] if attrs["divisor"] else list(range(1, attrs["kernel"][0] * attrs["kernel"][1] + 1))
    sizes = [evaluate(size, {}) for size in shape[2:]]
    rows, columns = (adaptive_windows(size, out) for size, out in zip(sizes, attrs["size"], strict=True))
    return list(range(1, max(w.count for w in rows) * max(w.count for w in columns) + 1))


def adaptive_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return (*shapes[0][:2], *attrs["size"])


POOLABLE = first_reason(float_activations, rank(4), fixed_channels)
MAX_POOL2D = OpDef(
    name="max_pool2d",
    targets=("aten.max_pool2d.default",),
    shares=True,
    bind=bind_pool,
    check=POOLABLE,
    infer=pool_shape,
    meaning=max_pool_meaning,
    kernel="pool",
)
AVG_POOL2D = OpDef(
    name="avg_pool2d",
    targets=("aten.avg_pool2d.default",),
    bind=bind_pool,
    check=first_reason(POOLABLE, positive_divisor),
    infer=pool_shape,
    meaning=avg_pool_meaning,
    kernel="pool",
)
ADAPTIVE_AVG_POOL2D = OpDef(
    name="adaptive_avg_pool2d",
    targets=("aten.adaptive_avg_pool2d.default",),
    bind=bind_adaptive,
    check=POOLABLE,
    infer=adaptive_shape,
    meaning=adaptive_meaning,
    kernel="pool",
)
OPS = (MAX_POOL2D, AVG_POOL2D, ADAPTIVE_AVG_POOL2D)
