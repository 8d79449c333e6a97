"""Commands of the command line and their options. Each command is implemented in the module of its name."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="int8 models for the CPU: quantize, look inside, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Tune = Annotated[bool, typer.Option("--tune", help="Look for faster schedules by the clock; takes seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead, and nothing else on stdout.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A saved file, or MODULE:NAME of a float model.")]
Data = Annotated[str | None, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that gives them.")]
Skip = Annotated[list[str] | None, typer.Option(metavar="SELECTOR", help="Leave this in float; may be repeated.")]
Only = Annotated[list[str] | None, typer.Option(metavar="SELECTOR", help="Quantize nothing else; may be repeated.")]
RecipeFile = Annotated[
    str | None, typer.Option(metavar="FILE", help="Settings by selector, TOML; or the name of a recipe: accurate.")
]
Samples = Annotated[int | None, typer.Option(min=1, help="Stop calibration after this many samples.")]
Isa = Annotated[str | None, typer.Option(help="Instruction set. Default: the best of this machine.")]
IsaList = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Instruction sets to build for: avx512vnni,avx2. Default: this machine's best."),
]
Shape = Annotated[
    list[str] | None,
    typer.Option(metavar="1,3,224,224", help="Random numbers of this shape as an input; once per input."),
]


class TextStage(StrEnum):
    """Stages whose text `intaglio inspect` prints."""

    captured = "captured"
    sites = "sites"
    reference = "reference"
    integer = "integer"
    plan = "plan"
    program = "program"


def _version(asked: bool) -> None:
    if asked:
        import intaglio

        print(f"intaglio {intaglio.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def demo(json: Json = False) -> None:
    """Quantize a small built-in network on generated data and compare it with the float network. Takes seconds."""
    import intaglio.cli.demo as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run()
    show(result, json, command.render)


@app.command()
def doctor(json: Json = False) -> None:
    """Measure what this machine can do for int8, and report problems with its setup."""
    import intaglio.cli.doctor as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run()
    show(result, json, command.render)


@app.command()
def quantize(
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A float model, or a function that gives it.")],
    data: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that gives them.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write.")],
    skip: Skip = None,
    only: Only = None,
    recipe: RecipeFile = None,
    samples: Samples = None,
    isa: IsaList = None,
    example: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Arguments of one call. Default: the first batch.")
    ] = None,
    tune: Tune = False,
    evaluate: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A function of a model that returns a metric, higher for better."),
    ] = None,
    max_drop: Annotated[float, typer.Option(min=0, help="By what share the metric may be below that in float.")] = 0.01,
    evaluations: Annotated[int, typer.Option(min=2, help="How often the function may be called.")] = 20,
    recipe_out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for the recipe that reaches the metric.")
    ] = None,
    json: Json = False,
) -> None:
    """Quantize a float model to an int8 file. With --evaluate, leave operators in float until a metric is reached."""
    import intaglio.cli.quantize as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        isas = tuple(name.strip() for name in isa.split(",")) if isa else None
        request = command.Request(target, data, out, skip or (), only or (), recipe, samples, isas, example)
        if evaluate is None:
            if recipe_out is not None:
                raise typer.BadParameter("only what --evaluate found is written", param_hint="--recipe-out")
            result = command.run(request, tune)
        else:
            if tune:
                raise typer.BadParameter("looks for speed; a metric is evaluated without it", param_hint="--tune")
            result = command.run_autotune(request, evaluate, max_drop, evaluations, recipe_out)
    show(result, json, command.render)


@app.command()
def inspect(
    target: Target,
    stage: Annotated[TextStage | None, typer.Option(help="Print the text of this stage.")] = None,
    match: Annotated[list[str] | None, typer.Option(metavar="SELECTOR", help="List what it selects.")] = None,
    data: Data = None,
    example_shape: Shape = None,
    skip: Skip = None,
    only: Only = None,
    recipe: RecipeFile = None,
    json: Json = False,
) -> None:
    """Show which operators run in int8, which stay in float and why, and what a selector matches."""
    import intaglio.cli.inspect as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        name = stage.value if stage else None
        result = command.run(target, name, match or (), data, example_shape or (), skip or (), only or (), recipe)
    show(result, json, command.render)


@app.command()
def compare(
    target: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved model.")],
    float_model: Annotated[str, typer.Option("--float", metavar="MODULE:NAME", help="Its float model.")],
    data: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that gives them.")],
    samples: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")] = None,
    worst: Annotated[int, typer.Option(min=1, help="Operators to list as selectors to skip.")] = 3,
    json: Json = False,
) -> None:
    """Show where a saved model loses accuracy, operator by operator."""
    import intaglio.cli.compare as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run(target, float_model, data, samples, worst)
    show(result, json, command.render)


@app.command()
def bench(
    target: Target,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: that of the data.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: as many as PyTorch takes.")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Time to measure, for each engine.")] = 4.0,
    against: Annotated[
        str, typer.Option(metavar="LIST", help="Of eager, compile, onnxruntime, openvino; all of them in float32.")
    ] = "eager",
    data: Data = None,
    example_shape: Shape = None,
    float_model: Annotated[
        str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model of a saved file.")
    ] = None,
    isa: Isa = None,
    json: Json = False,
) -> None:
    """Time the int8 model and float engines in alternation."""
    import intaglio.cli.bench as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        names = tuple(name.strip() for name in against.split(",") if name.strip())
        result = command.run(target, batch, threads, seconds, names, data, example_shape or (), float_model, isa)
    show(result, json, command.render)


@contextlib.contextmanager
def _stdout_kept_for_json(json: bool) -> Iterator[None]:
    """Redirect the output of models and libraries to stderr if stdout is reserved for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield
