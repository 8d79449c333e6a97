"""Exported programs on other processors, under qemu-user: the same bits as on this machine (`make isa`)."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio.runtime import QuantizedModel
from support import nets
from support.exported_program import arguments, executable, expected
from support.nets import Body, randomize

pytestmark = pytest.mark.slow(reason="cross compilers build five networks, and an emulator runs them")


@dataclass(frozen=True)
class Machine:
    """A processor: prefix of its compilers, command that runs its programs, and instruction sets to export."""

    prefix: str
    emulator: tuple[str, ...]
    isas: tuple[str, ...] = ("portable",)


def arm(processor: str, *isas: str) -> Machine:
    command = ("qemu-aarch64", "-cpu", processor, "-L", "/usr/aarch64-linux-gnu")
    return Machine("aarch64-linux-gnu-", command, isas)


MACHINES = {
    "aarch64": arm("cortex-a53", "neon_i8mm", "neon_dot", "portable"),
    "aarch64 with dot products": arm("cortex-a76", "neon_i8mm", "neon_dot"),
    "aarch64 with i8mm": arm("max", "neon_i8mm", "neon_dot"),
    "riscv64": Machine("riscv64-linux-gnu-", ("qemu-riscv64", "-L", "/usr/riscv64-linux-gnu")),
    "x86-64 without AVX": Machine("", ("qemu-x86_64", "-cpu", "Nehalem")),
}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def transformer(m: nn.Module, ids: Tensor) -> Tensor:
    x = m.table(ids)
    q, k, v = (layer(m.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for layer in (m.q, m.k, m.v))
    x = x + m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    return x + m.narrow(F.gelu(m.wide(x)))


def block() -> nn.Module:
    parts = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    return Body(
        transformer,
        **parts,
        norm=nn.LayerNorm(16),
        wide=nn.Linear(16, 32),
        narrow=nn.Linear(32, 16),
        table=nn.Embedding(50, 16),
    )


def images(m: nn.Module, x: Tensor) -> Tensor:
    y = F.hardswish(m.point(m.depth(F.max_pool2d(torch.relu(m.stem(x)), 2))))
    return F.interpolate(y, scale_factor=2, mode="bilinear") * torch.sigmoid(m.gate(y.mean((2, 3), keepdim=True)))


def mobile() -> nn.Module:
    return Body(
        images,
        stem=nn.Conv2d(3, 16, 3, padding=1),
        depth=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        point=nn.Conv2d(16, 24, 1),
        gate=nn.Conv2d(24, 24, 1),
    )


def pictures() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


NETWORKS = {
    "residual": (nets.Residual, pictures),
    "mobile": (mobile, pictures),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 10), nn.Softmax(-1)),
        lambda: torch.randn(3, 24, generator=torch.Generator().manual_seed(2)),
    ),
    "recurrent": (Recurrent, lambda: torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(3))),
    "transformer": (block, lambda: torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(4))),
}


@cache
def quantized(name: str) -> tuple[QuantizedModel, Tensor]:
    network, example = NETWORKS[name]
    return intaglio.quantize(randomize(network()).eval(), [example()], progress=False), example()


def result_of(name: str, processor: Machine, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Run an exported network on a processor."""
    for program in (f"{processor.prefix}gcc", f"{processor.prefix}g++", processor.emulator[0]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}: apt install qemu-user g++-aarch64-linux-gnu g++-riscv64-linux-gnu")
    model, example = quantized(name)
    model.export_c(folder / "exported", isa=processor.isas)
    run = executable(folder / "exported", processor.prefix)
    command = [*processor.emulator, str(run), *arguments(folder / "exported", [example], folder)]
    return subprocess.run(command, capture_output=True, check=False)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("machine", MACHINES)
def test_exported_programs_have_the_same_bits_on_other_processors(machine, name, tmp_path):
    found = result_of(name, MACHINES[machine], tmp_path)
    model, example = quantized(name)
    assert found.returncode == 0, found.stderr.decode()
    assert found.stdout == expected(model, [example])


def test_a_processor_without_the_instructions_is_told_so(tmp_path):
    found = result_of("perceptron", arm("cortex-a53", "neon_i8mm", "neon_dot"), tmp_path)
    assert found.returncode == 1
    assert b"none of the instruction sets that the network was exported for" in found.stderr
