"""Parameters that a copy of a model can share with it, and calls that must not write to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from intaglio.torch_private import OpOverload, TorchDispatchMode, pytree, schema_of

Result = TypeVar("Result")


def shareable_parameters(model: nn.Module) -> dict[int, torch.Tensor]:
    """Return the parameters whose memory no other tensor of a model uses, by their id."""
    leaves = [leaf for module in model.modules() for leaf in pytree.tree_leaves(vars(module))]
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    dense = {key: one for key, one in tensors.items() if one.layout is torch.strided and one.device.type == "cpu"}
    users = Counter(map(_memory, dense.values()))
    plain = {key: one for key, one in dense.items() if type(one) is nn.Parameter and one.grad_fn is None}
    return {key: one for key, one in plain.items() if users[_memory(one)] == 1}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def without_writes(tensors: Mapping[int, torch.Tensor], run: Callable[[], Result]) -> Result | None:
    """Return what a function returns, or ``None`` if it was about to write to one of these tensors.

    Args:
        tensors: the tensors, by their id.
        run: calls PyTorch. It is stopped by an exception before the first such write.
    """
    if not tensors:
        return run()
    mode = _ReadOnly(tensors)
    try:
        with mode:
            result = run()
    except Exception:
        if mode.refused:
            return None
        raise
    return None if mode.refused else result


class _ReadOnly(TorchDispatchMode):
    """Refuses operators that write to the memory of some tensors, before they do.

    Attributes:
        refused: whether it refused an operator. Forward may have handled the exception.
    """

    supports_higher_order_operators = True  # their bodies cannot write to tensors from outside

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        """Protect these tensors."""
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch does not annotate it
        self.protected = set(map(_memory, tensors.values())) - {0}
        self.refused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and schema_of(func).is_mutable and self._writes(func, args, kwargs):
            self.refused = True
            raise RuntimeError(f"{func} writes to a parameter that is shared with another model")
        return func(*args, **kwargs)

    def _writes(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operator writes to a protected tensor."""
        for place, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if any(one.layout is torch.strided and _memory(one) in self.protected for one in tensors):
                return True
        return False
