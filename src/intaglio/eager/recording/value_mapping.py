"""Find the node of a rewritten graph that holds a recorded value, by comparing values at run time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

TOLERANCE = 1e-4
"""Tolerance relative to the largest magnitude.

It is above the error of folding a batch norm, and far below the difference to another node.
"""


def map_values(
    before: fx.GraphModule, after: fx.GraphModule, nodes: Mapping[int, str], inputs: Sequence[torch.Tensor]
) -> dict[int, str]:
    """Map recorded values to nodes of a rewritten graph.

    Both graphs run on the example inputs and on random inputs; a node matches if its values agree for both.

    Args:
        before: Graph that holds the values.
        after: Rewritten graph.
        nodes: Name of the node of `before` by value number.
        inputs: Example inputs.

    Returns:
        Name of the node of `after` by value number, for values that `after` still holds.
    """
    samples = [list(inputs), _other_inputs(before, inputs)]
    probes = [_values(before, sample, set(nodes.values())) for sample in samples]
    others = [_values(after, sample) for sample in samples]
    alike: dict[Any, list[str]] = {}
    for name, value in others[0].items():
        alike.setdefault((value.shape, value.dtype), []).append(name)
    prints = cache(lambda name: [_fingerprint(values[name]) for values in others])
    found = {}
    for number, name in nodes.items():
        wanted = [values[name] for values in probes]
        if name in others[0] and all(map(_same, wanted, [values[name] for values in others])):
            found[number] = name
            continue
        own = [_fingerprint(value) for value in wanted]
        for candidate in alike.get((wanted[0].shape, wanted[0].dtype), ()):
            if all(map(_similar, own, prints(candidate))) and all(
                _same(a, values[candidate]) for a, values in zip(wanted, others, strict=True)
            ):
                found[number] = candidate
                break
    return found


def _fingerprint(value: torch.Tensor) -> tuple[float, float]:
    """Return mean and mean magnitude. Tensors that differ in these need no elementwise comparison."""
    numbers = value.float() if value.numel() else torch.zeros(1)
    return float(numbers.mean()), float(numbers.abs().mean())


def _similar(a: tuple[float, float], b: tuple[float, float]) -> bool:
    limit = 1e-2 * max(a[1], b[1])
    return not (abs(a[0] - b[0]) > limit or abs(a[1] - b[1]) > limit)


def _other_inputs(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return random inputs, and the given ones where the graph fails for random ones."""
    generator = torch.Generator().manual_seed(0)
    other = [torch.randn(x.shape, generator=generator).to(x.dtype) if x.is_floating_point() else x for x in inputs]
    if _runs(module, other):
        return other
    found = list(inputs)
    for index, value in enumerate(other):
        if _runs(module, [*found[:index], value, *found[index + 1 :]]):
            found[index] = value
    return found


def _runs(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> bool:
    with contextlib.suppress(RuntimeError, IndexError, ValueError), torch.no_grad():
        fx.Interpreter(module).run(*inputs)
        return True
    return False


class _RecordedNodeValues(fx.Interpreter):
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
    interpreter = _RecordedNodeValues(module, names)
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
