"""The plans of the shapes that a model was called with most recently."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from intaglio.runtime.calls.call_plans import CallPlan

STRIDED = torch.strided


class PlanCache(OrderedDict[Any, CallPlan]):
    """Plans of calls by shape, element type, device and layout of their tensors, the most recent last.

    It has no lock, because a forked child could inherit it in the locked state. Each of its steps is atomic.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: tuple[list[tuple[torch.Size, torch.dtype]], CallPlan] | None = None

    def latest_for(self, leaves: Sequence[Any]) -> CallPlan | None:
        """Return the most recent plan if it is the one for these tensors.

        It takes less time than to find a plan by its key: a large model evicts the interpreter from the caches of the
        core, and most calls have the shapes of the call before.
        """
        if self._latest is None:
            return None
        kinds, plan = self._latest
        if len(kinds) != len(leaves):
            return None
        try:
            for leaf, (shape, dtype) in zip(leaves, kinds, strict=False):
                if leaf.dtype is not dtype or leaf.shape != shape or not leaf.is_cpu or leaf.layout is not STRIDED:
                    return None
        except (AttributeError, RuntimeError):  # no tensor, or a nested one, which has no shape
            return None
        return plan

    def keep(self, leaves: Sequence[torch.Tensor], key: Any, plan: CallPlan, most: int) -> None:
        """Keep the plan of these tensors as the most recent one, and at most this many plans."""
        self._latest = [(leaf.shape, leaf.dtype) for leaf in leaves], plan
        self[key] = plan
        if len(self) > 1:
            with contextlib.suppress(KeyError):
                self.move_to_end(key)
                while len(self) > most:
                    self.popitem(last=False)


def key_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the key of the plan for these tensors.

    Raises:
        RuntimeError: One of them is a nested tensor.
    """
    kinds = [(leaf.shape, leaf.dtype, leaf.device, leaf.layout) for leaf in leaves if hasattr(leaf, "layout")]
    return tuple(chain.from_iterable(kinds))  # keys are kept, and the garbage collector visits each tuple
