"""Dimensions: integers, or polynomials over named symbols and their floor divisions.

A shape is a tuple of `Dim`. Expressions such as ``N*49`` and ``(H + 1)//2`` can be printed, compared, evaluated and
emitted as C.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class FloorDiv:
    """``numerator // divisor`` with a positive integer divisor."""

    numerator: Expression
    divisor: int

    def __str__(self) -> str:
        return f"({self.numerator})//{self.divisor}"


Atom = str | FloorDiv
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class Expression:
    """Sum of integer coefficients times products of atoms; terms are sorted and have no zero coefficient."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def only_symbol(self) -> str:
        """Return the name of the symbol if the expression is nothing but a symbol, else an empty text."""
        monomial, factor = self.terms[0] if len(self.terms) == 1 else ((), 0)
        return monomial[0] if factor == 1 and len(monomial) == 1 and isinstance(monomial[0], str) else ""

    def __str__(self) -> str:
        parts = []
        for monomial, coefficient in self.terms:
            factors = [str(atom) for atom in monomial]
            if coefficient != 1 or not factors:
                factors.append(str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    __repr__ = __str__

    def __add__(self, other: Dim) -> Dim:
        return _collect([*self.terms, *_terms(other)])

    def __mul__(self, other: Dim) -> Dim:
        if type(other) is int and other:  # the order of terms does not depend on their coefficients
            return self if other == 1 else Expression(tuple([(a, p * other) for a, p in self.terms]))
        return _collect([(_join(a, b), p * q) for a, p in self.terms for b, q in _terms(other)])

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: int) -> Dim:
        return self * -1 + other

    def __floordiv__(self, divisor: int) -> Dim:
        """Return the quotient in canonical form, so that equal quotients compare equal.

        Multiples of the divisor are moved out of the quotient. The remainder is a `FloorDiv` atom whose coefficients
        are smaller than its divisor, without common factors or nested quotients.
        """
        outside = [(monomial, coefficient // divisor) for monomial, coefficient in self.terms]
        rest = _collect([(monomial, coefficient % divisor) for monomial, coefficient in self.terms])
        return _collect([*outside, *_terms(_quotient(rest, divisor))])

    __radd__ = __add__
    __rmul__ = __mul__


MAX_POLYNOMIAL_TERMS = 16
"""Maximum number of terms of a quotient that `divide` searches for."""

Dim = int | Expression
Shape = tuple[Dim, ...]


RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""The relations of a `SizeCondition`, as Python and C write them."""


@dataclass(frozen=True)
class SizeCondition:
    """A relation of two dimensions that the sizes of every call must have.

    Attributes:
        left: Dimension on the left.
        relation: Key of `RELATIONS`.
        right: Dimension on the right.
        where: File and line of the model's code that compares the sizes.
    """

    left: Dim
    relation: str
    right: Dim
    where: str = ""

    def __str__(self) -> str:
        """Return the relation with terms that are subtracted added to the other side."""
        sides: tuple[list[tuple[Monomial, int]], list[tuple[Monomial, int]]] = ([], [])
        for place, dim in enumerate((self.left, self.right)):
            for monomial, factor in _terms(dim):
                sides[place if factor > 0 else 1 - place].append((monomial, abs(factor)))
        return f"{_collect(sides[0])} {self.relation} {_collect(sides[1])}"

    def holds(self, symbols: Mapping[str, int]) -> bool:
        """Return whether sizes have the relation."""
        return RELATIONS[self.relation](evaluate(self.left, symbols), evaluate(self.right, symbols))


def symbol(name: str) -> Expression:
    """Return the free dimension with this name."""
    return Expression((((name,), 1),))


def _terms(dim: Dim) -> Iterable[tuple[Monomial, int]]:
    """Return the terms of a dimension; an integer is one term without atoms."""
    return dim.terms if isinstance(dim, Expression) else [((), dim)]


def _join(a: Monomial, b: Monomial) -> Monomial:
    """Return the product of two monomials."""
    return tuple(sorted((*a, *b), key=str))


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Dim:
    """Add up the coefficients of equal monomials and return the sum in canonical order."""
    total: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0) + coefficient
    kept = {monomial: coefficient for monomial, coefficient in total.items() if coefficient}
    if not kept:
        return 0
    if list(kept) == [()]:
        return kept[()]
    return Expression(tuple(sorted(kept.items(), key=lambda term: (not term[0], -len(term[0]), str(term[0])))))


