"""Programs of define-by-run segments, each call compared with the interpreter of its reference."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intaglio import build
from intaglio.lower import Lowered
from intaglio.runtime import QuantizedModel
from intaglio.runtime.reports.clipping import ClippingMonitor
from support.lowering import tensors


@dataclass
class ProgramChecks:
    """Compiles segments and compares what their programs give. ``calls``: how many were compared."""

    calls: int = 0
    differing: list[str] = field(default_factory=list)

    def compile(self, lowered: Lowered) -> Any:
        return CheckedProgram(self, build.compile(lowered), lowered)


@dataclass
class CheckedProgram:
    """A program that notes where ``lowered`` gives other bits."""

    checks: ProgramChecks
    program: QuantizedModel
    lowered: Lowered

    def __call__(self, *inputs: Tensor) -> Any:
        expected = tensors(self.lowered(*inputs))
        found = self.program(*inputs)
        self.checks.calls += 1
        for number, pair in enumerate(zip(tensors(found), expected, strict=True)):
            if not same_bits(*pair):
                self.checks.differing.append(f"result {number} of {self.lowered.graph.outputs}")
        return found

    def share_clipping(self, monitor: ClippingMonitor) -> None:
        self.program.share_clipping(monitor)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and every value; NaN equals NaN."""
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(found, expected) or bool(((found == expected) | (found.isnan() & expected.isnan())).all())
