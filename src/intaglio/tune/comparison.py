"""`Comparison`, the result of `compare`: errors by operator, as values, text or a table, and selectors to leave in
float."""

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
    """Use of a site's quantization range by the float model's values.

    Attributes:
        below: share of values below the range.
        above: share of values above the range.
        levels: share of the quantized values that occur, or ``None`` for floating-point types.
    """

    below: float
    above: float
    levels: float | None


@dataclass(frozen=True)
class Row:
    """Error of one operator.

    Attributes:
        node: its name in the texts of stages.
        site: name of its result's site, or "".
        path: path of its module.
        operator: ATen operator.
        source: line of the model's source code.
        alone: signal-to-quantization-noise ratio in decibels with exact operands, that is, from the rounding of its own
            weights and result. Infinite without error.
        so_far: the same with everything before it quantized too.
        alone_cosine: cosine similarity of exact and quantized values with exact operands.
        so_far_cosine: cosine similarity with everything before it quantized too.
        low: smallest value of the float model.
        high: largest value of the float model.
        use: use of the site's quantization range.
        skip: selector that leaves this operator and those fused with it in float; "" for an input.
        recording: number of the recording, for a model of eager mode.
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
    """Errors of a quantized model.

    Attributes:
        rows: operators, the one with the largest error of its own first.
        results: signal-to-quantization-noise ratio in decibels of each tensor of the result.
        samples: number of samples.
        parted: calls of a model of eager mode in which data-dependent control flow took another path in int8. Operators
            after that point are not in ``rows``.
    """

    rows: tuple[Row, ...]
    results: tuple[float, ...]
    samples: int
    parted: int = 0

    @property
    def worst(self) -> Row:
        """Return the operator with the largest error of its own. Raise `InputError` if no operators were compared."""
        if not self.rows:
            raise InputError("compare", None, "no operator was compared", remedy=NEEDS_REFERENCE)
        return self.rows[0]

    def exclude(self, db: float) -> list[str]:
        """Return selectors, for ``skip=``, of all operators whose own signal-to-noise ratio is below ``db``."""
        return _selectors(row for row in self.rows if row.alone < db)

    def skip_list(self, count: int) -> list[str]:
        """Return selectors of the ``count`` operators with the largest errors of their own. Exact operators are left
        out."""
        return _selectors(row for row in self.rows if row.alone < math.inf)[:count]

    def __str__(self) -> str:
        """Format one line for the result, then one for each operator, the worst first."""
        if not self.rows:
            return f"{self._heading()}\noperators: {NEEDS_REFERENCE}"
        names = f"{'alone':>10} {'so far':>10} {'cut off':>8} {'levels':>7}  operator"
        return "\n".join([self._heading(), names, *map(str, self.rows)])

    def _heading(self) -> str:
        found = f"result: {', '.join(_decibels(r).strip() for r in self.results)} over {self.samples} samples"
        return found + (f"; {self.parted} calls took another way in int8" if self.parted else "")

    def __rich__(self) -> Table:
        """Return all columns as a table for `rich`."""
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
        """Return a dictionary for JSON, in which infinite decibels are ``None``."""
        rows = [{key: _finite(value) for key, value in asdict(row).items()} for row in self.rows]
        results = [_finite(value) for value in self.results]
        return {"results": results, "samples": self.samples, "parted": self.parted, "rows": rows}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


NEEDS_REFERENCE = "compare(model, reference, data) shows them, for the reference that convert gives"


def _selectors(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.skip for row in rows if row.skip))


def _used(use: RangeUse | None) -> tuple[str, str]:
    """Return the share of values cut off and the share of quantized values in use, as text."""
    if use is None:
        return "", ""
    return f"{100 * (use.below + use.above):.2f} %", "" if use.levels is None else f"{100 * use.levels:.0f} %"


def _decibels(value: float) -> str:
    return f"{'exact':>10}" if value == math.inf else f"{value:7.1f} dB"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
