"""Machine-dependent planning: schedules, guards, kernels, batch tiling, small barrier groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from intaglio.ir import Schedule
from intaglio.kernels import Isa
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import BatchTiling, CacheSizes, Choice, Target
from intaglio.plan.scheduling.accumulator_range import mark_guarded_partitions
from intaglio.plan.scheduling.batch_tiling import choose_batch_tiling
from intaglio.plan.scheduling.kernel_selection import choose_kernels
from intaglio.plan.scheduling.schedules import choose_schedules
from intaglio.plan.scheduling.small_groups import choose_small_groups


def schedule_plan(
    plan: Plan,
    isa: Isa,
    caches: CacheSizes,
    timed: Mapping[str, Schedule] | None = None,
    batch_tiling: BatchTiling | None = None,
) -> Plan:
    """Return the plan with all decisions that depend on the machine.

    Args:
        plan: The result of `plan_graph`.
        isa: The instruction set, whose tiles limit the schedules.
        caches: Cache sizes of one core.
        timed: Schedules of a timed search, by the value a partition computes; they replace analytic schedules.
        batch_tiling: Replaces the analytic batch tiling.
    """
    target = Target.of(isa, caches)
    plan = replace(plan, target=target)
    plan = choose_schedules(plan, target, timed or {})
    plan = mark_guarded_partitions(plan)
    plan = choose_kernels(plan, isa)  # after schedules and guards, which determine height and clamping of tiles
    if batch_tiling is None:
        plan = choose_batch_tiling(plan, target)
    else:
        plan = replace(plan, batch_tiling=batch_tiling).with_reasons(
            Choice.BATCH_TILING, {"": "the caller asked for it"}
        )
    return choose_small_groups(plan)  # after schedules, which determine units, and batch tiling
