"""Lowered -> plan -> program -> shared object -> `QuantizedModel`, in order."""

from __future__ import annotations

from collections.abc import Mapping

from intaglio.codegen import ISAS, CacheSizes, emit
from intaglio.errors import BuildError
from intaglio.ir import Schedule, partitions_text
from intaglio.lower import Lowered, plan
from intaglio.native.machine import caches, isas
from intaglio.runtime import Coverage, FloatPart, QuantizedModel, build_artifact


def compile(
    lowered: Lowered, *, isa: str | None = None, schedules: Mapping[str, Schedule] | None = None
) -> QuantizedModel:
    """Native program for one instruction set (default: the best this machine has). ``schedules`` replace analytic
    ones, by output value. Raises `BuildError`."""
    planned, sizes, about = plan(lowered.graph), caches(), lowered.about
    program = emit(planned, choose(isa), CacheSizes(sizes.l1, sizes.l2), _identifier(about.name), schedules)
    artifact = build_artifact(program)
    parts = partitions_text(tuple(step.partition for step in planned.steps), lowered.graph)
    about = about.after(integer=lowered.text(), partitions=parts, program=program.source)
    islands = {key: (island.module, island.dims) for key, island in lowered.islands.items()}
    graph, coverage = lowered.graph, _coverage(lowered, artifact.constants.nbytes)
    return QuantizedModel(artifact, lowered.signature, graph.inputs, graph.outputs, islands, coverage, about)


def choose(isa: str | None) -> str:
    """The best instruction set of this machine that there are kernels for, or the one asked for."""
    able = [candidate for candidate in isas() if candidate in ISAS]
    if isa is None:
        return able[0]
    if isa not in able:
        raise BuildError(f"isa={isa!r}", None, f"not among what this machine runs: {', '.join(able)}")
    return isa


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name) or "model"


def _coverage(lowered: Lowered, constant_bytes: int) -> Coverage:
    floats = tuple(
        FloatPart(skip.origin.path, skip.origin.operator, skip.reason, skip.macs, skip.origin.source)
        for skip in lowered.skipped
    )
    integer, total = lowered.macs
    operators = lowered.operators
    islands = [buffer.nbytes for island in lowered.islands.values() for buffer in island.module.buffers()]
    size = constant_bytes + sum(islands)
    return Coverage(
        integer, total, operators, operators + len(floats), len(lowered.islands), floats, lowered.about.bytes, size,
        lowered.about.notes,
    )  # fmt: skip
