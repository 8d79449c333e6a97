"""Histograms of values, and weights by channel."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.nodes import is_constant, operands, record_of
from intaglio.lower.facts.operator_facts import SiteFacts
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.qdq.operator_names import OperatorNames
from intaglio.reporting.report_data import Histogram, WeightReport
from intaglio.torch_private import buffers_of

MOST_BINS = 64
"""Largest number of bins of a histogram."""


def histogram_of(statistics: Statistics) -> Histogram | None:
    """Return the histogram of a value's statistics with at most `MOST_BINS` bins; ``None`` without finite values."""
    found = statistics.histogram(MOST_BINS)
    return None if found is None else Histogram(*found)


def weight_of(names: OperatorNames, name: str, facts: SiteFacts) -> WeightReport | None:
    """Return the weight of an operator by output channel, or ``None`` if it is not a constant.

    Args:
        names: the operators of a reference.
        name: name of the operator's node.
        facts: the site of its weight.
    """
    exact, quantized = _weight(names.named[name]), _weight(names.nodes[name])
    q = names.reference.qparams.get(facts.name)
    if exact is None or quantized is None or exact.shape != quantized.shape or q is None:
        return None
    axis = q.axis if isinstance(q.axis, int) else 0
    rows, rounded = (t.detach().double().movedim(axis, 0).flatten(1).numpy() for t in (exact, quantized))
    signal, noise = np.square(rows).sum(1), np.square(rows - rounded).sum(1)
    return WeightReport(
        site=facts.name,
        shape=tuple(exact.shape),
        datatype=facts.datatype,
        rounding=facts.rounding,
        scales=tuple(q.scales),
        largest=tuple(np.abs(rows).max(1).tolist()),
        decibels=tuple(_decibels(s, n) for s, n in zip(signal.tolist(), noise.tolist(), strict=True)),
        all_decibels=_decibels(float(signal.sum()), float(noise.sum())),
    )


def _weight(node: fx.Node) -> torch.Tensor | None:
    """Return the weight of a layer as a float tensor, or ``None`` if it is not known before the model runs."""
    record = record_of(node)
    if record is None or record.roles.weight is None:
        return None
    weight = operands(node)[record.roles.weight]
    found = None if weight is None else _constant(weight)
    return found if found is not None and found.is_floating_point() and found.dim() > 1 else None


def _constant(node: fx.Node) -> torch.Tensor | None:
    """Return the value of a node that only depends on constants, such as a dequantized weight, or ``None``."""
    if is_constant(node):
        return buffers_of(node.graph.owning_module).get(str(node.target))
    sources = {source: _constant(source) for source in node.all_input_nodes}
    if node.op != "call_function" or not sources or any(value is None for value in sources.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), sources.__getitem__)
    with torch.no_grad():
        found = node.target(*args, **kwargs)
    return found if isinstance(found, torch.Tensor) else None


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
