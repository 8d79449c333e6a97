"""What the arithmetic units allow: int8 multiply-accumulates a second from registers alone, and a network's limit.

    python benchmarks/limits.py                                     the rate of every core at once
    python benchmarks/limits.py resnet50 mobilenet_v2 --batch 1     and the least time these networks can take

The limit is MACs / rate. No program that counts every multiply-accumulate is faster; memory is not considered.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

import record

CHAINS = 24
"""Independent accumulators: more than latency times issue width, so that the units never wait."""
MACS = 64
"""Of one vpdpbusd on 512 bits."""

PROGRAM = """
#include <stdio.h>
#include <time.h>

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

int main(void) {
    const long rounds = 8000000;
    double best = 1e30;
    for (int repeat = 0; repeat < 5; ++repeat) {
        const double start = seconds();
        for (long i = 0; i < rounds; ++i) __asm__ volatile("%s" ::: %s);
        const double taken = seconds() - start;
        if (taken < best) best = taken;
    }
    printf("%%.6f\\n", rounds * (double)%d / best / 1e9);
    return 0;
}
"""


def program() -> str:
    body = "".join(rf"vpdpbusd %%zmm30, %%zmm31, %%zmm{register}\n\t" for register in range(CHAINS))
    clobbers = ", ".join(f'"xmm{register}"' for register in range(CHAINS))
    return PROGRAM % (body, clobbers, CHAINS * MACS)


def int8_rates(cores: int) -> list[float]:
    """G MACs a second of each of ``cores`` copies that run at the same time; empty without AVX512-VNNI."""
    if "avx512_vnni" not in record.cpu()["flags"]:
        return []
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "rate.c"), Path(folder, "rate")
        source.write_text(program())
        subprocess.run(["g++", "-x", "c", "-O2", "-mavx512f", str(source), "-o", str(binary)], check=True)
        copies = [subprocess.Popen([str(binary)], stdout=subprocess.PIPE, text=True) for _ in range(cores)]
        return [float(copy.communicate()[0]) for copy in copies]


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
        raise SystemExit("this CPU has no AVX512-VNNI; there is no limit to compare with")
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
