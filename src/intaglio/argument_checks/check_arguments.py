"""Decorators that check the arguments of public functions against their type annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from intaglio.argument_checks.annotation_checks import ANYTHING, Expected, expected, got_text
from intaglio.argument_checks.nesting import WITHOUT_CYCLES, nesting_problem
from intaglio.errors import InputError, did_you_mean

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Kind = TypeVar("Kind")
EMPTY = inspect.Parameter.empty
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_arguments(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a function raise an `InputError` for an argument that its annotation does not allow.

    The error names function and argument, and the nearest name for a keyword argument that the function does not have.
    A missing argument is Python's own `TypeError`. Annotations are read at the first call, because they may name what
    their module defines later; names that are imported for type checkers only allow any value.
    """
    return _checked(function, frozenset())


def check_arguments_except(*names: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return `check_arguments` without these arguments, about which the function itself says more."""
    return functools.partial(_checked, unchecked=frozenset(names))


def check_fields(kind: type[Kind]) -> type[Kind]:
    """Make the constructor of a dataclass check its arguments, as `check_arguments` does."""
    return check_fields_except()(kind)


def check_fields_except(*names: str) -> Callable[[type[Kind]], type[Kind]]:
    """Return `check_fields` without these fields, about which the class itself says more."""

    def decorate(kind: type[Kind]) -> type[Kind]:
        # mypy allows no change of a class, which is what this decorator is for
        kind.__init__ = check_arguments_except(*names)(kind.__init__)  # type: ignore[method-assign]  # the class is a parameter
        return kind

    return decorate


def _checked(function: Callable[Parameters, Result], unchecked: frozenset[str]) -> Callable[Parameters, Result]:
    checks = _ArgumentChecks(function, unchecked)

    @functools.wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        checks(args, kwargs)
        try:
            return function(*args, **kwargs)
        except RecursionError:
            checks.check_nesting(args, kwargs)
            raise

    checked.checks_arguments = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return checked


class _ArgumentChecks:
    """Checks of all arguments of one function."""

    def __init__(self, function: Callable[..., Any], unchecked: frozenset[str]) -> None:
        self.function, self.unchecked = function, unchecked
        self.name = function.__qualname__.removesuffix(".__init__")

    @functools.cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.function).parameters)

    @functools.cached_property
    def allowed(self) -> dict[str, Expected]:
        """Return what each parameter allows."""
        found = {}
        for name, parameter in self.parameters.items():
            skipped = name in self.unchecked or parameter.annotation is EMPTY
            found[name] = ANYTHING if skipped else expected(self._annotation(parameter))
        return found

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        """Return the annotation of a parameter as an object."""
        annotation: Any = parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, inspect.unwrap(self.function).__globals__)
            except NameError:  # imported for type checkers only
                return Any
        return annotation

    @functools.cached_property
    def positional(self) -> tuple[str, ...]:
        return tuple(name for name, one in self.parameters.items() if one.kind in POSITIONAL)

    def _variable(self, kind: Any) -> str | None:
        return next((name for name, one in self.parameters.items() if one.kind is kind), None)

    @functools.cached_property
    def others(self) -> tuple[str | None, str | None]:
        """Return the names of ``*args`` and ``**kwargs``, where the function has them."""
        return self._variable(inspect.Parameter.VAR_POSITIONAL), self._variable(inspect.Parameter.VAR_KEYWORD)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `InputError` for the first argument that is not allowed. The number of arguments is left to Python."""
        allowed, (more_args, more_kwargs) = self.allowed, self.others
        for name, value in zip(self.positional, args, strict=False):
            if not allowed[name].allows(value):
                raise self._error(name, name, value)
        if more_args is not None:
            for index, value in enumerate(args[len(self.positional) :]):
                if not allowed[more_args].allows(value):
                    raise self._error(more_args, f"{more_args}[{index}]", value)
        for name, value in kwargs.items():
            known = name if name in self.parameters and name not in (more_args, more_kwargs) else more_kwargs
            if known is None:
                raise self._unknown(name)
            if not allowed[known].allows(value):
                raise self._error(known, name, value)

    def check_nesting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `InputError` for an argument with a list or dictionary that contains itself."""
        names = (*self.positional, *(f"argument {index}" for index in range(len(self.positional), len(args))))
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if (problem := nesting_problem(value)) is not None:
                raise InputError(self.name, None, f"{name}: {problem}", remedy=WITHOUT_CYCLES) from None

    def _error(self, parameter: str, name: str, value: Any) -> InputError:
        allowed = self.allowed[parameter]
        problem = f"{name} takes {allowed.text}, got {got_text(value, allowed)}"
        return InputError(self.name, None, problem, remedy=self._remedy(parameter, value, allowed))

    def _remedy(self, parameter: str, value: Any, allowed: Expected) -> str:
        if isinstance(value, type) and (hint := _instance_of(value, allowed)):
            return hint
        words = [choice for choice in allowed.choices if isinstance(choice, str)]
        if isinstance(value, str) and (near := did_you_mean(value, words)):
            return near
        optional = self.parameters[parameter].default is not EMPTY
        return f"pass {allowed.text}" + (f", or leave {parameter} out for its default" if optional else "")

    def _unknown(self, name: str) -> InputError:
        names = [one for one in self.parameters if one not in ("self", *self.others)]
        problem = f"there is no argument {name!r}; " + (
            f"its arguments are {', '.join(names)}" if names else "it has none"
        )
        return InputError(self.name, None, problem, remedy=did_you_mean(name, names) or f"leave {name} out")


def _instance_of(value: type, allowed: Expected) -> str | None:
    """Return the remedy for a class that is given where an object of it is expected."""
    for kind in allowed.classes:
        protocol = getattr(kind, "_is_protocol", False)
        members = [name for name in vars(kind) if not name.startswith("_")]
        if all(hasattr(value, name) for name in members) if protocol else issubclass(value, kind):
            return f"pass an object of the class: {value.__name__}(...)"
    return None
