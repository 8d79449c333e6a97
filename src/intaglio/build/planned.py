"""`Planned`: an integer graph and the plan of its program, which `compile` turns into a model."""

from __future__ import annotations

from dataclasses import dataclass

from intaglio.lower import Lowered
from intaglio.plan import Plan


@dataclass(frozen=True)
class Planned:
    """Holds the integer graph and its plan for one instruction set and the caches of this machine.

    ``plan`` has partitions, layouts, views, memory, schedules, kernels and batch tiling, each with its reason.
    """

    lowered: Lowered
    plan: Plan

    @property
    def isa(self) -> str:
        """The instruction set that it is for."""
        if self.plan.target is None:
            raise ValueError("this plan is for no machine yet: schedule_plan(plan, ...)")
        return self.plan.target.isa

    def text(self) -> str:
        """Return all that was decided, with the reason of each choice."""
        return self.plan.text()

    def __repr__(self) -> str:
        return f"Planned({len(self.plan.steps)} steps for {self.isa})"
