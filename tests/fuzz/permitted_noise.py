"""Bound of the difference between a reference model and its float model.

The float model is run with noise of at most half a quantization step wherever the reference quantizes, weights
included, and with values clamped to the ranges of the reference. Results of the reference may be `NOISE_FACTOR` times
as far from the float results as those of the noisiest of a few such runs, as root mean squares. The bound is weak,
because quantization errors are not independent, but a wrong operator, scale, zero point or range is far beyond it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fuzz.network import Network
from intaglio.ir import QParams, Ref
from intaglio.quant.annotate.sites import Dynamic
from intaglio.quant.qdq.convert import Reference

NOISE_FACTOR = 8.0
FLOOR = 0.02
"""Relative error that is always permitted, for what has no site: functions as polynomials."""
RUNS = 3
JUMPS = re.compile(
    r"round|ceil|floor|torch\.(eq|ne|lt|le|gt|ge|sign|logical|bitwise|where|sort|div|reciprocal)|rounding_mode|\.to\(|masked|~|&|\||\^|[<>]|threshold|\.sign\("
    r"|max\(.*\)\.values|grid_sample\(.*mode='nearest'|(RMS|Layer)Norm\([12][,)]|EncoderLayer\([12],"
)
"""Calls after which a small error may become a large one."""
COMPARED = {
    "method",
    "functions",
    "bits",
    "shortcut",
    "residual",
    "rounding",
    "bias",
    "equalize",
    "embeddings",
    "two_bytes_below",
    "operand_bytes",
    "weight_bytes",
    "results",
    "rotate",
}
"""Settings of networks that are compared; weights of few bits have errors as large as the values."""


def is_compared(network: Network) -> bool:
    """Return whether errors of a network grow with the noise, so that the bound means something."""
    plain = all(key in COMPARED or network.settings[key] in ("channel", "static", "token") for key in network.settings)
    return plain and not any(JUMPS.search(text) for text in (*network.lines, *network.parts.values()))


class NoisyModel(fx.Interpreter):
    """Runs the prepared graph with noise at every site."""

    def __init__(self, module: fx.GraphModule, reference: Reference, seed: int) -> None:
        super().__init__(module)
        self.sites: dict[str, Any] = {}
        for site in reference.annotations.sites:
            if site.name in reference.qparams or isinstance(site.spec, Dynamic):
                self.sites.setdefault(site.value, site)
        self.qparams: Mapping[str, QParams] = reference.qparams
        self.tables = {table.node.args[0].name for table in reference.annotations.tables if table.is_quantized}
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.tables:
            noise = torch.rand(value.shape, generator=self.generator) - 0.5
            return value + noise * (value.amax(1, keepdim=True) - value.amin(1, keepdim=True)) / 255
        site = self.sites.get(n.name)
        if site is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        noise = torch.rand(value.shape, generator=self.generator) - 0.5
        q = self.qparams.get(site.name)
        if q is None or isinstance(q.scale, Ref):
            return value + noise * value.abs().amax() / 127
        spread = [-1 if q.axis == axis and len(q.scales) > 1 else 1 for axis in range(value.dim())]
        scale, zero = (torch.tensor(values, dtype=torch.float32) for values in (q.scales, q.zeros))
        fits = len(q.scales) == 1 or (isinstance(q.axis, int) and value.shape[q.axis] == len(q.scales))
        if not fits:
            return value + noise * scale.max()
        scale = scale.reshape(spread) if value.dim() else scale.squeeze()
        zero = (
            zero.reshape([-1 if size == -1 and len(q.zeros) > 1 else 1 for size in spread])
            if value.dim()
            else zero.squeeze()
        )
        low, high = (q.qmin - zero) * scale, (q.qmax - zero) * scale
        return torch.maximum(
            torch.minimum(value + noise * scale, high), low
        )  # roots are not taken of values below zero


def rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def too_far(exact: Sequence[Tensor], found: Sequence[Tensor], noisy: Sequence[Sequence[Tensor]]) -> str | None:
    """Return how far results are beyond the bound, or ``None``."""
    for index, (ours, truth) in enumerate(zip(found, exact, strict=True)):
        if ours.shape != truth.shape:
            return f"result {index} has the shape {tuple(ours.shape)}, but {tuple(truth.shape)} in float"
        if not ours.is_floating_point():
            continue
        permitted = NOISE_FACTOR * max(rms(run[index] - truth) for run in noisy) + FLOOR * rms(truth) + 1e-6
        if not rms(ours - truth) <= permitted:
            return f"result {index} is {rms(ours - truth):.2g} from float; permitted are {permitted:.2g}"
    return None
