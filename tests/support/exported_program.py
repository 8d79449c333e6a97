"""Exported programs as executables of their own, built by any compiler with any flags."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from intaglio.runtime import QuantizedModel
from support.exported_c import link

DRIVER = Path(__file__).with_name("run_exported.c")


def executable(folder: Path, prefix: str = "", flags: Sequence[str] = ()) -> Path:
    """Compile an exported program and `run_exported.c`.

    Args:
        folder: folder that `export_c` wrote.
        prefix: prefix of the compilers, such as "aarch64-linux-gnu-".
        flags: further flags, which follow those of README.txt.
    """
    name = next(folder.glob("*.h")).stem
    driver = [f"{prefix}gcc", "-O2", "-std=c11", f'-DHEADER="{name}.h"', f"-DNET(name)={name}_##name", f"-I{folder}"]
    subprocess.run([*driver, *flags, "-c", str(DRIVER), "-o", "driver.o"], cwd=folder, check=True)
    link(folder, f"{prefix}gcc", "-o run_exported", " ".join(flags))
    return folder / "run_exported"


def arguments(folder: Path, inputs: Sequence[Tensor], scratch: Path, threads: int = 0) -> list[str]:
    """Write inputs to files and return the arguments that follow the name of the executable."""
    found = [str(folder / "weights.bin"), str(threads)]
    for index, tensor in enumerate(inputs):
        file = scratch / f"input{index}"
        file.write_bytes(tensor.contiguous().numpy().tobytes())
        is_image = tensor.dtype is torch.uint8 and tensor.dim() == 4
        found += [str(file), str(int(is_image)), str(tensor.dim()), *map(str, tensor.shape)]
    return found


def expected(model: QuantizedModel, inputs: Sequence[Tensor]) -> bytes:
    """Return the bytes that the executable prints: those of all results."""
    results = [leaf for leaf in pytree.tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]
    return b"".join(result.contiguous().numpy().tobytes() for result in results)
