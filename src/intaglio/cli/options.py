"""Arguments and options that several commands of the command line share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Tune = Annotated[bool, typer.Option("--tune", help="Measure which kernel schedules are faster; takes seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value, and nothing else on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and JSON if it is asked for.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A saved file, or MODULE:NAME of a float model.")]
SavedFile = Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")]
FloatModel = Annotated[
    str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model that it was made from.")
]
FloatTarget = Annotated[
    str, typer.Argument(metavar="MODULE:NAME", help="A float model, or a function that returns it.")
]
Batches = Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that returns them.")]
OutFile = Annotated[Path, typer.Option(dir_okay=False, help="File to write.")]
Data = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that returns them.")]
Skip = Annotated[
    list[str] | None, typer.Option(metavar="SELECTOR", help="Leave these operators in float; may be repeated.")
]
Only = Annotated[
    list[str] | None, typer.Option(metavar="SELECTOR", help="Quantize only these operators; may be repeated.")
]
RecipeFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="TOML file with settings by selector, or the name of a recipe, such as accurate."
    ),
]
Samples = Annotated[int | None, typer.Option(min=1, help="Stop calibration after this many samples.")]
Isa = Annotated[str | None, typer.Option(help="Instruction set. Default: the best one that this CPU supports.")]
IsaList = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="Instruction sets to compile for, such as avx512vnni,avx2. Default: this CPU's best."
    ),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(metavar="1,3,224,224", help="Use random numbers of this shape as an input; once per input."),
]
Example = Annotated[
    str | None, typer.Option(metavar="MODULE:NAME", help="Arguments of one call. Default: the first batch.")
]
WithExample = Annotated[bool, typer.Option("--with-example", help="Store the arguments of one call for verify.")]


class TextStage(StrEnum):
    """Stages whose text `intaglio inspect` prints."""

    captured = "captured"
    quantizer = "quantizer"
    sites = "sites"
    corrections = "corrections"
    reference = "reference"
    parameters = "parameters"
    operators = "operators"
    integer = "integer"
    plan = "plan"
    program = "program"
