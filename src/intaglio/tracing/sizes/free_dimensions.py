"""Dynamic dimensions of an exported program: their names, which of them are equal, and their ranges."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product
from math import lcm, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram

from intaglio.errors import CaptureError
from intaglio.fxgraph.node_info import tensor_type
from intaglio.fxgraph.nodes import dim_of_expression
from intaglio.ir import Dim, Expression, Input, TensorType, evaluate, substitute, symbol, symbols_of
from intaglio.torch_private import size_expression, size_hint, traced_conditions

if TYPE_CHECKING:
    import sympy  # the import takes a third of a second

UNBOUNDED = 2**31
"""Upper bounds of torch at or above this value mean that a dimension is unbounded."""
SPECIALISED = 2
"""Lower bound that torch.export reports for every dynamic dimension; capture tests size 1 itself."""

MOST_FACTORS = 2
"""Largest number of dimensions whose factors are searched for together."""

Sizes = Mapping["sympy.Expr", Dim]
"""The size that each symbol of torch.export has: a dynamic dimension, or a multiple of one; and that of each largest or
smallest of several sizes that differs from call to call."""


def input_type(node: fx.Node) -> TensorType:
    """Return the type of an input. Raise `CaptureError` for a number that is dynamic."""
    kind = tensor_type(node)
    if kind is None:
        problem = "this number is dynamic, but only sizes of tensors can be"
        remedy = "set its entry in dynamic_shapes to None, and capture the model with each of its values"
        raise CaptureError(f"input '{node.name}'", None, problem, remedy=remedy)
    return kind


def free_sizes(program: ExportedProgram, one_batch: bool) -> Sizes:
    """Return the sizes of the dynamic dimensions in order of appearance (``n``, ``n1``, ...); equal ones share a name.

    A size is a multiple of a dimension, such as ``n1*32``, if the model compares sizes that are equal for multiples.

    Args:
        program: what torch.export traced.
        one_batch: whether all inputs have the same batch, also where torch.export does not find out that they have.
    """
    names: dict[Any, str] = {}
    same = _equal_symbols(program) | (_batches(program) if one_batch else {})
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes = [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ())
        for size in sizes:
            if isinstance(size, torch.SymInt):
                for free in sorted(size_expression(size).free_symbols, key=str):
                    if free not in names:
                        known = names.get(same.get(free))
                        names[free] = known or f"n{len(set(names.values())) or ''}"
    plain = {free: symbol(name) for free, name in names.items()}
    batch = {names[free] for size in _first_axes(program) for free in size_expression(size).free_symbols}
    multiples = common_multiples(_compared_sizes(program, plain), _example(program, names), batch)
    sizes = {free: Expression((((name,), multiples.get(name, 1)),)) for free, name in names.items()}
    return sizes | _extremes(program, sizes)


def _extremes(program: ExportedProgram, sizes: Mapping[sympy.Symbol, Expression]) -> dict[sympy.Expr, Dim]:
    """Return the sizes of the largest and smallest of several sizes, which are those that are so in the example.

    `conditions_of` returns the conditions that they are so in other calls.
    """
    import sympy

    values = [node.meta.get("val") for node in program.graph.nodes]
    dynamic = [
        one for value in values for one in (*getattr(value, "shape", ()), value) if isinstance(one, torch.SymInt)
    ]
    found: dict[sympy.Expr, Dim] = dict(sizes)
    inside = {
        part: None for one in dynamic for part in sympy.preorder_traversal(size_expression(one)) if is_extreme(part)
    }
    example = _example(program, {free: free.name for free in sizes})
    for extreme in sorted(inside, key=lambda one: one.count_ops()):
        if extreme.free_symbols <= sizes.keys():
            numbers = {free: sympy.Integer(example[free.name]) for free in extreme.free_symbols}
            choose = max if type(extreme).__name__ == "Max" else min
            chosen = choose(extreme.args, key=lambda part: int(part.xreplace(numbers)))
            with contextlib.suppress(CaptureError):
                found[extreme] = dim_of_expression(chosen, found)
    return {one: size for one, size in found.items() if one not in sizes}


def is_extreme(expression: Any) -> bool:
    """Return whether a sympy expression is the largest or smallest of several sizes."""
    return type(expression).__name__ in ("Max", "Min")


def common_multiples(
    compared: Iterable[tuple[Dim, Dim]], example: Mapping[str, int], excluded: Collection[str] = ()
) -> dict[str, int]:
    """Return the factors that make compared sizes equal, by the name of the dimension.

    For example, ``(n + 1)//2`` and ``n//2`` are equal if n is a multiple of 2. Equality is a proof: with multiples in
    place of the dimension, both sizes have the same canonical form.

    Args:
        compared: pairs of sizes that a model takes for equal.
        example: size of each dimension in the example, which is one of the multiples.
        excluded: dimensions without a factor.

    Returns:
        The factors of which the largest is smallest. Pairs with more than `MOST_FACTORS` dimensions that may have one,
        and pairs that no factors make equal, are left out.
    """
    found: dict[str, int] = {}
    for a, b in compared:
        names = sorted((symbols_of(a) | symbols_of(b)) - set(excluded))
        if a == b or not 0 < len(names) <= MOST_FACTORS:
            continue
        divisors = [[number for number in range(1, example[name] + 1) if example[name] % number == 0] for name in names]
        for factors in sorted(product(*divisors), key=lambda some: (max(some), prod(some))):
            multiples = {name: symbol(name) * factor for name, factor in zip(names, factors, strict=True)}
            if substitute(a, multiples) == substitute(b, multiples):
                found |= {name: lcm(found.get(name, 1), factor) for name, factor in zip(names, factors, strict=True)}
                break
    return {name: factor for name, factor in found.items() if factor > 1}


def _compared_sizes(program: ExportedProgram, sizes: Sizes) -> Iterator[tuple[Dim, Dim]]:
    """Yield pairs of sizes that must be equal: those that the model compared while it was traced, and the numbers of
    elements of tensors before and after their shape changes."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    dynamic = [size for value in values for size in getattr(value, "shape", ()) if isinstance(size, torch.SymInt)]
    conditions = [condition for condition, _ in (traced_conditions(dynamic[0]) if dynamic else ())]
    compared = [one.args for one in conditions if type(one).__name__ == "Equality"]
    views = [node for node in program.graph.nodes if dynamic and node.target in VIEWS and -1 not in node.args[1]]
    counts = [(_elements(node.args[0].meta["val"].shape), _elements(map(_size, node.args[1]))) for node in views]
    for a, b in dict.fromkeys([*compared, *(pair for pair in counts if pair[0] != pair[1])]):
        if (a.free_symbols | b.free_symbols) <= sizes.keys():
            try:
                yield dim_of_expression(a, sizes), dim_of_expression(b, sizes)
            except CaptureError:
                continue  # an expression that sizes of tensors cannot have


VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default})


def _size(size: int | fx.Node) -> int | torch.SymInt:
    """Return the value of a size of a view."""
    found: int | torch.SymInt = size.meta["val"] if isinstance(size, fx.Node) else size
    return found


def _elements(shape: Iterable[int | torch.SymInt]) -> sympy.Expr:
    """Return the number of elements of a shape."""
    import sympy

    return sympy.Mul(*(sympy.Integer(size) if isinstance(size, int) else size_expression(size) for size in shape))


def _equal_symbols(program: ExportedProgram) -> dict[Any, Any]:
    """Return pairs of symbols that must be equal although torch.export does not report it.

    A tensor indexed by whole ranges with the sizes of another input, as attention masks are, must be at least as large.
    A larger one would be cut off silently, so equal sizes are required.
    """
    same: dict[Any, Any] = {}
    reads: dict[fx.Node, bool] = {}
    for node in program.graph.nodes:
        reads[node] = _reads_values(node, reads)
        if str(node.target) != "aten.index.Tensor" or any(reads[index] for index in node.args[1] if index is not None):
            continue
        held = list(node.args[0].meta["val"].shape)
        made = [size for size in node.meta["val"].shape if not isinstance(size, int) or size != 1]
        if [_hint(size) for size in held] == [_hint(size) for size in made]:
            pairs = zip(held, made, strict=True)
            same.update((size_expression(a), size_expression(b)) for a, b in pairs if _is_symbol(a) and _is_symbol(b))
    return {**same, **{b: a for a, b in same.items()}}


