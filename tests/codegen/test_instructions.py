"""The object code of programs has the int8 instruction of its instruction set, in every kernel as often as planned."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import intaglio
from support import nets
from support.matmul_library import RUNNABLE_ISAS
from support.nets import randomize

INSTRUCTIONS = {"avx512vnni": ("vpdpbusd", 1), "avxvnni": ("vpdpbusd", 10), "avx2": ("vpmaddwd", 4)}
"""Instruction that multiplies, and how often the loops over steps of 4 bytes have it for one row and one block of 16
channels: kernels for AVX-VNNI have one loop with one step, and one with four."""
TILE = re.compile(r"tile_(\d+)x(\d+)_")
PARTS = re.compile(r"tiles_x(\d+)_\w+_parts(\d+)$")

NETWORKS = {
    "residual": (nets.Residual, lambda: torch.randn(2, 3, 12, 12)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 10)), lambda: torch.randn(4, 24)),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(8, 64, 1), nn.Conv2d(64, 64, 3, groups=64), nn.ReLU()),
        lambda: torch.randn(2, 8, 9, 9),
    ),
}


def disassembled(library: Path) -> dict[str, Counter[str]]:
    """Return how often each function of a library has each instruction."""
    text = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        if name := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            counts = found.setdefault(name[1], Counter())
        elif instruction := re.match(r"\s+[0-9a-f]+:\s+(?:\{\w+\} )?(\w+)", line):
            counts[instruction[1]] += 1
    return found


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (Debian: apt install binutils)")
@pytest.mark.parametrize("isa", [isa for isa in RUNNABLE_ISAS if isa in ("amx_int8", *INSTRUCTIONS)])
@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_multiply_by_the_instruction_of_their_set(name, isa):
    network, example = NETWORKS[name]
    model = intaglio.quantize(
        randomize(network()).eval(), [example()], options=intaglio.CompileOptions(isa=isa), progress=False
    )
    counts = disassembled(model.artifact.path)
    if isa == "amx_int8":  # kernels jump to a function of their family
        parts = {function: match for function in counts if (match := PARTS.match(function))}
        assert parts
        for function, match in parts.items():  # a step that loads activations with each of two instructions
            assert counts[function]["tdpbusd"] == 2 * int(match[1]) * int(match[2]), function
            assert counts[function]["tileloaddt1"] == int(match[2]), function
        return
    instruction, uses = INSTRUCTIONS[isa]
    tiles = {function: match for function in counts if (match := TILE.match(function)) and "_sums" not in function}
    assert tiles
    for function, match in tiles.items():
        rows, blocks = map(int, match.groups())
        found = counts[function][instruction]
        assert found >= uses * rows * blocks, function
        assert found % (uses * rows * blocks) == 0, function
    if name == "depthwise" and isa == "avx512vnni":
        depthwise = {function: found for function, found in counts.items() if function.startswith("depthwise")}
        assert depthwise
        assert all(found[instruction] for found in depthwise.values())
