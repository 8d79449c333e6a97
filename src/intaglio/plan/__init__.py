"""Execution plans of integer graphs: partitions, layouts, views, memory, schedules and batch tiling.

The passes that prepare an integer graph for planning are here too; `lower` runs them last. This package does not use
torch.
"""

from intaglio.plan.buffers import Buffer
from intaglio.plan.execution_plan import Plan
from intaglio.plan.graph_passes.integer_passes import INTEGER_PASSES
from intaglio.plan.plan_records import (
    BatchTiling,
    BufferLifetime,
    CacheSizes,
    Choice,
    Partition,
    Step,
    Target,
    TensorView,
)
from intaglio.plan.plan_verifier import verify_plan
from intaglio.plan.planning import PLAN_PASSES, plan_graph
from intaglio.plan.scheduling.batch_tiling import analytic_batch_tiling, separable_groups
from intaglio.plan.scheduling.schedules import (
    GENERATOR,
    GemmProblem,
    Geometry,
    analytic_schedule,
    analytic_schedules,
    gemm_problem,
    geometries,
    order_candidates,
    tile_candidates,
    unsupported_reason,
)
from intaglio.plan.scheduling.target_passes import schedule_plan

__all__ = [
    "GENERATOR",
    "INTEGER_PASSES",
    "PLAN_PASSES",
    "BatchTiling",
    "Buffer",
    "BufferLifetime",
    "CacheSizes",
    "Choice",
    "GemmProblem",
    "Geometry",
    "Partition",
    "Plan",
    "Step",
    "Target",
    "TensorView",
    "analytic_batch_tiling",
    "analytic_schedule",
    "analytic_schedules",
    "gemm_problem",
    "geometries",
    "order_candidates",
    "plan_graph",
    "schedule_plan",
    "separable_groups",
    "tile_candidates",
    "unsupported_reason",
    "verify_plan",
]
