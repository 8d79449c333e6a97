"""Neighbouring loops become one: what lies between them is never stored, unless somebody else reads it."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.loop_conditions import as_loop
from intaglio.fusion.table import DEQUANTIZE_LOOP, LOOP_LOOP
from intaglio.ir import Graph, Op, TensorType, fresh
from intaglio.ops.loop_ops.loop_space import body_of


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
        view, count = IntegerGraphView(self.graph), 0
        for index, op in enumerate(self.ops):
            for found in DEQUANTIZE_LOOP.find(op.outputs[0], view):
                self.ops[index] = _joined(as_loop(view.op(found.anchor), self.types), self.ops[index], set())
                count += 1
        return count

    def next_pair(self) -> tuple[int, int] | None:
        """Places of the next maker and reader that become one."""
        view = IntegerGraphView(self.graph, self.ops)
        for at in range(self.first, len(self.ops)):
            found = next(LOOP_LOOP.find(self.ops[at].outputs[0], view), None)
            if found is not None:
                return view.position(found.anchor), at
            self.first = at + 1
        return None

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
