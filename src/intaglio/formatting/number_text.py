"""Text of sizes and counts in reports, in the unit that fits the number."""

from __future__ import annotations

KILO, MEGA = 1_000, 1_000_000
"""Units are decimal: 1 kB is 1000 bytes and 1 MB is 1000 kB."""
LARGE_UNITS = ("MB", "GB", "TB", "PB", "EB")
"""Units from a million bytes on, each a thousand times the one before."""


def size_text(size: int) -> str:
    """Return a number of bytes as text, such as ``288 bytes``, ``46.7 kB``, ``25.95 MB`` or ``8.80 TB``."""
    if size < KILO:
        return f"{size} byte{'s' * (size != 1)}"
    if not _reaches_mega(size):
        return f"{size / KILO:.1f} kB"
    value, *larger = size / MEGA, *LARGE_UNITS
    while round(value, 2) >= KILO and len(larger) > 1:
        value /= KILO
        del larger[0]
    return f"{value:.2f} {larger[0]}"


def count_text(count: int) -> str:
    """Return a number of multiply-accumulates as text, such as ``640``, ``12.3 k`` or ``43.7 M``."""
    if count < KILO:
        return str(count)
    return f"{count / MEGA:.1f} M" if _reaches_mega(count) else f"{count / KILO:.1f} k"


def _reaches_mega(number: int) -> bool:
    """Return whether a number is a million when it is rounded to a tenth of a thousand."""
    return round(number / KILO, 1) >= KILO
