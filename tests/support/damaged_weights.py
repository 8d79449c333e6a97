"""Exported programs with sanitizers that open changed copies of their weights (`damaged_weights.c`)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("damaged_weights.c")
SANITIZE = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"


def sanitized(folder: Path) -> Path:
    """Compile the driver with the sources of an export for the portable instruction set, once, with sanitizers."""
    work = folder / "sanitized"
    if not (work / "driver").exists():
        compiler = sanitizing_compiler(folder)
        shutil.copytree(folder / "kernels", work / "kernels")
        name = next(folder.glob("*.h")).stem
        for source in (folder / f"{name}.h", folder / f"{name}.cpp"):
            shutil.copy(source, work)
        text = re.sub(r"\bNET(?=_)", name.upper(), re.sub(r"\bnet(?=_|\.h)", name, DRIVER.read_text()))
        (work / "driver.c").write_text(text)
        flags = re.search(r'^    FLAGS="(.*)"$', (folder / "README.txt").read_text(), re.MULTILINE)[1]
        cpp = f"{flags} {SANITIZE} -fno-exceptions -fno-rtti -Wl,--as-needed"
        sources = " ".join(sorted(str(path.relative_to(work)) for path in (work / "kernels").glob("portable*.[cs]*")))
        lines = [f"{compiler} {flags} {SANITIZE} -c driver.c", f"{compiler} {cpp} -c {name}.cpp {sources}"]
        lines += [f"{compiler} {SANITIZE} -pthread *.o -o driver"]
        subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=work, check=True)
    return work / "driver"


def sanitizing_compiler(folder: Path) -> str:
    """Return gcc or clang, if it has the libraries of its sanitizers."""
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    for compiler in ("gcc", "clang"):
        command = f"{compiler} {SANITIZE} empty.c -o empty && ./empty"
        if subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True).returncode == 0:
            return compiler
    pytest.skip("no compiler has AddressSanitizer")
