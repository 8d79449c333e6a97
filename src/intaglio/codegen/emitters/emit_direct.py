"""Print indexing, and sums, extrema, order and products with Hadamard matrices along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from intaglio import numerics
from intaglio.codegen.context import Context, fill_result_halo
from intaglio.codegen.emitters.loop_variables import number
from intaglio.codegen.writer import Code
from intaglio.ir import Dim, DType, Shape
from intaglio.ops.direct.direct_operands import MAX_INDEXED_AXES
from intaglio.ops.movement.data_movement import Strides
from intaglio.plan.plan_records import Partition

ELEMENT = {DType.F32: "float", DType.I64: "int64_t", DType.BOOL: "uint8_t"}
ADDEND = {DType.F32: "float", DType.I64: "uint64_t"}
"""C type of a sum by the result's element type; unsigned integers wrap around."""


def emit_index(code: Code, partition: Partition, context: Context) -> None:
    """Print the copy of the elements at the indices of some axes, and fill the halo of the result."""
    op, types = partition.anchor, context.graph.types
    if context.halo(op.output):
        fill_result_halo(code, context, op.output, context.limits(op))
    source, *indices = op.inputs
    axes, place = op.attrs["axes"], op.attrs["place"]
    start, strides = context.strided(source)
    rest = [step for axis, step in enumerate(strides) if axis not in axes]
    result = types[op.output].shape
    added = len(result) - len(rest)
    own = [*rest[:place], *[0] * added, *rest[place:]]
    _places(code, op.output, start, own, context)
    rows = []
    for axis, name in zip(axes, indices, strict=True):
        at, steps = context.strided(name)
        shape = types[name].shape
        aligned: list[Dim] = [0] * (added - len(shape))
        aligned += [0 if size == 1 else step for size, step in zip(shape, steps, strict=True)]
        along = [*[0] * place, *aligned, *[0] * (len(rest) - place)]
        rows.append(_index(at, along, types[source].shape[axis], strides[axis], True, context))
    _copy(code, rows)


def emit_gather_elements(code: Code, partition: Partition, context: Context) -> None:
    """Print the copy of the elements at the indices along one axis."""
    op, types = partition.anchor, context.graph.types
    (source, index), axis = op.inputs, op.attrs["axis"]
    start, strides = context.strided(source)
    own = [0 if at == axis else step for at, step in enumerate(strides)]
    _places(code, op.output, start, own, context)
    at, steps = context.strided(index)
    _copy(code, [_index(at, steps, types[source].shape[axis], strides[axis], False, context)])


def emit_cumsum(code: Code, partition: Partition, context: Context) -> None:
    """Print the cumulative sums along an axis."""
    op, types = partition.anchor, context.graph.types
    _lines(code, partition, context, types[op.output].shape, keeps=True)
    given, made = types[op.inputs[0]].dtype, types[op.output].dtype
    code(f"cumulative_sums<{ELEMENT[given]}, {ELEMENT[made]}, {ADDEND[made]}>(&l, thread, threads);")


def emit_hadamard(code: Code, partition: Partition, context: Context) -> None:
    """Print the product of blocks of the last axis with a Hadamard matrix."""
    op = partition.anchor
    context.include("sequences/hadamard.h")
    _lines(code, partition, context, context.graph.types[op.output].shape, keeps=True)
    scale = number(float(numerics.hadamard_scale(op.attrs["size"])))
    code(f"hadamard_lines(&l, {op.attrs['size']}, {scale}, thread, threads);")


def emit_integer_sum(code: Code, partition: Partition, context: Context) -> None:
    """Print the sums along an axis."""
    op, types = partition.anchor, context.graph.types
    _lines(code, partition, context, types[op.inputs[0]].shape, keeps=op.attrs["keepdim"])
    code(f"sums_of_integers<{ELEMENT[types[op.inputs[0]].dtype]}>(&l, thread, threads);")


def emit_extremum(code: Code, partition: Partition, context: Context) -> None:
    """Print the search for the largest or smallest elements along an axis."""
    op, types = partition.anchor, context.graph.types
    _lines(code, partition, context, types[op.inputs[0]].shape, keeps=op.attrs["keepdim"])
    element = ELEMENT[types[op.inputs[0]].dtype]
    code(f"places_of_extrema<{element}>(&l, {int(op.attrs['largest'])}, thread, threads);")


