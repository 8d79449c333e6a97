"""Loop fusion: adjacent loops are merged, so that a value between them is only stored for other readers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from intaglio.fusion.integer_graph_view import IntegerGraphView
from intaglio.fusion.loop_conditions import as_loop
from intaglio.fusion.table import DEQUANTIZE_LOOP, LOOP_LOOP
from intaglio.ir import Constants, Graph, Op, TensorType, fresh
from intaglio.ops.loop_ops.loop_space import body_of


def merge_loops(graph: Graph) -> tuple[Graph, int]:
    """Merge loops with the dequantizes of their operands, with the loops they read and with the quantizes of their
    results.

    This pass runs before layouts are assigned, because loops influence layouts. A producer and a consumer over the same
    rows are merged unless a path through a third operator connects them. A dequantize is recomputed for each reader.
    """
    merging = _Merging(list(graph.ops), graph)
    count = merging.read_quantized_values()
    while pair := merging.next_pair():
        merging.merge(*pair)
        count += 1
    wanted = {*graph.outputs, *(name for op in merging.ops for name in op.inputs)}
    return graph.replace(ops=tuple(_without_unread_results(op, wanted) for op in merging.ops)), count


def _without_unread_results(op: Op, wanted: set[str]) -> Op:
    """Return a loop without the results that only its own body reads; other operators stay as they are."""
    kept = tuple(name for name in op.outputs if name in wanted)
    if op.body is None or not kept or kept == op.outputs:
        return op
    return replace(op, outputs=kept, body=op.body.replace(outputs=kept))


@dataclass
class _Merging:
    """State of the pass: the operators so far, and the graph that it started from."""

    ops: list[Op]
    graph: Graph

    def __post_init__(self) -> None:
        self.types = self.graph.types
        self.first = 0  # earlier operators cannot be merged with a producer

    def read_quantized_values(self) -> int:
        """Make loops that read dequantized values read the quantized values instead; return the number of changes."""
        view, count = IntegerGraphView(self.graph), 0
        for index, op in enumerate(self.ops):
            for found in DEQUANTIZE_LOOP.find(op.outputs[0], view):
                self.ops[index] = _joined(as_loop(view.op(found.anchor), self.types), self.ops[index], set())
                count += 1
        return count

    def next_pair(self) -> tuple[int, int] | None:
        """Return the positions of the next producer and consumer that can be merged, or ``None``."""
        view = IntegerGraphView(self.graph, self.ops)
        for at in range(self.first, len(self.ops)):
            found = next(LOOP_LOOP.find(self.ops[at].outputs[0], view), None)
            if found is not None:
                return view.position(found.anchor), at
            self.first = at + 1
        return None

    def merge(self, maker: int, reader: int) -> None:
        """Replace both loops by one; operators that depend on the producer move after it, the others before it."""
        first, second = self.ops[maker], as_loop(self.ops[reader], self.types)
        reached, before, after = set(first.outputs), list[Op](), list[Op]()
        for op in self.ops[maker + 1 : reader]:
            if reached.intersection(op.inputs):
                reached.update(op.outputs)
                after.append(op)
            else:
                before.append(op)
        rest = [*self.ops[:maker], *before, *after, *self.ops[reader + 1 :]]
        wanted = {*self.graph.outputs, *(name for op in rest for name in op.inputs)}
        joined = _joined(first, second, wanted)
        self.ops = [*self.ops[:maker], *before, joined, *after, *self.ops[reader + 1 :]]
        self.first = min(self.first, maker)


def _joined(first: Op, second: Op, wanted: set[str]) -> Op:
    """Return one loop that computes the ``wanted`` results of the first and all results of the second.

    Computations that both bodies share are done once.
    """
    one, two = body_of(first), body_of(second)
    names, taken = {name: name for name in (*two.inputs, *two.outputs)}, {**one.types, **two.types}
    types = {**one.types, **{name: two.types[name] for name in names}}
    constants, steps = dict(one.constants), list(one.ops)
    for name, array in two.constants.items():
        names[name] = _unused_name(name, one, taken)
        constants[names[name]], types[names[name]] = array, two.types[name]
    for op in two.ops:
        inputs, (output,) = tuple(names[name] for name in op.inputs), op.outputs
        same = next((s for s in steps if (s.kind, s.inputs, s.attrs) == (op.kind, inputs, op.attrs)), None)
        if same is not None and output not in two.outputs and types[same.output] == two.types[output]:
            names[output] = same.output
            continue
        names[output] = output if output in two.outputs else _unused_name(output, one, taken)
        types[names[output]] = two.types[output]
        steps.append(Op(op.kind, inputs, (names[output],), op.attrs))
    known = {step.output for step in one.ops}
    read = tuple(dict.fromkeys([*first.inputs, *(name for name in second.inputs if name not in known)]))
    kept = [name for name in first.outputs if name in wanted]
    outputs = tuple(dict.fromkeys([*kept, *second.outputs]))
    return Op("loop", read, outputs, {}, Graph(read, outputs, types, tuple(steps), Constants(constants)), second.origin)


def _unused_name(name: str, one: Graph, taken: dict[str, TensorType]) -> str:
    """Return a name for a value of the second body that is unused in the first."""
    if name not in one.types:
        return name
    found = fresh(taken, name)
    taken[found] = one.types[name]
    return found
