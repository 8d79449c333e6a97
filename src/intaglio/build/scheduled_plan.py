"""Plans of graphs with schedules for an instruction set."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.ir import Graph, Program, Schedule
from intaglio.kernels import ISAS
from intaglio.native import cpu as machine
from intaglio.plan import CacheSizes, Plan, plan_graph, schedule_plan


def scheduled_plan(
    plan: Plan, isa: str, schedules: Mapping[str, Schedule] | None = None, caches: tuple[int, int] | None = None
) -> Plan:
    """Return the plan with schedules for an instruction set and cache sizes (default: those of this machine)."""
    sizes = machine.caches()
    return schedule_plan(plan, ISAS[isa], CacheSizes(*(caches or (sizes.l1, sizes.l2))), schedules)


def plan_text_of(graph: Graph, program: Program) -> str:
    """Return the text of the plan that the program of a graph was printed from."""
    return scheduled_plan(plan_graph(graph), program.isa, program.notes["schedules"], program.notes["caches"]).text()
