"""`Backend`: the protocol that every backend implements, and the steps that all of them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Protocol

from torch import fx

from intaglio.build.planned import Planned
from intaglio.errors import InputError, UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.lower import Lowered, requantize
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.captured import expect


class Backend(Protocol):
    """Compiles a stage of quantization into something that runs, or that another program runs.

    ``name``: what `intaglio.stages.compile` calls it. ``Options``: a frozen dataclass; its fields are the keyword
    arguments of `intaglio.stages.compile` for this backend, and those without a default are required. ``remedy``: what
    a user does about an operator that the backend does not support.
    """

    @property
    def name(self) -> str: ...

    @property
    def Options(self) -> type[Any]: ...  # noqa: N802 - it is a class

    @property
    def remedy(self) -> str: ...

    def supports(self, op: fx.Node) -> str | None:
        """Return why the backend cannot compile a node of a reference's graph, or ``None`` if it can."""

    def compile(self, stage: Any, options: Any) -> Any:
        """Compile the stage.

        Args:
            stage: a reference of supported operators, an integer graph or a plan; a backend that takes only some of
                them says so with `expect`.
            options: an instance of ``Options``.
        """


def backend_named(table: Sequence[Backend], name: str) -> Backend:
    """Return the backend of this name. Raises `InputError` that lists the names there are."""
    for backend in table:
        if backend.name == name:
            return backend
    names = ", ".join(backend.name for backend in table)
    raise InputError("backend", None, f"no backend {name!r}; there are {names}")


def options_for(backend: Backend, given: Mapping[str, Any]) -> Any:
    """Return the backend's options made of keyword arguments. Raises `InputError` for unknown and for missing ones."""
    known = {field.name: field for field in fields(backend.Options)}
    if unknown := [name for name in given if name not in known]:
        problem = f"{', '.join(unknown)}: no option of the {backend.name} backend; it has {', '.join(known)}"
        raise InputError("compile", None, problem)
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in needed if name not in given]:
        raise InputError("compile", None, f"the {backend.name} backend needs {' and '.join(missing)}")
    return backend.Options(**given)


def compile_with(backend: Backend, stage: Reference | Lowered | Planned, options: Any) -> Any:
    """Compile a stage once every operator is known to be supported.

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
    """Return the integer graph that a backend compiles, of a reference by `requantize`."""
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    expect(lowered, Lowered, "compile")
    assert isinstance(lowered, Lowered)
    return lowered
