"""Train a small network on scikit-learn's handwritten digits in 4 bits: weights and activations, every layer.

    python examples/training.py

Prints what it gets right of the held-out digits in float, rounded to 4 bits afterwards, and trained for as many epochs
again with the rounding in it. The network is narrow and deep, so that 4 bits hurt.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import intaglio
from intaglio import stages

TRAIN, CALIBRATE, EPOCHS = 1280, 256, 8
FOUR = intaglio.Setting(weights_dtype="s4", activations_dtype="u4")
RATE, RATE_OF_SCALES = 5e-3, 2e-4
"""Adam moves a parameter by about its rate at each step, whatever its size, and scales are hundredths."""


def normed(conv: nn.Conv2d) -> list[nn.Module]:
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU()]


def separable(channels: int) -> list[nn.Module]:
    """Depthwise, then pointwise."""
    depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
    return [*normed(depthwise), *normed(nn.Conv2d(channels, channels, 1, bias=False))]


def network(channels: int = 8, depth: int = 6) -> nn.Module:
    layers = [*normed(nn.Conv2d(1, channels, 3, padding=1, bias=False)), *separable(channels), nn.MaxPool2d(2)]
    for _ in range(depth - 1):
        layers += separable(channels)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(channels, 10))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """To learn from, and held out."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    order, labels = torch.randperm(len(labels)), torch.from_numpy(labels).long()
    return tuple(TensorDataset(images[part], labels[part]) for part in (order[:TRAIN], order[TRAIN:]))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """The same for the float model and for the one that is prepared."""
    rates = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=EPOCHS * len(loader))
    model.train()
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return 100 * (model(images).argmax(1) == labels).double().mean().item()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    seen, held_out = digits()
    loader = DataLoader(seen, batch_size=64, shuffle=True)
    model = network()
    train(model, torch.optim.AdamW(model.parameters(), lr=2e-2), loader)
    print(f"float32:                    {accuracy(model, held_out):.1f} %")

    recipe = intaglio.Recipe.of({}, default=FOUR)
    calibration = seen.tensors[0][:CALIBRATE].split(64)
    rounded = intaglio.quantize(model, calibration, recipe=recipe, progress=False)
    print(f"4 bits, rounded afterwards: {accuracy(rounded, held_out):.1f} %")

    captured = stages.capture(model, calibration[0], train=True)
    prepared = stages.prepare(captured, stages.Quantizer(recipe), qat=True)
    stages.calibrate(prepared, calibration, progress=False)
    prepared.learn_scales()
    scales = prepared.scale_parameters()
    others = [p for p in prepared.parameters() if p.requires_grad and all(p is not scale for scale in scales)]
    groups = [{"params": others}, {"params": scales, "lr": RATE_OF_SCALES, "weight_decay": 0.0}]
    train(prepared, torch.optim.AdamW(groups, lr=RATE), loader)
    trained = stages.compile(stages.convert(prepared))
    print(f"4 bits, trained:            {accuracy(trained, held_out):.1f} %")
    with torch.no_grad():
        same = trained(held_out.tensors[0]).argmax(1) == prepared(held_out.tensors[0]).argmax(1)
    print(f"decided as by the model that was trained: {100 * same.double().mean().item():.1f} %")


if __name__ == "__main__":
    main()
