"""Images of floats: pooling, resizing and sampling at computed places, where no neighbour is quantized.

No recipe quantizes these operators. The records of a model's operators name them in `OpDef.in_float`. Every result is a
sum in a stated order, so that kernels give the bits of these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from math import prod

import numpy as np

from intaglio.ir import Attrs, Dim, Graph, Op, Shape, TensorType, evaluate
from intaglio.ir.types import F32
from intaglio.ir.verify import TypeRule
from intaglio.ops.images.pool import Window, adaptive_shape, adaptive_windows, pool_shape, windows
from intaglio.ops.images.resize import (
    ONE,
    bind_resize,
    linear,
    nearest,
    require_finite_factors,
    resized,
    source_step,
    valid_factors,
)
from intaglio.ops.opdef import Call, OpDef

FLOAT_TO_FLOAT = TypeRule(((F32,),), (F32,))

# ---- pooling --------------------------------------------------------------------------------------------------------


def float_pool_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the pooled image; adaptive pooling has an attribute ``size``."""
    return adaptive_shape(attrs, shapes) if "size" in attrs else pool_shape(attrs, shapes)


def is_maximum(attrs: Attrs) -> bool:
    """Return whether a pooling takes maxima: only their windows have a dilation."""
    return "dilation" in attrs


def float_windows(attrs: Attrs, axis: int, size: int, outputs: int) -> list[Window]:
    """Return the windows of averages along one axis."""
    return adaptive_windows(size, outputs) if "size" in attrs else windows(attrs, axis, size, outputs)


def pool_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Reduce windows tap by tap, in the order of their elements: maxima, where NaN wins, or sums divided by a count."""
    (x,), attrs = args, op.attrs
    shape = tuple(evaluate(dim, {}) for dim in float_pool_shape(attrs, [x.shape])[2:])
    axes = range(x.ndim - 2)
    taps = [_taps(attrs, axis, x.shape[axis + 2], shape[axis]) for axis in axes]
    found = np.full((*x.shape[:2], *shape), -np.inf if is_maximum(attrs) else 0, np.float32)
    for chosen in product(*(range(len(at)) for at, _ in taps)):
        value, inside = x, np.ones(1, np.bool_)
        for axis, (tap, (at, known)) in enumerate(zip(chosen, taps, strict=True)):
            value = value.take(at[tap], axis + 2)
            inside = inside & known[tap].reshape([-1 if axis == other else 1 for other in axes])
        with np.errstate(all="ignore"):
            larger = np.where((value > found) | np.isnan(value), value, found)
            met = larger if is_maximum(attrs) else found + value
        found = np.where(inside, met, found)
    return found if is_maximum(attrs) else found / _divisors(attrs, x.shape[2:], found.shape[2:])


def _taps(attrs: Attrs, axis: int, size: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices [taps, outputs] that windows read along an axis, and which of them are inside of it."""
    if is_maximum(attrs):
        starts = np.arange(outputs) * attrs["stride"][axis] - attrs["padding"][axis]
        at = starts + np.arange(attrs["kernel"][axis])[:, None] * attrs["dilation"][axis]
        inside = (at >= 0) & (at < size)
    else:
        found = float_windows(attrs, axis, size, outputs)
        longest = max((one.stop - one.start for one in found), default=0)
        at = np.array([one.start for one in found]) + np.arange(longest)[:, None]
        inside = at < np.array([one.stop for one in found])
    return np.clip(at, 0, size - 1), inside


def _divisors(attrs: Attrs, sizes: Sequence[int], outputs: Sequence[int]) -> np.ndarray:
    """Return the number of values by which each sum is divided, f32 of the shape of the result's axes."""
    if attrs.get("divisor"):
        return np.array(attrs["divisor"], np.float32)
    axes = enumerate(zip(sizes, outputs, strict=True))
    counts = [[one.count for one in float_windows(attrs, axis, *pair)] for axis, pair in axes]
    return np.array([prod(one) for one in product(*counts)], np.float32).reshape(tuple(outputs))


def some_pixels(op: Op, graph: Graph) -> Iterable[tuple[Dim, str]]:
    """Yield the requirement that no axis of the image is empty."""
    for size in graph.types[op.inputs[0]].shape[2:]:
        yield size - 1, "it has no pixel to read"


POOL_KEYS = (
    {"kernel", "stride", "padding", "ceil", "dilation"},
    {"kernel", "stride", "padding", "ceil", "include_pad", "divisor"},
    {"size"},
)


