"""Structure of a call's arguments, as text, to compare calls of a strict model with those of calibration."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from intaglio.argument_checks import WITHOUT_CYCLES, nesting_problem
from intaglio.eager.recording.plain_objects import tensors_inside
from intaglio.errors import InputError
from intaglio.torch_private import pytree


class CallStructure(NamedTuple):
    """Nesting of the arguments of a call.

    Attributes:
        key: Text that two calls share if their arguments are nested alike.
        words: Text with the types of the arguments, for messages.
    """

    key: str
    words: str


def call_structure(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CallStructure:
    """Return the structure of a call. Arguments given by position, by keyword and by default are the same.

    Args:
        forward: Forward method of the model's class. Its first parameter is the model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    named: dict[str, Any] = {}
    try:
        bound = inspect.signature(forward).bind(None, *args, **kwargs)
        bound.apply_defaults()
    except (TypeError, ValueError):
        named = {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    else:
        for name, value in list(bound.arguments.items())[1:]:
            kind = bound.signature.parameters[name].kind
            named.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    key = ", ".join(
        f"{name}={_text(named[name], lambda leaf: 'None' if leaf is None else '*')}" for name in sorted(named)
    )
    words = ", ".join(f"{name}: {_text(value, _leaf_words)}" for name, value in named.items())
    return CallStructure(key, f"({words})")


def _text(value: Any, leaf: Callable[[Any], str]) -> str:
    kind = type(value).__name__
    if isinstance(value, Mapping):
        entries = ", ".join(f"{key!r}: {_text(value[key], leaf)}" for key in sorted(value, key=repr))
        return f"{'' if kind == 'dict' else kind}{{{entries}}}"
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        start, end = "[]" if isinstance(value, list) else "()"
        return f"{'' if kind in ('list', 'tuple') else kind}{start}{', '.join(_text(e, leaf) for e in value)}{end}"
    if pytree.tree_structure(value).is_leaf():
        return leaf(value)
    entries = ", ".join(_text(entry, leaf) for entry in pytree.tree_leaves(value))
    return f"{kind}({entries})"


def _leaf_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    count = len(tensors_inside(value))
    return type(value).__name__ + (f" with {count} tensor{'s' * (count != 1)}" if count else "")


@contextlib.contextmanager
def nesting_checked(value: Any, where: str) -> Iterator[None]:
    """Raise `InputError` if a value that is flattened inside the ``with`` contains itself."""
    try:
        yield
    except RecursionError:
        if (problem := nesting_problem(value)) is None:
            raise
        raise InputError(where, None, problem, remedy=WITHOUT_CYCLES) from None
