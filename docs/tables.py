"""Tables of the site, printed from the code while it is built; `conf.py` beside it asks for them.

A line ``{{ operators }}`` of a page becomes that table. ``python docs/tables.py operators`` prints it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from intaglio import errors
from intaglio.fusion.pattern import Pattern
from intaglio.fusion.table import FUSIONS, GRAPH_FUSIONS
from intaglio.kernels import ISAS, Isa
from intaglio.native.cpu import CPU_FLAGS
from intaglio.ops import BY_NAME, OPS, OpDef

MARK = re.compile(r"^\{\{ (\w+) \}\}$", re.MULTILINE)
BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "README.md"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(
        "| " + " | ".join(cell or " " for cell in line) + " |" for line in lines
    )


def operators() -> str:
    """Operators of a model that have an int8 form: one row a record."""
    found = [record for record in OPS.values() if record.targets]
    head = (
        "operator",
        "ATen overloads",
        "range of the result",
        "kernel",
        "fused in",
        "notes",
    )
    return table(head, map(_operator, found))


def _operator(record: OpDef) -> tuple[str, ...]:
    overloads = "<br>".join(f"`{target}`" for target in record.targets)
    rows = ", ".join(
        f"`{row.name}`" for row in GRAPH_FUSIONS if record.name in kinds(row.pattern)
    )
    owner = "its input's" if record.shares_qparams else "its own"
    return (
        f"`{record.name}`",
        overloads,
        owner,
        record.kernel or "host",
        rows,
        "; ".join(_notes(record)),
    )


def _notes(record: OpDef) -> Iterator[str]:
    if record.anchor:
        yield "quantized for its own sake"
    if record.roles.weight is not None:
        yield "constant weight"
    if record.function is not None:
        yield "a lookup table of 256 values"
    if record.variadic:
        yield "any number of operands, which share one range"
    elif len(record.roles.x) > 1:
        yield "both operands in int8"
    if record.tolerance != 1:
        yield f"differs from the reference by up to {record.tolerance} quantized values"


def internal() -> str:
    """Operators that only the integer graph has."""
    found = [record for record in OPS.values() if not record.targets]
    return table(
        ("operator", "kernel"),
        ((f"`{record.name}`", record.kernel or "host") for record in found),
    )


def reals() -> str:
    """Operators that generated loops compute in float32: one row a record."""
    found = [
        (record, record.loop.targets or record.targets)
        for record in BY_NAME.values()
        if record.loop is not None
    ]
    rows = (
        (f"`{record.name}`", ", ".join(f"`{target}`" for target in targets))
        for record, targets in found
    )
    return table(("operator", "ATen overloads"), rows)


PRECISE_ONLY = ', if the recipe says `functions = "precise"`'


def fusions() -> str:
    """List all rows of `intaglio.fusion.table`, level by level, in the order they are tried."""
    found = (
        (
            f"`{row.name}`",
            row.level,
            f"`{text(row.pattern)}`" + PRECISE_ONLY * row.precise,
            row.purpose,
        )
        for row in FUSIONS
    )
    return table(("row", "matched on", "operators that become one", "why"), found)


def text(pattern: Pattern) -> str:
    """``add(conv2d / linear(x), other)``: operators as calls, alternatives between slashes."""
    if not pattern.kinds:
        return ("constant " if pattern.is_constant else "") + (pattern.name or "any")
    return (
        f"{' / '.join(pattern.kinds)}({', '.join(map(text, pattern.operands)) or '…'})"
    )


def kinds(pattern: Pattern) -> set[str]:
    """Every operator a pattern names."""
    return set(pattern.kinds).union(*map(kinds, pattern.operands))


def error_classes() -> str:
    """Everything intaglio raises on purpose, the base class first."""
    found = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.IntaglioError)
    ]
    ordered = sorted(
        found, key=lambda c: (len(c.__mro__), inspect.getsourcelines(c)[1])
    )
    return table(
        ("error", "raised for"), ((f"`{c.__name__}`", first_line(c)) for c in ordered)
    )


def first_line(thing: type) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def kernels() -> str:
    """Microkernels of every instruction set, best first."""
    head = (
        "instruction set",
        "flags of the processor",
        "microkernels",
        "largest tiles, pixels × channels",
        "results",
    )
    return table(head, map(_kernels, ISAS.values()))


def _kernels(isa: Isa) -> tuple[str, ...]:
    specs = list(isa.specs())
    max_tile_rows = {
        blocks: max(s.rows for s in specs if s.blocks == blocks)
        for blocks in sorted({s.blocks for s in specs})
    }
    tiles = ", ".join(
        f"{rows} × {16 * blocks}" for blocks, rows in max_tile_rows.items()
    )
    flags = ", ".join(f"`{flag}`" for flag in sorted(CPU_FLAGS[isa.name])) or "none"
    results = ", ".join(
        f"`{result}`" for result in dict.fromkeys(spec.result for spec in specs)
    )
    return f"`{isa.name}`", flags, str(len(specs)), tiles, results


TABLES: Mapping[str, Callable[[], str]] = {
    "operators": operators,
    "internal": internal,
    "fusions": fusions,
    "reals": reals,
    "errors": error_classes,
    "kernels": kernels,
}


def fill(markdown: str) -> str:
    """The page with its tables; KeyError for a mark that names none."""
    return MARK.sub(lambda mark: TABLES[mark[1]](), markdown)


def benchmarks_page() -> str:
    """Return the text of benchmarks/README.md with the links of a page in docs."""
    return BENCHMARKS.read_text(encoding="utf-8").replace("](../docs/", "](")


if __name__ == "__main__":
    print("\n\n".join(TABLES[name]() for name in sys.argv[1:] or TABLES))
