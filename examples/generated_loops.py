"""The three loops of "Quantization 2.0" (document 002) as intaglio generates them: dequantize -> operator, operator ->
quantize, dequantize -> operator -> quantize.

    python examples/generated_loops.py [isa]

Convolutions and pools read and write quantized values. The maximum of a value and a learned bound is not an integer
operator here, so a loop runs between them: one pass over memory, with floats in registers only. Directly behind a
convolution it would be the epilogue of its kernel, without a pass of its own; with one bound for all channels, the
second loop would be a lookup table of 256 values.
"""

from __future__ import annotations

import re
import sys

import torch
from torch import nn

from intaglio import stages


class Bounded(nn.Module):
    """Learned lower bounds, one a channel, in front of, between and behind two convolutions with pools."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.least = nn.ParameterList(0.2 * torch.rand(channels, 1, 1) for channels in (3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(torch.maximum(x, self.least[0]))
        x = self.second(torch.maximum(x, self.least[1]))
        return torch.maximum(x, self.least[2])


LOOP = re.compile(r"// [^\n]*: loop of [^\n]*\n.*?\n}\n", re.DOTALL)
"""A step of the program that is a loop, its comment with it."""


def main(isa: str | None = None) -> None:
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 10, 10) for _ in range(4)]
    prepared = stages.prepare(stages.capture(Bounded().eval(), data[0]))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, data)))
    model = stages.compile(lowered, isa=isa)
    print(model.text("integer"))
    names = ("operator -> quantize", "dequantize -> operator -> quantize", "dequantize -> operator")
    for name, text in zip(names, LOOP.findall(model.text("program")), strict=True):
        print(f"// ---- {name}\n{text}")
    print("the same bits as the interpreter:", torch.equal(model(data[0]), lowered(data[0])))


if __name__ == "__main__":
    main(*sys.argv[1:2])
