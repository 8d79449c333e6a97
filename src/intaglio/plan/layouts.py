"""Layout assignment for every internal tensor.

Tensors that image operators use are channels last, with a halo as wide as their widest zero-padding reader needs.
Tensors that a linear layer reads or writes are row-major, and so are all tensors that pointwise operators connect to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from intaglio.ir import Dim, DType, Graph, Op, TensorType, evaluate, fresh
from intaglio.ir.disjoint_sets import DisjointSets
from intaglio.ir.phases import axis_phases
from intaglio.ops import Layout, op_def
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.movement.shape import PERMUTE
from intaglio.ops.products.attention import is_attention_over
from intaglio.plan.buffers import Buffer, is_identity_copy
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import Choice


def copy_padded_inputs(plan: Plan) -> Plan:
    """Copy the caller's quantized tensors that a convolution pads, because they have no room for a halo."""
    graph = plan.graph
    outside, types, copies, ops = graph.external_values(), dict(graph.types), dict[str, str](), list[Op]()
    for op in graph.ops:
        inputs = op.inputs
        if op_def(op).convolves and inputs[0] in outside and any(halo_of(op, graph)):
            x = inputs[0]
            if x not in copies:
                copies[x] = fresh(types, f"{x}_inside")
                types[copies[x]] = types[x]
                attrs = {"shape": types[x].shape, "relayout": True}
                ops.append(Op("reshape", (x,), (copies[x],), attrs, origin=op.origin))
            inputs = (copies[x], *inputs[1:])
        ops.append(replace(op, inputs=inputs))
    return replace(plan, graph=graph.replace(ops=tuple(ops), types=types)) if copies else plan


def assign_layouts(plan: Plan) -> Plan:
    """Assign a buffer to every quantized or internal value, and determine which values are row-major.

    A buffer has a halo only if a convolution pads it. Results of data movement without a copy become aliases.
    """
    graph = plan.graph
    halos, halo_reasons = _widest_halos(graph)
    layouts, inside, outside = assigned_layouts(graph), _kernel_only_values(graph), graph.external_values()
    row_major = frozenset(name for name, (is_row_major, _) in layouts.items() if is_row_major) | _keys_and_values(graph)
    buffers: dict[str, Buffer] = {}
    for name in [*graph.inputs, *(output for op in graph.ops for output in op.outputs)]:
        kind = graph.types[name]
        if name in inside or (kind.dtype in (DType.U8, DType.S8) and kind.q is not None and name not in outside):
            buffers[name] = Buffer(name, kind.shape, kind.dtype, halos.get(name, (0, 0)), None, name in row_major)
    alias_reasons = _assign_aliases(graph, buffers)
    plan = replace(plan, buffers=buffers, row_major=row_major, strided=_strided_inputs(graph))
    plan = plan.with_reasons(Choice.LAYOUT, {name: layouts[name][1] for name in buffers if name in layouts})
    plan = plan.with_reasons(Choice.HALO, {name: why for name, why in halo_reasons.items() if name in buffers})
    return plan.with_reasons(Choice.ALIAS, alias_reasons)


def _strided_inputs(graph: Graph) -> frozenset[str]:
    """Return the quantized inputs that only concatenations read, which copy them with any strides.

    Keys and values of a cache are such inputs: a copy into a layout of the program before the call would be as large as
    the cache.
    """
    return _inputs_read_by(graph, lambda reader, _: op_def(reader).moves_data and op_def(reader).variadic)


def _keys_and_values(graph: Graph) -> frozenset[str]:
    """Return the quantized inputs that only attention reads, as keys or values. They are row-major, so that it reads
    them where they are."""
    return _inputs_read_by(graph, is_attention_over)


def _inputs_read_by(graph: Graph, reads: Callable[[Op, str], bool]) -> frozenset[str]:
    """Return the quantized inputs that are read by some operators only, in the layout that these want.

    Args:
        graph: the graph.
        reads: returns whether an operator, which reads a value, is one of them.
    """
    users = graph.users()

    def is_read(name: str) -> bool:
        copies = users[name]
        readers = [(reader, op.output) for op in copies for reader in users[op.output]]
        return (
            name not in graph.outputs
            and bool(readers)
            and all(op.attrs.get("relayout") and op.output not in graph.outputs for op in copies)
            and all(reads(reader, value) for reader, value in readers)
        )

    inputs = [name for name in graph.inputs if graph.types[name].q is not None]
    return frozenset(name for name in inputs if 0 < len(graph.types[name].shape) <= 5 and is_read(name))


