"""`Comparison`, the result of `compare`: errors by operator, as values, text or a table, and selectors to leave in
float."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from intaglio.errors import InputError
from intaglio.formatting.html_text import element, html_table
from intaglio.formatting.plots import MARK, MOST_BARS, horizontal_bars
from intaglio.tune.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
        path: path of its module; ``@1`` behind a module marks its second call.
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
        folded: paths of the batch norms that were folded into the operator.
        detail: what tells the row apart from others of the same module and operator, such as "call 2 of 2".
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
    folded: tuple[str, ...] = ()
    detail: str = ""

    @property
    def name(self) -> str:
        """Return modules and operator as text, which no other row of a comparison has."""
        modules = " + ".join(_without_calls(path) or "model" for path in (self.path, *self.folded))
        return f"{modules} ({', '.join(filter(None, (self.operator, self.detail)))})"

    @property
    def line(self) -> str:
        """Return the source line, or "" if it is a line of an installed package and the row has a module."""
        installed = "-packages/" in self.source
        return "" if installed and self.path else self.source

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the name and `TABLE_COLUMNS` as text."""
        noise = (_decibels(self.alone).strip(), _decibels(self.so_far).strip(), f"{self.so_far_cosine:.5f}")
        cut = f"{100 * self.use.below:.2f} + {100 * self.use.above:.2f} %" if self.use else ""
        name = self.name + (f"\n{self.line}" if self.line else "")
        return (name, *noise, f"{self.low:.3g} … {self.high:.3g}", cut, _used(self.use)[1].strip())

    def __str__(self) -> str:
        cut, in_use = _used(self.use)
        where = self.name + (f"  at {self.line}" if self.line else "")
        return f"{_decibels(self.alone)} {_decibels(self.so_far)} {cut:>8} {in_use:>7}  {where}"


