"""Passes of a loop: what is computed per row and per element, before, between and after its reductions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from intaglio.ir import DType, Graph, Op
from intaglio.ops.loop_ops.primitives import primitive

FEW_OPERATORS = 2
"""Maximum number of operators on one loaded value that are recomputed instead of kept."""
LARGEST_SAFE = 2.0**100
"""Magnitudes below this stay finite in any sum over a row."""


@dataclass(frozen=True)
class LoopStage:
    """One pass along a row.

    Attributes:
        row: Operators computed once before the pass.
        loads: Operands that are loaded.
        restored: Values that an earlier pass kept.
        ops: Operators per element, in order.
        reductions: Reductions.
        kept: Values kept for later passes.
        stored: Results that are stored.
        direct: Results of a quantize that are written as they are computed, because they are not read again.
        any_order: All operands and results are contiguous quantized values, so that vectors may process them in any
            order.
    """

    row: tuple[Op, ...]
    loads: tuple[str, ...]
    restored: tuple[str, ...]
    ops: tuple[Op, ...]
    reductions: tuple[Op, ...]
    kept: tuple[str, ...]
    stored: tuple[str, ...]
    direct: frozenset[str] = frozenset()
    any_order: bool = False

    @property
    def empty(self) -> bool:
        """Return whether the pass has no work along the row."""
        return not (self.reductions or self.kept or self.stored)


class RowValues:
    """Classification of a body's values: one number per row or per element, and the pass that computes each."""

    def __init__(self, body: Graph, single: Collection[str]) -> None:
        """Analyze a body.

        Args:
            body: The body.
            single: Operands and constants with one number per row.
        """
        self.body = body
        self.producers = {op.output: op for op in body.ops if not _is_read_only(op)}
        self.value_with_axis = {op.output: op.inputs[0] for op in body.ops if primitive(op).drops_axis}
        self.row, self.stage = set(single), dict[str, int]()
        for op in self.producers.values():
            stages = [self.stage.get(name, 0) for name in op.inputs]
            self.stage[op.output] = max(stages, default=0) + primitive(op).reduces
            if primitive(op).reduces or self.row.issuperset(op.inputs):
                self.row.add(op.output)

    def stages(self, outputs: Mapping[str, bool], keep: bool) -> tuple[LoopStage, ...]:
        """Return all passes.

        Args:
            outputs: Whether each result is stored per element.
            keep: Values may be kept between passes; otherwise they are recomputed.
        """
        last = max(self.stage.values(), default=0)
        kept: list[set[str]] = [set() for _ in range(last + 1)]
        found: list[LoopStage] = []
        for index in reversed(range(last + 1)):
            reductions = [
                op for op in self.producers.values() if primitive(op).reduces and self.stage[op.output] == index + 1
            ]
            stored = [
                name for name, along in outputs.items() if along and self.stage.get(self.equal_value(name), 0) == index
            ]
            wanted = [*(op.inputs[0] for op in reductions), *map(self.equal_value, stored), *kept[index]]
            loads, restored, needed = self._needs(wanted, index, keep)
            for name in restored:
                kept[self.stage[name]].add(name)
            row = [op for op in self.producers.values() if op.output in self.row and self.stage[op.output] == index]
            row = [op for op in row if not primitive(op).reduces]
            ops = tuple(op for op in self.producers.values() if op.output in needed)
            own = tuple(name for name in self.producers if name in kept[index])
            found.append(
                LoopStage(tuple(row), tuple(loads), tuple(restored), ops, tuple(reductions), own, tuple(stored))
            )
        return tuple(reversed(found))

    def equal_value(self, output: str) -> str:
        """Return the value that an output equals: with the axis of reductions, if the output lacks it."""
        return self.value_with_axis.get(output, output)

    def _needs(self, wanted: Collection[str], index: int, keep: bool) -> tuple[list[str], list[str], set[str]]:
        """Return the values that one pass loads, restores and computes to obtain the wanted ones."""
        loads, restored, needed = dict[str, None](), dict[str, None](), set[str]()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in self.row or name in needed:
                continue
            if name not in self.producers:
                loads[name] = None
            elif self.stage[name] < index and keep and self._is_worth_keeping(name):
                restored[name] = None
            else:
                needed.add(name)
                waiting += self.producers[name].inputs
        return list(loads), list(restored), needed

    def _is_worth_keeping(self, name: str) -> bool:
        """Return whether keeping a value is cheaper than recomputing it."""
        if self.body.types[name].dtype not in (DType.F32, DType.BF16):
            return False
        loads, _, needed = self._needs([name], 0, False)
        several = len(loads) > 1 or len(needed) > FEW_OPERATORS
        return several or not all(primitive(self.producers[one]).cheap for one in needed)


def _is_read_only(op: Op) -> bool:
    """Return whether an operator computes nothing: rows of a table, or an axis that is added or dropped."""
    row = primitive(op)
    return row.gathers or row.drops_axis or row.adds_axis


def magnitudes(body: Graph) -> dict[str, float]:
    """Return bounds of the magnitudes of values that are finite for any operands.

    Such values are computed from quantized values and constants by a few operators. Rounding errors are smaller than
    the factor of two that callers leave.
    """
    found = {name: abs(float(array)) for name, array in body.constants.items() if abs(float(array)) < LARGEST_SAFE}
    for op in body.ops:
        size = _magnitude(op, body, found)
        if size is not None and size < LARGEST_SAFE:
            found[op.output] = size
    return found


def _magnitude(op: Op, body: Graph, found: Mapping[str, float]) -> float | None:
    """Return the bound of one result's magnitude, or ``None``."""
    row = primitive(op)
    if row.dequantizes:
        q = body.types[op.inputs[0]].qparams
        return max(q.zero, 255 - q.zero) * float(q.step)
    return row.bound([found[name] for name in op.inputs], op.attrs) if found.keys() >= {*op.inputs} else None
