"""Integer graph -> plan: partitions, layouts, views, memory, schedules and batch tiling. No torch.

The passes over the integer graph that prepare it for planning are here too; `lower` runs them last.
"""

from intaglio.plan.batch_tiling import Turns, analytic_turns, separable
from intaglio.plan.buffers import Buffer
from intaglio.plan.integer_passes import INTEGER_PASSES
from intaglio.plan.plan_records import Partition, Placement, Plan, Step, View
from intaglio.plan.plan_text import partitions_text
from intaglio.plan.planning import plan_graph
from intaglio.plan.schedules import (
    GENERATOR,
    CacheSizes,
    Geometry,
    Problem,
    TileLimits,
    analytic,
    geometries,
    misfit,
    problem,
    refinements,
    schedules,
    shapes,
)

__all__ = [
    "GENERATOR",
    "INTEGER_PASSES",
    "Buffer",
    "CacheSizes",
    "Geometry",
    "Partition",
    "Placement",
    "Plan",
    "Problem",
    "Step",
    "TileLimits",
    "Turns",
    "View",
    "analytic",
    "analytic_turns",
    "geometries",
    "misfit",
    "partitions_text",
    "plan_graph",
    "problem",
    "refinements",
    "schedules",
    "separable",
    "shapes",
]
