"""`intaglio completion`: scripts with which shells complete the commands of intaglio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from typer import completion

from intaglio.cli.show import Result

VARIABLE = "_INTAGLIO_COMPLETE"
"""Environment variable by which a shell asks the command for words."""


def run(shell: str) -> dict[str, Any]:
    """Return the script of a shell for JSON."""
    script = completion.get_completion_script(  # type: ignore[attr-defined]
        prog_name="intaglio", complete_var=VARIABLE, shell=shell
    )
    return {"shell": shell, "script": script}


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the script."""
    yield result["script"]
