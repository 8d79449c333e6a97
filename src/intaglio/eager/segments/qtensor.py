"""`QTensor`: a value of a converted model that is not computed before somebody needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from intaglio.eager.recording.events import fill
from intaglio.eager.recording.torch_functions import QUESTION_FUNCTIONS
from intaglio.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, make_wrapper_subclass


class DeferredValues(Protocol):
    """States what a deferred tensor asks of the frame it belongs to. `TraceFrame` is the one implementation."""

    made: dict[int, QTensor]

    @property
    def segment(self) -> object:
        """Return the segment that the frame runs along, for comparisons by identity."""

    def compute(self, wanted: Sequence[QTensor]) -> None:
        """Compute the contents of these tensors."""


class QTensor(torch.Tensor):
    """Shape and element type of the float model's value; its numbers are made when something asks for them.

    ``frame`` and ``slot`` say which value of which recording it stands for. For everyone who is not part of a
    converted model it is a tensor like any other: whatever reads it gets float numbers.
    """

    frame: DeferredValues | None
    """`None` of one that was written to: it belongs to no recording any more."""
    slot: int
    content: torch.Tensor | None

    def numbers(self) -> torch.Tensor:
        """The value as a plain tensor; what has to run for it runs now."""
        if self.content is None:
            assert self.frame is not None
            self.frame.compute([self])
        assert self.content is not None
        return self.content

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in QUESTION_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*fill(args, plain), **fill(kwargs or {}, plain))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*fill(args, plain), **fill(kwargs or {}, plain))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.numbers().clone()


def pending(size: tuple[int, ...], dtype: torch.dtype, frame: DeferredValues, slot: int) -> QTensor:
    made: QTensor = make_wrapper_subclass(QTensor, size, dtype=dtype)
    made.frame, made.slot, made.content = frame, slot, None
    return made


def become(tensor: QTensor, size: tuple[int, ...]) -> None:
    """The same object has another shape from now on."""
    with DisableTorchFunction():
        tensor.data = make_wrapper_subclass(QTensor, size, dtype=tensor.dtype)


def plain(value: Any) -> Any:
    """A tensor with its numbers; anything else as it is."""
    return value.numbers() if type(value) is QTensor else value
