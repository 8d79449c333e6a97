"""Matching of recipe selectors (module path globs, ``re:``, ``type:`` and ``op:``) against operators."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Mapping
from typing import Any

import re2

from intaglio.errors import SelectorError
from intaglio.ir import Origin

PREFIXES = ("op:", "type:", "")
"""Selector prefixes, weakest first: operator type < module type < module name (glob or ``re:``)."""


def matches(selector: str, origin: Origin, classes: Mapping[str, str]) -> int | None:
    """Return the depth of the module that a selector matches (0 for ``op:``), or ``None``."""
    if selector.startswith("op:"):
        name = selector[3:]
        forms = (origin.operator, origin.operator.rpartition(".")[0])
        return 0 if any(fnmatch.fnmatchcase(form, name) for form in forms) else None
    parts = [part.partition("@")[0] for part in origin.path.split(".")] if origin.path else []
    paths = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    for path in paths:
        if _covers(selector, path, classes):
            return path.count(".") + 1 if path else 0
    return None


def _covers(selector: str, path: str, classes: Mapping[str, str]) -> bool:
    if selector.startswith("type:"):
        return fnmatch.fnmatchcase(classes.get(path, ""), selector[5:])
    if selector.startswith("re:"):
        return _pattern(selector).fullmatch(path) is not None
    return fnmatch.fnmatchcase(path, selector)


@functools.lru_cache(maxsize=256)
def _pattern(selector: str) -> Any:
    """Return the compiled expression of a selector. RE2 matches in linear time, whatever the expression is."""
    options = re2.Options()
    options.log_errors = False  # the error says it
    try:
        return re2.compile(selector[3:], options=options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error, re2.error) else "it is not valid Unicode"
        if NONLINEAR_SYNTAX.match(reason):
            problem = f"regular expressions have no lookaround and no backreferences ({reason})"
            remedy = "select what it matches by several selectors: skip=['layer1.*', 're:layer[23]']"
        else:
            problem, remedy = f"not a regular expression: {reason}", "write \\ before signs that are part of a name"
        raise SelectorError(f"selector {selector!r}", None, problem, remedy=remedy) from error


NONLINEAR_SYNTAX = re.compile(r"invalid perl operator|invalid escape sequence: \\\d")
"""Reasons of RE2 for syntax that cannot be matched in linear time."""


def prefix_of(selector: str) -> str:
    """Return the prefix of a selector, one of `PREFIXES`."""
    return next(level for level in PREFIXES if selector.startswith(level))


def nearest(selector: str, origins: list[Origin], classes: Mapping[str, str]) -> str:
    """Return the part of an error message that lists selectors with similar names."""
    prefix = prefix_of(selector)
    if prefix == "op:":
        names = {f"op:{origin.operator.rpartition('.')[0]}" for origin in origins}
    elif prefix == "type:":
        names = {f"type:{name}" for name in classes.values()}
    else:
        names = {name for name in classes if name}
        if any(sign in selector for sign in "*?["):
            names |= {NUMBER.sub("*", name) for name in names}
    close = difflib.get_close_matches(selector, sorted(names), n=3, cutoff=0.3) or sorted(names)[:3]
    anywhere = f"*.{selector}"
    if prefix == "" and any(matches(anywhere, origin, classes) is not None for origin in origins):
        close = [anywhere, *close][:3]
    return "nearest: " + ", ".join(close)


NUMBER = re.compile(r"\b\d+\b")
"""Index of a layer in a module path."""
