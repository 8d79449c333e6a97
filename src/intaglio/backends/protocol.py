"""`Backend`, the protocol that every backend implements, and the steps that all backends share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Protocol

from torch import fx

from intaglio.build.planned import Planned
from intaglio.errors import InputError, UnsupportedError, did_you_mean
from intaglio.fxgraph.node_info import origin
from intaglio.lower import Lowered, requantize
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.captured import expect


class Backend(Protocol):
    """Compiles a stage of quantization into a model that runs, or into files for another program.

    Attributes:
        name: name of the backend in `intaglio.stages.compile`.
        Options: a frozen dataclass whose fields are the keyword arguments of `intaglio.stages.compile` for this
            backend. Fields without a default are required.
        remedy: what a user can do about an operator that the backend does not support.
    """

    @property
    def name(self) -> str:
        """Return the backend's name, which `intaglio.stages.compile` takes."""

    @property
    def Options(self) -> type[Any]:  # noqa: N802 - it is a class
        """Return the class of the backend's options."""

    @property
    def remedy(self) -> str:
        """Return what a user can do about an operator that the backend does not support."""

    def supports(self, op: fx.Node) -> str | None:
        """Return why the backend cannot compile a node of a reference's graph, or ``None`` if it can."""

    def compile(self, stage: Any, options: Any) -> Any:
        """Compile a stage.

        Args:
            stage: a reference with supported operators, an integer graph or a plan. A backend that accepts only some of
                these checks the type with `expect`.
            options: an instance of ``Options``.
        """


def backend_named(table: Sequence[Backend], name: str) -> Backend:
    """Return the backend with this name. Raise `InputError`, which lists all names, if there is none."""
    for backend in table:
        if backend.name == name:
            return backend
    names = [backend.name for backend in table]
    problem = f"{name!r} is not a backend; allowed are {', '.join(names)}"
    raise InputError("backend", None, problem, remedy=did_you_mean(name, names))


def options_for(backend: Backend, given: Mapping[str, Any]) -> Any:
    """Return the backend's options made from keyword arguments. Raise `InputError` if one is unknown or missing."""
    known = {field.name: field for field in fields(backend.Options)}
    if unknown := [name for name in given if name not in known]:
        problem = f"the {backend.name} backend has no option {', '.join(unknown)}; its options are {', '.join(known)}"
        raise InputError("compile", None, problem)
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        remedy = f"pass {', '.join(f'{name}=' for name in missing)} to compile"
        raise InputError("compile", None, f"the {backend.name} backend needs {' and '.join(missing)}", remedy=remedy)
    return backend.Options(**given)


def compile_with(backend: Backend, stage: Reference | Lowered | Planned, options: Any) -> Any:
    """Check that every operator is supported, then compile the stage.

    Raises:
        UnsupportedError: the backend does not support an operator of the reference.
    """
    for node in stage.module.graph.nodes if isinstance(stage, Reference) else ():
        if (reason := backend.supports(node)) is not None:
            where = origin(node)
            raise UnsupportedError(
                where.path or "model", where.operator, reason, remedy=backend.remedy, source=where.source or None
            )
    return backend.compile(stage, options)


def integer_graph(stage: Reference | Lowered | Planned) -> Lowered:
    """Return the integer graph for a backend to compile. A reference is lowered with `requantize`."""
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    expect(lowered, Lowered, "compile")
    assert isinstance(lowered, Lowered)
    return lowered
