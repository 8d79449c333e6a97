"""Channel and pixel shuffles, and depth windows as channels: each is one strided copy and changes no element."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import Attrs, Op, Shape, TensorType, evaluate
from intaglio.ops.movement.data_movement import (
    MOVED,
    pixel_shuffle_copies,
    pixel_unshuffle_copies,
    shuffle_copies,
    stays_inside,
    unfold_depth_copies,
)
from intaglio.ops.opdef import Call, Layout, OpDef, first_reason, fixed_channels, float_activations, rank


def whole_groups(call: Call) -> str | None:
    groups = call.arguments["groups"]
    return None if isinstance(groups, int) else f"groups {groups}"


def shuffle_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    n, c, *image = args[0].shape
    groups = op.attrs["groups"]
    return args[0].reshape(n, groups, c // groups, *image).swapaxes(1, 2).reshape(n, c, *image)


def pixel_shuffle_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    (n, c, h, w), r = shapes[0], attrs["factor"]
    return n, c // (r * r), h * r, w * r


def pixel_shuffle_meaning(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    (n, c, h, w), r = args[0].shape, op.attrs["factor"]
    split = args[0].reshape(n, c // (r * r), r, r, h, w)
    return split.transpose(0, 1, 4, 2, 5, 3).reshape(n, c // (r * r), h * r, w * r)


def pixel_unshuffle_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    (n, c, h, w), r = shapes[0], attrs["factor"]
    return n, c * (r * r), h // r, w // r


def pixel_unshuffle_meaning(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    (n, c, h, w), r = args[0].shape, op.attrs["factor"]
    split = args[0].reshape(n, c, h // r, r, w // r, r)
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(n, c * r * r, h // r, w // r)


def unfold_depth_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    n, c, d, h, w = shapes[0]
    taps = attrs["taps"]
    return n, c * taps, (d - attrs["dilation"] * (taps - 1) - 1) // attrs["stride"] + 1, h, w


def unfold_depth_meaning(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Depth windows as channels, tap by tap within each group: [n, (g, k, c), outputs, h, w]."""
    (n, c, d, h, w), attrs = args[0].shape, op.attrs
    outputs = evaluate(unfold_depth_shape(attrs, [args[0].shape])[2], {})
    grouped = args[0].reshape(n, attrs["groups"], 1, c // attrs["groups"], d, h, w)
    starts = [k * attrs["dilation"] for k in range(attrs["taps"])]
    taps = [grouped[..., a : a + attrs["stride"] * (outputs - 1) + 1 : attrs["stride"], :, :] for a in starts]
    return np.concatenate(taps, 2).reshape(n, c * attrs["taps"], outputs, h, w)


SHUFFLE = OpDef(
    name="shuffle",
    targets=("aten.channel_shuffle.default",),
    shares=True,
    bind=lambda call: {"groups": call.arguments["groups"]},
    check=first_reason(float_activations, rank(3, 4, 5), fixed_channels, whole_groups),
    meaning=shuffle_meaning,
    types=MOVED,
    validate=stays_inside(shuffle_copies),
    window=True,
    copies=shuffle_copies,
    layout=Layout.SAME,
    batch_separable=True,
    kernel="move",
)

PIXEL_SHUFFLE = OpDef(
    name="pixel_shuffle",
    targets=("aten.pixel_shuffle.default",),
    shares=True,
    bind=lambda call: {"factor": int(call.arguments["upscale_factor"])},
    check=first_reason(float_activations, rank(4), fixed_channels),
    infer=pixel_shuffle_shape,
    meaning=pixel_shuffle_meaning,
    types=MOVED,
    validate=stays_inside(pixel_shuffle_copies),
    window=True,
    copies=pixel_shuffle_copies,
    layout=Layout.SAME,
    batch_separable=True,
    kernel="move",
)

PIXEL_UNSHUFFLE = OpDef(
    name="pixel_unshuffle",
    targets=("aten.pixel_unshuffle.default",),
    shares=True,
    bind=lambda call: {"factor": int(call.arguments["downscale_factor"])},
    check=first_reason(float_activations, rank(4), fixed_channels),
    infer=pixel_unshuffle_shape,
    meaning=pixel_unshuffle_meaning,
    types=MOVED,
    validate=stays_inside(pixel_unshuffle_copies),
    window=True,
    copies=pixel_unshuffle_copies,
    layout=Layout.SAME,
    batch_separable=True,
    kernel="move",
)

UNFOLD_DEPTH = OpDef(
    name="unfold_depth",
    infer=unfold_depth_shape,
    meaning=unfold_depth_meaning,
    types=MOVED,
    validate=stays_inside(unfold_depth_copies),
    window=True,
    copies=unfold_depth_copies,
    layout=Layout.CHANNELS_LAST,
    kernel="move",
)
PIXEL_SHUFFLE_OPS = (SHUFFLE, PIXEL_SHUFFLE, PIXEL_UNSHUFFLE, UNFOLD_DEPTH)
