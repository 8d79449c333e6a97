"""`Code`: writes nested C++ source text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import dedent


class Code:
    """Collects lines of C++: `code("x += 1;")` adds lines, and `with code.block("for (...)"):` nests them."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def __call__(self, text: str = "") -> None:
        """Add lines at the current depth; indentation that all of them share is removed."""
        for line in dedent(text).strip("\n").split("\n"):
            self._lines.append("    " * self._depth + line if line else "")

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """Print `head {`, indent the lines added inside the `with` block, and print `end`."""
        self(head + " {")
        self._depth += 1
        yield
        self._depth -= 1
        self(end)

    def text(self) -> str:
        """Return the source text."""
        return "\n".join(self._lines) + "\n"
