"""HTML of small tables and lists, for values that notebooks show. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def element(name: str, text: object, attributes: str = "") -> str:
    """Return an element with escaped text."""
    return f"<{name}{attributes}>{escape(str(text))}</{name}>"


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "", text: int = 1) -> str:
    """Return a table. The first ``text`` columns hold words and are left-aligned, the others hold numbers."""
    sides = [LEFT if index < text else RIGHT for index in range(len(columns))]
    head = "".join(element("th", name, side) for name, side in zip(columns, sides, strict=True))
    lines = [
        "<tr>" + "".join(element("td", cell, side) for cell, side in zip(row, sides, strict=True)) + "</tr>"
        for row in rows
    ]
    title = element("caption", caption, LEFT) if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def definition_list(pairs: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values without a head."""
    rows = "".join(f"<tr>{element('th', name, LEFT)}{element('td', value, LEFT)}</tr>" for name, value in pairs)
    return f"<table><tbody>{rows}</tbody></table>"


def folded_text(summary: str, text: str) -> str:
    """Return a long text that is shown at a click on its summary."""
    return f"<details>{element('summary', summary)}{element('pre', text)}</details>"


def shortened(rows: Sequence[Sequence[object]], name: str) -> tuple[Sequence[Sequence[object]], str]:
    """Return the rows of a long table that notebooks show, and a sentence about the others, such as "7 more sites"."""
    rest = len(rows) - MOST_ROWS
    return rows[:MOST_ROWS], f"{rest} more {name}" if rest > 0 else ""


MOST_ROWS = 50
"""Largest number of rows of a table in a notebook."""
LEFT, RIGHT = ' style="text-align:left"', ' style="text-align:right"'
