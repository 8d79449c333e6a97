"""Lowered -> plan -> program -> shared object -> `QuantizedModel`, in order."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from intaglio.build.check import check_graph
from intaglio.codegen import ISAS, CacheSizes, emit
from intaglio.errors import ArtifactError, BuildError
from intaglio.ir import Plan, Program, Schedule, graph_text, partitions_text
from intaglio.lower import Lowered, plan
from intaglio.native.compile import install, text_key
from intaglio.native.machine import caches, isas
from intaglio.runtime import (
    Artifact,
    Coverage,
    FloatPart,
    QuantizedModel,
    Saved,
    build_artifact,
    load_saved,
    open_artifact,
)

logger = logging.getLogger("intaglio")


def compile(
    lowered: Lowered, *, isa: str | None = None, schedules: Mapping[str, Schedule] | None = None
) -> QuantizedModel:
    """Native program for one instruction set (default: the best this machine has). ``schedules`` replace analytic
    ones, by output value. Raises `BuildError`."""
    planned = plan(lowered.graph)
    program = _emit(planned, choose(isa), lowered.about.name, schedules)
    islands = {key: (island.module, island.dims) for key, island in lowered.islands.items()}
    saved = Saved(lowered.graph, lowered.signature, islands, _coverage(lowered), lowered.about)
    return _model(saved, planned, build_artifact(program))


def load(path: str | Path, *, trust: bool = False, isa: str | None = None) -> QuantizedModel:
    """The model in the file at ``path``, as `QuantizedModel.save` wrote it, for one instruction set (default: the best
    this machine has). Nothing is unpickled and nothing imported.

    The program is built from the integer graph, unless the cache has it. ``trust=True`` uses the compiled library in
    the file instead, where there is one for this instruction set and of this version's text: native code, so only for
    files whose origin you know. Raises `ArtifactError` and `BuildError`.
    """
    saved, chosen = load_saved(path), choose(isa)
    library = saved.libraries.get(chosen) if trust else None
    try:
        check_graph(saved.graph)
        planned = plan(saved.graph)
        program = _emit(planned, chosen, saved.about.name, library.schedules if library else None)
    except Exception as error:  # whatever our own steps trip over in a graph they did not make
        raise ArtifactError(
            str(path), None, f"its graph cannot be compiled: {type(error).__name__}: {error}",
            remedy="save the model again with the installed version",
        ) from error  # fmt: skip
    if library is not None and library.key == text_key(program.source, chosen):
        artifact = open_artifact(program, install(library.content, name=program.name))
    else:
        if trust:
            logger.info("%s: no library for %s of this version's text; built from the graph", path, chosen)
        artifact = build_artifact(program)
    return _model(saved, planned, artifact)


def _emit(planned: Plan, isa: str, name: str, schedules: Mapping[str, Schedule] | None) -> Program:
    sizes = caches()
    return emit(planned, isa, CacheSizes(sizes.l1, sizes.l2), _identifier(name), schedules)


def _model(saved: Saved, planned: Plan, artifact: Artifact) -> QuantizedModel:
    """What a user holds; the texts of the last stages and the size follow from the program."""
    graph, islands = saved.graph, saved.islands
    parts = partitions_text(tuple(step.partition for step in planned.steps), graph)
    about = saved.about.after(integer=graph_text(graph), partitions=parts, program=artifact.program.source)
    size = artifact.constants.nbytes + sum(b.nbytes for module, _ in islands.values() for b in module.buffers())
    coverage = replace(saved.coverage, bytes_after=size)
    return QuantizedModel(artifact, saved.signature, graph, islands, coverage, about, saved.example)


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


def _coverage(lowered: Lowered) -> Coverage:
    """All but the bytes after, which the program decides."""
    floats = tuple(
        FloatPart(skip.origin.path, skip.origin.operator, skip.reason, skip.macs, skip.origin.source)
        for skip in lowered.skipped
    )
    integer, total = lowered.macs
    operators = lowered.operators
    return Coverage(
        integer, total, operators, operators + len(floats), len(lowered.islands), floats, lowered.about.bytes, 0,
        lowered.about.notes,
    )  # fmt: skip
