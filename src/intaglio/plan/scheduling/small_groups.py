"""Small barrier groups: those whose steps one thread computes in less time than a barrier takes.

Two such groups have no barrier in between. A decoder's step of one token has many: norms, rotary embeddings, new keys.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from intaglio.ir import Dim
from intaglio.ops import op_def
from intaglio.plan.execution_plan import Plan
from intaglio.plan.plan_records import SMALL_WORK, SharedWork, Step
from intaglio.plan.scheduling.cost_model import cost_of

DIVISIBLE = 2
"""Units of work that threads can always divide."""


def choose_small_groups(plan: Plan) -> Plan:
    """Find the barrier groups that are small if all free sizes are 1, and that have a neighbor which is small, too.

    Their work is compared with the limit in every call. Groups that batch tiling runs on sub-batches are left out.
    """
    tiled = 0 if plan.batch_tiling is None else plan.batch_tiling.groups
    ones = dict.fromkeys(plan.graph.symbols(), 1)
    small: dict[int, SharedWork] = {}
    segments: dict[int, int] = {}
    for number, steps in groupby(plan.steps, key=lambda step: step.barrier_group):
        members = list(steps)
        if number < tiled or members[0].called:
            continue
        work = _shared_work(members, plan)
        if work.total(ones) <= SMALL_WORK:
            small[number], segments[number] = work, members[0].segment
    chosen = {
        number: work
        for number, work in small.items()
        if segments[number] in (segments.get(number - 1), segments.get(number + 1))
    }
    return replace(plan, small_groups=chosen)


def _shared_work(steps: list[Step], plan: Plan) -> SharedWork:
    """Return the work of the steps of a barrier group; those that are one unit at all sizes are left out.

    Products count as divisible, so that the result does not depend on the tiles of an instruction set.
    """
    work: dict[Dim, Dim] = {}
    for step in steps:
        cost = cost_of(step, plan)
        units = DIVISIBLE if op_def(step.partition.anchor).multiplies_weight else cost.units
        if units != 1:
            work[units] = work.get(units, 0) + cost.bytes + cost.macs
    return SharedWork(tuple(work.items()))
