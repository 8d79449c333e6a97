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
    help="Quantize PyTorch models to int8 for the CPU, and inspect, compare and time them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Tune = Annotated[bool, typer.Option("--tune", help="Measure which kernel schedules are faster; takes seconds.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON value, and nothing else on stdout.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="A saved file, or MODULE:NAME of a float model.")]
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


def _version(requested: bool) -> None:
    if requested:
        import intaglio

        print(f"intaglio {intaglio.__version__}")
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Define the options that the command accepts without a subcommand."""


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
    target: Annotated[str, typer.Argument(metavar="MODULE:NAME", help="A float model, or a function that returns it.")],
    data: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that returns them.")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="File to write.")],
    skip: Skip = None,
    only: Only = None,
    recipe: RecipeFile = None,
    samples: Samples = None,
    isa: IsaList = None,
    example: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="Arguments of one call. Default: the first batch.")
    ] = None,
    with_example: WithExample = False,
    tune: Tune = False,
    evaluate: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="A function that takes a model and returns a metric, higher for better."
        ),
    ] = None,
    max_drop: Annotated[
        float, typer.Option(min=0, help="Largest accepted loss, as a fraction of the float metric.")
    ] = 0.01,
    evaluations: Annotated[int, typer.Option(min=2, help="Largest number of calls of the function.")] = 20,
    recipe_out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the resulting recipe to.")
    ] = None,
    json: Json = False,
) -> None:
    """Quantize a float model to an int8 file. With --evaluate, leave operators in float until a metric is reached."""
    import intaglio.cli.quantize as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        selection = skip or (), only or ()
        request = command.Request(target, data, out, *selection, recipe, samples, _names(isa), example, with_example)
        if evaluate is None:
            if recipe_out is not None:
                raise typer.BadParameter(
                    "it writes the recipe that --evaluate finds, so it needs --evaluate", param_hint="--recipe-out"
                )
            result = command.run(request, tune)
        else:
            if tune:
                raise typer.BadParameter(
                    "--evaluate does not search schedules: use only one of the two options", param_hint="--tune"
                )
            result = command.run_autotune(request, evaluate, max_drop, evaluations, recipe_out)
    show(result, json, command.render)


@app.command()
def inspect(
    target: Target,
    stage: Annotated[TextStage | None, typer.Option(help="Print the text of one stage.")] = None,
    match: Annotated[
        list[str] | None, typer.Option(metavar="SELECTOR", help="List the operators that it selects.")
    ] = None,
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
    target: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")],
    float_model: Annotated[
        str, typer.Option("--float", metavar="MODULE:NAME", help="The float model that it was made from.")
    ],
    data: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that returns them.")],
    samples: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")] = None,
    worst: Annotated[
        int, typer.Option(min=1, help="Number of the worst operators to list as options for quantize.")
    ] = 3,
    json: Json = False,
) -> None:
    """Show where a saved model loses accuracy, operator by operator."""
    import intaglio.cli.compare as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run(target, float_model, data, samples, worst)
    show(result, json, command.render)


@app.command()
def report(
    target: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")],
    float_model: Annotated[
        str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model that it was made from.")
    ] = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="HTML file to write. Default: report.html, none with --json.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="A saved model, or the JSON of a report, to show beside it."),
    ] = None,
    model_explorer: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for the graphs and node data of Model Explorer."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to compare.")] = 64,
    calls: Annotated[int, typer.Option(min=0, help="Number of timed calls; 0 measures no times.")] = 20,
    tries: Annotated[
        int, typer.Option(min=0, help="Number of the worst operators to try in float; 0 tries no changes.")
    ] = 3,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    json: Json = False,
) -> None:
    """Write a page that shows what a saved model costs in accuracy and time, operator by operator."""
    import intaglio.cli.report as command
    from intaglio.cli.show import show

    page = out if out is not None or json else Path("report.html")
    with _stdout_kept_for_json(json):
        request = command.ReportRequest(target, float_model, data, page, against, model_explorer, samples, calls, tries)
        found, summary = command.run(request)
    if json or not quiet:
        show(found.to_dict() if json else summary, json, command.render)


@app.command()
def explain(
    target: Annotated[
        Path,
        typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model, or a report's JSON."),
    ],
    where: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Path of a module, operator (aten.relu), or line (net.py:12)."),
    ],
    float_model: Annotated[
        str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model that it was made from.")
    ] = None,
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to compare.")] = 64,
    calls: Annotated[int, typer.Option(min=0, help="Number of timed calls; 0 measures no times.")] = 20,
    json: Json = False,
) -> None:
    """Show why an operator of a saved model is in int8 or float, what it costs, and what would change."""
    import intaglio.cli.explain as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        found = command.run(command.ExplainRequest(target, where, float_model, data, samples, calls))
    show(found.to_dict() if json else {}, json, lambda _: [str(found)])


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")],
    second: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Another one.")],
    data: Data = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run both in the interpreter, which is slow, and list values that differ.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what differs between two saved models, and how far their results are from each other."""
    import intaglio.cli.diff as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run(first, second, data, trace)
    show(result, json, command.render)


@app.command()
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the sources, which is created if needed.")],
    isa: IsaList = None,
    json: Json = False,
) -> None:
    """Write a saved model as C sources that run without Python, with the same bits."""
    import intaglio.cli.export as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run(target, out, _names(isa))
    show(result, json, command.render)


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A saved int8 model.")],
    json: Json = False,
) -> None:
    """Check that this machine gives the same bits as the one that saved a model with an example."""
    import intaglio.cli.verify_bits as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        result = command.run(target)
    show(result, json, command.render)


@app.command()
def bench(
    target: Target,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: that of the data.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: that of PyTorch.")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds to measure each engine.")] = 4.0,
    against: Annotated[
        str,
        typer.Option(metavar="LIST", help="Float32 engines to compare with: eager, compile, onnxruntime, openvino."),
    ] = "eager",
    data: Data = None,
    example_shape: Shape = None,
    float_model: Annotated[
        str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model, if TARGET is a saved file.")
    ] = None,
    isa: Isa = None,
    json: Json = False,
) -> None:
    """Time the int8 model and float engines in alternation."""
    import intaglio.cli.bench as command
    from intaglio.cli.show import show

    with _stdout_kept_for_json(json):
        names = _names(against) or ()
        result = command.run(target, batch, threads, seconds, names, data, example_shape or (), float_model, isa)
    show(result, json, command.render)


def _names(text: str | None) -> tuple[str, ...] | None:
    """Return the names of a list with commas; ``None`` without a list."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else None


@contextlib.contextmanager
def _stdout_kept_for_json(json: bool) -> Iterator[None]:
    """Redirect the output of models and libraries to stderr if stdout is reserved for JSON."""
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        yield
