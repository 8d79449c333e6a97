"""`Comparison`: what `compare` found, operator by operator; as values, text, a table, and what to leave in float."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from intaglio.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class RangeUse:
    """How the float model's values use the levels of a site: shares of values below and above its range, and of its
    levels that occur (``None`` where levels are floating-point numbers)."""

    below: float
    above: float
    levels: float | None


@dataclass(frozen=True)
class Row:
    """One operator. ``node`` is its name in the stages' texts, ``site`` that of its result if it has one.

    Signal to quantization noise in decibels: ``alone`` with exact operands, so of its own weights' and result's
    rounding; ``so_far`` with everything before it quantized too. Infinite where nothing is lost. The cosines are of
    the angle between exact and quantized values. ``low`` and ``high`` bound the float model's values. ``skip``: the
    selector that leaves this operator in float, with what is fused to it; "" for an input. ``recording``: of a model
    of the eager door, by number.
    """

    node: str
    site: str
    path: str
    operator: str
    source: str
    alone: float
    so_far: float
    alone_cosine: float = 1.0
    so_far_cosine: float = 1.0
    low: float = 0.0
    high: float = 0.0
    use: RangeUse | None = None
    skip: str = ""
    recording: int = 0

    def __str__(self) -> str:
        cut, levels = _used(self.use)
        where = f"{self.path or 'model'} ({self.operator})" + (f"  at {self.source}" if self.source else "")
        return f"{_decibels(self.alone)} {_decibels(self.so_far)} {cut:>8} {levels:>7}  {where}"


@dataclass(frozen=True)
class Comparison:
    """``rows``: operators, the one that alone loses most first. ``results``: decibels of each tensor of the result.

    ``parted``: calls of a model of the eager door whose numbers took another way in int8; what ran behind that is in
    no row.
    """

    rows: tuple[Row, ...]
    results: tuple[float, ...]
    samples: int
    parted: int = 0

    @property
    def worst(self) -> Row:
        """`InputError` when operators were not compared."""
        if not self.rows:
            raise InputError("compare", None, "no operator was compared", remedy=NEEDS_REFERENCE)
        return self.rows[0]

    def exclude(self, db: float) -> list[str]:
        """Selectors of all operators that alone keep less than ``db``: to be pasted into ``skip=``."""
        return _selectors(row for row in self.rows if row.alone < db)

    def skip_list(self, count: int) -> list[str]:
        """Selectors of the ``count`` operators that alone lose most; fewer when fewer lose anything."""
        return _selectors(row for row in self.rows if row.alone < math.inf)[:count]

    def __str__(self) -> str:
        """A line for the result, then one an operator, the worst first."""
        if not self.rows:
            return f"{self._heading()}\noperators: {NEEDS_REFERENCE}"
        names = f"{'alone':>10} {'so far':>10} {'cut off':>8} {'levels':>7}  operator"
        return "\n".join([self._heading(), names, *map(str, self.rows)])

    def _heading(self) -> str:
        found = f"result: {', '.join(_decibels(r).strip() for r in self.results)} over {self.samples} samples"
        return found + (f"; {self.parted} calls took another way in int8" if self.parted else "")

    def __rich__(self) -> Table:
        """All of a row, as a table for `rich`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._heading(), title_justify="left", caption="" if self.rows else NEEDS_REFERENCE)
        table.add_column("operator", overflow="fold")
        for name in ("alone", "so far", "cosine", "values", "cut off", "levels"):
            table.add_column(name, justify="right")
        for row in self.rows:
            noise = (_decibels(row.alone).strip(), _decibels(row.so_far).strip(), f"{row.so_far_cosine:.5f}")
            cut = f"{100 * row.use.below:.2f} + {100 * row.use.above:.2f} %" if row.use else ""
            name = f"{row.path or 'model'} ({row.operator})" + (f"\n{row.source}" if row.source else "")
            cells = (name, *noise, f"{row.low:.3g} … {row.high:.3g}", cut, _used(row.use)[1])
            table.add_row(*map(Text, cells))
        return table

    def to_dict(self) -> dict[str, Any]:
        """For JSON: decibels of what is exact are ``None``."""
        rows = [{key: _finite(value) for key, value in asdict(row).items()} for row in self.rows]
        results = [_finite(value) for value in self.results]
        return {"results": results, "samples": self.samples, "parted": self.parted, "rows": rows}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


NEEDS_REFERENCE = "compare(model, reference, data) shows them, for the reference that convert gives"


def _selectors(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.skip for row in rows if row.skip))


def _used(use: RangeUse | None) -> tuple[str, str]:
    """Share of values cut off, share of levels in use."""
    if use is None:
        return "", ""
    return f"{100 * (use.below + use.above):.2f} %", "" if use.levels is None else f"{100 * use.levels:.0f} %"


def _decibels(value: float) -> str:
    return f"{'exact':>10}" if value == math.inf else f"{value:7.1f} dB"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
