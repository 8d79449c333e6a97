"""Exported programs include every part of the library that they call in one C++ file, so no two parts may declare the
same name."""

import subprocess

import pytest

from intaglio import config
from intaglio.native.cpu import ISA_FLAGS
from intaglio.native.toolchain import COMPILE_FLAGS
from intaglio.native.units import HEADER_FOLDER

FOLDERS = ("elementwise", "images", "layers", "products", "sequences")
INSIDE_ANOTHER_HEADER = ("depthwise_vectors.h",)


def errors_of(text: str, isa: str) -> str:
    """Return the compiler's messages about a file for an instruction set. No code is generated."""
    flags = [flag for flag in COMPILE_FLAGS if flag != "-shared"]
    command = [config.compiler(), *flags, *ISA_FLAGS[isa], f"-I{HEADER_FOLDER}", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


@pytest.mark.parametrize("isa", ["portable", "avx2", "avxvnni", "avx512vnni"])
def test_all_parts_of_programs_fit_into_one_file(isa):
    files = [path for folder in FOLDERS for path in sorted((HEADER_FOLDER / folder).glob("*.[hc]*"))]
    parts = [
        f'#include "{path.relative_to(HEADER_FOLDER)}"\n' for path in files if path.name not in INSIDE_ANOTHER_HEADER
    ]
    assert len(parts) > 20
    assert "error" not in errors_of("".join(parts), isa)


def test_the_check_detects_a_name_that_two_parts_declare():
    text = '#include "images/resize.cpp"\nenum { BLENDED = 1 };\n'
    assert "conflicts with a previous declaration" in errors_of(text, "portable")
