"""torchvision beside a CPU build of torch.

It has no CPU wheel of its own: its operators may not load there, and importing it wants two of them to exist. Its
classifiers use none.
"""

from __future__ import annotations

import torch

LIBRARIES: list[torch.library.Library] = []
"""Held: operators go when their library does."""


def import_torchvision() -> None:
    """Import it; where its operators do not load, with two empty ones in their place."""
    try:
        import torchvision
    except RuntimeError:
        LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for operator in ("nms", "qnms"):
            LIBRARIES[-1].define(f"{operator}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        import torchvision  # noqa: F401
