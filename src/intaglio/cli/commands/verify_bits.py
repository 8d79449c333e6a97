"""`intaglio verify`: whether this machine gives the bits of the machine that saved a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from intaglio.cli import targets
from intaglio.cli.show import Result


def run(target: Path) -> dict[str, Any]:
    """Run the stored example of a file and return the result for JSON. Raise `ArtifactError` if a bit differs."""
    model = targets.load_saved(str(target))
    assert model is not None
    model.verify()
    return {"model": model.model_info.name, "isa": model.artifact.program.isa, "verified": True}


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    yield f"{result['model']}: the stored example gives the same bits here ({result['isa']})"
