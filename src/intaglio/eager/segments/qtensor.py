"""`QTensor`: a deferred tensor of a converted model, which is computed when its contents are first needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from intaglio.eager.recording.events import fill
from intaglio.eager.recording.plain_objects import replace_inside
from intaglio.eager.recording.torch_functions import METADATA_FUNCTIONS
from intaglio.torch_private import DisableTorchFunction, DisableTorchFunctionSubclass, make_wrapper_subclass, pytree


class DeferredValues(Protocol):
    """Protocol for the frame that a deferred tensor belongs to. `TraceFrame` implements it."""

    deferred: dict[int, QTensor]

    @property
    def segment(self) -> object:
        """Return the segment that the frame runs along, for comparisons by identity."""

    def compute(self, wanted: Sequence[QTensor]) -> None:
        """Compute the contents of these tensors."""


class QTensor(torch.Tensor):
    """Tensor subclass with the shape and data type of the float model's value, whose contents are computed on demand.

    Code outside the converted model can use it like any float tensor.

    Attributes:
        frame: Frame that computes the value. It is None after an in-place update: the tensor is then independent.
        slot: Number of the value in the recording of the frame.
        content: The computed tensor, or None.
    """

    frame: DeferredValues | None
    """None after an in-place update: the tensor then belongs to no recording."""
    slot: int
    content: torch.Tensor | None

    def compute(self) -> torch.Tensor:
        """Return the value as a plain tensor, and compute it first if necessary."""
        if self.content is None:
            assert self.frame is not None
            self.frame.compute([self])
        assert self.content is not None
        return self.content

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*fill(args, plain), **fill(kwargs or {}, plain))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares no types
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*fill(args, plain), **fill(kwargs or {}, plain))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.compute().clone()


def deferred_tensor(size: tuple[int, ...], dtype: torch.dtype, frame: DeferredValues, slot: int) -> QTensor:
    """Return a deferred tensor for value `slot` of a frame."""
    made: QTensor = make_wrapper_subclass(QTensor, size, dtype=dtype)
    made.frame, made.slot, made.content = frame, slot, None
    return made


def set_shape(tensor: QTensor, size: tuple[int, ...]) -> None:
    """Change the shape of a deferred tensor, in place."""
    with DisableTorchFunction():
        tensor.data = make_wrapper_subclass(QTensor, size, dtype=tensor.dtype)


def become_plain(tensor: QTensor) -> None:
    """Turn a computed deferred tensor into a plain tensor, for everything that references it.

    Tensors with weak references cannot change their class and stay as they are.
    """
    assert tensor.content is not None
    with DisableTorchFunction(), contextlib.suppress(RuntimeError):
        torch.utils.swap_tensors(tensor, tensor.content.detach())


def plain(value: Any) -> Any:
    """Return the computed tensor of a `QTensor`, and any other value unchanged."""
    return value.compute() if type(value) is QTensor else value


def plain_results(result: Any) -> Any:
    """Replace deferred tensors in the result of a model by computed ones, in all containers and objects."""
    if type(result) is QTensor:
        return result.compute()
    if isinstance(result, torch.Tensor):
        return result
    return pytree.tree_map(lambda leaf: replace_inside(leaf, plain, {}), result)