def _quotient(dim: Dim, divisor: int) -> Dim:
    """Return ``dim // divisor`` for coefficients in [0, divisor)."""
    if isinstance(dim, int):
        return dim // divisor
    free = [coefficient for monomial, coefficient in dim.terms if monomial]
    if (common := gcd(divisor, *free)) > 1:
        return _quotient(_collect([(monomial, factor // common) for monomial, factor in dim.terms]), divisor // common)
    inner = [term for term in dim.terms if any(isinstance(atom, FloorDiv) for atom in term[0])]
    if len(inner) == 1 and len(inner[0][0]) == inner[0][1] == 1:
        ((atom,), _) = inner[0]
        if isinstance(atom, FloorDiv):  # (a // b + t) // c is (a + b * t) // (b * c)
            others = _collect([term for term in dim.terms if term is not inner[0]])
            return (atom.numerator + others * atom.divisor) // (atom.divisor * divisor)
    return Expression((((FloorDiv(dim, divisor),), 1),))


def divide(a: Dim, b: Dim) -> Dim | None:
    """Return the dimension that equals ``a`` when multiplied by ``b``, for all values of the symbols; ``None`` without
    one.

    The quotient is found by polynomial long division.
    """
    if b == 0:
        return None
    (leading, coefficient), *_ = _terms(b)
    quotient: Dim = 0
    for _ in range(MAX_POLYNOMIAL_TERMS):
        if a == 0:
            return quotient
        (atoms, count), *_ = _terms(a)
        left = list(atoms)
        for atom in leading:
            if atom not in left:
                return None
            left.remove(atom)
        if count % coefficient:
            return None
        term = _collect([(tuple(left), count // coefficient)])
        quotient, a = quotient + term, a - term * b
    return None


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Return the value of a dimension; raise `KeyError` with the name of a symbol that has no value.

    The function uses loops, so that torch.compile can trace it when the values are symbolic sizes.
    """
    if isinstance(dim, int):
        return dim
    total = 0
    for monomial, product in dim.terms:
        for atom in monomial:
            product *= _atom(atom, symbols)
        total += product
    return total


def _atom(atom: Atom, symbols: Mapping[str, int]) -> int:
    if isinstance(atom, str):
        return symbols[atom]
    return evaluate(atom.numerator, symbols) // atom.divisor


def solve(dim: Dim, size: int, name: str, symbols: Mapping[str, int]) -> int | None:
    """Return the value of the symbol ``name`` for which the dimension is ``size``.

    Returns ``None`` if that value is not an integer, or if the symbol occurs elsewhere than in one linear term.
    """
    factor = dict(_terms(dim)).get((name,), 0)
    rest = dim - symbol(name) * factor
    if not factor or name in symbols_of(rest):
        return None
    product = size - evaluate(rest, symbols)
    return None if product % factor else product // factor  # not divmod, which torch's symbolic sizes do not support


def substitute(dim: Dim, symbols: Mapping[str, Dim]) -> Dim:
    """Return the dimension with symbols replaced; symbols without a replacement remain."""
    if isinstance(dim, int):
        return dim
    total: Dim = 0
    for monomial, coefficient in dim.terms:
        product: Dim = coefficient
        for atom in monomial:
            if isinstance(atom, str):
                product = product * symbols.get(atom, symbol(atom))
            else:
                product = product * (substitute(atom.numerator, symbols) // atom.divisor)
        total = total + product
    return total


def evaluator(dims: Sequence[Dim], symbols: Sequence[str]) -> Callable[..., tuple[int, ...]]:
    """Compile a function of the values of ``symbols``, in this order, that evaluates all ``dims`` at once.

    It is many times as fast as `evaluate`. The compiled text contains only numbers and generated names, whatever the
    symbols are called.
    """
    names = {name: f"s{index}" for index, name in enumerate(symbols)}
    distinct = {dim: f"d{index}" for index, dim in enumerate(dict.fromkeys(dims))}
    parameters = ", ".join(names.values())
    lines = [f"    {name} = {_python(dim, names)}" for dim, name in distinct.items()]
    results = "".join(f"{distinct[dim]}, " for dim in dims)
    scope: dict[str, Callable[..., tuple[int, ...]]] = {}
    exec("\n".join([f"def found({parameters}):", *lines, f"    return ({results})"]), {"__builtins__": {}}, scope)
    return scope["found"]


def _python(dim: Dim, names: Mapping[str, str]) -> str:
    """Return Python text that computes a dimension."""
    if isinstance(dim, int):
        return str(int(dim))

    def atom(value: Atom) -> str:
        return names[value] if isinstance(value, str) else f"(({_python(value.numerator, names)}) // {value.divisor:d})"

    return " + ".join("*".join([*map(atom, monomial), f"({factor:d})"]) for monomial, factor in dim.terms)


def never_decreases(dim: Dim) -> bool:
    """Return whether larger values of the symbols never make a dimension smaller, as far as its terms show it."""
    if isinstance(dim, int):
        return True
    quotients = (atom for monomial, _ in dim.terms for atom in monomial if isinstance(atom, FloorDiv))
    return all(factor > 0 for monomial, factor in dim.terms if monomial) and all(
        never_decreases(atom.numerator) for atom in quotients
    )


def symbols_of(dim: Dim) -> frozenset[str]:
    """Return the names of the free symbols in a dimension."""
    if isinstance(dim, int):
        return frozenset()
    atoms = [atom for monomial, _ in dim.terms for atom in monomial]
    inner = [symbols_of(atom.numerator) if isinstance(atom, FloorDiv) else frozenset({atom}) for atom in atoms]
    return frozenset().union(*inner)


def has_quotient(dim: Dim) -> bool:
    """Return whether a dimension contains a floor division of symbols."""
    return isinstance(dim, Expression) and any(isinstance(atom, FloorDiv) for atoms, _ in dim.terms for atom in atoms)


def numel(shape: Shape) -> Dim:
    """Return the number of elements of a shape."""
    total: Dim = 1
    for dim in shape:
        total = total * dim
    return total


def c_expression(dim: Dim, name: str = "{}", divide: str = "(({}) / {})") -> str:
    """Return C text that computes the dimension with int64 variables.

    Args:
        dim: The dimension.
        name: Format of a symbol.
        divide: Format of a quotient. The default is C's division, which equals floor division for dimensions (>= 0)
            only.
    """
    if isinstance(dim, int):
        return str(dim)

    def atom(value: Atom) -> str:
        if isinstance(value, str):
            return name.format(value)
        return divide.format(c_expression(value.numerator, name, divide), value.divisor)

    parts = [" * ".join([*map(atom, m), *([str(c)] if c != 1 or not m else [])]) for m, c in dim.terms]
    return " + ".join(parts) if len(parts) == 1 else "(" + " + ".join(parts) + ")"
