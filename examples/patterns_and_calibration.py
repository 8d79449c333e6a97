"""Patterns, calibration callbacks and requantization on a small network for handwritten digits.

    python examples/patterns_and_calibration.py                    scikit-learn's digits
    python examples/patterns_and_calibration.py --data mnist.npz   arrays `images` [n, 28, 28] of bytes and `labels` [n]

The network is that of "Quantization in TVM" (784-128-10, ReLU, softmax); the order of steps is that text's, too.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.calibration import AverageMaxCalibrationCallback, CalibrationCallback, Calibrator, DatasetManager
from intaglio.patterns import QuantizerPattern, builtin, op

EPOCHS, HIDDEN, CLASSES = 12, 128, 10


def mnist(side: int) -> nn.Module:
    layers = nn.Linear(side * side, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES), nn.Softmax(1)
    return nn.Sequential(nn.Flatten(), *layers)


def digits(path: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, side, side] in 0..1, and labels."""
    if path is None:
        from sklearn.datasets import load_digits

        bundled = load_digits()
        images, labels = bundled.images / 16, bundled.target
    else:
        arrays = np.load(path)
        images, labels = arrays["images"] / 255, arrays["labels"]
    return torch.from_numpy(images).float()[:, None], torch.from_numpy(labels).long()


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.nll_loss(model(images[batch]).clamp(min=1e-9).log(), labels[batch]).backward()
            optimizer.step()
    model.eval()


class LeastError(CalibrationCallback):
    """The input range, of a few, under which the region's own result moves least; weights and the rest by default."""

    def calibrate(self, info):
        name = info.sites.inputs[0]
        if name in info.known_qparams:
            return {}
        high = max(float(info.unquantized_inputs(batch)[0].max()) for batch in range(info.batches))
        candidates = [(0.0, high * share) for share in (1.0, 0.9, 0.8, 0.7)]
        return {name: min(candidates, key=lambda found: self.error(info.with_parameters({name: found}), info))}

    def error(self, trial, info):
        outputs = [(trial.quantized_outputs(b)[0], info.unquantized_outputs(b)[0]) for b in range(info.batches)]
        return sum(float(F.mse_loss(mine, exact)) for mine, exact in outputs)


def quantize(model, images, patterns, **settings):
    """The four steps, one by one: patterns, calibration, requantization, and the program."""
    manager = DatasetManager(images, batch_size=64, num_samples=512)
    captured = stages.capture(model, images[:2])
    prepared = stages.prepare(captured, stages.Quantizer(patterns=patterns, **settings))
    ranges = Calibrator(prepared, manager).calibrate()
    lowered = stages.Requantizer().requantize(stages.convert(prepared, ranges))
    return lowered, stages.compile(lowered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    torch.manual_seed(0)
    images, labels = digits(parser.parse_args().data)
    order = torch.randperm(len(images))
    seen, held_out = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    model = mnist(images.shape[-1])
    train(model, images[seen], labels[seen])

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            return 100 * (network(images[held_out]).argmax(1) == labels[held_out]).double().mean().item()

    average = AverageMaxCalibrationCallback()
    document = builtin("conv2d_bias", "conv2d", "dense", "add", "multiply", calibration=average)
    lowered, int8 = quantize(model, images[seen], document)
    print(lowered.text())
    print(int8.coverage)

    own = QuantizerPattern("dense_by_error", op("linear"), calibration=LeastError(), priority=1)
    rows = [
        ("float32", model),
        ("int8, average of extrema", int8),
        ("int8, least error", quantize(model, images[seen], [*document, own])[1]),
        ("int8, last layer in float", quantize(model, images[seen], document, skip_last=True)[1]),
        ("int8, no pattern, default method", intaglio.quantize(model, images[seen], samples=512)),
    ]
    print(f"\naccuracy on {len(held_out)} digits held out:")
    for name, network in rows:
        print(f"  {name:33}{accuracy(network):6.2f} %")


if __name__ == "__main__":
    main()
