"""Conditions on values, made from type annotations."""

from __future__ import annotations

import collections.abc
import numbers
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
from numpy.typing import ArrayLike

from intaglio.argument_checks.value_text import value_text, with_article


@dataclass(frozen=True)
class Expected:
    """Values that a type annotation allows.

    Attributes:
        text: the values that it allows, for an error message.
        allows: returns whether it allows a value.
        classes: classes whose objects it allows, to recognize a class that is given instead of an object of it.
        choices: the values that it lists.
    """

    text: str
    allows: Callable[[Any], bool]
    classes: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()


ANYTHING = Expected("any value", lambda value: True)
NOTHING = Expected("None", lambda value: value is None)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _fspath(value: Any) -> Any:
    """Return the path of an object that has one."""
    method = getattr(type(value), "__fspath__", None)
    return method(value) if method is not None else None


def _is_numeric(value: Any) -> bool:
    """Return whether a value can be converted to an array of numbers."""
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a ragged tensor
        return False


PLAIN_TYPES: Mapping[Any, Expected] = {
    Any: ANYTHING,
    object: ANYTHING,
    None: NOTHING,
    type(None): NOTHING,
    bool: Expected("True or False", lambda value: isinstance(value, (bool, np.bool_))),
    int: Expected("an integer", lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool)),
    float: Expected("a number", _is_real),
    ArrayLike: Expected("an array of numbers", _is_numeric),
    str: Expected("a string", lambda value: isinstance(value, str)),
    Path: Expected("a path", lambda value: isinstance(value, PurePath) or isinstance(_fspath(value), str)),
}
CONTAINER_TEXTS = {
    collections.abc.Mapping: "a mapping",
    collections.abc.MutableMapping: "a mapping",
    dict: "a dictionary",
    collections.abc.Iterable: "an iterable",
    collections.abc.Iterator: "an iterator",
    collections.abc.Collection: "a collection",
    collections.abc.Sequence: "a sequence",
    list: "a list",
    tuple: "a tuple",
    set: "a set",
    frozenset: "a frozen set",
}


@lru_cache(maxsize=1024)
def expected(annotation: Any) -> Expected:
    """Return what an annotation allows. Annotations that cannot be checked, such as type variables, allow any value."""
    if annotation in PLAIN_TYPES:
        return PLAIN_TYPES[annotation]
    kind, parts = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return _one_of([expected(part) for part in parts])
    if kind is Literal:
        return Expected(listed([repr(part) for part in parts]), lambda value: _is_in(value, parts), choices=parts)
    if kind is type:
        return _class_of(parts[0])
    if annotation is Callable or kind is collections.abc.Callable:
        return Expected("a function", callable)
    if (kind or annotation) in CONTAINER_TEXTS:
        return _container(kind or annotation, parts)
    if getattr(annotation, "_is_protocol", False):
        return _protocol(annotation)
    if isinstance(annotation, type):
        name = f"nn.{annotation.__name__}" if annotation.__module__.startswith("torch.nn.") else annotation.__name__
        return Expected(
            f"an {name}" if name.startswith("nn.") else with_article(name),
            lambda value: isinstance(value, annotation),
            classes=(annotation,),
        )
    return ANYTHING


def listed(texts: Iterable[str]) -> str:
    """Return alternatives as text: ``a, b or c``."""
    *others, last = dict.fromkeys(texts)
    return f"{', '.join(others)} or {last}" if others else last


def _is_in(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(type(one) is type(value) and one == value for one in choices)


def _one_of(options: list[Expected]) -> Expected:
    if ANYTHING in options:
        return ANYTHING
    options.sort(key=lambda one: one is NOTHING)
    return Expected(
        listed(one.text for one in options),
        lambda value: any(one.allows(value) for one in options),
        tuple(kind for one in options for kind in one.classes),
        tuple(choice for one in options for choice in one.choices),
    )


def _class_of(wanted: Any) -> Expected:
    if not isinstance(wanted, type):
        return Expected("a class", lambda value: isinstance(value, type))
    text = f"a subclass of {wanted.__name__}"
    return Expected(text, lambda value: isinstance(value, type) and issubclass(value, wanted))


def _protocol(protocol: Any) -> Expected:
    """Return a condition that an object, not a class, has the members of a protocol."""
    names = [name for name in vars(protocol) if not name.startswith("_")]
    methods = listed([f"{name}()" for name in names]).replace(" or ", " and ")
    return Expected(
        f"an object with {methods}",
        lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in names),
        classes=(protocol,),
    )


def _container(kind: Any, parts: tuple[Any, ...]) -> Expected:
    """Return a condition on a container and its elements. A string is not a container of strings."""
    if kind is tuple and parts and parts[-1] is not Ellipsis:
        elements = [expected(part) for part in parts]
        text = f"a tuple ({', '.join(one.text for one in elements)})"
        return Expected(text, lambda value: isinstance(value, tuple) and _fits_each(value, elements))
    inner = [expected(part) for part in parts if part is not Ellipsis]
    text = CONTAINER_TEXTS[kind] + _elements_text(inner)

    def allows(value: Any) -> bool:
        if not isinstance(value, kind) or isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0:
            return False
        if isinstance(value, Iterator):  # it can be read only once
            return True
        if isinstance(value, Mapping) and len(inner) == 2:
            return all(inner[0].allows(key) and inner[1].allows(one) for key, one in value.items())
        return not inner or inner[0] is ANYTHING or all(inner[0].allows(one) for one in value)

    return Expected(text, allows)


def _fits_each(value: tuple[Any, ...], elements: list[Expected]) -> bool:
    return len(value) == len(elements) and all(one.allows(part) for part, one in zip(value, elements, strict=True))


def _elements_text(inner: list[Expected]) -> str:
    """Return the part of a container's text that says what its elements are."""
    texts = [PLURALS.get(one.text, f"({one.text})") for one in inner]
    if not inner or all(one is ANYTHING for one in inner):
        return ""
    return f" of {texts[0]}" if len(texts) == 1 else f" from {texts[0]} to {texts[1]}"


PLURALS = {
    "any value": "any values",
    "a string": "strings",
    "an integer": "integers",
    "a number": "numbers",
    "a string or a path": "paths",
}


def got_text(value: Any, allowed: Expected) -> str:
    """Return what was given, for an error message."""
    text = value_text(value)
    plain = type(value) in (bool, int, float, complex, str, bytes)
    return f"{text}, {with_article(type(value).__name__)}" if plain and not allowed.choices else text
