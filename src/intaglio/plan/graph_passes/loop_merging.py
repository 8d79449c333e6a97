"""Neighbouring loops become one: what lies between them is never stored, unless somebody else reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from intaglio.ir import DType, Graph, Op, TensorType, fresh
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop_space import body_of, row_axis, space
from intaglio.ops.loop_ops.primitives import primitive


def merge_loops(graph: Graph) -> tuple[Graph, int]:
    """Loops with what dequantizes their operands, with the loops they read and with what quantizes their results.

    Before layouts are decided, which loops have a say in. Merged are a maker and a reader of the same rows, if no way
    from one to the other leads through a third; a dequantize alone is computed again for each reader.
    """
    merging = _Merging(list(graph.ops), graph)
    count = merging.take_dequantizes()
    while pair := merging.next_pair():
        merging.merge(*pair)
        count += 1
    return graph.replace(ops=tuple(merging.ops)), count


@dataclass
class _Merging:
    ops: list[Op]
    graph: Graph

    def __post_init__(self) -> None:
        self.types = self.graph.types
        self.first = 0  # operators before it have no reader to merge with

    def take_dequantizes(self) -> int:
        """Loops that read floats made of levels read the levels."""
        made = {op.output: op for op in self.ops if op_def(op).dequantizes and is_plain(op, self.types)}
        count = 0
        for index, op in enumerate(self.ops):
            if op.is_loop:
                found = [made[name] for name in op.inputs if name in made]
                for one in found:
                    op = _joined(as_loop(one, self.types), op, set())
                self.ops[index] = op
                count += len(found)
        return count

    def next_pair(self) -> tuple[int, int] | None:
        """Places of the next maker and reader that become one."""
        makers = {name: index for index, op in enumerate(self.ops) if op.is_loop for name in op.outputs}
        for at in range(self.first, len(self.ops)):
            op = self.ops[at]
            if not (op.is_loop or op_def(op).quantizes) or not is_plain(op, self.types):
                continue
            for name in op.inputs:
                if name in makers and self._fits(makers[name], at):
                    return makers[name], at
            self.first = at + 1
        return None

    def _fits(self, maker: int, reader: int) -> bool:
        first, second = self.ops[maker], as_loop(self.ops[reader], self.types)
        return (
            _same_rows(body_of(first), body_of(second)) and _links(first, second) and not self._between(maker, reader)
        )

    def _between(self, maker: int, reader: int) -> bool:
        """Whether a third operator reads the one and feeds the other."""
        reached = set(self.ops[maker].outputs)
        for op in self.ops[maker + 1 : reader]:
            if reached.intersection(op.inputs):
                reached.update(op.outputs)
        return any(name in reached and name not in self.ops[maker].outputs for name in self.ops[reader].inputs)

    def merge(self, maker: int, reader: int) -> None:
        """What reads the maker moves behind the reader, what the reader needs stays in front."""
        first, second = self.ops[maker], as_loop(self.ops[reader], self.types)
        reached, before, behind = set(first.outputs), list[Op](), list[Op]()
        for op in self.ops[maker + 1 : reader]:
            if reached.intersection(op.inputs):
                reached.update(op.outputs)
                behind.append(op)
            else:
                before.append(op)
        rest = [*self.ops[:maker], *before, *behind, *self.ops[reader + 1 :]]
        wanted = {*self.graph.outputs, *(name for op in rest for name in op.inputs)}
        joined = _joined(first, second, wanted)
        self.ops = [*self.ops[:maker], *before, joined, *behind, *self.ops[reader + 1 :]]
        self.first = min(self.first, maker)


def is_plain(op: Op, types: Mapping[str, TensorType]) -> bool:
    """A loop; or a quantize, or dequantize, of u8 levels that all have the same parameters."""
    if op.is_loop:
        return True
    kind = types[op.output if op_def(op).quantizes else op.inputs[0]]
    return kind.dtype is DType.U8 and kind.q is not None and kind.q.axis is None


def as_loop(op: Op, types: Mapping[str, TensorType]) -> Op:
    """A quantize or dequantize as a loop of one operator; a loop as it is."""
    if op.is_loop:
        return op
    ends = {name: types[name] for name in (*op.inputs, *op.outputs)}
    body = Graph(op.inputs, op.outputs, ends, (Op(op.kind, op.inputs, op.outputs, op.attrs),))
    return Op("loop", op.inputs, op.outputs, {}, body, op.origin)


def _same_rows(first: Graph, second: Graph) -> bool:
    """The same shape, along the same axis; or one number per row of the first."""
    shapes, axes = (space(first), space(second)), (row_axis(first), row_axis(second))
    if shapes[0] == shapes[1]:
        return None in axes or axes[0] == axes[1]
    axis = axes[0] if axes[1] is None else axes[1] if axes[0] is None else None
    if axis is None or len(shapes[0]) != len(shapes[1]):
        return False
    short = shapes[1] if axes[1] is None else shapes[0]
    full = shapes[0] if axes[1] is None else shapes[1]
    return short == (*full[:axis], 1, *full[axis + 1 :])


def _links(first: Op, second: Op) -> bool:
    """All that the second reads of the first is there element by element: with its axis, no table, no ids."""
    one, two = body_of(first), body_of(second)
    whole, axis = space(one), row_axis(one)
    shared = set(first.outputs) & set(second.inputs)
    lost = {name for op in one.ops if primitive(op).drops_axis for name in op.outputs}
    lost |= {name for op in two.ops if primitive(op).adds_axis or primitive(op).gathers for name in op.inputs}
    shapes = [whole] if axis is None else [whole, (*whole[:axis], 1, *whole[axis + 1 :])]
    return not shared & lost and all(one.types[name].shape in shapes for name in shared)


def _joined(first: Op, second: Op, wanted: set[str]) -> Op:
    """One loop of both, which gives what is ``wanted`` of the first and all of the second. What both compute of the
    same values is computed once."""
    one, two = body_of(first), body_of(second)
    names, taken = {name: name for name in (*two.inputs, *two.outputs)}, {**one.types, **two.types}
    types = {**one.types, **{name: two.types[name] for name in names}}
    constants, steps = dict(one.constants), list(one.ops)
    for name, array in two.constants.items():
        names[name] = _room(name, one, taken)
        constants[names[name]], types[names[name]] = array, two.types[name]
    for op in two.ops:
        inputs, (output,) = tuple(names[name] for name in op.inputs), op.outputs
        same = next((s for s in steps if (s.kind, s.inputs, s.attrs) == (op.kind, inputs, op.attrs)), None)
        if same is not None and output not in two.outputs and types[same.output] == two.types[output]:
            names[output] = same.output
            continue
        names[output] = output if output in two.outputs else _room(output, one, taken)
        types[names[output]] = two.types[output]
        steps.append(Op(op.kind, inputs, (names[output],), op.attrs))
    known = {step.output for step in one.ops}
    read = tuple(dict.fromkeys([*first.inputs, *(name for name in second.inputs if name not in known)]))
    kept = [name for name in first.outputs if name in wanted]
    outputs = tuple(dict.fromkeys([*kept, *second.outputs]))
    return Op("loop", read, outputs, {}, Graph(read, outputs, types, tuple(steps), constants), second.origin)


def _room(name: str, one: Graph, taken: dict[str, TensorType]) -> str:
    """A name of the second body that the first has not."""
    if name not in one.types:
        return name
    found = fresh(taken, name)
    taken[found] = one.types[name]
    return found
