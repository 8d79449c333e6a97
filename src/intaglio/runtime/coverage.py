"""What of a model runs in int8, and why the rest does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FloatPart:
    """An operator that stays in float: where, which, why, its multiply-accumulates at batch 1."""

    path: str
    operator: str
    reason: str
    macs: int = 0

    def __str__(self) -> str:
        work = f" [{self.macs / 1e6:.1f} M MACs]" if self.macs else ""
        return f"{self.path or 'model'} ({self.operator}): {self.reason}{work}"


@dataclass(frozen=True)
class Coverage:
    """Shares of a model that run in int8. ``islands`` counts the float parts the program stops for."""

    macs_int8: int
    macs_total: int
    operators_int8: int
    operators_total: int
    islands: int
    floats: tuple[FloatPart, ...]
    bytes_before: int
    bytes_after: int

    @property
    def macs(self) -> float:
        """Share of multiply-accumulates of convolutions and linear layers, 0..1."""
        return self.macs_int8 / self.macs_total if self.macs_total else 0.0

    @property
    def operators(self) -> float:
        """Share of operators on floating-point tensors, 0..1."""
        return self.operators_int8 / self.operators_total if self.operators_total else 0.0

    def __str__(self) -> str:
        lines = [
            f"{100 * self.macs:.1f} % of {self.macs_total / 1e6:.1f} M MACs and {self.operators_int8} of "
            f"{self.operators_total} operators in int8",
            f"{self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB",
            f"{self.islands} float island{'s' * (self.islands != 1)}" + (":" if self.floats else ""),
        ]
        return "\n".join(lines + [f"  {part}" for part in self.floats])
