"""Commands for what leaves the machine: model cards, and reports of problems; and completion of commands in shells."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from intaglio.cli.options import Data, FloatModel, Json, Quiet, SavedFile, Shape
from intaglio.cli.reserved_output import reserved_output

sharing = typer.Typer()


class Shell(StrEnum):
    """Shells that commands are completed in."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@sharing.command()
def card(
    target: SavedFile,
    float_model: FloatModel = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Markdown file to write. Default: print the card.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to compare.")] = 64,
    calls: Annotated[int, typer.Option(min=0, help="Number of timed calls; 0 measures no times.")] = 0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a model card: what was quantized, with which recipe, how accurate it is on which data."""
    import intaglio.cli.commands.card as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(target, float_model, data, out, samples, calls)
    show(result, json, command.render, quiet)


@sharing.command()
def bundle_issue(
    out: Annotated[Path, typer.Option(dir_okay=False, help="Zip file to write.")],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="A saved file, or MODULE:NAME of a float model.")
    ] = None,
    data: Data = None,
    example_shape: Shape = None,
    error: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text file with the error that you saw.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Pack what a maintainer needs to look at a problem: versions, machine, graph and error, but no weights."""
    import intaglio.cli.commands.bundle_issue as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(out, target, data, example_shape or (), error)
    show(result, json, command.render, quiet)


@sharing.command()
def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell.")], quiet: Quiet = False, json: Json = False
) -> None:
    """Print the script that lets a shell complete commands, options and their values."""
    import intaglio.cli.commands.completion as command
    from intaglio.cli.show import show

    show(command.run(shell.value), json, command.render, quiet)
