"""Coverage reports: how much of a model runs in int8, and why the rest does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.formatting.html_text import definition_list, html_table, shortened
from intaglio.formatting.number_text import count_text, size_text

SHOWN_ISLANDS = 3
"""Number of operators that are named for each reason."""
NO_MACS = "MACs are not counted: the model has no convolution, linear layer or matrix product"


@dataclass(frozen=True)
class FloatPart:
    """An operator that stays in float.

    Attributes:
        path: path of its module.
        operator: ATen operator.
        reason: why it stays in float.
        macs: its multiply-accumulates for a batch of one.
        source: its line in the source code of the model.
    """

    path: str
    operator: str
    reason: str
    macs: int = 0
    source: str = ""

    @property
    def location(self) -> str:
        """Return the module path or, outside of any submodule, the line of the source code."""
        return self.path or self.source or "model"

    def __str__(self) -> str:
        return f"{self.location} ({self.operator}): {self.reason}"


@dataclass(frozen=True)
class Coverage:
    """Share of a model that runs in int8.

    Attributes:
        macs_int8: multiply-accumulates in int8 of convolutions, linear layers and matrix products, for a batch of one.
        macs_total: all multiply-accumulates of such operators.
        operators_int8: number of operators in int8.
        operators_total: number of operators on floating-point tensors.
        islands: number of float islands, for which the compiled program returns to PyTorch.
        floats: operators in float islands.
        bytes_before: bytes of the float model's tensors.
        bytes_after: bytes of the int8 model's constants.
        notes: decisions made by earlier stages, one line each.
        hosts: user-defined operators on quantized values, for which the program returns to Python.
        loops: float operators that the compiled program runs itself.
    """

    macs_int8: int
    macs_total: int
    operators_int8: int
    operators_total: int
    islands: int
    floats: tuple[FloatPart, ...]
    bytes_before: int
    bytes_after: int
    notes: tuple[str, ...] = ()
    hosts: tuple[FloatPart, ...] = ()
    loops: tuple[FloatPart, ...] = ()

    @check_arguments
    def with_body(self, body: Coverage) -> Coverage:
        """Return the coverage with the body of a loop added. The body counts once, however often it runs."""
        return replace(
            self,
            macs_int8=self.macs_int8 + body.macs_int8,
            macs_total=self.macs_total + body.macs_total,
            operators_int8=self.operators_int8 + body.operators_int8,
            operators_total=self.operators_total + body.operators_total,
            islands=self.islands + body.islands,
            floats=self.floats + body.floats,
            hosts=self.hosts + body.hosts,
            loops=self.loops + body.loops,
        )

    @check_arguments
    def with_sizes(self, before: int, after: int, notes: tuple[str, ...]) -> Coverage:
        """Return the coverage with these sizes in bytes and notes."""
        return replace(self, bytes_before=before, bytes_after=after, notes=notes)

    @check_arguments
    def assert_int8(self, macs: float = 1.0) -> None:
        """Raise `AssertionError`, with the reasons, if less than this share of multiply-accumulates runs in int8."""
        if not 0 <= macs <= 1:
            problem = f"macs = {macs}; it must be between 0 and 1"
            raise InputError("assert_int8", None, problem, remedy="pass a share, such as macs=0.95")
        if self.macs < macs:
            share = f"{100 * self.macs:.2f} % of MACs in int8, asked for {100 * macs:.2f} %"
            raise AssertionError(f"{share}\n{self}")

    @property
    def macs(self) -> float:
        """Return the share of multiply-accumulates of convolutions, linear layers and matrix products in int8, from 0
        to 1."""
        return self.macs_int8 / self.macs_total if self.macs_total else 0.0

    @property
    def has_float_layers(self) -> bool:
        """Return whether float islands have convolutions, linear layers or matrix products."""
        return self.islands > 0 and any(part.macs for part in self.floats)

    @property
    def operators(self) -> float:
        """Return the share of operators on floating-point tensors that run in int8, from 0 to 1."""
        return self.operators_int8 / self.operators_total if self.operators_total else 0.0

    @property
    def macs_text(self) -> str:
        """Return the share of multiply-accumulates in int8 as text."""
        return f"{100 * self.macs:.1f} % of {count_text(self.macs_total)} MACs" if self.macs_total else "no MACs"

    @property
    def _shares(self) -> str:
        operators = f"{self.operators_int8} of {self.operators_total} operators in int8"
        return f"{self.macs_text} and {operators}" if self.macs_total else operators

    def __repr__(self) -> str:
        return f"Coverage({self._shares}, {self.islands} float island{'s' * (self.islands != 1)})"

    def _repr_html_(self) -> str:
        """Return the shares, and the float operators by reason, for notebooks."""
        facts = [
            ("In int8", self._shares),
            ("Parameters", f"{size_text(self.bytes_after)} instead of {size_text(self.bytes_before)}"),
            ("Float islands", self.islands),
            *(("Note", note) for note in self.notes),
        ]
        kinds = {"in float islands": self.floats, "in the program, in float": self.loops, "in Python": self.hosts}
        return definition_list(facts) + "".join(_html_of(kind, parts) for kind, parts in kinds.items() if parts)

    def __str__(self) -> str:
        """Format the shares, then the float operators grouped by reason, those with the most multiply-accumulates
        first."""
        lines = [self._shares] if self.macs_total else [self._shares, NO_MACS]
        lines += [
            f"parameters take {size_text(self.bytes_after)} instead of {size_text(self.bytes_before)}",
            f"{self.islands} float island{'s' * (self.islands != 1)}" + (":" if self.floats else ""),
        ]
        lines += _reasons(self.floats)
        if self.loops:
            lines += [
                f"{len(self.loops)} float operator{'s' * (len(self.loops) != 1)} in the program:",
                *_reasons(self.loops),
            ]
        if self.hosts:
            lines += [f"{len(self.hosts)} host operator{'s' * (len(self.hosts) != 1)}:", *_reasons(self.hosts)]
        return "\n".join([*lines, *[f"note: {note}" for note in self.notes]])


def _groups(found: tuple[FloatPart, ...]) -> Iterator[tuple[str, str, str, int, int]]:
    """Yield operator, reason, places, number and multiply-accumulates of the operators that share a reason, those with
    the most multiply-accumulates first."""
    groups: dict[tuple[str, str], list[FloatPart]] = {}
    for part in found:
        groups.setdefault((part.operator, part.reason), []).append(part)
    for (operator, reason), parts in sorted(groups.items(), key=lambda group: -sum(part.macs for part in group[1])):
        places = ", ".join(dict.fromkeys(part.location for part in parts[:SHOWN_ISLANDS])) + ", ..." * (
            len(parts) > SHOWN_ISLANDS
        )
        yield operator, reason, places, len(parts), sum(part.macs for part in parts)


def _reasons(found: tuple[FloatPart, ...]) -> list[str]:
    """Return one line for each operator and reason."""
    lines = []
    for operator, reason, places, number, work in _groups(found):
        count = f" x {number}" if number > 1 else ""
        share = f" [{count_text(work)} MACs]" if work else ""
        lines.append(f"  {operator}{count}: {reason}{share} ({places})")
    return lines


def _html_of(kind: str, found: tuple[FloatPart, ...]) -> str:
    """Return a table with one row for each operator and reason."""
    rows = [(*words, number, count_text(work)) for *words, number, work in _groups(found)]
    shown, more = shortened(rows, "reasons")
    columns = ("operator", "reason", "where", "number", "MACs")
    return html_table(columns, shown, "; ".join(filter(None, (f"Operators {kind}", more))), text=3)
