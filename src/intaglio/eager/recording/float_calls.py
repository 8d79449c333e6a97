"""Count the multiply-accumulates of operators that run in float outside of graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from intaglio.eager.recording.plain_objects import tensors_inside
from intaglio.mac_counter import MacCounter


class FloatWork:
    """Multiply-accumulates that ran inside a `counted` block, for a batch of one.

    Attributes:
        macs: The number, once the block has ended.
    """

    macs = 0


@contextlib.contextmanager
def counted(batch: int) -> Iterator[FloatWork]:
    """Count the multiply-accumulates of a `with` block.

    Args:
        batch: Number of samples in the call.
    """
    found = FloatWork()
    with MacCounter() as counter:
        yield found
    found.macs = counter.total // max(1, batch)


def batch_of(args: Any) -> int:
    """Return the size of the first axis of the first tensor in the arguments, or 1."""
    return next((int(tensor.size(0)) for tensor in tensors_inside(args) if tensor.dim() > 0), 1)
