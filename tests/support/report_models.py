"""Small quantized models of every kind, made once, and their reports."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

import intaglio
from intaglio import eager
from intaglio.runtime.reports.speed import MeasuredSpeed, OperatorSpeed
from support import nets
from support.partial_models import Routed

NASTY = '</script><img src=x onerror="alert(1)">{{ 7 * 7 }}&amp;\'"'
"""A name of a module that would run code, end an element, or be a template, if it were not escaped."""


@dataclass(frozen=True)
class Case:
    """A float model, its quantized form, and batches."""

    exact: nn.Module
    quantized: Any
    batches: list[Any]

    def report(self, **options: Any) -> intaglio.Report:
        return intaglio.report(self.exact, self.quantized, self.batches, **{"calls": 2, "tries": 0, **options})


class Islands(nn.Module):
    """Two convolutions with an operator between them that only PyTorch computes, and one that a program computes in
    float32."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.cumsum(self.first(x), 2)
        return self.head(torch.erf(self.second(x)).mean((2, 3)))


class Branching(nn.Module):
    """Adds or multiplies, by the values of its input."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x + 1) if x.mean() > 10 else self.second(x)


def pictures(seed: int = 0, samples: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(samples, 3, 12, 12, generator=generator) for _ in range(2)]


def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, 16, generator=generator) for _ in range(2)]


def spoiled() -> nn.Module:
    """A residual network whose first feature is always zero, and has weights in `blocks.0.conv1` so large that all
    others vanish in their scale: harmless in float."""
    model = nets.randomize(nets.Residual())
    with torch.no_grad():
        model.stem[1].weight[0], model.stem[1].bias[0] = 0, -1
        model.blocks[0].conv1[0].weight[:, 0] = 300
    return model


def case_of(exact: nn.Module, batches: list[Any], **options: Any) -> Case:
    return Case(exact, intaglio.quantize(exact, batches, progress=False, **options), batches)


@cache
def residual() -> Case:
    """Channels with sizes so different, in so many samples, that factors gain in all of them."""
    return case_of(nets.uneven(nets.randomize(nets.Residual())), pictures(samples=32))


@cache
def islands() -> Case:
    return case_of(nets.randomize(Islands()), pictures())


@cache
def parts() -> Case:
    return case_of(nets.randomize(Routed()), pictures())


@cache
def define_by_run() -> Case:
    exact, batches = nets.randomize(Branching()), vectors()
    prepared = eager.prepare(exact, batches[0])
    for batch in batches:
        prepared(batch)
    return Case(exact, eager.convert(prepared), batches)


@cache
def residual_report() -> intaglio.Report:
    return residual().report(tries=2)


def nasty_report() -> intaglio.Report:
    """A report in which every text is a nasty one."""
    data = residual_report().data
    (graph,) = data.graphs
    operators = tuple(
        replace(
            one,
            name=f"{index} {NASTY}",
            fused=(NASTY,) if one.fused else (),
            counted_with="",
            facts=replace(one.facts, path=NASTY, operator=NASTY, source=NASTY, reason=NASTY, selector=NASTY),
        )
        for index, one in enumerate(graph.operators)
    )
    tried = tuple(replace(one, title=NASTY, python=NASTY, command=NASTY) for one in data.suggestions)
    run = replace(data.run, recipe=NASTY, corrections=(NASTY,), cpu=NASTY, versions={NASTY: NASTY})
    graphs = (replace(graph, name=NASTY, operators=operators),)
    coverage = replace(data.coverage, notes=(NASTY,))
    slow = OperatorSpeed(NASTY, NASTY, (2.0,), (1.0,))
    measured = MeasuredSpeed(1, (2.0,), (1.0,), (slow,), limits=(NASTY,))
    changed = replace(
        data,
        name=NASTY,
        graphs=graphs,
        suggestions=tried,
        run=run,
        limits=(NASTY,),
        coverage=coverage,
        measured=measured,
    )
    return intaglio.Report(changed, changed)
