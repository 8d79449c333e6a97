"""Exported programs as executables of their own, built by any compiler with any flags."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from intaglio.native.compile import COMPILE_FLAGS
from intaglio.native.cpu import ISA_FLAGS
from intaglio.runtime import QuantizedModel

DRIVER = Path(__file__).with_name("run_exported.c")


def executable(folder: Path, isa: str, prefix: str = "", flags: Sequence[str] = ()) -> Path:
    """Compile an exported program and `run_exported.c`.

    Args:
        folder: folder that `export_c` wrote, for one instruction set.
        isa: the instruction set.
        prefix: prefix of the compilers, such as "aarch64-linux-gnu-".
        flags: further flags, which follow the usual ones.
    """
    name = next(folder.glob("*.h")).stem
    driver, run = folder / "driver.o", folder / "run_exported"
    names = [f'-DHEADER="{name}.h"', f"-DNET(name)={name}_##name", f"-I{folder}"]
    usual = [flag for flag in COMPILE_FLAGS if flag != "-shared"]
    commands = [
        [f"{prefix}gcc", "-O2", "-std=c11", *names, *flags, "-c", str(DRIVER), "-o", str(driver)],
        [f"{prefix}g++", *usual, "-w", *flags, f"-I{folder}", "-c", str(folder / f"{name}.cpp")],
    ]
    objects = [str(driver), str(folder / f"{name}.o")]
    for source in sorted(path for path in (folder / "kernels").iterdir() if path.suffix in (".cpp", ".s", ".S")):
        made = folder / f"kernels_{source.stem}.o"
        for_isa = ISA_FLAGS[isa] if source.stem.startswith(isa) else ()
        commands.append([f"{prefix}g++", *usual, "-w", *for_isa, *flags, "-c", str(source), "-o", str(made)])
        objects.append(str(made))
    commands.append([f"{prefix}g++", "-pthread", *flags, *objects, "-o", str(run)])
    for command in commands:
        subprocess.run(command, cwd=folder, check=True)
    return run


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
