"""What the arithmetic units allow: int8 multiply-accumulates a second from registers alone, and a network's limit.

    python benchmarks/limits.py                                     the rate of every core at once
    python benchmarks/limits.py resnet50 mobilenet_v2 --batch 1     and the least time these networks can take

The limit is MACs / rate. No program that counts every multiply-accumulate is faster; memory is not considered.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import record

from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits

ROUNDS, SECONDS = 10, 0.005
"""Short repeats, and many: whoever else runs takes some of them, not all."""


def int8_rates(cores: int) -> list[float]:
    """G MACs a second of each of ``cores`` threads that work at once, with this CPU's best instructions; empty where
    there is nothing to measure them with."""
    rounds = [limits.int8_rates(machine.isas()[0], cores, SECONDS) for _ in range(ROUNDS)]
    return [max(rates) for rates in zip(*rounds, strict=True)]


def limit_ms(macs: int, batch: int, rates: list[float]) -> float:
    return macs * batch / sum(rates) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--data", type=Path, help="folder of trained weights, for cifar_resnet20 and -56")
    arguments = parser.parse_args()
    rates = int8_rates(arguments.threads)
    if not rates:
        raise SystemExit("this CPU has neither AVX512-VNNI nor AVX2; there is no limit to compare with")
    print("G MACs a second of each core:", ", ".join(f"{rate:.1f}" for rate in rates))
    results = {"rates_gmacs": rates, "limits_ms": {}}
    for name in arguments.networks:
        import networks

        macs = networks.count_macs(*networks.build(name, arguments.data, arguments.image))
        results["limits_ms"][name] = limit_ms(macs, arguments.batch, rates)
        print(f"{name}, batch {arguments.batch}: {macs / 1e9:.3f} G MACs an image, {results['limits_ms'][name]:.3f} ms")
    record.append("limits", arguments, results)


if __name__ == "__main__":
    main()