def emit_argsort(code: Code, partition: Partition, context: Context) -> None:
    """Print the places of the elements along an axis in order."""
    op, types = partition.anchor, context.graph.types
    _lines(code, partition, context, types[op.inputs[0]].shape, keeps=True)
    element, count = ELEMENT[types[op.inputs[0]].dtype], context.dim(types[op.output].shape[op.attrs["axis"]])
    code(f"places_in_order<{element}>(&l, {int(op.attrs['descending'])}, {count}, thread, threads);")


def emit_scatter(code: Code, partition: Partition, context: Context) -> None:
    """Print the elements that are put to indices along an axis; threads divide the lines along it."""
    op, types = partition.anchor, context.graph.types
    (x, index, source), axis = op.inputs, op.attrs["axis"]
    _lines(code, partition, context, types[op.output].shape, keeps=True)
    (start, steps), (at, places) = context.strided(source), context.strided(index)
    if len(places) == 1:
        places = tuple(places[0] if place == axis else 0 for place in range(len(steps)))
    rows = []
    for values in (steps, places):
        rows.append(f"{_padded((*values[:axis], *values[axis + 1 :]), 0, context)}, {context.dim(values[axis])}")
    count = context.dim(types[source].shape[axis])
    code(f"const struct Scattered s = {{{start}, (const int64_t*){at}, {', '.join(rows)}, {count}}};")
    mode = f"SCATTER_{op.attrs['mode'].upper()}"
    code(f"scatter_lines<{ELEMENT[types[x].dtype]}>(&l, &s, {mode}, r->outside, thread, threads);")


def _places(code: Code, result: str, start: str, strides: Sequence[Dim], context: Context) -> None:
    """Print the `struct Places` of a result, read from ``start`` with these strides along its axes."""
    context.include("sequences/indexing.h")
    kind, (to, steps) = context.graph.types[result], context.strided(result)
    sizes = _padded(kind.shape, 1, context)
    code(f"const struct Places p = {{{sizes}, {start}, {to}, {_padded(strides, 0, context)}, ")
    code(f"    {_padded(steps, 0, context)}, {kind.dtype.bytes}}};")


def _index(at: str, steps: Sequence[Dim], limit: Dim, step: Dim, wraps: bool, context: Context) -> str:
    """Return the `struct Index` of an index tensor."""
    along = _padded(steps, 0, context)
    return f"{{(const int64_t*){at}, {along}, {context.dim(limit)}, {context.dim(step)}, {int(wraps)}}}"


def _copy(code: Code, rows: Sequence[str]) -> None:
    code(f"const struct Index indices[] = {{{', '.join(rows)}}};")
    code(f"copy_indexed(&p, indices, {len(rows)}, r->outside, thread, threads);")


def _lines(code: Code, partition: Partition, context: Context, shape: Shape, keeps: bool) -> None:
    """Print the `struct Lines` of an operand along an axis, which the result keeps or lacks."""
    context.include("sequences/indexing.h")
    op, axis = partition.anchor, partition.anchor.attrs["axis"]
    (start, given), (to, made) = context.strided(op.inputs[0]), context.strided(op.output)
    made = made if keeps else (*made[:axis], 0, *made[axis:])
    around: list[Strides] = [(*values[:axis], *values[axis + 1 :]) for values in (shape, given, made)]
    sizes, steps, to_steps = (_padded(values, int(i == 0), context) for i, values in enumerate(around))
    size, along, to_along = (context.dim(values[axis]) for values in (shape, given, made))
    code(f"const struct Lines l = {{{sizes}, {start}, {to}, {steps}, {to_steps}, {size}, {along}, {to_along}}};")


def _padded(values: Sequence[Dim], with_number: int, context: Context) -> str:
    """Return a braced list of one number per axis, with leading axes added."""
    padded = [*[with_number] * (MAX_INDEXED_AXES - len(values)), *values]
    return f"{{{', '.join(map(context.dim, padded))}}}"
