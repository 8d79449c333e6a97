"""A network exported as C against the call of it from Python: bits, time of a call, bytes on disk.

    python benchmarks/exported.py resnet50 --batch 1 --threads 1
    python benchmarks/exported.py mobilenet_v2 --rounds 3

Both run in one process, by turns, in blocks of --seconds; a block counts by its median call. ``ratio`` is the median
over rounds of C's block by Python's. The library is built by the commands of the export's README.txt.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import networks
import record
import torch
from race import PAUSE, block

import intaglio

POINTERS = ctypes.c_void_p * 2


def build(folder: Path) -> Path:
    """A shared library by the commands of README.txt, stripped, and ``main``."""
    commands = re.findall(r"^    ((?:FLAGS=|gcc ).*)$", (folder / "README.txt").read_text(), re.MULTILINE)
    library = next(folder.glob("*.h")).with_suffix("").name
    strip = f"strip lib{library}.so"
    subprocess.run(["sh", "-ec", "\n".join([*commands, strip])], cwd=folder, check=True)
    return folder / f"lib{library}.so"


def opened(folder: Path, name: str, x: torch.Tensor, result: torch.Tensor, threads: int) -> Callable[[], None]:
    """One call of the library: reads ``x``, writes ``result``."""
    library, handle = ctypes.CDLL(str(build(folder))), ctypes.c_void_p()
    checked(getattr(library, f"{name}_open")(str(folder / "weights.bin").encode(), ctypes.byref(handle)))
    sizes = (ctypes.c_int64 * x.dim())(*x.shape)
    checked(getattr(library, f"{name}_resize")(handle, POINTERS(ctypes.addressof(sizes))))
    run, inputs, outputs = getattr(library, f"{name}_run"), POINTERS(x.data_ptr()), POINTERS(result.data_ptr())
    return lambda: checked(run(handle, inputs, outputs, threads))


def checked(status: int) -> None:
    if status:
        raise SystemExit(f"status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", help="resnet18, resnet50, or a torchvision model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--image", type=int, default=224)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    float_model, shape = networks.build(arguments.network, image=arguments.image)
    x = torch.randn(arguments.batch, *shape)
    model = intaglio.quantize(float_model, [torch.randn(2, *shape)], progress=False)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.export_c(folder)
        expected = model(x)
        result = torch.empty_like(expected)
        call = opened(folder, next(folder.glob("*.h")).stem, x, result, arguments.threads)
        call()
        assert torch.equal(result, expected), "the export has other bits"
        found = measure(arguments, lambda: model(x), call)
        files = {"library.so": next(folder.glob("lib*.so")), "weights.bin": folder / "weights.bin"}
        found["bytes"] = {name: file.stat().st_size for name, file in files.items()}
    record.append("exported", arguments, found)
    best = {engine: min(found[engine]) for engine in ("python_ms", "c_ms")}
    size = sum(found["bytes"].values()) / 1e6
    print(f"Python {best['python_ms']:.3f} ms, C {best['c_ms']:.3f} ms, ratio {found['ratio']:.3f}, {size:.2f} MB")


def measure(arguments: argparse.Namespace, python: Callable[[], object], c: Callable[[], None]) -> dict:
    """Medians of blocks, by turns, the one that begins changing from round to round."""
    quiet = record.idle()
    blocks: dict[str, list[float]] = {"python_ms": [], "c_ms": []}
    engines = list(zip(blocks, (python, c), strict=True))
    for _ in range(arguments.rounds):
        for name, call in engines:
            time.sleep(PAUSE)
            blocks[name].append(block(call, arguments.seconds))
        engines.reverse()
    ratios = [c / python for python, c in zip(*blocks.values(), strict=True)]
    return {"idle": record.busy() <= record.IDLE_SHARE and quiet, "ratio": statistics.median(ratios), **blocks}


if __name__ == "__main__":
    main()
