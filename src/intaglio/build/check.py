"""Validate schedules from a file or a user."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir import Schedule
from intaglio.kernels import ISAS
from intaglio.ops import op_def
from intaglio.plan import Plan, unsupported_reason


def check_schedules(schedules: Mapping[str, Mapping[str, Schedule]], plan: Plan) -> None:
    """Raise `ValueError` for a schedule of an unknown value, or one without kernels in its instruction set."""
    products = {step.partition.output for step in plan.steps if op_def(step.partition.anchor).multiplies_weight}
    for isa, chosen in schedules.items():
        for value, schedule in chosen.items():
            if isa not in ISAS or value not in products:
                raise ValueError(
                    f"a schedule is given for %{value} on {isa}: not a product of the plan, or not an instruction set"
                )
            if (problem := unsupported_reason(schedule, ISAS[isa])) is not None:
                raise ValueError(f"%{value}: {problem}")
