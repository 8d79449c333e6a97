"""What a loop computes when: once for each row, or along it; before, between and behind its reductions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from intaglio.ir import DType, Graph, Op
from intaglio.ops.loop_ops.primitives import primitive

FEW_OPERATORS = 2
"""Operators on one loaded value that are computed again rather than kept."""
LARGEST_SAFE = 2.0**100
"""Sizes below it stay finite through any sum of a row."""


@dataclass(frozen=True)
class LoopStage:
    """One pass along a row.

    ``row``: what is computed before it, once; then along it ``loads``, ``restored`` (values an earlier pass kept),
    ``ops`` in order, ``sums`` (reductions), ``kept`` and ``stored``. ``direct``: results of a quantize that are written
    as they are computed, because nothing else reads them. ``any_order``: all that it reads and writes are neighbouring
    quantized values, so vectors may take them in any order.
    """

    row: tuple[Op, ...]
    loads: tuple[str, ...]
    restored: tuple[str, ...]
    ops: tuple[Op, ...]
    sums: tuple[Op, ...]
    kept: tuple[str, ...]
    stored: tuple[str, ...]
    direct: frozenset[str] = frozenset()
    any_order: bool = False

    @property
    def empty(self) -> bool:
        """Return whether nothing is left to do along the row."""
        return not (self.sums or self.kept or self.stored)


class RowValues:
    """Finds what every value of a body is: one number a row or an element, and the pass that computes it."""

    def __init__(self, body: Graph, single: Collection[str]) -> None:
        """``single``: operands and constants that are one number a row."""
        self.body = body
        self.makers = {op.output: op for op in body.ops if not _is_read_only(op)}
        self.same = {op.output: op.inputs[0] for op in body.ops if primitive(op).drops_axis}
        self.row, self.stage = set(single), dict[str, int]()
        for op in self.makers.values():
            stages = [self.stage.get(name, 0) for name in op.inputs]
            self.stage[op.output] = max(stages, default=0) + primitive(op).reduces
            if primitive(op).reduces or self.row.issuperset(op.inputs):
                self.row.add(op.output)

    def stages(self, outputs: Mapping[str, bool], keep: bool) -> tuple[LoopStage, ...]:
        """Return all passes.

        Args:
            outputs: value -> whether it is stored along the row.
            keep: whether values may be kept from pass to pass; else they are computed again.
        """
        last = max(self.stage.values(), default=0)
        kept: list[set[str]] = [set() for _ in range(last + 1)]
        found: list[LoopStage] = []
        for index in reversed(range(last + 1)):
            sums = [op for op in self.makers.values() if primitive(op).reduces and self.stage[op.output] == index + 1]
            stored = [name for name, along in outputs.items() if along and self.stage.get(self.at(name), 0) == index]
            wanted = [*(op.inputs[0] for op in sums), *map(self.at, stored), *kept[index]]
            loads, restored, needed = self._needs(wanted, index, keep)
            for name in restored:
                kept[self.stage[name]].add(name)
            row = [op for op in self.makers.values() if op.output in self.row and self.stage[op.output] == index]
            row = [op for op in row if not primitive(op).reduces]
            ops = tuple(op for op in self.makers.values() if op.output in needed)
            own = tuple(name for name in self.makers if name in kept[index])
            found.append(LoopStage(tuple(row), tuple(loads), tuple(restored), ops, tuple(sums), own, tuple(stored)))
        return tuple(reversed(found))

    def at(self, output: str) -> str:
        """Return the value that an output is, perhaps with an axis less."""
        return self.same.get(output, output)

    def _needs(self, wanted: Collection[str], index: int, keep: bool) -> tuple[list[str], list[str], set[str]]:
        """Return what is loaded, restored and computed for these in one pass."""
        loads, restored, needed = dict[str, None](), dict[str, None](), set[str]()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in self.row or name in needed:
                continue
            if name not in self.makers:
                loads[name] = None
            elif self.stage[name] < index and keep and self._is_worth_keeping(name):
                restored[name] = None
            else:
                needed.add(name)
                waiting += self.makers[name].inputs
        return list(loads), list(restored), needed

    def _is_worth_keeping(self, name: str) -> bool:
        """Return whether keeping a value costs less than computing it again."""
        if self.body.types[name].dtype not in (DType.F32, DType.BF16):
            return False
        loads, _, needed = self._needs([name], 0, False)
        several = len(loads) > 1 or len(needed) > FEW_OPERATORS
        return several or not all(primitive(self.makers[one]).cheap for one in needed)


def _is_read_only(op: Op) -> bool:
    """Return whether an operator computes nothing: rows of a table, or an axis more or less."""
    row = primitive(op)
    return row.gathers or row.drops_axis or row.adds_axis


def magnitudes(body: Graph) -> dict[str, float]:
    """Return bounds of the sizes of values that are finite whatever the loop reads.

    These are made of quantized values and constants by a few operators. Rounding adds less than the factor of two that
    users of this leave.
    """
    found = {name: abs(float(array)) for name, array in body.constants.items() if abs(float(array)) < LARGEST_SAFE}
    for op in body.ops:
        size = _magnitude(op, body, found)
        if size is not None and size < LARGEST_SAFE:
            found[op.output] = size
    return found


def _magnitude(op: Op, body: Graph, found: Mapping[str, float]) -> float | None:
    row = primitive(op)
    if row.dequantizes:
        q = body.types[op.inputs[0]].levels
        return max(q.zero, 255 - q.zero) * float(q.step)
    return row.bound([found[name] for name in op.inputs], op.attrs) if found.keys() >= {*op.inputs} else None