def valid_float_pool(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless the attributes are those of a pooling of one to three axes, one number per axis."""
    axes = len(graph.types[op.inputs[0]].shape) - 2
    numbers = [value for value in op.attrs.values() if isinstance(value, tuple)]
    plain = all(len(one) == axes and all(isinstance(n, int) and n >= 0 for n in one) for one in numbers)
    positive = [one for key in ("kernel", "stride", "size") for one in op.attrs.get(key, (1,))]
    if set(op.attrs) not in POOL_KEYS or not 1 <= axes <= 3 or not plain or min(positive) < 1:
        raise ValueError(f"pool_f32 of {graph.types[op.inputs[0]]} with the attributes {dict(op.attrs)}")


# ---- resizing -------------------------------------------------------------------------------------------------------

CUBIC = np.float32(-0.75)
"""Slope of the cubic convolution at one pixel from the centre, that of PyTorch."""


def resize_taps(attrs: Attrs, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices [outputs, taps] that outputs read along one axis, and their weights in float32."""
    size, result, scale = (attrs[name][axis] for name in ("sizes", "results", "scales"))
    if attrs["mode"] == "nearest":
        index = nearest(size, result, scale, images=len(attrs["sizes"]) == 2)[:, None]
        return index, np.ones(index.shape, np.float32)
    if attrs["mode"] == "linear":
        return linear(size, result, scale, attrs["align"])
    return cubic(size, result, scale, attrs["align"])


def cubic(size: int, result: int, scale: float | None, align: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices i32[result, 4] and weights f32[result, 4] of a cubic convolution; its ends are repeated."""
    place = np.arange(result, dtype=np.float32)
    if align:
        place = place * (np.float32(size - 1) / np.float32(result - 1) if result > 1 else np.float32(0))
    else:
        place = source_step(size, result, scale) * (place + np.float32(0.5)) - np.float32(0.5)
    below = np.floor(place)
    over = place - below
    far = [((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC for x in (over + ONE, (ONE - over) + ONE)]
    near = [((CUBIC + 2) * x - (CUBIC + 3)) * x * x + ONE for x in (over, ONE - over)]
    index = below.astype(np.int64)[:, None] + np.arange(-1, 3)
    return np.clip(index, 0, size - 1), np.stack([far[0], *near, far[1]], 1).astype(np.float32)


def resize_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Interpolate from the last axis to the first; terms are added in the order of their indices."""
    (value,) = args
    with np.errstate(all="ignore"):
        for axis in reversed(range(2, value.ndim)):
            index, weights = resize_taps(op.attrs, axis - 2)
            spread = [-1 if i == axis else 1 for i in range(value.ndim)]
            terms = [value.take(index[:, t], axis) * weights[:, t].reshape(spread) for t in range(index.shape[1])]
            value = terms[0]
            for term in terms[1:]:
                value = value + term
    return value


def valid_float_resize(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless there are sizes, results and scale factors for one to three axes, and a known mode."""
    axes = len(graph.types[op.inputs[0]].shape) - 2
    if set(op.attrs) != {"sizes", "results", "scales", "align", "mode"} or op.attrs["mode"] not in RESIZE_MODES:
        raise ValueError(f"resize_f32 with the attributes {dict(op.attrs)}")
    if not 1 <= axes <= 3 or len(op.attrs["sizes"]) != axes:
        raise ValueError(f"resize_f32 of {graph.types[op.inputs[0]]} with {len(op.attrs['sizes'])} sizes")
    valid_factors(op)


RESIZE_MODES = ("nearest", "linear", "cubic")

# ---- sampling at computed places ------------------------------------------------------------------------------------

FAR = np.float32(2**30)
"""Places further away are outside of any image."""


def bind_grid_sample(call: Call) -> Attrs:
    """Return whether places outside are those of the border, and whether -1 and 1 are the centres of the corners."""
    given = call.arguments
    return {"border": given["padding_mode"] == 1, "align": bool(given["align_corners"])}


def require_bilinear(call: Call) -> str | None:
    """Return why sampling stays in PyTorch: it takes images, bilinear interpolation, and zeros or borders around."""
    if [len(call.shape(operand)) for operand in (0, 1)] != [4, 4]:
        return "it samples volumes; the kernel samples images"
    if call.arguments["interpolation_mode"] != 0:
        return "its interpolation is not bilinear"
    return None if call.arguments["padding_mode"] in (0, 1) else "it reflects places outside of the image"


def grid_sample_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return [n, c, rows, columns] of an image [n, c, h, w] and places [n, rows, columns, 2]."""
    image, grid = shapes
    return (*image[:2], *grid[1:3])


def grid_sample_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Interpolate the four pixels around each place; a pixel outside of the image adds nothing."""
    x, grid = args
    with np.errstate(all="ignore"):
        columns, rows = (_along(grid[..., i], x.shape[3 - i], op.attrs) for i in (0, 1))
    found = np.zeros((*x.shape[:2], *grid.shape[1:3]), np.float32)
    image = np.arange(len(x))[:, None, None]
    for i, j in product((0, 1), (0, 1)):
        (at_y, weight_y), (at_x, weight_x) = rows[i], columns[j]
        inside = (at_y >= 0) & (at_y < x.shape[2]) & (at_x >= 0) & (at_x < x.shape[3])
        y, z = np.where(inside, at_y, 0), np.where(inside, at_x, 0)
        with np.errstate(all="ignore"):
            value = np.moveaxis(x[image, :, y, z], -1, 1)
            found = np.where(inside[:, None], found + value * (weight_y * weight_x)[:, None], found)
    return found


def _along(place: np.ndarray, size: int, attrs: Attrs) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the index before and behind each place along an axis, and their weights; index -2 is outside."""
    half, count = np.float32(0.5), np.float32(size)
    at = (place + ONE) * half * (count - ONE) if attrs["align"] else ((place + ONE) * count - ONE) * half
    if attrs["border"]:
        at = np.where(at > 0, at, np.float32(0))
        at = np.where(at < count - ONE, at, count - ONE)
    near = (at > -FAR) & (at < FAR)
    at = np.where(near, at, np.float32(0))
    below = np.floor(at)
    index = np.where(near, below.astype(np.int64), -2)
    return [(index, (below + ONE) - at), (index + 1, at - below)]


def valid_grid_sample(op: Op, graph: Graph) -> None:
    """Raise `ValueError` unless the places are pairs for each image."""
    image, grid = (graph.types[name].shape for name in op.inputs)
    fits = len(image) == len(grid) == 4 and image[0] == grid[0] and grid[3] == 2
    if not fits or {name: type(value) for name, value in op.attrs.items()} != {"border": bool, "align": bool}:
        raise ValueError(f"grid_sample of {image} at {grid} with the attributes {dict(op.attrs)}")


def _float_images(
    name: str,
    infer: Callable[[Attrs, Sequence[Shape]], Shape],
    reference: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType], TensorType], np.ndarray],
    validate: Callable[[Op, Graph], None],
) -> OpDef:
    return OpDef(
        name=name,
        infer=infer,
        reference=reference,
        types=FLOAT_TO_FLOAT,
        validate=validate,
        needs=some_pixels,
        window=name == "pool_f32",
        min_pixels=1,
        any_strides=True,
        emit=name,
        kernel="float_images",
    )


