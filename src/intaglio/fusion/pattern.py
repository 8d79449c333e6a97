"""The pattern language: small DAGs of operator names, written from their root towards the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from intaglio.argument_checks import check_arguments, check_fields


@check_fields
@dataclass(frozen=True)
class Pattern:
    """A node of a pattern: an operator of one of these ``kinds``, or a leaf without ``kinds``.

    Attributes:
        kinds: Names of the operators that match.
        operands: Patterns of the operands.
        name: Binds the matched value; leaves or operators with the same name must be the same value (a diamond).
        is_constant: The value must be constant.
        where: Condition on the node.
        commutative: The first two operands may be swapped.
        any_operand: The only pattern in ``operands`` may match any operand.
        shared: The value may be read outside of the match.
    """

    kinds: tuple[str, ...] = ()
    operands: tuple[Pattern, ...] = ()
    name: str = ""
    is_constant: bool = False
    where: Callable[[object], bool] | None = None
    commutative: bool = False
    any_operand: bool = False
    shared: bool = False

    def size(self) -> int:
        """Return the number of operators in the pattern."""
        return bool(self.kinds) + sum(operand.size() for operand in self.operands)

    def leaves(self) -> Iterator[Pattern]:
        """Yield the leaves from left to right."""
        if not self.kinds:
            yield self
        for operand in self.operands:
            yield from operand.leaves()

    def named_kinds(self) -> Iterator[str]:
        """Yield every operator name in the pattern, including repeats."""
        yield from self.kinds
        for operand in self.operands:
            yield from operand.named_kinds()


@check_arguments
def wildcard(name: str = "") -> Pattern:
    """Return a pattern that matches any value.

    Args:
        name: Name that the value is bound to. Equal names must be bound to the same value.
    """
    return Pattern(name=name)


@check_arguments
def const(name: str = "") -> Pattern:
    """Return a pattern that matches a constant.

    Args:
        name: Name that the constant is bound to. Equal names must be bound to the same constant.
    """
    return Pattern(name=name, is_constant=True)


@check_arguments
def op(
    kinds: str | Iterable[str],
    *operands: Pattern,
    name: str = "",
    where: Callable[[object], bool] | None = None,
    commutative: bool = False,
    shared: bool = False,
) -> Pattern:
    """Return a pattern that matches an operator of one of these kinds; operands beyond the given ones are ignored.

    Args:
        kinds: Name of the operator, or several alternatives.
        operands: Patterns of the first operands.
        name: Name that the result is bound to. Equal names must be bound to the same value.
        where: Condition on the matched node.
        commutative: The first two operands may be swapped.
        shared: The result may be read outside of the match.
    """
    names = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    return Pattern(names, operands, name, where=where, commutative=commutative, shared=shared)


def reads(kinds: str | Iterable[str], operand: Pattern) -> Pattern:
    """Return a pattern that matches an operator of one of these kinds, any operand of which matches ``operand``."""
    return Pattern((kinds,) if isinstance(kinds, str) else tuple(kinds), (operand,), any_operand=True)


@check_arguments
def seq(*kinds: str | Iterable[str]) -> Pattern:
    """Return a chain along first operands: ``seq("conv2d", "clamp")`` is ``op("clamp", op("conv2d", wildcard()))``.

    Args:
        kinds: Names of the operators in execution order; each is a name or several alternatives.
    """
    pattern = wildcard("x")
    for entry in kinds:
        pattern = op(entry, pattern)
    return pattern
