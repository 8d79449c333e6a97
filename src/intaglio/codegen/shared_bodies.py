"""Steps whose C++ text differs in names and numbers only are compiled once.

The body becomes a function of its own, whose parameters are the numbers that differ: scales, zero points, and positions
of buffers, constants and counts. The function of each step calls it. Sizes are never parameters, because the compiler
optimizes for them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

LEAST_LENGTH = 400
"""Characters of a body from which on it is shared; shorter ones compile in no time."""

_PARAMETERS = "const struct Run* r, int thread, int threads"
_FUNCTION = re.compile(
    rf"^static void (p\d+_\w*)\({re.escape(_PARAMETERS)}\) \{{\n(.*?)^\}}\n", re.MULTILINE | re.DOTALL
)
_TOKEN = re.compile(
    r"(?P<name>\bv(?:_\w+|\d\w*))"
    r"|(?<=\br->offsets\[)(?P<place>\d+)(?=\])"
    r"|(?<=\badd_clipped\(r->clipped, )(?P<count>\d+)"
    r"|(?P<constant>\bp\d+_\w+)"
    r"|(?P<zero>\(int32_t\)-?\d+)"
    r"|(?P<real>\b0x[01]\.[0-9a-f]+p[+-]\d+f)"
)
_TYPES = {"place": "int", "count": "int", "constant": "int64_t", "zero": "int32_t", "real": "float"}


class _Body(NamedTuple):
    """The body of a step's function.

    Attributes:
        place: number of the step.
        symbol: name of the function.
        text: lines between its braces.
        numbers: the numbers in which it may differ from equal bodies, in order.
    """

    place: int
    symbol: str
    text: str
    numbers: tuple[str, ...]


def with_shared_bodies(steps: Sequence[str]) -> list[str]:
    """Return the texts of steps, in which equal bodies are functions that several steps call.

    Args:
        steps: text of each step: comments, constants, and one function named ``p<number>_<value>`` at the end.
    """
    found, equal = list(steps), defaultdict[str, list[_Body]](list)
    for place, text in enumerate(steps):
        function = _FUNCTION.search(text)
        if function is not None and len(function[2]) >= LEAST_LENGTH:
            pattern, numbers = _pattern(function[2])
            equal[pattern].append(_Body(place, function[1], function[2], numbers))
    for bodies in equal.values():
        if len(bodies) > 1:
            _share(bodies, found)
    return found


def _pattern(text: str) -> tuple[str, tuple[str, ...]]:
    """Return what bodies that can share a function have in common, and the numbers in which they may differ."""
    names, numbers = dict[str, int](), list[str]()

    def replaced(token: re.Match[str]) -> str:
        if token.lastgroup == "name":
            return f"<{names.setdefault(token[0], len(names))}>"
        numbers.append(token[0])
        return f"<{token.lastgroup}>"

    return _TOKEN.sub(replaced, text), tuple(numbers)


def _share(bodies: Sequence[_Body], steps: list[str]) -> None:
    """Let the steps of equal bodies call one function, which the first of them defines."""
    first = bodies[0]
    kinds = [str(token.lastgroup) for token in _TOKEN.finditer(first.text) if token.lastgroup != "name"]
    columns = list(zip(kinds, zip(*(body.numbers for body in bodies), strict=True), strict=True))
    differing = dict.fromkeys((kind, values) for kind, values in columns if len(set(values)) > 1)
    labels = {column: f"given_{i}" for i, column in enumerate(differing)}
    left = iter(columns)

    def replaced(token: re.Match[str]) -> str:
        return token[0] if token.lastgroup == "name" else labels.get(next(left), token[0])

    shared = f"{first.symbol}_body"
    parameters = "".join(f", {_TYPES[kind]} {label}" for (kind, _), label in labels.items())
    text = _TOKEN.sub(replaced, first.text)
    definition = f"SHARED static void {shared}({_PARAMETERS}{parameters}) {{\n{text}}}\n"
    for number, body in enumerate(bodies):
        given = "".join(f", {values[number]}" for _, values in labels)
        call = f"static void {body.symbol}({_PARAMETERS}) {{\n    {shared}(r, thread, threads{given});\n}}\n"
        function = _FUNCTION.search(steps[body.place])
        assert function is not None
        before, after = steps[body.place][: function.start()], steps[body.place][function.end() :]
        steps[body.place] = f"{before}{definition if body is first else ''}{call}{after}"
