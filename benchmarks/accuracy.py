"""What int8 costs in accuracy, engine by engine, on trained networks and real images.

    python benchmarks/accuracy.py --data FOLDER
    python benchmarks/accuracy.py --data FOLDER --engines eager,intaglio --limit 256

Every engine is calibrated on the same training images and scored on test images. Per split of the data: top-1; the
share of images that get the class the float model gives them; and the signal-to-noise ratio of the logits,
10 log10(sum y^2 / sum (y - y_int8)^2), which sees differences that no class changes by.

    python benchmarks/accuracy.py --data FOLDER --networks efficientnet_lite0 --images 128 --batch 32 --limit 512

EfficientNet-Lite0 gets the same photographs, enlarged to its size. It has classes of its own, so it has no top-1.

Seconds are those until the engine could be called, its imports included, with nothing compiled before; MB are the peak
of the process meanwhile.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import fresh
import networks
import record
import torch
from engines import ENGINES
from rich.console import Console
from rich.table import Table

SPLITS = ("lossless", "jpeg")
CLASSES = 10
INT8 = "eager,torchao,onnxruntime_int8,openvino_int8,intaglio"


def score(engine: str, network: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Split -> figures."""
    torch.set_num_threads(arguments.threads)
    model, _ = networks.build(network, arguments.data)
    resized = networks.for_imagenet if network == "efficientnet_lite0" else torch.Tensor.contiguous
    images, _, _ = networks.cifar10(arguments.data, "jpeg" if network == "efficientnet_lite0" else "lossless")
    calibration = [(resized(batch),) for batch in images[: arguments.images].split(arguments.batch)]
    results = {}
    with torch.no_grad():
        begin = time.perf_counter()
        run = ENGINES[engine](model, calibration[0], calibration, arguments.threads)
        run(*calibration[0])  # torchao compiles at the first call
        cost = {"seconds": time.perf_counter() - begin}
        cost["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        for split in [split for split in SPLITS if (arguments.data / f"cifar10_{split}.npz").exists()]:
            _, images, labels = networks.cifar10(arguments.data, split)
            images, labels = images[: arguments.limit], labels[: arguments.limit]
            expected = in_batches(model, images, arguments.batch, resized)
            got = in_batches(run, images, arguments.batch, resized)
            noise = (got - expected).double().square().sum() / expected.double().square().sum()
            results[split] = {
                "images": len(labels),
                "top1": 100 * (got.argmax(1) == labels).double().mean().item() if got.shape[1] == CLASSES else None,
                "agreement": 100 * (got.argmax(1) == expected.argmax(1)).double().mean().item(),
                "sqnr_db": -10 * torch.log10(noise + 1e-14).item(),
                **cost,
            }
    return results


def in_batches(run, images: torch.Tensor, size: int, resized=torch.Tensor.contiguous) -> torch.Tensor:
    """Results for all images, resized. Every call has ``size`` of them, as engines with fixed shapes want."""
    missing = -len(images) % size
    padded = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
    return torch.cat([run(resized(batch)).clone() for batch in padded.split(size)])[: len(images)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of weights and images; see README.md")
    parser.add_argument("--networks", default="cifar_resnet20,cifar_resnet56")
    parser.add_argument("--engines", default=INT8)
    parser.add_argument("--images", type=int, default=256, help="to calibrate on")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--limit", type=int, help="score only so many images")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.images % arguments.batch:
        parser.error("--images must be a multiple of --batch: some engines take one batch size only")
    console, results = Console(highlight=False), {}
    for network in arguments.networks.split(","):
        table = Table(title=network)
        for column in ("images", "engine", "top-1 %", "agreement %", "SQNR dB", "s", "peak MB"):
            table.add_column(column, justify="left" if column == "engine" else "right")
        for engine in arguments.engines.split(","):
            try:
                with tempfile.TemporaryDirectory() as folder:  # an empty cache of kernels
                    caches = {"INTAGLIO_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
                    found = fresh.call(score, engine, network, arguments, environment=caches)
            except fresh.FailedError as error:
                console.print(f"{engine} on {network} failed: {error}", markup=False)
                continue
            results[f"{network}/{engine}"] = found
            for split, figures in found.items():
                shares = [figures[key] for key in ("top1", "agreement")]
                shares = ["-" if share is None else f"{share:.2f}" for share in shares]
                costs = f"{figures['sqnr_db']:.1f}", f"{figures['seconds']:.1f}", f"{figures['peak_mb']:.0f}"
                table.add_row(f"{figures['images']} {split}", engine, *shares, *costs)
        console.print(table)
    record.append("accuracy", arguments, results)


if __name__ == "__main__":
    main()
