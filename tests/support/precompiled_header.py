"""A compiler that has read program.h before. The tests build thousands of small programs, and half the time of each
would go into the declarations of intrinsics; the object files are the same ones.
"""

import hashlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from intaglio import config
from intaglio.native.compile import COMPILE_FLAGS, HEADER_FOLDER, included
from intaglio.native.machine import ISA_FLAGS

HEADER = "program.h"


def compiler() -> str | None:
    """Path of a script that calls g++ with a precompiled header for each instruction set; None without g++, or where
    ``CXX`` chooses something."""
    found = config.compiler()
    if found is None or os.environ.get("CXX"):
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    texts = sorted(included(f'#include "{HEADER}"').items())
    key = hashlib.sha256(repr((found, version, str(HEADER_FOLDER), COMPILE_FLAGS, ISA_FLAGS, texts)).encode())
    folder = config.cache_dir() / "precompiled" / key.hexdigest()[:16]
    if not folder.exists():
        _make(folder, found)
    return str(folder / "g++")


def _make(folder: Path, found: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        headers = Path(scratch, "made", f"{HEADER}.gch")
        headers.mkdir(parents=True)
        for isa, flags in ISA_FLAGS.items():
            made = ["-x", "c++-header", str(HEADER_FOLDER / HEADER), "-o", str(headers / isa)]
            subprocess.run([found, *COMPILE_FLAGS, *flags, *made], check=True)
        script = headers.parent / "g++"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(found)} -I {shlex.quote(str(folder))} "$@"\n')
        script.chmod(0o755)
        try:
            os.replace(script.parent, folder)
        except OSError:
            if not folder.exists():
                raise
