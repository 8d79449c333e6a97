"""Division of the text of a program into parts that are compiled at the same time."""

from __future__ import annotations

import re
from itertools import accumulate

LEAST_BYTES = 1 << 15
"""Bytes of text of a part; shorter ones spend most of their time on the headers."""
MOST_PARTS = 8
"""Largest number of parts: each compiler needs some 200 MB of memory."""

_HEAD = r"void p\d+_\w*\(const struct Run\* r, int thread, int threads[^)]*\)"
_STEP = re.compile(rf"^(?P<shared>SHARED )?static (?P<head>{_HEAD}) \{{\n.*?^\}}\n", re.MULTILINE | re.DOTALL)
_SEGMENTS = re.compile(r"^static void segment\d", re.MULTILINE)


def split_program(source: str, most: int) -> list[str]:
    """Return texts that together define what the text of a program defines.

    The first one has the segments, which call the functions of steps in all parts. All parts have the declarations in
    front of the steps. A text without steps, or with few bytes, is returned as it is.

    Args:
        source: C++ text from `codegen`.
        most: largest number of parts.
    """
    steps, segments = list(_STEP.finditer(source)), _SEGMENTS.search(source)
    count = min(most, MOST_PARTS, len(source) // LEAST_BYTES, len(steps))
    if count < 2 or segments is None or segments.start() < steps[-1].end():
        return [source]
    ends = list(accumulate(len(step[0]) for step in steps))
    owners = [min(end * count // (ends[-1] + 1), count - 1) for end in ends]
    return [_part(source, steps, owners, part, segments.start()) for part in range(count)]


def _part(source: str, steps: list[re.Match[str]], owners: list[int], part: int, segments: int) -> str:
    """Return the text of one part, in which steps of other parts are declared."""
    pieces, at = list[str](), 0
    for step, owner in zip(steps, owners, strict=True):
        pieces += [source[at : step.start()], _definition(step) if owner == part else f"{step['head']};\n"]
        at = step.end()
    return "".join([*pieces, source[at:] if part == 0 else source[at:segments]])


def _definition(step: re.Match[str]) -> str:
    """Return the definition of a step that other parts may call."""
    return f"{step['shared'] or ''}{step[0][step.start('head') - step.start() :]}"
