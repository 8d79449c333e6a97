"""Changed weights of exported C: a status, whatever their bytes are, and no access outside of them.

    python -m fuzz.exported_weights --count 100000 --seed 0          all networks (make fuzz-weights)
    python -m fuzz.exported_weights --seed 0 --net lstm --case 123   one copy of the weights of one network

The exports are compiled with AddressSanitizer and UndefinedBehaviorSanitizer, and every copy is in memory of exactly
its size. A copy depends on the seed, the network and its number only.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

from fuzz import originals
from intaglio.errors import IntaglioError
from support.damaged_weights import sanitized

NETWORKS = ("nested", "lstm", "recommender", "chains", "attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--net", choices=NETWORKS, help="this network only (default: all)")
    parser.add_argument("--case", type=int, help="this copy of the weights only")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    networks = (arguments.net,) if arguments.net else NETWORKS
    count = 1 if arguments.case is not None else -(-arguments.count // len(networks))
    begin, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        for name in networks:
            text = run(Path(folder, name), name, count, arguments.seed, arguments.case or 0)
            failures += text is not None
            print(f"{name}: {text or f'{count:,} copies are a status'}", flush=True)
    total = count * len(networks)
    print(f"changed weights: {total:,} copies in {time.monotonic() - begin:.0f} s; {failures} networks with failures")
    sys.exit(failures > 0)


def run(folder: Path, name: str, count: int, seed: int, first: int) -> str | None:
    """Open changed copies of the weights of one network.

    Returns:
        What was found, with the command that reproduces it, or ``None``.
    """
    try:
        originals.compiled(originals.MODELS[name], "portable").export_c(folder, isa="portable")
    except IntaglioError as error:
        return f"cannot be exported: {error}"
    command = [sanitized(folder), folder / "weights.bin", str(count), str(seed), str(first)]
    found = subprocess.run(command, capture_output=True, text=True)
    opened = re.fullmatch(r"(\d+) opened, \1 unchanged\n", found.stdout)
    if found.returncode == 0 and opened and not found.stderr:
        return None
    again = f"PYTHONPATH=src:tests python -m fuzz.exported_weights --seed {seed} --net {name} --count {count}"
    return f"status {found.returncode}\n{found.stdout}{found.stderr[:4000]}\n  reproduce: {again}"


if __name__ == "__main__":
    main()
