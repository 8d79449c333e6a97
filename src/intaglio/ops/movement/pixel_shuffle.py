"""Channel shuffle, pixel shuffle and unshuffle, and depth windows as channels; each is one strided copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import Attrs, Op, Shape, TensorType, evaluate
from intaglio.ops.movement.data_movement import (
    pixel_shuffle_copies,
    pixel_unshuffle_copies,
    shuffle_copies,
    unfold_depth_copies,
)
from intaglio.ops.movement.shape import movement
from intaglio.ops.opdef import Call, Layout, first_reason, rank, require_fixed_channels, require_float_operands


def require_fixed_groups(call: Call) -> str | None:
    """Return why a channel shuffle is refused: the number of groups must be fixed."""
    groups = call.arguments["groups"]
    return None if isinstance(groups, int) else f"the number of groups, {groups}, is dynamic"


def shuffle_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Shuffle the channels."""
    n, c, *image = args[0].shape
    groups = op.attrs["groups"]
    return args[0].reshape(n, groups, c // groups, *image).swapaxes(1, 2).reshape(n, c, *image)


def pixel_shuffle_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    (n, c, h, w), r = shapes[0], attrs["factor"]
    return n, c // (r * r), h * r, w * r


def pixel_shuffle_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Move channels to pixels."""
    (n, c, h, w), r = args[0].shape, op.attrs["factor"]
    split = args[0].reshape(n, c // (r * r), r, r, h, w)
    return split.transpose(0, 1, 4, 2, 5, 3).reshape(n, c // (r * r), h * r, w * r)


def pixel_unshuffle_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    (n, c, h, w), r = shapes[0], attrs["factor"]
    return n, c * (r * r), h // r, w // r


def pixel_unshuffle_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Move pixels to channels."""
    (n, c, h, w), r = args[0].shape, op.attrs["factor"]
    split = args[0].reshape(n, c, h // r, r, w // r, r)
    return split.transpose(0, 1, 3, 5, 2, 4).reshape(n, c * r * r, h // r, w // r)


def unfold_depth_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return [n, channels * taps, depth windows, h, w]."""
    n, c, d, h, w = shapes[0]
    taps = attrs["taps"]
    return n, c * taps, (d - attrs["dilation"] * (taps - 1) - 1) // attrs["stride"] + 1, h, w


def unfold_depth_reference(
    op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType
) -> np.ndarray:
    """Unfold depth windows into channels, tap by tap within each group: [n, (g, k, c), outputs, h, w]."""
    (n, c, d, h, w), attrs = args[0].shape, op.attrs
    outputs = evaluate(unfold_depth_shape(attrs, [args[0].shape])[2], {})
    grouped = args[0].reshape(n, attrs["groups"], 1, c // attrs["groups"], d, h, w)
    starts = [k * attrs["dilation"] for k in range(attrs["taps"])]
    taps = [grouped[..., a : a + attrs["stride"] * (outputs - 1) + 1 : attrs["stride"], :, :] for a in starts]
    return np.concatenate(taps, 2).reshape(n, c * attrs["taps"], outputs, h, w)


SHUFFLE = movement(
    "shuffle",
    shuffle_copies,
    targets=("aten.channel_shuffle.default",),
    bind=lambda call: {"groups": call.arguments["groups"]},
    check=first_reason(require_float_operands, rank(3, 4, 5), require_fixed_channels, require_fixed_groups),
    reference=shuffle_reference,
)

PIXEL_SHUFFLE = movement(
    "pixel_shuffle",
    pixel_shuffle_copies,
    targets=("aten.pixel_shuffle.default",),
    bind=lambda call: {"factor": int(call.arguments["upscale_factor"])},
    check=first_reason(require_float_operands, rank(4), require_fixed_channels),
    infer=pixel_shuffle_shape,
    reference=pixel_shuffle_reference,
)

PIXEL_UNSHUFFLE = movement(
    "pixel_unshuffle",
    pixel_unshuffle_copies,
    targets=("aten.pixel_unshuffle.default",),
    bind=lambda call: {"factor": int(call.arguments["downscale_factor"])},
    check=first_reason(require_float_operands, rank(4), require_fixed_channels),
    infer=pixel_unshuffle_shape,
    reference=pixel_unshuffle_reference,
)

UNFOLD_DEPTH = movement(
    "unfold_depth",
    unfold_depth_copies,
    infer=unfold_depth_shape,
    reference=unfold_depth_reference,
    layout=Layout.CHANNELS_LAST,
    shares_qparams=False,
    batch_separable=False,
)
PIXEL_SHUFFLE_OPS = (SHUFFLE, PIXEL_SHUFFLE, PIXEL_UNSHUFFLE, UNFOLD_DEPTH)
