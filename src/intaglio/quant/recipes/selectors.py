"""Matching of recipe selectors (module path globs, ``re:``, ``type:`` and ``op:``) against operators."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping

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
        return re.fullmatch(_pattern(selector), path) is not None
    return fnmatch.fnmatchcase(path, selector)


def _pattern(selector: str) -> re.Pattern[str]:
    try:
        return re.compile(selector[3:])
    except re.error as error:
        raise SelectorError(f"selector {selector!r}", None, f"not a regular expression: {error}") from error


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