GRID_SAMPLE = OpDef(
    name="grid_sample",
    operands=("input", "grid"),
    infer=grid_sample_shape,
    reference=grid_sample_reference,
    types=TypeRule(((F32,), (F32,)), (F32,)),
    validate=valid_grid_sample,
    needs=some_pixels,
    any_strides=True,
    emit="grid_sample",
    kernel="float_images",
)


def _resized(mode: str) -> Callable[[Attrs], tuple[str, Attrs]]:
    return lambda attrs: ("resize_f32", {**attrs, "mode": mode})


FLOAT_IMAGE_OPS = (
    OpDef(
        name="grid_sampler",
        targets=("aten.grid_sampler.default", "aten.grid_sampler_2d.default"),
        operands=("input", "grid"),
        bind=bind_grid_sample,
        check=require_bilinear,
        in_float=lambda attrs: ("grid_sample", attrs),
    ),
    *(
        OpDef(
            name=name,
            targets=(f"aten.{name}.vec",),
            operands=("input",),
            bind=bind_resize,
            check=require_finite_factors,
            in_float=_resized(mode),
        )
        for name, mode in (("upsample_bicubic2d", "cubic"), ("upsample_trilinear3d", "linear"))
    ),
    _float_images("pool_f32", float_pool_shape, pool_reference, valid_float_pool),
    _float_images("resize_f32", resized, resize_reference, valid_float_resize),
    GRID_SAMPLE,
)
