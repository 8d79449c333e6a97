"""Train a small residual network on scikit-learn's handwritten digits, turn it into int8, compare the two.

`make demo`, or with intaglio and scikit-learn installed: `python examples/demo.py`
"""

import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import intaglio

CLASSES, EPOCHS, TRAIN = 10, 5, 1280


class Block(nn.Module):
    """Two convolutions and a shortcut; the shortcut has weights where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        projection = (nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if same else nn.Sequential(*projection)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class DigitNet(nn.Module):
    """A ResNet in small: a stem, three stages that halve the image and double the channels, a linear layer."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.stage1 = Block(width, width, stride=1)
        self.stage2 = Block(width, 2 * width, stride=2)
        self.stage3 = Block(2 * width, 4 * width, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(4 * width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.classify(self.pool(x).flatten(1))


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,280 images to learn from and 517 held out, enlarged from 8 to 16 pixels a side so that strides have room."""
    bundled = load_digits()
    images = torch.from_numpy(bundled.images).float()[:, None] / 16
    images = F.interpolate(images, size=(16, 16), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(bundled.target).long()
    order = torch.randperm(len(labels))
    train, held_out = order[:TRAIN], order[TRAIN:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def train(model: nn.Module, loader: DataLoader) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=EPOCHS * len(loader))
    model.train()
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    model.eval()


def milliseconds(models: tuple[nn.Module, nn.Module], x: torch.Tensor) -> list[float]:
    """Median call of each model. They take turns in short blocks, so that both meet the same state of the machine."""
    blocks: list[list[float]] = [[], []]
    for _ in range(7):
        for model, medians in zip(models, blocks, strict=True):
            calls, end = [], time.perf_counter() + 0.1
            while time.perf_counter() < end:
                begin = time.perf_counter()
                model(x)
                calls.append((time.perf_counter() - begin) * 1e3)
            medians.append(statistics.median(calls))
    return [statistics.median(medians) for medians in blocks]


def main() -> None:
    console = Console(highlight=False)
    torch.set_num_threads(1)  # times of one thread stay fair where other programs use the cores too
    torch.manual_seed(0)
    seen, held_out = digits()
    model = DigitNet()
    begin = time.perf_counter()
    train(model, DataLoader(seen, batch_size=128, shuffle=True))
    console.print(f"trained a {type(model).__name__} in {time.perf_counter() - begin:.1f} s")

    begin = time.perf_counter()
    loader = DataLoader(seen, batch_size=64)  # (image, label) pairs, as for training; labels are left out
    int8 = intaglio.quantize(model, loader, samples=256)
    console.print(f"quantized it in {time.perf_counter() - begin:.1f} s\n")

    images, labels = held_out.tensors
    with torch.no_grad():
        expected, got = model(images).argmax(1), int8(images).argmax(1)
        table = Table(title=f"{len(labels)} held-out digits, one thread, {int8.artifact.program.isa}")
        for column in ("", "float32", "int8", ""):
            table.add_column(column, justify="left" if not table.columns else "right")
        accuracy = [100 * (found == labels).double().mean().item() for found in (expected, got)]
        table.add_row("accuracy", *[f"{a:.2f} %" for a in accuracy], f"{accuracy[1] - accuracy[0]:+.2f}")
        table.add_row("same answer", "", f"{100 * (expected == got).double().mean():.2f} %", "")
        for batch in (1, 64):
            slow, fast = milliseconds((model, int8), images[:batch])
            table.add_row(f"batch of {batch}", f"{slow:.3f} ms", f"{fast:.3f} ms", f"{slow / fast:.1f}x the speed")
    before, after = int8.coverage.bytes_before / 1e6, int8.coverage.bytes_after / 1e6
    table.add_row("parameters", f"{before:.2f} MB", f"{after:.2f} MB", f"{before / after:.1f}x less")
    console.print(table)
    console.print(f"\n{int8.coverage}")
    console.print("\nNext: docs/guide.md has the same for a model of your own; make test runs the tests.")


if __name__ == "__main__":
    main()