def _widest_halos(graph: Graph) -> tuple[dict[str, tuple[int, int]], dict[str, str]]:
    """Return the widest halo that the readers of each value need, and which reader that is."""
    halos: dict[str, tuple[int, int]] = {}
    reasons: dict[str, str] = {}
    for op in graph.ops:
        if op_def(op).convolves:
            (y, x), (wide_y, wide_x) = halo_of(op, graph), halos.get(op.inputs[0], (0, 0))
            halos[op.inputs[0]] = max(y, wide_y), max(x, wide_x)
            if y > wide_y or x > wide_x:
                reasons[op.inputs[0]] = f"{_op_text(op)} pads with the zero point"
    return halos, reasons


def _assign_aliases(graph: Graph, buffers: dict[str, Buffer]) -> dict[str, str]:
    """Make aliases of the results of data movement without a copy and of operands of concatenations; return the
    reasons.
    """
    reasons: dict[str, str] = {}
    for op in graph.ops:
        if not op_def(op).moves_data or not {op.inputs[0], op.output} <= buffers.keys():
            continue
        if is_identity_copy(op, buffers[op.inputs[0]], buffers[op.output]):
            source = buffers[op.inputs[0]]
            buffers[op.output] = replace(buffers[op.output], alias=source.alias or source.value)
            reasons[op.output] = f"the {op.kind} copies no bytes"
    for op in graph.ops:
        if op_def(op).variadic and op.output in buffers and buffers[op.output].channels_last and op.attrs["axis"] == 1:
            _alias_concatenated_operands(op, graph, buffers, reasons)
    return reasons


def _kernel_only_values(graph: Graph) -> frozenset[str]:
    """Return the values without quantization parameters that only kernels write and read, not callers."""
    called = [op for op in graph.ops if op.is_called_back]
    seen = {*graph.outputs, *(name for op in called for name in (*op.inputs, *op.outputs))}
    made = (name for op in graph.ops for name in op.outputs if graph.types[name].q is None)
    return frozenset(name for name in made if name not in seen)


def _alias_concatenated_operands(cat: Op, graph: Graph, buffers: dict[str, Buffer], reasons: dict[str, str]) -> None:
    """Make operands of a concatenation aliases of its parts, if it is their only reader and their kernels allow it."""
    users, makers = graph.users(), graph.makers()
    channel: Dim = 0
    for name in cat.inputs:
        if name not in buffers:
            return
    for name in cat.inputs:
        buffer, alone = buffers[name], len(users[name]) == cat.inputs.count(name) == 1 and name not in graph.outputs
        if not isinstance(channel, int):
            return
        if (
            alone
            and buffer.channels_last
            and buffer.alias is None
            and _writes_any_pixel_stride(makers.get(name), makers)
        ):
            buffers[name] = replace(buffer, alias=cat.output, first_channel=channel)
            reasons[name] = "only the concatenation reads it, so its kernel writes there"
        channel += buffer.channels()


def _writes_any_pixel_stride(maker: Op | None, makers: Mapping[str, Op]) -> bool:
    """Return whether the kernel of an operator can write pixels at any distance, like convolutions and pools."""
    if maker is not None and op_def(maker).quantizes_accumulator:
        maker = makers.get(maker.inputs[0])
    return maker is not None and op_def(maker).writes_any_pixel_stride


def halo_of(op: Op, graph: Graph) -> tuple[int, int]:
    """Return the rows and columns of padding that a convolution reads; 1-d inputs have no padding rows."""
    kernel = tuple(evaluate(size, {}) for size in graph.types[op.inputs[1]].shape[2:])
    if op_def(op).transposed:
        reach = [max(max(p.before, p.after) for p in axis) for axis in axis_phases(op, kernel)]
    else:
        padding = op.attrs["padding"]
        reach = [max(padding[2 * axis : 2 * axis + 2]) for axis in range(len(kernel))]
    return (reach[-2] if len(reach) > 1 else 0), reach[-1]


