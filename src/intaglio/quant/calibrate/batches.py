"""Convert batches of any structure into calls of the model."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from intaglio.errors import CalibrationError, CaptureError
from intaglio.ir import Signature
from intaglio.torch_private import pytree

logger = logging.getLogger("intaglio")

Call = tuple[tuple[Any, ...], dict[str, Any]]
Use = Callable[[torch.nn.Module], Any]
"""A function that uses a model in another way than by one call of forward, such as ``generate``."""
Data = Iterable[Any] | Callable[[Any], Any] | torch.Tensor


_LOGGED: ContextVar[set[str] | None] = ContextVar("logged", default=None)
"""Messages about batches that were logged inside of the current `log_once`."""


@contextlib.contextmanager
def log_once() -> Iterator[None]:
    """Log every message about batches once, although several stages and parts of a model read the same data."""
    token = _LOGGED.set(set() if (outer := _LOGGED.get()) is None else outer)
    try:
        yield
    finally:
        _LOGGED.reset(token)


def log_about_data(log: logging.Logger, level: int, message: str) -> None:
    """Log a message about batches, unless it was logged inside of the current `log_once`."""
    logged = _LOGGED.get()
    if logged is None:
        logged = set()
    if message not in logged:
        log.log(level, "%s", message)
        logged.add(message)


def is_function(data: Any) -> bool:
    """Return whether data is a function. Models, classes, tensors and iterables do not count."""
    others = (torch.Tensor, torch.nn.Module, type)
    return callable(data) and not isinstance(data, others) and not hasattr(data, "__iter__")


def batches(data: Any) -> Iterator[Any]:
    """Return an iterator over batches; a single tensor is one batch."""
    if isinstance(data, torch.Tensor):
        return iter([data])
    try:
        return iter(data)
    except TypeError as error:
        raise CalibrationError(
            "data",
            None,
            f"expected an iterable of batches, got {type(data).__name__}",
            remedy="pass a list of batches or a DataLoader; with a function, pass example_inputs as well",
        ) from error


def peek(data: Any) -> tuple[Any, Iterator[Any]]:
    """Return the first batch, and an iterator that still starts with it; raise `CalibrationError` without batches."""
    found = batches(data)
    first = next(found, _NOTHING)
    if first is _NOTHING:
        raise CalibrationError(
            "data",
            None,
            "no batch: the iterable is empty, or was read to its end before",
            remedy="pass a list or a DataLoader; a generator can be read only once",
        )
    return first, CountedBatches(itertools.chain([first], found), length_of(data))


class CountedBatches(Iterator[Any]):
    """An iterator over batches that knows how many there were at its beginning, if that is known.

    Attributes:
        length: the number of batches, or ``None``.
    """

    def __init__(self, items: Iterator[Any], length: int | None) -> None:
        self._items, self.length = items, length

    def __next__(self) -> Any:
        return next(self._items)


def length_of(data: Any) -> int | None:
    """Return the number of batches, or ``None`` if it is unknown."""
    if isinstance(data, CountedBatches):
        return data.length
    try:
        return 1 if isinstance(data, torch.Tensor) else len(data)
    except TypeError:
        return None


_NOTHING = object()
LABELS = frozenset({"label", "labels"})
"""Keys of a batch that are passed to forward only if it has no default for them."""


class Binder:
    """Converts batches into calls, by the signature of forward and the structure of the example inputs."""

    def __init__(
        self,
        names: tuple[str, ...],
        required: int,
        keywords: tuple[str, ...] = (),
        nested: type | None = None,
        open_ended: bool = False,
    ) -> None:
        """Store how forward can be called.

        Args:
            names: parameters that forward takes by name, positional ones first.
            required: number of positional arguments that a sequence fills first.
            keywords: keyword arguments that a sequence fills after these.
            nested: type of the container that the first argument is, if it is one.
            open_ended: whether forward has ``**kwargs``.
        """
        self.names, self.required, self.keywords, self.nested = names, required, keywords, nested
        self.open_ended = open_ended
        self._warned = False

    @staticmethod
    def of(signature: Signature) -> Binder:
        """Return the binder for a captured model."""
        args, kwargs = pytree.tree_unflatten([None] * signature.in_tree.num_leaves, signature.in_tree)
        nested = type(args[0]) if args and isinstance(args[0], (tuple, list, Mapping)) else None
        return Binder(signature.names, len(args), tuple(kwargs), nested)

    def __call__(self, item: Any) -> Call:
        """Return the positional and keyword arguments of a call for one batch of the data.

        Raises:
            CalibrationError: the batch is of an unsupported type, or its contents do not match the model's arguments.
        """
        if isinstance(item, torch.Tensor):
            return (item,), {}
        if isinstance(item, Mapping):
            return self._mapping(item)
        if isinstance(item, (tuple, list)):
            return self._sequence(tuple(item))
        raise CalibrationError(
            "data",
            None,
            f"a batch is of type {type(item).__name__}, which is not supported",
            remedy="give batches that are tensors, tuples of tensors, dictionaries, or (inputs, label) pairs",
        )

    def _mapping(self, item: Mapping[str, Any]) -> Call:
        """Return the call for a mapping, whose keys are parameters of forward; other keys are left out."""
        known = {*self.names, *self.keywords}
        labels = LABELS.difference(self.names[: self.required])
        used = {key: value for key, value in item.items() if key in known and key not in labels}
        if not used and self.nested is not None and isinstance(item, self.nested):
            return (item,), {}
        if not used:
            problem = f"a batch has keys {sorted(item)}; forward takes {sorted(known)}"
            remedy = "name the keys after the parameters of forward"
            if len(self.names) == 1:
                remedy += f"; if {self.names[0]!r} is the dictionary itself, make the batch a tuple with it: (batch,)"
            raise CalibrationError("data", None, problem, remedy=remedy)
        left_out = sorted(set(item) - set(used))
        if self.open_ended and not self._warned and not LABELS.issuperset(left_out):
            warnings.warn(
                f"forward takes **kwargs, but does not name {', '.join(left_out)}, so these are left out; "
                "to pass them, name them in capture(..., example_kwargs=...)",
                stacklevel=3,
            )
        self._log_left_out(f"batches are dictionaries: {sorted(used)} go to forward", left_out)
        args = tuple(used.pop(name) for name in self.names[: self.required] if name in used)
        return args, used

    def _sequence(self, item: tuple[Any, ...]) -> Call:
        """Return the call for a sequence; what follows the arguments of forward is left out, as labels."""
        if self.nested is None and len(item) == 2 and isinstance(item[0], (tuple, list, Mapping)):
            self._log_left_out("batches are pairs: the first part goes to forward", ["the second part"])
            return self(item[0])
        if len(item) > self.required + len(self.keywords):
            others = [f"element {index}" for index in range(self.required, len(item))]
            optional = self.names[self.required : len(item)]
            if optional and not self._warned:
                warnings.warn(
                    f"the first {self.required} of {len(item)} elements of a batch go to forward, and the others are "
                    f"left out as labels; if they are {', '.join(optional)}, pass dictionaries or example_inputs",
                    stacklevel=2,
                )
            self._log_left_out(f"the first {self.required} of {len(item)} elements of a batch go to forward", others)
            return item[: self.required], {}
        positional, rest = item[: self.required], item[self.required :]
        return positional, dict(zip(self.keywords, rest, strict=False))

    def _log_left_out(self, decision: str, left_out: list[str]) -> None:
        """Log once which parts of batches are left out."""
        if self._warned or not left_out:
            return
        self._warned = True
        log_about_data(logger, logging.INFO, f"{decision}; left out: {', '.join(left_out)}")


def binder_for(model: torch.nn.Module) -> Binder:
    """Return the binder for a model that is not captured, from the parameters of forward without defaults."""
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(type(model).__name__, None, "the model is not an nn.Module", remedy="pass the float model")
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {p.kind for p in parameters}
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = sum(p.default is p.empty for p in plain)
    return Binder(
        (*[p.name for p in plain], *[p.name for p in by_name if p.default is not p.empty]),
        max(required, min(len(plain), 1)) if inspect.Parameter.VAR_POSITIONAL not in kinds else 10**6,
        tuple(p.name for p in by_name if p.default is p.empty),
        open_ended=inspect.Parameter.VAR_KEYWORD in kinds,
    )


def first_call(model: torch.nn.Module, data: Any, example_inputs: Any) -> tuple[Call, Any]:
    """Return the arguments of the example call, by default the first batch, and data that still starts with it."""
    if example_inputs is None:
        first, data = peek(data)
        return binder_for(model)(first), data
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}), data


def kept_first(data: Any) -> tuple[list[Any] | None, Any]:
    """Return the first batch of an iterator, which can be read only once, and the data that still starts with it."""
    if not isinstance(data, Iterator):
        return None, data
    first, items = peek(data)
    return [first], items
