"""Build a `QuantizedModel`: plan the integer graph, print the program, compile it, and load the library."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from intaglio.build.planned import Planned
from intaglio.build.scheduled_plan import plan_text_of, scheduled_plan
from intaglio.build.stored_programs import print_program, program_of_file, program_of_library
from intaglio.errors import ArtifactError, BuildError, did_you_mean
from intaglio.ir import Graph, Program, Schedule, graph_text
from intaglio.kernels import ISAS
from intaglio.native import cpu as machine
from intaglio.native.compile import install
from intaglio.native.native_library import use_trusted
from intaglio.native.toolchain import NO_COMPILER
from intaglio.ops import OpDef, check_graph, checked_records
from intaglio.plan import plan_graph
from intaglio.runtime import (
    Artifact,
    Coverage,
    FloatPart,
    HostLoop,
    QuantizedModel,
    SavedModel,
    build_artifact,
    build_library,
    decode_saved,
    host_names,
    island_of,
    loops_in,
    open_artifact,
)
from intaglio.runtime.calls.call_plans import NewShapePolicy
from intaglio.runtime.saved.archive import Contents, read
from intaglio.runtime.saved.model_file import REBUILT_STAGES
from intaglio.runtime.saved.saved_libraries import Library
from intaglio.runtime.saved.state_dict_io import with_state_parameters_of

if TYPE_CHECKING:  # a model is loaded without the modules that quantize
    from intaglio.lower import Island, Lowered

TRUST_INSTEAD = "or, if you know the origin of the file, load the program in it: load(path, trust=True)"

logger = logging.getLogger("intaglio")


def compile(
    lowered: Lowered, *, isa: str | Iterable[str] | None = None, schedules: Mapping[str, Schedule] | None = None
) -> QuantizedModel:
    """Compile a lowered model.

    The model runs the best of the given instruction sets that this machine supports. Libraries for the others are only
    built, and are included when the model is saved.

    Args:
        lowered: Model to compile.
        isa: Instruction sets. The default is the best that this machine supports.
        schedules: Schedules by output value that replace analytic ones of the program for this machine. The model keeps
            them.

    Raises:
        BuildError: An instruction set is not supported, or compilation fails.
    """
    here, *others = isas_to_build(isa)
    general, name = plan_graph(lowered.graph), lowered.model_info.name
    planned = Planned(lowered, scheduled_plan(general, here, schedules))
    artifact = build_artifact(print_program(planned.plan, name).packed())
    libraries = {other: build_library(print_program(scheduled_plan(general, other), name).text) for other in others}
    return _compiled(planned, artifact, libraries, isa, {here: dict(schedules)} if schedules else {})


def compile_planned(planned: Planned) -> QuantizedModel:
    """Compile a plan for its instruction set.

    Raises:
        BuildError: Compilation fails.
    """
    program = print_program(planned.plan, planned.lowered.model_info.name).packed()
    return _compiled(planned, build_artifact(program), {}, planned.isa, {})


def plan_program(lowered: Lowered, *, isa: str | None = None) -> Planned:
    """Return the plan that `compile` makes for one instruction set, with analytic schedules."""
    return Planned(lowered, scheduled_plan(plan_graph(lowered.graph), isas_to_build(isa)[0]))


def _compiled(
    planned: Planned,
    artifact: Artifact,
    libraries: Mapping[str, Library],
    isa: str | Iterable[str] | None,
    schedules: Mapping[str, Mapping[str, Schedule]],
) -> QuantizedModel:
    """Return the callable model of a compiled program. Bodies of loops are compiled for the same `isa`."""
    lowered = planned.lowered
    bodies = {name: compile(body, isa=isa) for name, body in lowered.bodies.items()}
    islands = {
        key: (island_of(island.module, _loops(island, bodies)) if island.loops else island.module, island.dims)
        for key, island in lowered.islands.items()
    }
    saved = SavedModel(
        lowered.graph,
        lowered.signature,
        islands,
        coverage_of(lowered),
        lowered.model_info,
        libraries,
        schedules=schedules,
    )
    return _model(saved, artifact, lowered.hosts)


def _loops(island: Island, bodies: Mapping[str, QuantizedModel]) -> dict[str, HostLoop]:
    return {
        name: HostLoop(carried, island_of(condition), bodies[name])
        for name, (carried, condition) in island.loops.items()
    }


def load_program(path: str | Path, *, trust: bool = False, isa: str | None = None) -> QuantizedModel:
    """Load a model that `QuantizedModel.save` wrote. See `intaglio.load` for the arguments and errors."""
    return open_model(path, read(Path(path)), trust=trust, isa=isa)


def open_model(
    path: str | Path,
    contents: Contents,
    *,
    trust: bool = False,
    isa: str | None = None,
    operators: Iterable[OpDef] = (),
) -> QuantizedModel:
    """Return the model with compiled programs from the manifest and the members of its file.

    Args:
        path: the file, for errors.
        contents: its contents. Members are removed as they are used.
        trust: as in `intaglio.load`.
        isa: as in `intaglio.load`.
        operators: as in `intaglio.load`.

    Raises:
        ArtifactError: the contents are not valid, or have user-defined operators that are not given.
        BuildError: the compilation fails, or this machine does not support the instruction set.
    """
    given = {record.name: record for record in checked_records(operators)}
    with _without_collector():
        saved = decode_saved(path, contents)
    return _opened(saved, path, trust, isa, given)


def _opened(
    saved: SavedModel, path: str | Path, trust: bool, isa: str | None, given: Mapping[str, OpDef]
) -> QuantizedModel:
    """Return the model of a file's content with compiled programs, and those of loop bodies first."""
    chosen = isas_to_build(isa)[0]
    if trust and saved.runtime is not None:
        use_trusted(saved.runtime)
    loops = {name: loop for module, _ in saved.islands.values() for name, loop in loops_in(module).items()}
    for name, body in saved.bodies.items():
        loops[name].body = _opened(body, path, trust, isa, given)
    with _without_collector():
        present = [one for one in supported_isas() if one in saved.libraries and isa in (None, one)] if trust else []
        library = saved.libraries[present[0]] if present else None
        try:
            if missing := [one for one in host_names(saved.graph) if one not in given]:
                raise ArtifactError(
                    str(path),
                    None,
                    f"the model has user-defined operators whose code is not in the file: {', '.join(missing)}",
                    remedy="pass their records again: load(path, operators=[...])",
                )
            check_graph(saved.graph, given)
            found = None if library is None else program_of_library(saved, present[0], library)
            library = None if found is None else library
            program = program_of_file(saved, chosen, saved.schedules.get(chosen)) if found is None else found
        except ArtifactError:
            raise
        except Exception as error:  # a file's graph can be invalid in ways that checks do not find
            raise ArtifactError(
                str(path),
                None,
                f"its graph cannot be compiled: {type(error).__name__}: {error}",
                remedy="quantize the float model again with the installed version and save it",
            ) from error
    hosts = {one: given[one] for one in host_names(saved.graph)}
    _warn_of_lost_fallback(saved, path)
    if library is None:
        if trust:
            logger.info("%s: the file has no library for %s of this version; it is built from the graph", path, chosen)
        with _trust_as_remedy(not trust and chosen in saved.libraries):
            return _model(replace(saved, libraries={}), build_artifact(program), hosts)
    if program.isa != chosen:
        logger.info("%s: has a library for %s, none for %s, which this machine runs", path, program.isa, chosen)
    return _model(saved, open_artifact(program, install(library.content, name=program.name)), hosts)


