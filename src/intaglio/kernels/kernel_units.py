"""Kernel families as translation units: generated and assembled once, then linked into every program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

from intaglio.kernels import ISAS, KernelFamily
from intaglio.native.units import TranslationUnit, included


def kernel_units(families: Iterable[KernelFamily], isa: str) -> tuple[TranslationUnit, ...]:
    """Return one translation unit per family.

    The text of a family is generated only if the cache has no object file for it from the current generators.
    """
    table = ISAS[isa]
    return tuple(
        TranslationUnit(
            f"{isa}_{family.name}",
            hashlib.sha256(f"{isa} {family.name} {_sources()}".encode()).hexdigest(),
            table.suffix,
            partial(table.family_text, family),
        )
        for family in families
    )


@cache
def _sources() -> str:
    """Return the digest of the generators in this folder and of the headers that kernels in C++ include."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.rglob("*.py"))]
    headers = '#include "tiles/portable_tile.h"\n#include "tiles/neon_tile.h"\n'
    texts += [text for _, text in sorted(included(headers).items())]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
