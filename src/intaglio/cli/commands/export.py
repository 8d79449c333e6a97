"""`intaglio export`: a saved model as C sources that run without Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from intaglio.cli import targets
from intaglio.cli.show import Result
from intaglio.formatting.number_text import size_text


def run(target: Path, out: Path, isa: Sequence[str] | None) -> dict[str, Any]:
    """Write the sources of a saved model to a folder and return the result for JSON."""
    model = targets.load_saved(str(target))
    assert model is not None
    model.export_c(out, isa=isa)
    chosen = list(isa or (model.artifact.program.isa,))
    return {
        "model": model.model_info.name,
        "out": str(out),
        "isa": chosen,
        "weights_bytes": (out.expanduser() / "weights.bin").stat().st_size,
    }


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    size = size_text(result["weights_bytes"])
    yield f"{result['model']} was written to {result['out']} for {', '.join(result['isa'])} ({size} of weights)"
    yield f"build it: cmake -S {result['out']} -B {result['out']}/build && cmake --build {result['out']}/build"
