"""Matrix products without an integer form, which stay in PyTorch; their records count multiply-accumulates."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio.ir import Attrs, Dim, Shape, numel
from intaglio.ops.opdef import OpDef


def matrix_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a product whose first operand is reduced along its last axis."""
    return numel(result) * shapes[0][-1]


def added_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a product that is added to the first operand."""
    return numel(result) * shapes[1][-1]


def summed_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a batch of products that are summed and added to the first operand."""
    return numel(shapes[1]) * shapes[2][-1]


def dot_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count one multiply-accumulate for every element of the first operand."""
    return numel(shapes[0])


def grouped_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of products of groups of rows.

    If both operands are matrices, the offsets divide the reduced axis into groups.
    """
    a, b = shapes[:2]
    return numel(a) * b[-1] if len(a) == len(b) == 2 else numel(result) * a[-1]


def bilinear_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of ``x1 @ weight[o] @ x2`` for every output."""
    return numel(result) * numel(shapes[2][1:])


def convolution_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a convolution, plain or, with the argument ``transposed``, transposed."""
    x, weight = shapes[:2]
    axes = len(weight) - 2
    of = x if attrs.get("transposed") else result
    return numel(of[: -axes - 1]) * numel(of[len(of) - axes :]) * numel(weight)


def time_batch_channel_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of a convolution whose result is [time, batch, channels]."""
    return numel(result[:2]) * numel(shapes[1])


def einsum_macs(attrs: Attrs, shapes: Sequence[Shape], result: Shape) -> Dim:
    """Count the multiply-accumulates of an einsum that is contracted from left to right; 0 for a single operand."""
    left, _, output = attrs["equation"].replace(" ", "").partition("->")
    terms = [_letters(term, len(shape)) for term, shape in zip(left.split(","), shapes, strict=True)]
    sizes: dict[str, Dim] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for letter, size in zip(term, shape, strict=True):
            if sizes.get(letter, 1) == 1:
                sizes[letter] = size
    last = set(_letters(output, len(result))) if "->" in attrs["equation"] else _implicit(terms)
    total: Dim = 0
    current = terms[0]
    for index, term in enumerate(terms[1:], start=2):
        met = dict.fromkeys((*current, *term))
        total = total + numel(tuple(sizes[letter] for letter in met))
        wanted = last.union(*terms[index:])
        current = [letter for letter in met if letter in wanted]
    return total


def _letters(term: str, rank: int) -> list[str]:
    """Return the labels of an operand's axes; the axes of an ellipsis are numbered from the last one."""
    before, dots, after = term.partition("...")
    if not dots:
        return list(term)
    count = rank - len(before) - len(after)
    return [*before, *(str(axis) for axis in reversed(range(count))), *after]


def _implicit(terms: Sequence[Sequence[str]]) -> set[str]:
    """Return the labels of the result of an equation without an arrow: those of an ellipsis, and unique ones."""
    found = [letter for term in terms for letter in term]
    return {letter for letter in found if letter.isdigit() or found.count(letter) == 1}


FLOAT_PRODUCT_OPS = (
    OpDef(
        "mm", ("aten.mm.default", "aten._int_mm.default"), ("self", "mat2"), macs=matrix_macs, computed_in_float32=True
    ),
    OpDef("batched_mm", ("aten.bmm.default",), ("self", "mat2"), macs=matrix_macs, computed_in_float32=True),
    OpDef("addmm", ("aten.addmm.default",), ("self", "mat1", "mat2"), macs=added_macs, computed_in_float32=True),
    OpDef("baddbmm", ("aten.baddbmm.default",), ("self", "batch1", "batch2"), macs=added_macs),
    OpDef("addbmm", ("aten.addbmm.default",), ("self", "batch1", "batch2"), macs=summed_macs),
    OpDef("mv", ("aten.mv.default",), ("self", "vec"), macs=matrix_macs),
    OpDef("addmv", ("aten.addmv.default",), ("self", "mat", "vec"), macs=added_macs),
    OpDef("dot", ("aten.dot.default", "aten.vdot.default"), ("self", "other"), macs=dot_macs),
    OpDef("vecdot", ("aten.linalg_vecdot.default",), ("x", "y"), macs=dot_macs),
    OpDef(
        "distances",
        ("aten.cdist.default", "aten._cdist_forward.default", "aten._euclidean_dist.default"),
        ("x1", "x2"),
        macs=matrix_macs,
    ),
    OpDef("conv_tbc", ("aten.conv_tbc.default",), ("self", "weight", "bias"), macs=time_batch_channel_macs),
    OpDef("inner", ("aten.inner.default",), ("self", "other"), macs=matrix_macs),
    OpDef("einsum", ("aten.einsum.default",), ("tensors",), variadic=True, macs=einsum_macs),
    OpDef("bilinear", ("aten.bilinear.default",), ("input1", "input2", "weight", "bias"), macs=bilinear_macs),
    OpDef(
        "grouped_mm",
        ("aten._grouped_mm.default", "aten._scaled_grouped_mm.default"),
        ("self", "mat2"),
        macs=grouped_macs,
    ),
    OpDef("grouped_mm_fallback", ("transformers.grouped_mm_fallback.default",), ("input", "weight"), macs=grouped_macs),
    OpDef(
        "convolution",
        ("aten.convolution.default", "aten._convolution.default", "aten.convolution_overrideable.default"),
        ("input", "weight"),
        macs=convolution_macs,
        computed_in_float32=True,
    ),
)
