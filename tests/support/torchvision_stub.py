"""torchvision with plain operators in place of compiled ones that do not load, as the benchmarks have it."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

OPERATORS = Path(__file__).parents[2] / "benchmarks" / "torchvision_operators.py"


def import_torchvision() -> None:
    """Import torchvision, with plain `nms` and `roi_align` where its own do not load."""
    spec = spec_from_file_location("torchvision_operators", OPERATORS)
    assert spec is not None
    assert spec.loader is not None
    operators = module_from_spec(spec)
    spec.loader.exec_module(operators)
    LIBRARIES.append(operators.declare_operators())


LIBRARIES: list[object] = []
"""Held, because operators exist as long as their library does."""
