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
    lowered: Lowered,
    *,
    isa: str | None = None,
    schedules: Mapping[str, Schedule] | None = None,
    texts: Mapping[str, str] | None = None,
    name: str = "model",
    bytes_before: int = 0,
) -> QuantizedModel:
    """Native program for one instruction set (default: the best this machine has). Raises `BuildError`."""
    planned = plan(lowered.graph)
    sizes = caches()
    program = emit(planned, choose(isa), CacheSizes(sizes.l1, sizes.l2), _identifier(name), schedules)
    artifact = build_artifact(program)
    stages = {
        **(texts or {}),
        "integer": lowered.text(),
        "partitions": partitions_text(tuple(step.partition for step in planned.steps), lowered.graph),
        "program": program.source,
    }
    islands = {key: (island.module, island.dims) for key, island in lowered.islands.items()}
    graph, coverage = lowered.graph, _coverage(lowered, artifact.constants.nbytes, bytes_before)
    return QuantizedModel(artifact, lowered.signature, graph.inputs, graph.outputs, islands, coverage, stages, name)


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


def _coverage(lowered: Lowered, constant_bytes: int, bytes_before: int) -> Coverage:
    floats = tuple(
        FloatPart(skip.origin.path, skip.origin.operator, skip.reason, skip.macs) for skip in lowered.skipped
    )
    integer, total = lowered.macs
    operators = lowered.operators
    islands = [buffer.nbytes for island in lowered.islands.values() for buffer in island.module.buffers()]
    return Coverage(
        integer, total, operators, operators + len(floats), len(lowered.islands), floats, bytes_before,
        constant_bytes + sum(islands),
    )  # fmt: skip
