"""What of a model runs in int8, and why the rest does not."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHOWN_ISLANDS = 3
"""Places named per reason."""


@dataclass(frozen=True)
class FloatPart:
    """An operator that stays in float: module path, operator, why, its multiply-accumulates at batch 1, line of the
    model's source."""

    path: str
    operator: str
    reason: str
    macs: int = 0
    source: str = ""

    @property
    def place(self) -> str:
        """The module, or, outside any submodule, the line."""
        return self.path or self.source or "model"

    def __str__(self) -> str:
        return f"{self.place} ({self.operator}): {self.reason}"


@dataclass(frozen=True)
class Coverage:
    """Shares of a model that run in int8. ``islands`` counts the float parts the program stops for; ``notes`` says what
    was decided on the way. ``hosts``: operators on int8 levels that it stops for too, as their meaning is a user's.
    ``loops``: float operators that it runs itself."""

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

    def with_body(self, body: Coverage) -> Coverage:
        """Of a model whose float parts run a loop over this body, which counts once however often it runs."""
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

    @property
    def macs(self) -> float:
        """Share of multiply-accumulates of convolutions, linear layers and matrix products, 0..1."""
        return self.macs_int8 / self.macs_total if self.macs_total else 0.0

    @property
    def operators(self) -> float:
        """Share of operators on floating-point tensors, 0..1."""
        return self.operators_int8 / self.operators_total if self.operators_total else 0.0

    def __str__(self) -> str:
        """The shares, then the float operators by reason, the most work first."""
        lines = [
            f"{100 * self.macs:.1f} % of {self.macs_total / 1e6:.1f} M MACs and {self.operators_int8} of "
            f"{self.operators_total} operators in int8",
            f"{self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB",
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


def _reasons(found: tuple[FloatPart, ...]) -> list[str]:
    """One line an operator and reason, the most work first."""
    groups: dict[tuple[str, str], list[FloatPart]] = {}
    for part in found:
        groups.setdefault((part.operator, part.reason), []).append(part)
    ordered = sorted(groups.items(), key=lambda group: -sum(part.macs for part in group[1]))
    lines = []
    for (operator, reason), parts in ordered:
        places = ", ".join(dict.fromkeys(part.place for part in parts[:SHOWN_ISLANDS])) + ", ..." * (
            len(parts) > SHOWN_ISLANDS
        )
        work = sum(part.macs for part in parts)
        count = f" x {len(parts)}" if len(parts) > 1 else ""
        share = f" [{work / 1e6:.1f} M MACs]" if work else ""
        lines.append(f"  {operator}{count}: {reason}{share} ({places})")
    return lines
