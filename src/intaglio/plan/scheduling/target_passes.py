"""Decide what depends on the machine: schedules, guards, batch tiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.ir import Schedule
from intaglio.kernels import Isa
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import BatchTiling, CacheSizes, Choice, Target
from intaglio.plan.scheduling.accumulator_range import choose_guards
from intaglio.plan.scheduling.batch_tiling import choose_batch_tiling
from intaglio.plan.scheduling.kernel_selection import choose_kernels
from intaglio.plan.scheduling.schedules import choose_schedules


def schedule_plan(
    plan: Plan,
    isa: Isa,
    caches: CacheSizes,
    timed: Mapping[str, Schedule] | None = None,
    batch_tiling: BatchTiling | None = None,
) -> Plan:
    """Return the plan with all that depends on the machine.

    Args:
        plan: what `plan_graph` returned.
        isa: the instruction set, whose tiles bound the schedules.
        caches: sizes of the caches of one core.
        timed: schedules of a timed search, by the value a partition makes; they replace analytic ones.
        batch_tiling: replaces the analytic one.
    """
    target = Target(isa.name, isa.tallest, caches)
    plan = replace(plan, target=target)
    plan = choose_schedules(plan, target, timed or {})
    plan = choose_guards(plan)
    plan = choose_kernels(plan, isa)  # tiles are as tall as schedules say, and clamp where guards say
    if batch_tiling is not None:
        return replace(plan, batch_tiling=batch_tiling).because(Choice.BATCH_TILING, {"": "the caller asked for it"})
    return choose_batch_tiling(plan, target)
