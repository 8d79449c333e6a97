"""Translation units that programs are linked with: parts of the C++ library in this folder, and generated kernels.

A `TranslationUnit` is compiled once per instruction set to an object file in the kernel cache (native/compile.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HEADER_FOLDER = Path(__file__).parent

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class TranslationUnit:
    """Source text that is compiled to an object file of its own.

    Attributes:
        name: Stem of the file in the cache.
        digest: Digest of everything that the text is generated from.
        suffix: ".s" for assembly, ".cpp" for C++.
        text: Returns the source; called only if the cache has no object file with this digest.
    """

    name: str
    digest: str
    suffix: str
    text: Callable[[], str]


def included(source: str, headers: tuple[str, ...] = ()) -> dict[str, str]:
    """Return path and text of every file of this folder that ``source`` or ``headers`` include, also indirectly."""
    texts: dict[str, str] = {}
    waiting = [*headers, *_INCLUDE.findall(source)]
    while waiting:
        name = waiting.pop()
        if name not in texts and (HEADER_FOLDER / name).is_file():
            texts[name] = _read(name)
            waiting += _INCLUDE.findall(texts[name])
    return texts


def include_option() -> str:
    """Return the compiler option that adds this folder to the include path."""
    return f"-I{HEADER_FOLDER}"


def library_files(source: str) -> tuple[str, ...]:
    """Return the sorted names of the C++ files with the library functions that ``source`` may call, also indirectly."""
    found, waiting = set[str](), [source]
    while waiting:
        for header in included(waiting.pop()):
            name = f"{header.removesuffix('.h')}.cpp"
            if name not in found and name in _library(HEADER_FOLDER):
                found.add(name)
                waiting.append(_read(name))
    return tuple(sorted(found))


def library_units(source: str) -> tuple[TranslationUnit, ...]:
    """Return the parts of the library that ``source`` is linked with."""
    return tuple(_library_unit(name) for name in library_files(source))


@cache
def _library(folder: Path) -> frozenset[str]:
    """Return the C++ files whose header declares functions of the library."""
    headers = (path for path in folder.rglob("*.h") if "LIBRARY void" in path.read_text(encoding="utf-8"))
    sources = (path.with_suffix(".cpp") for path in headers)
    return frozenset(str(path.relative_to(folder)) for path in sources if path.is_file())


def _library_unit(name: str) -> TranslationUnit:
    text = _read(name)
    digest = hashlib.sha256("\0".join([text, *sorted(included(text).values())]).encode()).hexdigest()
    return TranslationUnit(f"library_{Path(name).stem}", digest, ".cpp", lambda: text)


def _read(name: str) -> str:
    return (HEADER_FOLDER / name).read_text(encoding="utf-8")
