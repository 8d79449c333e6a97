"""Entry point of the command line. PyTorch is imported only by the commands that need it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from intaglio.errors import IntaglioError

MISSING = "the command line of intaglio needs the package typer; install it with pip install 'intaglio[cli]'"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with status 0 (success), 1 (an `IntaglioError`, printed on stderr) or 2 (invalid
    command)."""
    try:
        importlib.import_module("typer")
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
