"""Programs of graphs: printed, or read from the cache if the file of the graph was loaded before."""

from __future__ import annotations

import hashlib
import logging
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from intaglio.build.check import check_schedules
from intaglio.build.scheduled_plan import scheduled_plan
from intaglio.codegen import PrintedProgram, constants_memory, emit
from intaglio.ir import Program, Schedule
from intaglio.ir.names import sanitized
from intaglio.native import cpu as machine
from intaglio.native import program_cache
from intaglio.plan import Plan, plan_graph
from intaglio.runtime import SavedModel, host_names
from intaglio.runtime.artifact import program_key
from intaglio.runtime.saved.saved_libraries import Library

logger = logging.getLogger("intaglio")


def print_program(plan: Plan, name: str) -> PrintedProgram:
    """Return the program of a scheduled plan, whose constants are not packed yet."""
    return emit(plan, sanitized(name) or "model")


def program_of_file(saved: SavedModel, isa: str, schedules: Mapping[str, Schedule] | None) -> Program:
    """Return the program of a file's graph, which later loads of the file read from the cache.

    Args:
        saved: contents of the file, with a checked graph.
        isa: instruction set.
        schedules: schedules by output value that replace analytic ones.

    Raises:
        ValueError: a schedule of the file is invalid.
    """
    found = _program(saved, isa, schedules, None, "")
    assert found is not None
    return found


def program_of_library(saved: SavedModel, isa: str, library: Library) -> Program | None:
    """Return the program of a library in a file, with schedules for the machine that compiled it.

    Return ``None``, without packing constants, if this version prints another text than the library's.

    Args:
        saved: contents of the file, with a checked graph.
        isa: instruction set of the library.
        library: the library.

    Raises:
        ValueError: a schedule of the file is invalid.
    """
    return _program(saved, isa, library.schedules, library.caches, library.key)


def _program(
    saved: SavedModel,
    isa: str,
    schedules: Mapping[str, Schedule] | None,
    caches: tuple[int, int] | None,
    wanted: str,
) -> Program | None:
    """Return the program for an instruction set and cache sizes, by default those of this machine, or ``None`` if the
    digest of its text is not the wanted one."""
    key = _key(saved, isa, schedules, caches)
    if key and wanted and program_cache.known_text(key) not in ("", wanted):
        return None
    if key and (found := _stored(key)) is not None:
        return found if wanted in ("", program_key(found)) else None
    plan = plan_graph(saved.graph)
    check_schedules(saved.schedules, plan)
    printed = print_program(scheduled_plan(plan, isa, schedules, caches), saved.model_info.name)
    if wanted and (text := program_key(printed.text)) != wanted:
        if key:
            program_cache.write_text(key, text)
        return None
    program = printed.packed()
    if key:
        record = pickle.dumps(replace(program, constants=np.empty(0, np.uint8)), pickle.HIGHEST_PROTOCOL)
        program_cache.write(key, program.constants.data, record)
    return program


def _stored(key: str) -> Program | None:
    """Return the program that the cache has under a key, or ``None``."""
    found = program_cache.read(key, lambda size: memoryview(constants_memory(size))[:size])
    if found is None:
        return None
    constants, record = found
    try:
        program = pickle.loads(record)  # of this user or root, like the libraries that are loaded from the cache
        return replace(program, constants=np.frombuffer(constants, np.uint8))
    except Exception as error:  # whatever a class does that another version of a package has written
        logger.warning("a stored program cannot be read and is printed again: %s: %s", type(error).__name__, error)
        return None


def _key(saved: SavedModel, isa: str, schedules: Mapping[str, Schedule] | None, caches: tuple[int, int] | None) -> str:
    """Return a digest of all that the program depends on but the code that prints it.

    It is empty if the graph has operators of the user, whose code is not in the package.
    """
    weights, sizes = saved.graph.constants.source, machine.caches()
    assert saved.graph_digest
    assert weights
    if host_names(saved.graph):
        return ""
    tuned = {one: sorted(chosen.items()) for one, chosen in sorted(saved.schedules.items())}
    parts = saved.graph_digest, weights, saved.model_info.name, isa, caches or (sizes.l1, sizes.l2), tuned
    versions = sys.implementation.cache_tag, np.__version__  # which can read the record
    return hashlib.sha256(repr((*parts, sorted((schedules or {}).items()), versions)).encode()).hexdigest()
