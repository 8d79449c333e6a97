"""`Planned`: a lowered model with the plan of its program, which `compile_planned` compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from intaglio.formatting.html_text import element, folded_text
from intaglio.plan import Plan

if TYPE_CHECKING:
    from intaglio.lower import Lowered


@dataclass(frozen=True)
class Planned:
    """A lowered model and its plan for one instruction set and the cache sizes of this machine.

    The plan holds partitions, layouts, views, memory, schedules, kernels and batch tiling, each with its reason.
    """

    lowered: Lowered
    plan: Plan

    @property
    def isa(self) -> str:
        """Return the instruction set of the plan."""
        if self.plan.target is None:
            raise ValueError("the plan has no instruction set yet; call schedule_plan(plan, ...) first")
        return self.plan.target.isa

    def text(self) -> str:
        """Return all decisions of the plan with their reasons."""
        return self.plan.text()

    def __repr__(self) -> str:
        return f"Planned({len(self.plan.steps)} steps for {self.isa})"

    def _repr_html_(self) -> str:
        """Return the plan for notebooks, at a click."""
        return element("p", repr(self)) + folded_text("Plan", self.text())
