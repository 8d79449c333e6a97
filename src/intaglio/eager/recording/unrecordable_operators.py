"""Detect operators that no recording can contain: they draw random numbers, or sizes depend on values of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.rnn import PackedSequence

from intaglio.eager.recording.events import tensors
from intaglio.eager.recording.torch_functions import plain_name
from intaglio.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode

RANDOM = "it draws random numbers"
SIZE_OF_VALUES = "a size in it depends on the values of a tensor"
TAKES_PACKED = "it takes a packed sequence, which torch.export cannot trace"
PACKING = ("_pack_padded_sequence", "_pad_packed_sequence")
"""Functions between padded and packed sequences, which have sizes of their own for lengths."""
INDEXING = "aten.index.Tensor"
INDEXED_UPDATES = ("aten.index_put.default", "aten.index_put_.default", "aten._index_put_impl_.default")


class OperatorWatch(TorchDispatchMode):
    """Notices why no recording can contain the operator that runs in the `with` block.

    Attributes:
        axes: Axes of the result, besides the first, whose sizes depend on values.
    """

    def __init__(self, kwargs: Mapping[str, Any], known_reason: str) -> None:
        """Begin to watch.

        Args:
            kwargs: Keyword arguments of the operator, which may name a generator of its own.
            known_reason: Reason that is known before the operator runs, or an empty text.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        self._before = torch.get_rng_state()
        self._has_generator = isinstance(kwargs.get("generator"), torch.Generator)
        self._known_reason = known_reason
        self._depends, self.axes = False, {1} if known_reason else set[int]()

    @property
    def reason(self) -> str:
        """Return the reason, once the block has ended; an empty text if a recording can contain the operator."""
        if self._has_generator or not torch.equal(self._before, torch.get_rng_state()):
            return RANDOM
        return self._known_reason or (SIZE_OF_VALUES if self._depends else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._depends:
            self._depends = self._depends_on_values(func, args, kwargs or {})
        return result

    def _depends_on_values(self, operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a size depends on values of tensors. Indexing does if one of the indices is a mask."""
        name = str(operator)
        if name in (INDEXING, *INDEXED_UPDATES):
            first = next((axis for axis, index in enumerate(args[1]) if _is_mask(index)), None)
            if first is None:
                return False
            self.axes = {first} - {0} if all(index is None for index in args[1][:first]) else set()
            return name == INDEXING or _has_selected_axis(args)
        if operator.namespace in ("aten", "prims"):
            return torch.Tag.dynamic_output_shape in operator.tags
        return _has_unknown_size(operator, args, kwargs)


def reason_of_packing(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return why no recording can contain an operator on packed sequences; an empty text for other operators."""
    if function is not None and plain_name(function) in PACKING:
        return SIZE_OF_VALUES
    return TAKES_PACKED if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())) else ""


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _has_selected_axis(args: tuple[Any, ...]) -> bool:
    """Return whether the values of an indexed update have the axis that its mask selects, instead of broadcasting."""
    target, indices, values = args[:3]
    left = target.dim() - sum(index.dim() if _is_mask(index) else 1 for index in indices if index is not None)
    return bool(values.dim() > left)


def _has_unknown_size(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator of a library says that a size of its result depends on values."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value

    try:
        with mode:
            result = operator(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()})
    except Exception:  # the operator has no implementation without data; capture says so
        return False
    return any(isinstance(size, torch.SymInt) for tensor in tensors(result) for size in tensor.shape)
