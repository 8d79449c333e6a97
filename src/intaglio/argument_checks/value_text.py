"""Short texts of values in error messages."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 60
"""Length after which the text of a value is cut."""
SHOWN_ELEMENTS = 3
"""Number of elements of a container that are shown."""
BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("{", "}"),
    dict: ("{", "}"),
}


def value_text(value: Any) -> str:
    """Return a short text of a value: plain values as they are written, other objects by their type.

    No code of the value's class runs, because its ``repr`` could be long, slow or fail.
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _shortened(value)
    if type(value) in BRACKETS:
        first, last = BRACKETS[type(value)]
        shown = [_element_text(value, key) for key in list(value)[:SHOWN_ELEMENTS]]
        return first + ", ".join(shown + ["..."] * (len(value) > SHOWN_ELEMENTS)) + last
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an"."""
    return f"an {noun}" if noun[:1].lower() in "aeio" or noun[:2] == "Un" else f"a {noun}"


def _element_text(container: Any, key: Any) -> str:
    if type(container) is dict:
        return f"{_nested_text(key)}: {_nested_text(container[key])}"
    return _nested_text(key)


def _nested_text(value: Any) -> str:
    first, last = BRACKETS.get(type(value), ("", ""))
    return f"{first}...{last}" if first and value else first + last if first else value_text(value)


def _shortened(value: Any) -> str:
    try:
        text = repr(value[:MAX_TEXT] if isinstance(value, (str, bytes)) else value)
    except ValueError:  # Python writes no integers of more than 4300 digits
        return "a number of many digits"
    cut = len(text) > MAX_TEXT or (isinstance(value, (str, bytes)) and len(value) > MAX_TEXT)
    return f"{text[:MAX_TEXT]}..." if cut else text
