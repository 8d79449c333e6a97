"""A drawn network as data: lines of Python that are run, captured, printed, shrunk and stored as they are."""

from __future__ import annotations

import json
import linecache
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 3
"""Batch of the example inputs."""
_numbers = count()


@dataclass(frozen=True)
class Input:
    """One input. ``kind``: "float", "bool", or "ids" below ``limit``; ``free``: dynamic axes, the first one included;
    values of floats are ``scale * normal + shift``."""

    name: str
    shape: tuple[int, ...]
    kind: str = "float"
    free: tuple[int, ...] = (0,)
    scale: float = 1.0
    shift: float = 0.0
    limit: int = 0

    def draw(self, sizes: Sequence[int], seed: int) -> Tensor:
        """Return values of these sizes, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(self.name.encode()))
        if self.kind == "ids":
            return torch.randint(0, self.limit, tuple(sizes), generator=generator)
        values = torch.randn(tuple(sizes), generator=generator)
        return values > 0 if self.kind == "bool" else self.scale * values + self.shift


@dataclass(frozen=True)
class Network:
    """Inputs, constructors of modules and parameters by name, statements, and the values that are returned.

    ``makers``: the name of the generator of each line; ``settings``: entries of the recipe for this network; ``seed``:
    of weights and data.
    """

    inputs: tuple[Input, ...]
    parts: Mapping[str, str]
    lines: tuple[str, ...]
    makers: tuple[str, ...]
    results: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def code(self) -> str:
        """Return the network as Python text."""
        arguments = ", ".join(["self", *(entry.name for entry in self.inputs)])
        parts = [f"        self.{name} = {text}" for name, text in self.parts.items()]
        head = ["    def __init__(self):", "        super().__init__()", *parts, ""] if parts else []
        body = [f"        {line}" for line in self.lines]
        shapes = [f"    # {entry}" for entry in self.inputs]
        last = f"        return {', '.join(self.results)},"
        return "\n".join(["class Net(nn.Module):", *shapes, *head, f"    def forward({arguments}):", *body, last])

    def module(self) -> nn.Module:
        """Return the module with weights that depend only on the seed and their names."""
        space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
        text, name = self.code(), f"<network {next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(f"{text}\n", name, "exec"), space)  # the text is our own
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            made = space["Net"]()
        for name in self.parts:
            fill(getattr(made, name), name, self.seed)
        return made.eval()

    def example(self, seed: int = 0, batch: int = BATCH, sizes: Mapping[int, int] | None = None) -> list[Tensor]:
        """Return arguments of a call with this batch, and these sizes of other free axes in place of the usual ones."""
        found = []
        for entry in self.inputs:
            shape = [batch if axis == 0 and 0 in entry.free else size for axis, size in enumerate(entry.shape)]
            for axis in entry.free:
                if axis and sizes:
                    shape[axis] = sizes.get(shape[axis], shape[axis])
            found.append(entry.draw(shape, self.seed + seed))
        return found

    @property
    def writes(self) -> bool:
        """Return whether a line may write over an input."""
        return any("inplace=True" in line or "_(" in line for line in self.lines)

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the float results for copies of the inputs."""
        with torch.no_grad():
            return self.module()(*[x.clone() for x in inputs])

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Network:
        """Read the text of `to_json`."""
        found = json.loads(text)
        inputs = tuple(
            Input(**{**entry, "shape": tuple(entry["shape"]), "free": tuple(entry["free"])})
            for entry in found.pop("inputs")
        )
        lists = {key: tuple(found.pop(key)) for key in ("lines", "makers", "results")}
        return Network(inputs=inputs, **lists, **found)

    def with_settings(self, settings: Mapping[str, Any]) -> Network:
        """Return the network with other entries of the recipe."""
        return replace(self, settings=settings)


def fill(part: nn.Module | Tensor, name: str, seed: int) -> None:
    """Draw the parameters and statistics of one part; some have channels of zeros or of other sizes."""
    draw = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
    kind = int(torch.randint(0, 8, (1,), generator=draw))
    with torch.no_grad():
        for parameter in [part] if isinstance(part, Tensor) else part.parameters():
            if parameter.dim() > 1 and isinstance(part, nn.Module):
                parameter.normal_(0, (2 / max(parameter[0].numel(), 1)) ** 0.5, generator=draw)
                if kind == 0:
                    parameter[0] = 0
                elif kind == 1:
                    parameter[-1] *= 30
            else:
                parameter.normal_(0, 0.5, generator=draw)
        for key, buffer in part.named_buffers() if isinstance(part, nn.Module) else ():
            if key.endswith("running_mean"):
                buffer.normal_(0, 0.5, generator=draw)
            elif key.endswith("running_var"):
                buffer.uniform_(0.5, 2, generator=draw)
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) and part.affine:
            part.weight.uniform_(0.5, 1.5, generator=draw)