@dataclass(frozen=True)
class Comparison:
    """Errors of a quantized model.

    Attributes:
        rows: operators, the one with the largest error of its own first.
        results: signal-to-quantization-noise ratio (SQNR) in decibels of each tensor of the result.
        samples: number of samples.
        parted: calls of a model of eager mode in which data-dependent control flow took another path in int8. Operators
            after that point are not in ``rows``.
        agreement: share of samples whose top-1 class is the same in both models, from 0 to 1. ``None`` if the result
            does not look like logits: a tensor f[n, classes], with at least two classes, that comes from a linear
            layer or a convolution, directly or through a softmax or a reshape.
        cosine: cosine similarity of the first tensor of the result, as the mean of its samples.
        names: names of the tensors in ``results``, such as ``logits`` or ``boxes.1``; "" if the result is one tensor.
    """

    rows: tuple[Row, ...]
    results: tuple[float, ...]
    samples: int
    parted: int = 0
    agreement: float | None = None
    cosine: float = 1.0
    names: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Return two sentences about the first tensor of the result: how close it is to float, and what that usually
        means."""
        if not self.results:
            return "no result was compared, because the two models took different paths in every call."
        return verdict(self.agreement, self.cosine, self.results[0], self.samples)

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
        out. Raise `InputError` if no operators were compared."""
        if not self.rows:
            raise InputError("compare", None, "no operator was compared", remedy=NEEDS_REFERENCE)
        return _selectors(row for row in self.rows if row.alone < math.inf)[:count]

    def skipped_by(self, selector: str) -> tuple[Row, ...]:
        """Return the rows that leave int8 with a selector of `skip_list` or `exclude`: operators of one kernel are left
        in float together."""
        return tuple(row for row in self.rows if row.skip == selector)

    def advice(self, count: int = 3) -> list[str]:
        """Return a line for each of the worst selectors, with the rows that it leaves in float.

        Selectors whose operators are all `ADVICE_DB` better than the worst operator are left out.

        Args:
            count: largest number of selectors.
        """
        if not self.rows:
            return []
        selectors = [one for one in self.skip_list(count) if self._alone(one) <= self.worst.alone + ADVICE_DB]
        lines = [f"skip={one!r} leaves in float: {_listed(self.skipped_by(one))}" for one in selectors]
        return [*lines, f"all of them: skip={selectors!r}"] if len(selectors) > 1 else lines

    def _alone(self, selector: str) -> float:
        """Return the decibels alone of the worst operator that a selector leaves in float."""
        return min(row.alone for row in self.skipped_by(selector))

    def plot(self, ax: Axes | None = None, *, most: int = MOST_BARS) -> Axes:
        """Draw the worst operators: their own error as bars, and the error so far as marks, in decibels.

        Args:
            ax: axes of matplotlib to draw on (default: those of a new figure).
            most: largest number of operators.

        Returns:
            The axes.

        Raises:
            InputError: matplotlib is not installed, or no operators were compared.
        """
        if not self.rows:
            raise InputError("compare", None, "no operator was compared", remedy=NEEDS_REFERENCE)
        rows = self.listed[:most]
        names, ratios = [row.name for row in rows], [row.alone for row in rows]
        drawn = horizontal_bars(ax, names, ratios, "signal-to-quantization-noise ratio in dB", label="alone")
        known = [(row.so_far, place) for place, row in enumerate(rows) if math.isfinite(row.so_far)]
        if known:
            drawn.scatter(*zip(*known, strict=True), color=MARK, marker="|", zorder=3, label="so far")
        drawn.legend(loc="lower right", framealpha=0.9)
        drawn.set_title(self._heading(), fontsize="medium")
        return drawn

    def __repr__(self) -> str:
        result = f"{_decibels(self.results[0]).strip()} over {self.samples} samples" if self.results else "no results"
        worst = f", the worst {self.worst.name}: {_decibels(self.worst.alone).strip()}" if self.rows else ""
        return f"Comparison({result}, {len(self.rows)} operators{worst})"

    def _repr_html_(self) -> str:
        """Return the result, the worst operators, what to skip, and the verdict, for notebooks."""
        rows = [row.cells for row in self.listed[:PRINTED_ROWS]]
        table = (
            html_table(("operator", *TABLE_COLUMNS), rows, self._heading()) if rows else element("p", self._heading())
        )
        end = ([] if self.rows else [NEEDS_REFERENCE]) + self._unlisted() + self.advice() + [self._verdict_line()]
        return table + "".join(element("p", line) for line in end)

    def __str__(self) -> str:
        """Format one line for the result, one for each operator, the worst first, then what to skip, and the
        verdict."""
        end = self._verdict_line()
        if not self.rows:
            reason = "not compared, because the reference cannot be made again"
            return f"{self._heading()}\noperators: {reason}; {NEEDS_REFERENCE}\n{end}"
        names = f"{'alone':>10} {'so far':>10} {'clipped':>8} {'in use':>7}  operator"
        rows = map(str, self.listed[:PRINTED_ROWS])
        return "\n".join([self._heading(), names, *rows, *self._unlisted(), *self.advice(), end])

    @property
    def listed(self) -> tuple[Row, ...]:
        """Return the rows with an error of their own, which texts and tables list."""
        return tuple(row for row in self.rows if row.alone < math.inf)

    def _unlisted(self) -> list[str]:
        """Return a line with the numbers of operators that are not printed, or an empty list."""
        exact, better = len(self.rows) - len(self.listed), self.listed[PRINTED_ROWS:]
        parts = (
            [f"{len(better)} operators from {better[0].alone:.1f} dB alone on (they are in .listed)"] if better else []
        )
        parts += [f"{_exact_operators(exact)}, such as data movement"] if exact else []
        return [f"not listed: {', and '.join(parts)}"] if parts else []

    def _heading(self) -> str:
        names = self.names or ("",) * len(self.results)
        errors = [f"{name} {_decibels(sqnr).strip()}".strip() for name, sqnr in zip(names, self.results, strict=True)]
        found = f"result{'s' * (len(errors) > 1)}: {', '.join(errors)} over {self.samples} samples"
        return found + (f"; {self.parted} calls took another path in int8" if self.parted else "")

    def _verdict_line(self) -> str:
        """Return the verdict, with the name of the tensor that it is about if there are several."""
        subject = f" for {self.names[0]}" if len(self.results) > 1 and self.names else ""
        return f"verdict{subject}: {self.verdict}"

    def __rich__(self) -> Table:
        """Return all columns as a table for `rich`."""
        from rich.table import Table
        from rich.text import Text

        end = [] if self.rows else [NEEDS_REFERENCE]
        caption = "\n".join([*end, *self._unlisted(), *self.advice(), self._verdict_line()])
        table = Table(title=self._heading(), title_justify="left", caption=Text(caption), caption_justify="left")
        table.add_column("operator", overflow="fold")
        for name in TABLE_COLUMNS:
            table.add_column(name, justify="right")
        for row in self.listed[:PRINTED_ROWS]:
            table.add_row(*map(Text, row.cells))
        return table

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON, in which infinite decibels are ``None``."""
        rows = [{"name": row.name, **{key: _finite(value) for key, value in asdict(row).items()}} for row in self.rows]
        return {
            "results": [_finite(value) for value in self.results],
            "names": list(self.names),
            "samples": self.samples,
            "parted": self.parted,
            "agreement": self.agreement,
            "cosine": self.cosine,
            "verdict": self.verdict,
            "rows": rows,
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


TABLE_COLUMNS = ("alone", "so far", "cosine", "values", "clipped", "in use")
"""Columns of tables beside the name."""
PRINTED_ROWS = 25
"""Largest number of operators in texts and tables; those with the largest errors of their own come first."""
ADVICE_DB = 10
"""Operators that are better than the worst one by more decibels have less than a tenth of its squared error."""
NEEDS_REFERENCE = "compare(model, reference, data) shows them, for the reference that stages.convert returns"


def number_repeated_calls(rows: Sequence[Row]) -> list[Row]:
    """Return rows, given in execution order, with the number of the call in ``detail`` where a module calls an operator
    more than once."""
    calls, seen, found = Counter(row.name for row in rows), Counter[str](), []
    for row in rows:
        seen[row.name] += 1
        if calls[row.name] > 1:
            call = f"call {seen[row.name]} of {calls[row.name]}"
            row = replace(row, detail=", ".join(filter(None, (row.detail, call))))
        found.append(row)
    return found


def _listed(rows: Sequence[Row]) -> str:
    """Return the names of operators with an error of their own, and the number of the others."""
    names = [row.name for row in rows if row.alone < math.inf]
    exact = len(rows) - len(names)
    return ", ".join(names) + (f" and {_exact_operators(exact)}" if exact else "")


def _exact_operators(count: int) -> str:
    return f"{count} exact operator{'s' * (count != 1)}"


def _without_calls(path: str) -> str:
    """Return the path of a module without the marks of its second and later calls (``relu@1``)."""
    return ".".join(part.partition("@")[0] for part in path.split("."))


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
