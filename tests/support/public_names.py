"""Public functions, classes and methods of intaglio, by the names in ``__all__`` of its public modules."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

MODULES = (
    "intaglio",
    "intaglio.stages",
    "intaglio.eager",
    "intaglio.patterns",
    "intaglio.annotation",
    "intaglio.calibration",
)


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the object of every function and class, once for each object."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found) and id(found) not in seen:
                seen.add(id(found))
                yield f"{module.__name__}.{name}".removeprefix("intaglio."), found


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield functions, constructors and methods with parameters besides the object itself."""
    for name, found in public_objects():
        if not inspect.isclass(found):
            if inspect.signature(found).parameters:
                yield name, found
            continue
        if inspect.signature(found.__init__).parameters.keys() - {"self", "args", "kwargs"}:
            yield name, found.__init__
        for method, value in vars(found).items():
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if not inspect.isfunction(function) or method.startswith("_"):
                continue
            if inspect.signature(function).parameters.keys() - {"self", "args", "kwargs"}:
                yield f"{name}.{method}", function
