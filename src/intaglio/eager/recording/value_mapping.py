"""Which node of a rewritten graph holds a value: asked of the numbers, not of the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

TOLERANCE = 1e-4
"""Of the largest magnitude: what folding a batch norm may change, and far below what a wrong node would."""


def places(
    before: fx.GraphModule, after: fx.GraphModule, nodes: Mapping[int, str], inputs: Sequence[torch.Tensor]
) -> dict[int, str]:
    """Value -> node of ``after``, for values that ``before`` holds in ``nodes`` and ``after`` holds at all.

    Both graphs run on the example and on random numbers in its place; a node that differs in either is another value.
    """
    probes = [_values(before, sample, set(nodes.values())) for sample in _samples(inputs)]
    others = [_values(after, sample) for sample in _samples(inputs)]
    alike: dict[Any, list[str]] = {}
    for name, value in others[0].items():
        alike.setdefault((value.shape, value.dtype), []).append(name)
    prints = cache(lambda name: [_print(values[name]) for values in others])
    found = {}
    for number, name in nodes.items():
        wanted = [values[name] for values in probes]
        if name in others[0] and all(map(_same, wanted, [values[name] for values in others])):
            found[number] = name
            continue
        own = [_print(value) for value in wanted]
        for candidate in alike.get((wanted[0].shape, wanted[0].dtype), ()):
            if all(map(_close, own, prints(candidate))) and all(
                _same(a, values[candidate]) for a, values in zip(wanted, others, strict=True)
            ):
                found[number] = candidate
                break
    return found


def _print(value: torch.Tensor) -> tuple[float, float]:
    """Mean and mean magnitude: what differs in these need not be compared number by number."""
    numbers = value.float() if value.numel() else torch.zeros(1)
    return float(numbers.mean()), float(numbers.abs().mean())


def _close(a: tuple[float, float], b: tuple[float, float]) -> bool:
    limit = 1e-2 * max(a[1], b[1])
    return not (abs(a[0] - b[0]) > limit or abs(a[1] - b[1]) > limit)


def _samples(inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    other = [torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else x for x in inputs]
    return [list(inputs), other]


class _Keeping(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, names: set[str] | None) -> None:
        super().__init__(module)
        self.names, self.kept = names, dict[str, torch.Tensor]()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and (self.names is None or n.name in self.names):
            self.kept[n.name] = result
        return result


def _values(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], names: set[str] | None = None
) -> dict[str, torch.Tensor]:
    interpreter = _Keeping(module, names)
    with torch.no_grad():
        interpreter.run(*inputs)
    return interpreter.kept


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    equal = torch.equal(a, b)
    if equal or not a.is_floating_point():
        return equal
    limit = TOLERANCE * float(a.abs().nan_to_num().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=limit + 1e-30, equal_nan=True)