@contextlib.contextmanager
def _trust_as_remedy(has_library: bool) -> Iterator[None]:
    """Name ``trust=True`` in the error of a machine without a compiler if the file has a library for the machine."""
    try:
        yield
    except BuildError as error:
        if not has_library or error.remedy != NO_COMPILER:
            raise
        raise BuildError(error.where, None, error.problem, remedy="; ".join((NO_COMPILER, TRUST_INSTEAD))) from error


def _warn_of_lost_fallback(saved: SavedModel, path: str | Path) -> None:
    """Warn that a file of a model with a float fallback does not hold the float model."""
    if saved.on_new_shape != NewShapePolicy.PLAN:
        logger.warning(
            "%s: saved with on_new_shape=%r, but a file has no float model: new shapes are planned until "
            "model.fall_back_to(float_model)",
            path,
            saved.on_new_shape,
        )


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection inside the `with` block.

    Reading a graph makes many small objects without cycles, and a collection scans all objects of PyTorch. It took a
    fifth of the time of `load`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _integer_text(graph: Graph, bodies: Mapping[str, QuantizedModel]) -> str:
    """Return the text of a graph and of the bodies of its loops."""
    return graph_text(graph) + "".join(f"body of {name}:\n{one.text('integer')}" for name, one in bodies.items())


