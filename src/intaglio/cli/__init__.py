"""The command line. Nothing here imports PyTorch before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from intaglio.errors import IntaglioError

MISSING = "the command line of intaglio needs typer, which the extra 'cli' brings: pip install 'intaglio[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 done, 1 an `IntaglioError` (its text on stderr), 2 a command that makes no sense."""
    try:
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(MISSING, file=sys.stderr)
        sys.exit(2)
    from intaglio.cli.app import app

    try:
        app(args=arguments, prog_name="intaglio")
    except IntaglioError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
