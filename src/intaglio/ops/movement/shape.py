"""Reshape, slice, pad, concatenate, permute and expand; each consists of a few strided copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from intaglio.ir import Attrs, Dim, Graph, Op, Shape, TensorType, numel
from intaglio.ops.movement.aliasing import EXPANDED, FLIPPED, PERMUTED, RESHAPED, SLICED
from intaglio.ops.movement.data_movement import (
    MOVED,
    Copies,
    cat_copies,
    expand_copies,
    flip_copies,
    pad_copies,
    pad_inside,
    permute_copies,
    relayout_copies,
    slice_copies,
    slice_inside,
    slice_length,
    stays_inside,
)
from intaglio.ops.opdef import Call, Layout, OpDef, first_reason, rank, require_float_operands

END = 2**62
"""Slices without an end have the largest int64 as end; any bound this large means "to the end"."""
MAX_AXES = 6


# -- reshape ----------------------------------------------------------------------------------------------------------


def bind_reshape(call: Call) -> Attrs:
    """Return the shape of the result."""
    return {"shape": call.result}


def require_same_numel(call: Call) -> str | None:
    """Return why a reshape is refused: it must have the same number of elements for all free sizes."""
    if len(call.result) > MAX_AXES:
        return f"the result has {len(call.result)} axes; the kernel supports up to {MAX_AXES}"
    given, made = numel(call.shape()), numel(call.result)
    return (
        None
        if given == made
        else f"{given} elements become {made}, and it cannot be proved that these numbers are equal"
    )


def reshape_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Reshape in logical order."""
    return args[0].reshape(op.attrs["shape"])