def _batches(program: ExportedProgram) -> dict[Any, Any]:
    """Return a pair of symbols for the first axis of each input with that of the first such input."""
    symbols = [size_expression(size) for size in _first_axes(program) if _is_symbol(size)]
    return {other: symbols[0] for other in symbols[1:] if other != symbols[0]}


def _first_axes(program: ExportedProgram) -> list[torch.SymInt]:
    """Return the dynamic sizes of the first axes of inputs."""
    used = {name for name in program.graph_signature.user_inputs if isinstance(name, str)}
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in used]
    sizes: list[Any] = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim()]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _reads_values(node: fx.Node, reads: Mapping[fx.Node, bool]) -> bool:
    """Return whether a value depends on elements of an input or constant, not only on sizes."""
    if node.op == "placeholder":
        return True
    if node.op != "call_function" or node.target is torch.ops.aten.sym_size.int:
        return False
    return any(reads[source] for source in node.all_input_nodes)


def _is_symbol(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and size_expression(size).is_Symbol


def _hint(size: int | torch.SymInt) -> int:
    """Return the size in the example."""
    return size if isinstance(size, int) else size_hint(size)


def ranges_of(program: ExportedProgram, sizes: Sizes) -> dict[str, tuple[int, int | None]]:
    """Return the smallest and largest value of dynamic dimensions; unbounded ones are left out."""
    found: dict[str, tuple[int, int | None]] = {}
    for free, bounds in program.range_constraints.items():
        size = sizes.get(free)
        if not isinstance(size, Expression):
            continue
        name, factor = _name_and_factor(size)
        low, high = _bound(bounds.lower) or 0, _bound(bounds.upper)
        low, high = -(-low // factor) if low > SPECIALISED else 0, None if high is None else high // factor
        if name in found:
            other = found[name]
            low, high = max(low, other[0]), min([b for b in (high, other[1]) if b is not None], default=None)
        found[name] = (low, high)
    return {name: ends for name, ends in found.items() if ends != (0, None)}


def _bound(value: Any) -> int | None:
    number = int(value) if getattr(value, "is_Integer", isinstance(value, int)) else UNBOUNDED
    return number if number < UNBOUNDED else None


def _name_and_factor(size: Expression) -> tuple[str, int]:
    """Return the dimension that a size is a multiple of, and the factor."""
    (name,) = symbols_of(size)
    return name, evaluate(size, {name: 1})


def example_sizes(program: ExportedProgram, sizes: Sizes, inputs: Collection[Input]) -> dict[str, int]:
    """Return the value of every dynamic dimension in the example, with the batch at 1, to count MACs and bytes."""
    batch = set().union(*[symbols_of(entry.type.shape[0]) for entry in inputs if entry.type.shape])
    plain = {free: size for free, size in sizes.items() if free.is_Symbol and isinstance(size, Expression)}
    own = dict(map(_name_and_factor, plain.values()))
    hints = _example(program, {free: _name_and_factor(size)[0] for free, size in plain.items()})
    return {name: 1 if name in batch else hint // own[name] or 1 for name, hint in hints.items()}


def _example(program: ExportedProgram, names: Mapping[sympy.Symbol, str]) -> dict[str, int]:
    """Return the size in the example that has each of these names."""
    hints: dict[str, int] = {}
    for node in program.graph.nodes:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, torch.SymInt) and size_expression(size) in names:
                hints[names[size_expression(size)]] = size_hint(size) or 0
    return hints
