"""reshape, slice, pad: levels move, they do not change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from intaglio.ir import Op, Shape, TensorType, numel
from intaglio.ops.opdef import Attrs, Call, OpDef, first_reason, fixed_channels, float_activations, rank

END = 2**62
"""Slices without an end carry the largest int64; anything this large means "to the end"."""


def bind_reshape(call: Call) -> Attrs:
    return {"shape": call.result}


def fixed_rows(call: Call) -> str | None:
    """Both shapes are free in the batch axis only."""
    free = [dim for shape in (call.shape(), call.result) for dim in shape[1:] if not isinstance(dim, int)]
    return f"free dimension {free[0]} inside a reshape" if free else None


def reshape_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    fixed = [dim if isinstance(dim, int) else -1 for dim in op.attrs["shape"]]
    return args[0].reshape(fixed)


def bind_slice(call: Call) -> Attrs:
    """(axis, start, stop, step) with every default and negative index resolved."""
    given, shape = call.arguments, call.shape()
    axis = int(given.get("dim", 0)) % len(shape)
    size = shape[axis]
    start, stop = given.get("start"), given.get("end")
    start, stop = 0 if start is None else start, END if stop is None else stop
    if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int):
        start, stop, _ = slice(start, min(stop, END)).indices(size)
    return {"axis": axis, "start": start, "stop": max(start, stop), "step": int(given.get("step", 1))}


def fixed_slice(call: Call) -> str | None:
    bounds = bind_slice(call)
    if isinstance(call.shape()[bounds["axis"]], int) and all(isinstance(b, int) for b in bounds.values()):
        return "an empty result" if call.result[bounds["axis"]] == 0 else None
    return "a slice of the free batch"


def slice_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    shape = list(shapes[0])
    shape[attrs["axis"]] = -(-(attrs["stop"] - attrs["start"]) // attrs["step"])
    return tuple(shape)


def slice_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    index = [slice(None)] * args[0].ndim
    index[op.attrs["axis"]] = slice(op.attrs["start"], op.attrs["stop"], op.attrs["step"])
    return args[0][tuple(index)]


def bind_pad(call: Call) -> Attrs:
    """``before`` and ``after`` of every axis, in axis order; torch counts from the last axis."""
    given, axes = list(call.arguments["pad"]), len(call.shape())
    pairs = [(0, 0)] * (axes - len(given) // 2) + [(given[i], given[i + 1]) for i in range(len(given) - 2, -1, -2)]
    return {"before": tuple(p[0] for p in pairs), "after": tuple(p[1] for p in pairs)}


def zero_pad(call: Call) -> str | None:
    given = call.arguments
    if given.get("mode", "constant") != "constant":
        return f"padding mode {given['mode']!r}; the kernel pads with a constant"
    if given.get("value") not in (None, 0, 0.0):
        return f"padding with {given['value']}; only 0 is exact at any scale"
    bounds = bind_pad(call)
    amounts = [*bounds["before"], *bounds["after"]]
    if not all(isinstance(amount, int) for amount in amounts):
        return "padding by a free amount"
    if min(amounts) < 0:
        return "negative padding (cropping)"
    return "padding of the free batch" if bounds["before"][0] or bounds["after"][0] else None


def pad_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    return tuple(d + (b + a) for d, b, a in zip(shapes[0], attrs["before"], attrs["after"], strict=True))


def pad_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    widths = list(zip(op.attrs["before"], op.attrs["after"], strict=True))
    return np.pad(args[0], widths, constant_values=types[0].levels.zero)


def same_elements(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    if numel(attrs["shape"]) != numel(shapes[0]):
        raise ValueError(f"reshape of {shapes[0]} to {attrs['shape']}")
    return attrs["shape"]


def bind_cat(call: Call) -> Attrs:
    return {"axis": int(call.arguments.get("dim", 0)) % len(call.result)}


def along_channels(call: Call) -> str | None:
    if None in call.shapes:
        return "an operand is not a tensor"
    last = len(call.result) - 1
    wanted = 1 if last == 3 else last
    if last == 0 or bind_cat(call)["axis"] != wanted:
        return f"concatenation along axis {bind_cat(call)['axis']}; the kernel joins channels"
    return "an empty operand" if any(0 in call.shape(i) for i in range(len(call.shapes))) else None


def cat_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    axis = attrs["axis"]
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def cat_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    return np.concatenate(args, op.attrs["axis"])


CAT = OpDef(
    name="cat",
    targets=("aten.cat.default",),
    operands=("tensors",),
    variadic=True,
    shares=True,
    bind=bind_cat,
    check=first_reason(float_activations, rank(2, 3, 4), fixed_channels, along_channels),
    infer=cat_shape,
    meaning=cat_meaning,
    kernel="move",
)
def whole_groups(call: Call) -> str | None:
    groups = call.arguments["groups"]
    return None if isinstance(groups, int) else f"groups {groups}"


def shuffle_meaning(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    n, c, h, w = args[0].shape
    groups = op.attrs["groups"]
    return args[0].reshape(n, groups, c // groups, h, w).swapaxes(1, 2).reshape(n, c, h, w)


SHUFFLE = OpDef(
    name="shuffle",
    targets=("aten.channel_shuffle.default",),
    shares=True,
    bind=lambda call: {"groups": call.arguments["groups"]},
    check=first_reason(float_activations, rank(4), fixed_channels, whole_groups),
    meaning=shuffle_meaning,
    kernel="move",
)
RESHAPE = OpDef(
    name="reshape",
    targets=(
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.unsqueeze.default",
    ),
    shares=True,
    bind=bind_reshape,
    check=first_reason(float_activations, fixed_rows),
    infer=same_elements,
    meaning=reshape_meaning,
    kernel="move",
)
SLICE = OpDef(
    name="slice",
    targets=("aten.slice.Tensor",),
    shares=True,
    bind=bind_slice,
    check=first_reason(float_activations, rank(4), fixed_channels, fixed_slice),
    infer=slice_shape,
    meaning=slice_meaning,
    kernel="move",
)
PAD = OpDef(
    name="pad",
    targets=("aten.pad.default", "aten.constant_pad_nd.default"),
    shares=True,
    bind=bind_pad,
    check=first_reason(float_activations, rank(4), fixed_channels, zero_pad),
    infer=pad_shape,
    meaning=pad_meaning,
    kernel="move",
)
OPS = (CAT, SHUFFLE, RESHAPE, SLICE, PAD)
