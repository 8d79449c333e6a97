"""Programs of define-by-run segments, each call compared with the interpreter of its reference."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intaglio import build
from intaglio.lower import Lowered
from support.lowering import tensors


@dataclass
class ProgramChecks:
    """Compiles segments and compares what their programs give. ``calls``: how many were compared."""

    calls: int = 0
    differing: list[str] = field(default_factory=list)

    def compile(self, lowered: Lowered) -> Any:
        return self.checked(build.compile(lowered), lowered)

    def checked(self, program: Any, lowered: Lowered) -> Any:
        """Return a function that runs ``program`` and notes where ``lowered`` gives other bits."""

        def run(*inputs: Tensor) -> Any:
            expected = tensors(lowered(*inputs))
            found = program(*inputs)
            self.calls += 1
            if lowered.islands:  # PyTorch adds in the order of the memory format, which differs between the two
                return found
            for number, pair in enumerate(zip(tensors(found), expected, strict=True)):
                if not same_bits(*pair):
                    self.differing.append(f"result {number} of {lowered.graph.outputs}")
            return found

        return run


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and every value; NaN equals NaN."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(found, expected) or bool(((found == expected) | (found.isnan() & expected.isnan())).all())
