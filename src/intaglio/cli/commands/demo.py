"""`intaglio demo`: a small network that classifies the direction of stripes, in float and in int8."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio.cli.commands import bench
from intaglio.cli.engines import eager_engine
from intaglio.cli.show import Result, coverage_parts, coverage_result, name_value_table

CLASSES, IMAGE_SIZE, TRAINING_STEPS, BATCH = 4, 24, 30, 32
DEMO_SECONDS = 0.6
"""Seconds of measurement for each of the two models."""


class StripeNet(nn.Module):
    """A stem, one residual block, global average pooling and a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits f32[n, classes] of images f32[n, 1, h, w]."""
        x = F.max_pool2d(self.stem(x), 2)
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)
        return self.classify(x.mean((2, 3)))


def stripes(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of noisy stripes with random frequency and phase, f32[count, 1, h, w], and their direction out of
    four."""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * (torch.pi / CLASSES)
    frequency, phase = 0.6 + 0.6 * torch.rand(count, generator=generator), 6.28 * torch.rand(count, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(IMAGE_SIZE), torch.arange(IMAGE_SIZE), indexing="ij")
    across = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    clean = torch.sin(frequency[:, None, None] * across + phase[:, None, None])
    return (clean + 1.5 * torch.randn(clean.shape, generator=generator))[:, None], labels


def run() -> dict[str, Any]:
    """Train, quantize and measure the network, and return the result for JSON."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = StripeNet()
    begin, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)  # the network is too small for several threads
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(TRAINING_STEPS):
        images, labels = stripes(BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    trained = time.perf_counter() - begin
    model.eval()
    begin = time.perf_counter()
    quantized = intaglio.quantize(model, [stripes(BATCH, generator) for _ in range(4)])
    taken = time.perf_counter() - begin
    images, labels = stripes(512, generator)
    with torch.no_grad():
        expected, got = model(images), quantized(images)
    engines = {"int8": eager_engine(quantized), "eager": eager_engine(model)}
    return {
        "model": repr(quantized),
        "trained_s": trained,
        "quantized_s": taken,
        "accuracy_float": _mean(expected.argmax(1) == labels),
        "accuracy_int8": _mean(got.argmax(1) == labels),
        "same_answer": _mean(expected.argmax(1) == got.argmax(1)),
        "sqnr_db": bench.decibels(expected, got),
        "coverage": coverage_result(quantized.coverage),
        "speed": bench.time_alternately(engines, ((images[:8],), {}), DEMO_SECONDS, torch.get_num_threads()),
    }


def _mean(hits: torch.Tensor) -> float:
    return hits.float().mean().item()


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    yield "A residual network of three convolutions and a linear layer learns to classify noisy stripes by direction."
    yield name_value_table(
        (
            ("trained", f"{result['trained_s']:.1f} s, {TRAINING_STEPS} batches"),
            ("quantized", f"{result['quantized_s']:.1f} s, with {4 * BATCH} images"),
            (
                "accuracy",
                f"{100 * result['accuracy_float']:.1f} % in float, "
                f"{100 * result['accuracy_int8']:.1f} % in int8 (512 new images)",
            ),
            ("same class", f"{100 * result['same_answer']:.1f} % of these images in int8 as in float"),
        )
    )
    yield from coverage_parts(result["coverage"])
    yield from bench.timing_parts(result["speed"], "batch 8")
    yield "Quantize your own model: intaglio quantize MODULE:NAME --data MODULE:NAME --out FILE"
