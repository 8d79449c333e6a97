"""Rotary position embedding without copies: loops that read a vector and the same vector with its halves exchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from intaglio.ir import Constants, Dim, DType, Graph, Op, Shape, TensorType, evaluate, fresh
from intaglio.ops import op_def
from intaglio.ops.loop_ops.loop import LOOP
from intaglio.ops.loop_ops.loop_space import body_of, space
from intaglio.ops.loop_ops.primitives import primitive
from intaglio.ops.movement.shape import CAT, SLICE
from intaglio.ops.pointwise import DEQUANTIZE

MOST_AXES = 4
"""Axes of a loop that can have one more."""


def exchange_halves(graph: Graph) -> tuple[Graph, int]:
    """Let loops read the halves of a vector in the other order where they are, instead of a copy.

    Rotary position embedding computes ``x * cos + cat(-x[..., half:], x[..., :half]) * sin``. The loop that reads the
    concatenation gets an axis for the halves before the last one. Along it, ``x`` is read backwards, and the sign is an
    operand.
    """
    rewriting = _Rewriting(graph)
    ops: dict[str, list[Op]] = {op.output: [op] for op in graph.ops}
    for op in graph.ops:
        source = rewriting.exchanged(op)
        loop = None if source is None else rewriting.reader(op)
        if source is not None and loop is not None:
            ops[loop.output] = rewriting.with_halves(loop, op.output, source)
            rewriting.count += 1
    changed = _without_unread([op for made in ops.values() for op in made], graph.outputs)
    made = graph.replace(ops=tuple(changed), types=rewriting.types, constants=graph.constants | rewriting.constants)
    return made, rewriting.count


def _without_unread(ops: list[Op], outputs: tuple[str, ...]) -> list[Op]:
    """Return the operators whose results are read. Those before a concatenation may be unread without it."""
    wanted, kept = set(outputs), list[Op]()
    for op in reversed(ops):
        if op_def(op) not in (CAT, SLICE, DEQUANTIZE, LOOP) or wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            kept.append(op)
    return kept[::-1]


@dataclass
class _Rewriting:
    """State of the pass: the graph that it started from, and new values with their types."""

    graph: Graph
    types: dict[str, TensorType] = field(init=False)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.types = dict(self.graph.types)
        self.makers, self.users = self.graph.makers(), self.graph.users()
        self.taken = dict(self.types)  # new names are new in the bodies of loops too
        for op in self.graph.ops:
            self.taken |= body_of(op).types if op.is_loop else {}

    def add(self, stem: str, kind: TensorType) -> str:
        """Add a value of this type, and return its name."""
        name = fresh(self.taken, stem)
        self.taken[name] = self.types[name] = kind
        return name

    def exchanged(self, cat: Op) -> str | None:
        """Return ``x`` of a concatenation of ``-x[..., half:]`` and ``x[..., :half]``, or ``None``.

        ``x`` may be quantized, and its halves dequantized.
        """
        if op_def(cat) is not CAT or len(cat.inputs) != 2 or self.types[cat.output].dtype is not DType.F32:
            return None
        negation, first = (self.makers.get(name) for name in cat.inputs)
        steps = [one.kind for one in body_of(negation).ops] if negation is not None and negation.is_loop else []
        if negation is None or first is None or steps not in (["neg"], ["dequantize", "neg"]):
            return None
        if len(steps) > 1:
            first = self.makers.get(first.inputs[0]) if op_def(first) is DEQUANTIZE else None
        last = self.makers.get(negation.inputs[0])
        if first is None or last is None or not self.are_halves(first, last, cat):
            return None
        return first.inputs[0]

    def are_halves(self, first: Op, last: Op, cat: Op) -> bool:
        """Return whether two operators take the halves of a value along its last axis, along which ``cat`` joins
        them."""
        shape = self.types[cat.output].shape
        axis, size = len(shape) - 1, shape[-1]
        if not isinstance(size, int) or size % 2 or cat.attrs["axis"] != axis:
            return False
        for part, start in ((first, 0), (last, size // 2)):
            bounds = {"axis": axis, "step": 1, "start": start, "stop": start + size // 2}
            if op_def(part) is not SLICE or dict(part.attrs) != bounds:
                return False
        source = self.types[first.inputs[0]]
        return first.inputs == last.inputs and source.shape == shape and _can_have_halves(source, len(shape), size)

    def reader(self, cat: Op) -> Op | None:
        """Return the loop that is the only reader of a concatenation, if it can have an axis for halves."""
        users = self.users.get(cat.output, ())
        if len(users) != 1 or not users[0].is_loop or cat.output in self.graph.outputs:
            return None
        loop, size = users[0], self.types[cat.output].shape[-1]
        shape = space(body_of(loop))
        whole = all(_can_have_halves(self.types[name], len(shape), size) for name in (*loop.inputs, *loop.outputs))
        elementwise = all(primitive(step).elementwise for step in body_of(loop).ops)
        return loop if elementwise and whole and len(shape) <= MOST_AXES and shape[-1] == size else None

    def with_halves(self, loop: Op, cat: str, x: str) -> list[Op]:
        """Return a loop with an axis for halves, with reshapes of its operands and results.

        Args:
            loop: the loop.
            cat: its operand that is a copy of ``x`` with exchanged halves and a sign.
            x: the operand itself.
        """
        body, before, after = body_of(loop), list[Op](), list[Op]()
        axes, size, names = len(space(body)), self.types[cat].shape[-1], dict[str, str]()
        for name in loop.inputs:
            if self.types[name].shape and name != cat:
                names[name] = self.halved(name, axes, size)
                before += self.reshaped(name, names[name], loop)
        halves = names.get(x) or self.halved(x, axes, size)
        if x not in names:
            before += self.reshaped(x, halves, loop)
        turned = self.add(f"{x}_exchanged", self.types[halves])
        before.append(Op("flip", (halves,), (turned,), {"axis": axes - 1}, origin=loop.origin))
        for name in loop.outputs:
            names[name] = self.halved(name, axes, size)
            after += self.reshaped(names[name], name, loop)
        return [*before, self.loop(loop, cat, turned, names), *after]

    def halved(self, name: str, axes: int, size: Dim) -> str:
        """Return the name of a new value: another one with an axis for halves."""
        return self.add(f"{name}_halves", _with_halves(self.types[name], axes, size))

    def reshaped(self, source: str, result: str, loop: Op) -> list[Op]:
        """Return the operators that give a value another shape; a constant needs none."""
        shape = self.types[result].shape
        if source in self.graph.constants:
            self.constants[result] = self.graph.constants[source].reshape([evaluate(dim, {}) for dim in shape])
            return []
        return [Op("reshape", (source,), (result,), {"shape": shape}, origin=loop.origin)]

    def loop(self, loop: Op, cat: str, turned: str, names: Mapping[str, str]) -> Op:
        """Return the loop that reads ``turned`` times a sign instead of the concatenation."""
        body, shape = body_of(loop), self.types[turned].shape
        signs = np.array([-1, 1], np.float32).reshape(*(1,) * (len(shape) - 2), 2, 1)
        sign = self.add(f"{turned}_sign", TensorType(signs.shape, DType.F32))
        self.constants[sign] = signs
        product, real = (self.add(f"{turned}_{name}", TensorType(shape, DType.F32)) for name in ("signed", "f32"))
        names = {**names, cat: product}
        types = {
            names.get(name, name): _with_halves(kind, len(shape) - 1, shape[-1] * 2)
            for name, kind in body.types.items()
        }
        types |= {name: self.types[name] for name in (turned, sign, product, real)}
        steps = [Op("dequantize", (turned,), (real,))] if self.types[turned].dtype is DType.U8 else []
        real = real if steps else turned
        steps.append(Op("mul", (real, sign), (product,)))
        steps += [
            Op(s.kind, tuple(names.get(n, n) for n in s.inputs), tuple(names.get(n, n) for n in s.outputs), s.attrs)
            for s in body.ops
        ]
        read = (*(names.get(name, name) for name in loop.inputs if name != cat), turned, sign)
        outputs = tuple(names[name] for name in loop.outputs)
        inside = Graph(read, outputs, types, tuple(steps), Constants(body.constants))
        return Op("loop", read, outputs, {}, inside, loop.origin)


def _can_have_halves(kind: TensorType, axes: int, size: Dim) -> bool:
    """Return whether the last of so many axes has ``size`` elements or one, and no axis has its own scales."""
    return (
        len(kind.shape) <= axes and kind.shape[-1:] in ((), (1,), (size,)) and (kind.q is None or kind.q.axis is None)
    )


def _with_halves(kind: TensorType, axes: int, size: Dim) -> TensorType:
    """Return the type of a value with an axis for halves; numbers stay numbers."""
    if not kind.shape:
        return kind
    shape: Shape = (1,) * (axes - len(kind.shape)) + kind.shape
    last: Shape = (1, 1) if shape[-1] == 1 else (2, size // 2)
    return replace(kind, shape=(*shape[:-1], *last))