def same_elements(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result; raise `ValueError` if the number of elements changes."""
    if numel(attrs["shape"]) != numel(shapes[0]):
        raise ValueError(f"reshape from {shapes[0]} to {attrs['shape']} changes the number of elements")
    return attrs["shape"]


# -- slice ------------------------------------------------------------------------------------------------------------


def bind_slice(call: Call) -> Attrs:
    """Return axis, start, stop and step with all defaults and negative indices resolved."""
    given, shape = call.arguments, call.shape()
    axis = int(given.get("dim", 0)) % len(shape)
    size = shape[axis]
    start, stop = given.get("start"), given.get("end")
    start, stop = 0 if start is None else start, END if stop is None else stop
    if isinstance(size, int) and isinstance(start, int) and isinstance(stop, int):
        start, stop, _ = slice(start, min(stop, END)).indices(size)
        stop = max(start, stop)
    else:
        start, stop = (_from_front(bound, size) for bound in (start, stop))
    return {"axis": axis, "start": start, "stop": stop, "step": int(given.get("step", 1))}


def _from_front(bound: Dim, size: Dim) -> Dim:
    """Return a bound of an axis of free size, counted from its front; symbolic bounds count from the front already."""
    if not isinstance(bound, int):
        return bound
    return size if bound >= END else bound + size if bound < 0 else bound


def require_exact_bounds(call: Call) -> str | None:
    """Return why a slice is refused: its bounds must give the size that torch found, which must not be zero."""
    bounds = bind_slice(call)
    made = call.result[bounds["axis"]]
    if made == 0:
        return "the result is empty"
    found = slice_length(bounds["start"], bounds["stop"], bounds["step"])
    return (
        None
        if found == made
        else f"the slice has size {made}, but from {bounds['start']} to {bounds['stop']} it would be {found}"
    )


def slice_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the slice."""
    shape = list(shapes[0])
    shape[attrs["axis"]] = slice_length(attrs["start"], attrs["stop"], attrs["step"])
    return tuple(shape)


def slice_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Take a slice."""
    index = [slice(None)] * args[0].ndim
    index[op.attrs["axis"]] = slice(op.attrs["start"], op.attrs["stop"], op.attrs["step"])
    return args[0][tuple(index)]


def flip_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Reverse an axis."""
    return np.ascontiguousarray(np.flip(args[0], op.attrs["axis"]))


# -- pad --------------------------------------------------------------------------------------------------------------

NUMPY_MODES: Mapping[str, Any] = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def bind_pad(call: Call) -> Attrs:
    """Return ``before`` and ``after`` of every axis in order of axes; torch counts from the last axis."""
    given, axes = list(call.arguments["pad"]), len(call.shape())
    pairs = [(0, 0)] * (axes - len(given) // 2) + [(given[i], given[i + 1]) for i in range(len(given) - 2, -1, -2)]
    mode = call.arguments.get("mode", "constant")
    return {"before": tuple(p[0] for p in pairs), "after": tuple(p[1] for p in pairs), "mode": mode}


def require_supported_padding(call: Call) -> str | None:
    """Return why padding is refused: mode, value and amounts must be supported."""
    given, bounds = call.arguments, bind_pad(call)
    if bounds["mode"] not in NUMPY_MODES:
        return f"the padding mode {bounds['mode']!r} is not supported"
    if bounds["mode"] == "constant" and given.get("value") not in (None, 0, 0.0):
        return f"the padding value is {given['value']}; only 0 is exact at every scale"
    amounts = [*bounds["before"], *bounds["after"]]
    if not all(isinstance(amount, int) for amount in amounts):
        return "the amount of padding is dynamic"
    return "the padding is negative (cropping)" if min(amounts) < 0 else None


def pad_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the padded shape; ``between`` zeros are inserted after every element but the last before the axis is
    padded.
    """
    between = attrs.get("between", (0,) * len(shapes[0]))
    sides = zip(shapes[0], attrs["before"], attrs["after"], between, strict=True)
    return tuple(d * (z + 1) + (b + a - z) for d, b, a, z in sides)


def pad_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Pad with the zero point, which is 0 for values that are not quantized, or with elements of the operand."""
    x, between = args[0], op.attrs.get("between")
    zero = 0 if types[0].q is None else types[0].qparams.zero
    if between:
        wide = [size * (z + 1) - z for size, z in zip(x.shape, between, strict=True)]
        spread = np.full(wide, zero, x.dtype)
        spread[tuple(slice(None, None, z + 1) for z in between)] = x
        x = spread
    widths = list(zip(op.attrs["before"], op.attrs["after"], strict=True))
    mode = NUMPY_MODES[op.attrs.get("mode", "constant")]
    return np.pad(x, widths, constant_values=zero) if mode == "constant" else np.pad(x, widths, mode=mode)


# -- cat --------------------------------------------------------------------------------------------------------------


def bind_cat(call: Call) -> Attrs:
    """Return the axis, counted from the front."""
    return {"axis": int(call.arguments.get("dim", 0)) % len(call.result)}


def require_nonempty_tensors(call: Call) -> str | None:
    """Return why a concatenation is refused: all operands must be tensors with elements."""
    if None in call.shapes:
        return "an operand is not a tensor"
    return "an operand is empty" if any(0 in call.shape(i) for i in range(len(call.shapes))) else None


def cat_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the shape of the result."""
    axis = attrs["axis"]
    total: Dim = 0
    for shape in shapes:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def cat_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Concatenate the operands."""
    return np.concatenate(args, op.attrs["axis"])


# -- permute, expand, shuffles ----------------------------------------------------------------------------------------


def bind_permute(call: Call) -> Attrs:
    """Return ``order``, the input axis of each result axis."""
    given, axes = call.arguments, len(call.shape())
    if "dims" in given:
        return {"order": tuple(dim % axes for dim in given["dims"])}
    order = list(range(axes))
    if "t.default" not in call.target:
        a, b = given["dim0"] % axes, given["dim1"] % axes
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    return {"order": tuple(order)}


def permute_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the permuted shape."""
    return tuple(shapes[0][axis] for axis in attrs["order"])


def permute_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Permute the axes."""
    return args[0].transpose(op.attrs["order"])


def bind_expand(call: Call) -> Attrs:
    """Return the shape of the result."""
    return {"shape": call.result}


def require_same_rank(call: Call) -> str | None:
    """Return why an expand is refused: it must not add axes."""
    return "the result has more axes than the operand" if len(call.shape()) != len(call.result) else None


def expand_shape(attrs: Attrs, shapes: Sequence[Shape]) -> Shape:
    """Return the expanded shape."""
    return attrs["shape"]


def expand_reference(op: Op, args: Sequence[np.ndarray], types: Sequence[TensorType], out: TensorType) -> np.ndarray:
    """Repeat axes of one element."""
    return np.broadcast_to(args[0], op.attrs["shape"])


def keeps_type(op: Op, graph: Graph) -> bool:
    """Return whether result and operand have the same type; a copy into another layout does not count."""
    return not op.attrs.get("relayout") and graph.types[op.output] == graph.types[op.inputs[0]]


def keeps_axes(op: Op, graph: Graph) -> bool:
    """Return whether a permutation keeps all axes in place."""
    return op.attrs["order"] == tuple(sorted(op.attrs["order"])) and keeps_type(op, graph)


def movement(name: str, copies: Copies, **fields: Any) -> OpDef:
    """Return the record of an operator that moves elements of any type.

    Args:
        name: Name of the operator.
        copies: Returns its strided copies, which must stay inside of its tensors.
        fields: Further fields of `OpDef`, which override the common ones.
    """
    common = {
        "shares_qparams": True,
        "types": MOVED,
        "validate": stays_inside(copies),
        "window": True,
        "layout": Layout.SAME,
        "batch_separable": True,
        "kernel": "move",
    }
    return OpDef(name=name, copies=copies, **{**common, **fields})


ANY_RANK = rank(*range(MAX_AXES + 1))
CAT = movement(
    "cat",
    cat_copies,
    targets=("aten.cat.default",),
    operands=("tensors",),
    variadic=True,
    bind=bind_cat,
    check=first_reason(require_float_operands, ANY_RANK, require_nonempty_tensors),
    infer=cat_shape,
    reference=cat_reference,
    changes_nothing=keeps_type,
    types=None,
)
RESHAPE = movement(
    "reshape",
    relayout_copies,
    keeps_last_axis=lambda attrs, axes: True,
    passes_factors=True,
    targets=(
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.reshape.default",
        "aten.flatten.using_ints",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.unsqueeze.default",
    ),
    bind=bind_reshape,
    check=first_reason(require_float_operands, ANY_RANK, require_same_numel),
    infer=same_elements,
    reference=reshape_reference,
    keeps_order=True,
    emit="reshape",
    changes_nothing=keeps_type,
    alias=RESHAPED,
    layout=Layout.ANY,
    validate=lambda op, graph: None,  # `infer` compares the numbers of elements
)
SLICE = movement(
    "slice",
    slice_copies,
    keeps_last_axis=lambda attrs, axes: attrs["axis"] != axes - 1,
    passes_factors=True,
    targets=("aten.slice.Tensor",),
    bind=bind_slice,
    check=first_reason(require_float_operands, ANY_RANK, require_exact_bounds),
    infer=slice_shape,
    reference=slice_reference,
    needs=slice_inside,
    changes_nothing=keeps_type,
    alias=SLICED,
)
FLIP = movement(
    "flip",
    flip_copies,
    keeps_last_axis=lambda attrs, axes: attrs["axis"] != axes - 1,
    infer=lambda attrs, shapes: shapes[0],
    reference=flip_reference,
    alias=FLIPPED,
    batch_separable=False,
)
PAD = movement(
    "pad",
    pad_copies,
    passes_factors=True,
    targets=("aten.pad.default", "aten.constant_pad_nd.default"),
    bind=bind_pad,
    check=first_reason(require_float_operands, ANY_RANK, require_supported_padding),
    infer=pad_shape,
    reference=pad_reference,
    needs=pad_inside,
    changes_nothing=keeps_type,
)
PERMUTE = movement(
    "permute",
    permute_copies,
    keeps_last_axis=lambda attrs, axes: attrs["order"][-1] == axes - 1,
    targets=("aten.permute.default", "aten.transpose.int", "aten.t.default"),
    bind=bind_permute,
    check=first_reason(require_float_operands, ANY_RANK),
    infer=permute_shape,
    reference=permute_reference,
    changes_nothing=keeps_axes,
    alias=PERMUTED,
    layout=Layout.ANY,
)
EXPAND = movement(
    "expand",
    expand_copies,
    targets=("aten.expand.default",),
    bind=bind_expand,
    check=first_reason(require_float_operands, ANY_RANK, require_same_rank),
    infer=expand_shape,
    reference=expand_reference,
    changes_nothing=keeps_type,
    alias=EXPANDED,
    batch_separable=False,
)
SHAPE_OPS = (CAT, RESHAPE, SLICE, FLIP, PAD, PERMUTE, EXPAND)