def _model(saved: SavedModel, artifact: Artifact, hosts: Mapping[str, OpDef]) -> QuantizedModel:
    """Return the model for the user, with the texts of the last stages and the size of its constants.

    Only libraries that were built here, or that the user trusts, become part of the model and are saved with it.
    """
    graph, islands = saved.graph, saved.islands
    bodies = {name: loop.body for module, _ in islands.values() for name, loop in loops_in(module).items()}
    model_info = saved.model_info.with_stage(
        integer=partial(_integer_text, graph, bodies),
        plan=partial(plan_text_of, graph, artifact.program),
        program=artifact.program.source,
    )
    size = artifact.constants.nbytes + sum(b.nbytes for module, _ in islands.values() for b in module.buffers())
    inner = (one for module, _ in islands.values() for one in module.modules() if isinstance(one, QuantizedModel))
    size += sum(one.artifact.constants.nbytes for one in inner)
    coverage = replace(saved.coverage, bytes_after=size)
    others = {isa: library for isa, library in saved.libraries.items() if isa != artifact.program.isa}
    model = QuantizedModel(
        artifact,
        saved.signature,
        graph,
        islands,
        coverage,
        model_info,
        saved.example,
        others,
        recompile,
        saved.schedules,
        hosts,
        emit_for,
    )
    model.kept_attributes = saved.attributes
    return model


def emit_for(model: QuantizedModel, isa: str) -> Program:
    """Return the model's program for another instruction set, with the schedules that it keeps for that one."""
    plan = scheduled_plan(plan_graph(model.graph), isa, model.schedules.get(isa))
    return print_program(plan, model.model_info.name).packed()


def recompile(model: QuantizedModel, graph: Graph) -> QuantizedModel:
    """Return the model with another graph (other weights and scales) for the same instruction sets.

    The reference text and the example are dropped, as they no longer apply.
    """
    hosts = {name: record for name, record in model.hosts.items() if isinstance(record, OpDef)}
    check_graph(graph, hosts)
    general, name = plan_graph(graph), model.model_info.name
    isa = model.artifact.program.isa
    artifact = build_artifact(print_program(scheduled_plan(general, isa, model.schedules.get(isa)), name).packed())
    libraries = {
        one: build_library(print_program(scheduled_plan(general, one, model.schedules.get(one)), name).text)
        for one in model.libraries
    }
    kept = [stage for stage in model.model_info.texts if stage not in ("reference", *REBUILT_STAGES)]
    texts = {stage: model.model_info.texts[stage] for stage in kept}
    islands = {key: (module, model.island_dims[key]) for key, module in model.islands.items()}
    model_info = replace(model.model_info, texts=texts)
    signature = with_state_parameters_of(model.signature, graph)
    saved = SavedModel(graph, signature, islands, model.coverage, model_info, libraries, schedules=model.schedules)
    return _model(saved, artifact, hosts)


def supported_isas() -> list[str]:
    """Return the instruction sets that this machine supports and that have kernels, best first."""
    return [isa for isa in machine.isas() if isa in ISAS]


def isas_to_build(isa: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the instruction sets to build for: the best one that runs here, then the others, best first.

    Raises:
        BuildError: None of them runs here, or one has no kernels.
    """
    able = supported_isas()
    if isa is None:
        return (able[0],)
    requested = (isa,) if isinstance(isa, str) else tuple(isa)
    where = f"isa={isa!r}" if isinstance(isa, str) else f"isa={requested}"
    if unknown := [one for one in requested if one not in ISAS]:
        problem = f"there are no kernels for {', '.join(map(str, unknown))}; allowed are {', '.join(ISAS)}"
        remedy = did_you_mean(unknown[0], ISAS) or "leave isa out for the best one of this machine"
        raise BuildError(where, None, problem, remedy=remedy)
    supported = [one for one in able if one in requested]
    if not supported:
        raise BuildError(
            where,
            None,
            f"this machine supports none of these; it runs {', '.join(able)}",
            remedy="add one of those; the file of a model can hold libraries for several instruction sets",
        )
    return (supported[0], *[one for one in ISAS if one in requested and one != supported[0]])


def coverage_of(lowered: Lowered) -> Coverage:
    """Return the coverage of a lowered model. `bytes_after` is 0 until the program is known."""
    floats, loops = (
        tuple(
            FloatPart(skip.origin.path, skip.origin.operator, skip.reason, skip.macs, skip.origin.source)
            for skip in lowered.skipped
            if (skip.node in lowered.native) is native
        )
        for native in (False, True)
    )
    hosts = tuple(
        FloatPart(
            op.origin.path,
            op.origin.operator,
            f"{op.attrs['operator']}: a NumPy implementation, no kernel",
            source=op.origin.source,
        )
        for op in lowered.graph.ops
        if op.is_host
    )
    integer, total = lowered.macs
    operators = lowered.operators
    own = Coverage(
        integer,
        total,
        operators,
        operators + sum(not skip.is_added for skip in lowered.skipped),
        len(lowered.islands),
        floats,
        lowered.model_info.bytes,
        0,
        lowered.model_info.notes,
        hosts,
        loops,
    )
    for body in lowered.bodies.values():
        own = own.with_body(coverage_of(body))
    return own