def assigned_layouts(graph: Graph) -> dict[str, tuple[bool, str]]:
    """Return whether each value of three to five axes is row-major, and why.

    Values that linear layers use are row-major. Of the values that no image operator uses, those with other than four
    axes or a free second axis are row-major, too.
    """
    groups = _components(graph)
    near_images = _groups_beside_row_major_permutes(graph, groups.same_layout, groups.with_layout)
    free = _free_channels(graph, groups.same_layout)

    def layout(kind: TensorType, group: str) -> tuple[bool, str]:
        rank = len(kind.shape)
        if group in groups.linear:
            return True, f"row-major for {groups.linear[group]}"
        if group in groups.image:
            return False, f"channels last for {groups.image[group]}"
        if group in near_images:
            return True, "row-major, so that a permutation from or to images copies no bytes"
        if group in free or not isinstance(kind.shape[1], int):  # channels last needs a fixed number of channels
            return True, "row-major: the number of channels is dynamic"
        return (True, f"row-major: {rank} axes") if rank != 4 else (False, "channels last: four axes")

    laid = {name: kind for name, kind in graph.types.items() if _layout_is_free(kind)}
    found = {name: layout(kind, groups.same_layout.find(name)) for name, kind in laid.items()}
    for op in graph.ops:
        if op.attrs.get("relayout") and op.output in graph.outputs and found.get(op.inputs[0], (False, ""))[0]:
            found[op.output] = True, f"row-major like %{op.inputs[0]}, of which it is a copy for the caller"
    return found


def _groups_beside_row_major_permutes(graph: Graph, same_layout: DisjointSets, decided: set[str]) -> set[str]:
    """Return undecided groups at the row-major end of a permutation from or to a channels-last image.

    As row-major tensors, they make the permutation a no-op.
    """
    hinted = set()
    for op in graph.ops:
        if op_def(op) is PERMUTE and (ends := _row_major_side(op)) is not None:
            hinted.add(same_layout.find(ends))
    return hinted - decided


def _free_channels(graph: Graph, same_layout: DisjointSets) -> set[str]:
    """Return groups whose second axis is free and whose last axis is fixed; row-major pixels then have a fixed size."""
    laid = [
        (name, kind.shape)
        for name, kind in graph.types.items()
        if _layout_is_free(kind) and name not in graph.constants
    ]
    return {same_layout.find(n) for n, shape in laid if not isinstance(shape[1], int) and isinstance(shape[-1], int)}


def _row_major_side(op: Op) -> str | None:
    """Return the operand or result of a permutation whose channels are last, if they are second on the other side."""
    order = op.attrs["order"]
    axes = len(order)
    if order == (0, *range(2, axes), 1):
        return op.output
    return op.inputs[0] if order == (0, axes - 1, *range(1, axes - 1)) else None


def separate_layouts(graph: Graph) -> tuple[Graph, int]:
    """Insert reshapes that copy between layouts where linear layers and image operators use the same values."""
    groups = _components(graph)
    both = groups.image.keys() & groups.linear.keys()
    users, types, renamed = graph.users(), dict(graph.types), dict[str, str]()
    chains = [
        _with_accumulator_reader(op, users)
        for op in graph.ops
        if op_def(op).layout_of(op, graph.types) is Layout.ROW_MAJOR
    ]
    cut = {
        link.outputs: link
        for chain in chains
        if any(groups.same_layout.find(name) in both for link in chain for name in (*link.inputs, *link.outputs))
        for link in chain
    }
    ops: list[Op] = []
    moved: dict[str, str] = {}

    def copy(name: str, stem: str, source: Op) -> str:
        result = fresh(types, stem)
        types[result] = types[name]
        attrs = {"shape": types[name].shape, "relayout": True}
        ops.append(Op("reshape", (name,), (result,), attrs, origin=source.origin))
        return result

    for op in graph.ops:
        inputs = tuple(renamed.get(name, name) for name in op.inputs)
        if op.outputs in cut:
            for name in inputs:
                if (
                    _requires_row_major(op, types[name])
                    and _layout_is_free(types[name])
                    and name not in {*moved, *graph.constants}
                ):
                    moved[name] = copy(name, f"{name}_rows", op)
            inputs = tuple(moved.get(name, name) for name in inputs)
        ops.append(Op(op.kind, inputs, op.outputs, op.attrs, op.body, op.origin))
        for name in op.outputs:
            is_float = types[name].dtype is DType.F32 and _layout_is_free(types[name])  # loops pass layouts on
            if op.outputs in cut and (is_float or _requires_row_major(op, types[name])):
                renamed[name] = copy(name, f"{name}_image", op)
    outputs = tuple(renamed.get(name, name) for name in graph.outputs)
    return graph.replace(ops=tuple(ops), types=types, outputs=outputs), len(moved) + len(renamed)


