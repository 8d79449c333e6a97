"""Microkernels for AArch64 under an emulator: the results of plain C++, to the bit, and the instructions of a loop.

Run by `make isa`; it needs qemu-user and g++-aarch64-linux-gnu.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from intaglio.kernels import ISAS, KernelFamily, TileSpec
from intaglio.kernels.tile_spec import PACKED_RESULTS
from intaglio.native.cpu import ISA_FLAGS
from intaglio.native.toolchain import COMPILE_FLAGS
from intaglio.native.units import HEADER_FOLDER

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")
DRIVER = Path(__file__).with_name("compare_tiles.cpp")
SETS = ("neon_i8mm", "neon_dot")

pytestmark = [
    pytest.mark.slow(reason="a cross compiler builds all kernels twice, and an emulator runs them"),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in (COMPILER, EMULATOR[0])),
        reason="needs apt install qemu-user g++-aarch64-linux-gnu",
    ),
]


def compiled(text: str, name: str, isa: str, folder: Path) -> Path:
    path = folder / f"{name}.cpp"
    path.write_text(text)
    flags = [flag for flag in COMPILE_FLAGS if flag != "-shared"]
    command = [COMPILER, *flags, *ISA_FLAGS[isa], "-Wall", "-Wextra", "-Werror", f"-I{HEADER_FOLDER}", f"-I{folder}"]
    subprocess.run([*command, "-c", path, "-o", path.with_suffix(".o")], check=True)
    return path.with_suffix(".o")


def families(isa: str, heights: int) -> dict[str, KernelFamily]:
    """Tables of all kernels of an instruction set up to a height."""
    specs = {spec.family: spec for spec in ISAS[isa].specs() if spec.rows == 1}
    every = {
        name: (None, *(replace(spec, rows=rows) for rows in range(1, heights + 1))) for name, spec in specs.items()
    }
    return {name: KernelFamily(name, "TileKernel", kernels) for name, kernels in every.items()}


def text_of(isa: str, tables: Sequence[KernelFamily]) -> str:
    """The text of some families, whose tables have the instruction set in their names."""
    texts = [re.sub(rf"\b{family.name}\b", f"{isa}_{family.name}", ISAS[isa].family_text(family)) for family in tables]
    return "\n".join(texts)


@pytest.mark.parametrize("isa", SETS)
def test_all_kernels_have_the_bits_of_plain_cpp(isa, tmp_path):
    heights = ISAS[isa].max_tile_rows[1]
    tables = families(isa, heights)
    assert set(tables) == set(families("portable", heights))
    objects = [compiled(text_of(one, list(tables.values())), one, one, tmp_path) for one in (isa, "portable")]
    lines = [f"KERNEL_TABLE(TileKernel, {one}_{name});" for one in (isa, "portable") for name in tables]
    items = {name: 1 if family.kernels[-1].result in PACKED_RESULTS else 4 for name, family in tables.items()}
    rows = [f'{{"{name}", {isa}_{name}, portable_{name}, {heights}, {items[name]}}},' for name in tables]
    (tmp_path / "pairs.h").write_text("\n".join([*lines, "static const Pair pairs[] = {", *rows, "};\n"]))
    objects.append(compiled(DRIVER.read_text(), "driver", "portable", tmp_path))
    program = tmp_path / "compare"
    subprocess.run([COMPILER, *objects, "-o", program], check=True)
    found = subprocess.run([*EMULATOR, program], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert found.stdout == f"0 of {20 * heights * len(tables)} differ\n"


@pytest.mark.parametrize(
    ("isa", "expected"),
    [
        ("neon_i8mm", {"usmmla": 24, "ldr": 3, "ld1": 3, "ldp": 4, "zip1": 4, "zip2": 4}),
        ("neon_dot", {"sdot": 96, "ldr": 6, "ldp": 8, "movi": 1, "eor": 6}),
    ],
)
def test_the_loop_has_the_instructions_that_are_counted(isa, expected, tmp_path):
    """Two or four steps of 6 pixels by 16 outputs, 768 or 1536 products, and 2 instructions of the loop."""
    spec = TileSpec(6, 1, "u8")
    family = KernelFamily(spec.family, "TileKernel", (None, spec))
    code = compiled(ISAS[isa].family_text(family), isa, isa, tmp_path)
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", code]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s+[0-9a-f]+:\s+(\w+(?:\.\w+)?)", listing, re.MULTILINE)
    end = names.index("b.ge") + 1
    start = end - 1 - names[end - 2 :: -1].index("b.lt")
    assert Counter(names[start:end]) == {**expected, "subs": 1, "b.ge": 1}
