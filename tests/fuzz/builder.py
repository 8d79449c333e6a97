"""Builds a network line by line: each line is run on the example at once, and refused lines leave nothing behind."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.network import BATCH, Input, Network, fill

MOST_VALUES = 6000
"""Largest number of elements of a value; small ones reach all parts of a kernel and are quick."""
LARGEST = 300.0
"""Largest magnitude of a value; functions such as exp, one after the other, would leave float32."""


class RefusedError(Exception):
    """The line cannot be drawn here."""


class Builder:
    """Inputs, parts and lines so far, and the values of the lines on the example."""

    def __init__(self, seed: int, free_sizes: bool = False) -> None:
        self.rng = random.Random(seed)
        self.seed, self.free_sizes = seed, free_sizes
        self.inputs: list[Input] = []
        self.parts: dict[str, str] = {}
        self.lines: list[str] = []
        self.makers: list[str] = []
        self.maker = ""
        self.values: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.holder = nn.Module()

    # -- numbers -------------------------------------------------------------------------------------------------

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def size(self, low: int, high: int) -> int:
        """Return a size; the smallest, and those around 16, come up more often."""
        common = [size for size in (low, 8, 15, 16, 17, 32, 33) if low <= size <= high]
        return self.rng.choice(common) if self.rng.random() < 0.3 else self.rng.randint(low, high)

    def number(self, low: float, high: float) -> float:
        return round(self.rng.uniform(low, high), 3)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # -- values --------------------------------------------------------------------------------------------------

    def value(self, axes: Sequence[int] = (), where: Callable[[Tensor], bool] = lambda x: True) -> str:
        """Return a float value with one of these numbers of axes, if possible the latest one, else a new input."""
        fits = [name for name in self.values if self.values[name].dtype is torch.float32]
        fits = [name for name in fits if (not axes or self.values[name].dim() in axes) and where(self.values[name])]
        if fits and self.rng.random() < 0.9:
            found = fits[-1] if self.rng.random() < 0.6 else self.rng.choice(fits)
        else:
            found = self.input(self.rng.choice(axes) if axes else self.pick(2, 3, 4, 4))
        if not where(self.values[found]):
            raise RefusedError
        return found

    def input(self, axes: int = 4, shape: Sequence[int] | None = None, **fields: Any) -> str:
        """Add an input and return its name."""
        if len(self.inputs) >= 4:
            raise RefusedError
        if shape is None:
            channels = self.size(1, 33)
            image = [self.size(1, 9) for _ in range(axes - 2)]
            shape = (BATCH, channels, *image) if axes > 1 else (BATCH,)
        free = tuple(axis for axis in range(2, len(shape))) if self.free_sizes and len(shape) in (3, 4) else ()
        fields = {
            "free": (0, *free),
            "scale": self.pick(1.0, 1.0, 0.1, 5.0),
            "shift": self.pick(0.0, 0.0, 1.5),
            **fields,
        }
        fields["free"] = tuple(axis for axis in fields["free"] if axis or tuple(shape[:1]) == (BATCH,))
        entry = Input(f"x{len(self.inputs)}", tuple(shape), **fields)
        self.inputs.append(entry)
        self.values[entry.name] = entry.draw(entry.shape, self.seed)
        return entry.name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def part(self, text: str) -> str:
        """Add a module or parameter and return how lines name it."""
        name = f"p{len(self.parts)}"
        try:
            made = eval(text, {"torch": torch, "nn": nn})  # the text is our own
        except Exception as error:
            raise RefusedError from error
        fill(made, name, self.seed)
        if hasattr(self.holder, name):  # of a generator that was refused
            delattr(self.holder, name)
        setattr(self.holder, name, made)
        self.holder.eval()
        self.parts[name] = text
        return f"self.{name}"

    def emit(self, text: str) -> str:
        """Add the line ``v = text`` and return the name of its value."""
        name = f"v{len(self.lines)}"
        space = {"torch": torch, "F": F, "self": self.holder, **self.values}
        try:
            with torch.no_grad():
                found = eval(text, space)  # the text is our own
        except Exception as error:
            raise RefusedError from error
        self.check(found)
        self.lines.append(f"{name} = {text}")
        self.makers.append(self.maker)
        self.values[name] = found
        return name

    def check(self, found: Tensor) -> None:
        if not isinstance(found, Tensor) or not 0 < found.numel() <= MOST_VALUES or found.dim() > 6:
            raise RefusedError
        if found.is_floating_point() and not (found.isfinite().all() and found.abs().max() < LARGEST):
            raise RefusedError

    # -- whole networks ------------------------------------------------------------------------------------------

    def attempt(self, maker: Callable[[Builder], Any], name: str) -> bool:
        """Let a generator add lines; if it is refused, restore what was there."""
        before = (list(self.inputs), dict(self.parts), list(self.lines), list(self.makers), dict(self.values))
        versions = {key: value._version for key, value in self.values.items()}
        copies = {key: value.clone() for key, value in self.values.items()}
        self.maker = name
        try:
            maker(self)
            return True
        except RefusedError:
            self.inputs, self.parts, self.lines, self.makers, self.values = before
            for key, value in self.values.items():
                if value._version != versions[key]:
                    self.values[key] = copies[key]
            return False

    def network(self) -> Network:
        """Return the network, which gives the values that no line reads, and sometimes another one."""
        words = {word for line in self.lines for word in re.findall(r"\w+", line)}
        names = [line.partition(" = ")[0] for line in self.lines]
        last = [name for name in names if not any(self._reads(line, name) for line in self.lines)]
        kept = [
            name for name in last or names[-1:] if self.values[name].dtype in (torch.float32, torch.bool, torch.int64)
        ]
        if len(names) > 1 and self.chance(0.15) and (extra := self.rng.choice(names)) not in kept:
            kept.append(extra)
        inputs = tuple(entry for entry in self.inputs if entry.name in words)
        return Network(inputs, dict(self.parts), tuple(self.lines), tuple(self.makers), tuple(kept), seed=self.seed)

    @staticmethod
    def _reads(line: str, name: str) -> bool:
        return re.search(rf"\b{name}\b", line.partition(" = ")[2]) is not None