def _requires_row_major(op: Op, kind: TensorType) -> bool:
    """Return whether a value must be row-major: a quantized value, or an operand or result of a float product."""
    return kind.dtype is DType.U8 or op_def(op).multiplies_floats


@dataclass
class _Groups:
    """Values that must share a layout, as disjoint sets, and which operator requires a layout for a set.

    Attributes:
        same_layout: The sets.
        image: Sets that must be channels last, with the operator that requires it.
        linear: Sets that must be row-major, with the operator that requires it.
    """

    same_layout: DisjointSets
    image: dict[str, str]
    linear: dict[str, str]

    @property
    def with_layout(self) -> set[str]:
        """Return the sets for which some operator requires a layout."""
        return {*self.image, *self.linear}

    def required(self, layout: Layout) -> dict[str, str]:
        """Return the sets that must have this layout, with the operators that require it."""
        return self.image if layout is Layout.CHANNELS_LAST else self.linear


def _components(graph: Graph) -> _Groups:
    """Join values that must share a layout, and collect the layouts that operators require."""
    same_layout, touched = DisjointSets(), list[tuple[Layout, str, Op]]()
    given = {*graph.inputs, *(name for op in graph.ops if op.is_island for name in op.outputs)}
    for op in graph.ops:
        read = [name for name in op.inputs if name not in graph.constants and _layout_is_free(graph.types[name])]
        made = [name for name in op.outputs if _layout_is_free(graph.types[name])]
        wanted = op_def(op).layout_of(op, graph.types)
        if op_def(op).reads_any_strides:
            read = []
        if wanted is Layout.SAME:
            ends = [*read, *made]
            if op.is_loop:
                ends = [name for name in ends if graph.types[name].shape == space(body_of(op)) and name not in given]
            for name in ends[1:]:
                same_layout.join(name, ends[0])
        elif wanted is not Layout.ANY:
            touched += [(wanted, name, op) for name in (*read, *made)]
    groups = _Groups(same_layout, {}, {})
    for wanted, name, op in touched:
        groups.required(wanted).setdefault(same_layout.find(name), _op_text(op))
    for op in graph.ops:
        preferred = _preferred_layout(op) if op.is_loop else None
        if preferred is not None:
            other = groups.linear if preferred is Layout.CHANNELS_LAST else groups.image
            for group in {
                same_layout.find(name) for name in (*op.inputs, *op.outputs) if _layout_is_free(graph.types[name])
            }:
                if group not in other:
                    groups.required(preferred).setdefault(group, f"rows of {_op_text(op)}")
    return groups


def _op_text(op: Op) -> str:
    """Return kind and result of an operator for a reason."""
    return f"{op.kind} %{op.outputs[0]}"


def _preferred_layout(op: Op) -> Layout | None:
    """Return the layout in which the rows of a loop are contiguous.

    It is only a preference, since loops accept any strides.
    """
    axis, rank = row_axis(body_of(op)), len(space(body_of(op)))
    return Layout.ROW_MAJOR if axis == rank - 1 else Layout.CHANNELS_LAST if (axis, rank) == (1, 4) else None


def _with_accumulator_reader(op: Op, users: Mapping[str, tuple[Op, ...]]) -> list[Op]:
    """Return a matrix product with the operator that reads its accumulator, or a single operator."""
    return [op, *users[op.output]] if op_def(op).accumulates else [op]


def _layout_is_free(kind: TensorType) -> bool:
    """Return whether a value can have either layout, because it has three to five axes."""
    return len(kind.shape) in (3, 4, 5)
