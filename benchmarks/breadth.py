"""Which networks run in int8 from end to end, and with the same bits on every instruction set.

    python benchmarks/breadth.py                      all of them
    python benchmarks/breadth.py mobilenet_v2 --image 64

For each network: share of multiply-accumulates in int8, float islands, size of the file, and whether the programs for
all instruction sets of this machine give equal bits for two images. Nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import networks
import record
import torch
from rich.console import Console
from rich.table import Table

from intaglio import stages
from intaglio.native.cpu import isas

NETWORKS = (
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "efficientnet_b0",
    "squeezenet1_0",
    "densenet121",
    "googlenet",
    "regnet_y_400mf",
    "shufflenet_v2_x1_0",
    "vgg11_bn",
    "resnext50_32x4d",
    "convnext_tiny",
)


def examine(name: str, image: int) -> dict:
    """Coverage, size and bits of one network."""
    model, shape = networks.build(name, image=image)
    torch.manual_seed(1)
    data = [torch.randn(2, *shape) for _ in range(2)]
    prepared = stages.prepare(stages.capture(model, data[0]))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, data)))
    results, first = {}, None
    for isa in isas():
        compiled = stages.compile(lowered, isa=isa)
        results[isa] = compiled(data[1])
        first = first or compiled
    equal = all(torch.equal(result, results[isas()[0]]) for result in results.values())
    with tempfile.TemporaryDirectory() as folder:
        first.save(path := Path(folder) / "model")
        size = path.stat().st_size
    return {
        "macs_int8": first.coverage.macs,
        "islands": first.coverage.islands,
        "operators": first.coverage.operators,
        "file_mb": size / 1e6,
        "float_mb": first.coverage.bytes_before / 1e6,
        "equal_bits": equal,
        "isas": isas(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--image", type=int, default=224)
    arguments = parser.parse_args()
    table = Table("network", "MACs in int8", "islands", "float, MB", "file, MB", "equal bits")
    results = {}
    for name in arguments.networks:
        results[name] = found = examine(name, arguments.image)
        bits = f"{'yes' if found['equal_bits'] else 'NO'}: {', '.join(found['isas'])}"
        table.add_row(
            name,
            f"{100 * found['macs_int8']:.2f} %",
            str(found["islands"]),
            f"{found['float_mb']:.1f}",
            f"{found['file_mb']:.1f}",
            bits,
        )
    Console(width=120).print(table)
    record.append("breadth", arguments, results)


if __name__ == "__main__":
    main()
