"""What training with the rounding in the graph gains where rounding afterwards loses: top-1 of a network in 4 bits.

    python benchmarks/training.py --data FOLDER

The trained CIFAR ResNet-20, in float; in 4 bits after training, its ranges calibrated and its weights rounded by
AdaRound or GPTQ; and trained in 4 bits for two epochs on all training images of both splits, from the same calibration.
All are scored as int8 programs on the test images of both splits.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import networks
import numpy as np
import record
import torch
from accuracy import SPLITS, in_batches
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

import intaglio
from intaglio import stages

FOUR_BITS = {"weights_dtype": "s4", "activations_dtype": "u4"}
EIGHT_BITS = {"weights_dtype": "s8", "activations_dtype": "u8"}


def recipe(ends: int, rounding: str = "gptq") -> intaglio.Recipe:
    """4 bits everywhere, or 8 in the first and the last layer."""
    entries = {"conv1": EIGHT_BITS, "linear": EIGHT_BITS} if ends == 8 else {}
    return intaglio.Recipe.of(entries, default=intaglio.Setting(rounding=rounding, **FOUR_BITS))


def training_set(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """All training images of both splits, and their labels."""
    images = torch.cat([networks.cifar10(folder, split)[0] for split in SPLITS])
    labels = [np.load(folder / f"cifar10_{split}.npz")["train_labels"] for split in SPLITS]
    return images, torch.from_numpy(np.concatenate(labels)).long()


def after_training(rounding: str, model, calibration, arguments):
    return intaglio.quantize(model, calibration, recipe=recipe(arguments.ends, rounding), progress=False)


def trained(model, calibration, arguments, report):
    """From the float weights: images flipped and shifted; half of each target is what the float model gives."""
    torch.manual_seed(arguments.seed)
    images, labels = training_set(arguments.data)
    captured = stages.capture(model, calibration[0], train=True)
    prepared = stages.prepare(captured, stages.Quantizer(recipe(arguments.ends)), qat=True)
    stages.calibrate(prepared, calibration, progress=False)
    prepared.learn_scales()
    scales = prepared.scale_parameters()
    others = [p for p in prepared.parameters() if p.requires_grad and all(p is not s for s in scales)]
    steps = arguments.epochs * (len(images) // arguments.train_batch)
    optimizer = torch.optim.SGD(
        [{"params": others, "weight_decay": 1e-4}, {"params": scales, "weight_decay": 0.0}],
        lr=arguments.rate,
        momentum=0.9,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for epoch in range(arguments.epochs):
        prepared.train()
        order, total = torch.randperm(len(images)), 0.0
        for chosen in order[: len(order) // arguments.train_batch * arguments.train_batch].split(arguments.train_batch):
            batch = augmented(images[chosen])
            with torch.no_grad():
                soft = model(batch).softmax(1)
            logits = prepared(batch)
            target = 0.5 * soft + 0.5 * F.one_hot(labels[chosen], 10)
            loss = F.cross_entropy(logits, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        report(f"epoch {epoch + 1}: loss {total * arguments.train_batch / len(images):.4f}")
    return stages.compile(stages.convert(prepared))


def augmented(images: torch.Tensor) -> torch.Tensor:
    """Flipped half of the time, and shifted by up to 4 pixels in what is filled up with zeros."""
    n, _, height, width = images.shape
    images = torch.where(torch.rand(n, 1, 1, 1) < 0.5, images.flip(3), images)
    padded = F.pad(images, (4, 4, 4, 4))
    shifts = torch.randint(0, 9, (n, 2)).tolist()
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, shifts, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of weights and images; see README.md")
    parser.add_argument("--ends", type=int, choices=(4, 8), default=4, help="bits of the first and the last layer")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--train-batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=1024, help="to calibrate on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default="float,adaround,gptq,trained")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(highlight=False)
    model, _ = networks.build("cifar_resnet20", arguments.data)
    calibration = list(training_set(arguments.data)[0][: arguments.images].split(64))
    ways = {
        "float": lambda: model,
        "adaround": lambda: after_training("adaround", model, calibration, arguments),
        "gptq": lambda: after_training("gptq", model, calibration, arguments),
        "trained": lambda: trained(model, calibration, arguments, console.print),
    }
    results = {}
    table = Table(title=f"CIFAR ResNet-20, W4A4, first and last layer in {arguments.ends} bits")
    for column in ("way", *(f"top-1 {split} %" for split in SPLITS), "s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way in arguments.ways.split(","):
        start = time.perf_counter()
        made = ways[way]()
        results[way] = {"seconds": time.perf_counter() - start}
        for split in SPLITS:
            _, images, labels = networks.cifar10(arguments.data, split)
            with torch.no_grad():
                logits = in_batches(made, images, 64)
            results[way][split] = 100 * (logits.argmax(1) == labels).double().mean().item()
        console.print(way, results[way])
        table.add_row(way, *(f"{results[way][split]:.2f}" for split in SPLITS), f"{results[way]['seconds']:.0f}")
    console.print(table)
    record.append("training", arguments, results)


if __name__ == "__main__":
    main()
