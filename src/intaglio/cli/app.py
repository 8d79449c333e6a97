"""Commands of the command line and their options. Each command is implemented in the module of its name, `search` in
that of `quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from intaglio.cli.options import (
    Batches,
    Data,
    Example,
    FloatModel,
    FloatTarget,
    Isa,
    IsaList,
    Json,
    Only,
    OutFile,
    Quiet,
    RecipeFile,
    Samples,
    SavedFile,
    Shape,
    Skip,
    Target,
    TextStage,
    Tune,
    WithExample,
)
from intaglio.cli.reserved_output import reserved_output
from intaglio.cli.sharing import sharing

app = typer.Typer(
    help="Quantize PyTorch models to int8 for the CPU, and inspect, compare and time them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
def demo(quiet: Quiet = False, json: Json = False) -> None:
    """Quantize a small built-in network on generated data and compare it with the float network. Takes seconds."""
    import intaglio.cli.commands.demo as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run()
    show(result, json, command.render, quiet)


@app.command()
def doctor(quiet: Quiet = False, json: Json = False) -> None:
    """Measure what this machine can do for int8, and report problems with its setup."""
    import intaglio.cli.commands.doctor as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run()
    show(result, json, command.render, quiet)


@app.command()
def quantize(
    target: FloatTarget,
    data: Batches,
    out: OutFile,
    skip: Skip = None,
    only: Only = None,
    recipe: RecipeFile = None,
    samples: Samples = None,
    isa: IsaList = None,
    example: Example = None,
    with_example: WithExample = False,
    tune: Tune = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Quantize a float model to an int8 file."""
    import intaglio.cli.commands.quantize as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        selection = skip or (), only or ()
        request = command.Request(target, data, out, *selection, recipe, samples, _names(isa), example, with_example)
        result = command.run(request, tune)
    show(result, json, command.render, quiet)


@app.command()
def search(
    target: FloatTarget,
    data: Batches,
    evaluate: Annotated[
        str, typer.Option(metavar="MODULE:NAME", help="A function of a model that returns a metric, higher for better.")
    ],
    out: OutFile,
    max_drop: Annotated[
        float | None,
        typer.Option(min=0, help="Largest accepted loss, as a fraction of the float metric. Default: 0.01 or a limit."),
    ] = None,
    max_latency: Annotated[float | None, typer.Option(help="Largest accepted milliseconds per call.")] = None,
    max_size: Annotated[float | None, typer.Option(help="Largest accepted megabytes of the saved model.")] = None,
    minimize: Annotated[str, typer.Option(help="What to minimize under --max-drop: latency or size.")] = "latency",
    budget: Annotated[float, typer.Option(help="Minutes.")] = 10.0,
    evaluations: Annotated[int, typer.Option(min=2, help="Largest number of calls of the function.")] = 20,
    journal: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File of measurements; if it exists, the search continues.")
    ] = None,
    recipe_out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File to write the resulting recipe to.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Picture of the front to write.")] = None,
    skip: Skip = None,
    only: Only = None,
    recipe: RecipeFile = None,
    samples: Samples = None,
    isa: IsaList = None,
    example: Example = None,
    with_example: WithExample = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Search for the precision of every group of operators that keeps a metric at the least latency, or has the best
    metric within limits."""
    import intaglio.cli.commands.quantize as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        selection = skip or (), only or ()
        request = command.Request(target, data, out, *selection, recipe, samples, _names(isa), example, with_example)
        limits = {"max_drop": max_drop, "max_latency": max_latency, "max_size": max_size, "minimize": minimize}
        options = limits | {"budget": budget, "evaluations": evaluations, "journal": journal}
        result = command.run_search(request, evaluate, options, recipe_out, plot)
    show(result, json, command.render, quiet)


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
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show which operators run in int8, which stay in float and why, and what a selector matches."""
    import intaglio.cli.commands.inspect as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        name = stage.value if stage else None
        result = command.run(target, name, match or (), data, example_shape or (), skip or (), only or (), recipe)
    show(result, json, command.render, quiet)


@app.command()
def compare(
    target: SavedFile,
    float_model: Annotated[
        str, typer.Option("--float", metavar="MODULE:NAME", help="The float model that it was made from.")
    ],
    data: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Batches, or a function that returns them.")],
    samples: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples.")] = None,
    worst: Annotated[
        int, typer.Option(min=1, help="Number of the worst operators to list as options for quantize.")
    ] = 3,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show where a saved model loses accuracy, operator by operator."""
    import intaglio.cli.commands.compare as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(target, float_model, data, samples, worst)
    show(result, json, command.render, quiet)


@app.command()
def report(
    target: SavedFile,
    float_model: FloatModel = None,
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
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a page that shows what a saved model costs in accuracy and time, operator by operator."""
    import intaglio.cli.commands.report as command
    from intaglio.cli.show import show

    page = out if out is not None or json else Path("report.html")
    with reserved_output(json, quiet):
        request = command.ReportRequest(target, float_model, data, page, against, model_explorer, samples, calls, tries)
        found, summary = command.run(request)
    show(found.to_dict() if json else summary, json, command.render, quiet)


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
    float_model: FloatModel = None,
    data: Data = None,
    samples: Annotated[int, typer.Option(min=1, help="Number of samples to compare.")] = 64,
    calls: Annotated[int, typer.Option(min=0, help="Number of timed calls; 0 measures no times.")] = 20,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show why an operator of a saved model is in int8 or float, what it costs, and what would change."""
    import intaglio.cli.commands.explain as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        found = command.run(command.ExplainRequest(target, where, float_model, data, samples, calls))
    show(found.to_dict() if json else {}, json, lambda _: [str(found)], quiet)


@app.command()
def diff(
    first: SavedFile,
    second: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="Another one.")],
    data: Data = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run both in the interpreter, which is slow, and list values that differ.")
    ] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Show what differs between two saved models, and how far their results are from each other."""
    import intaglio.cli.commands.diff as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(first, second, data, trace)
    show(result, json, command.render, quiet)


@app.command()
def export(
    target: SavedFile,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the sources, which is created if needed.")],
    isa: IsaList = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a saved model as C sources that run without Python, with the same bits."""
    import intaglio.cli.commands.export as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(target, out, _names(isa))
    show(result, json, command.render, quiet)


@app.command()
def verify(
    target: SavedFile,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Check that this machine gives the same bits as the one that saved a model with an example."""
    import intaglio.cli.commands.verify_bits as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        result = command.run(target)
    show(result, json, command.render, quiet)


@app.command()
def bench(
    target: Target,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: that of the data.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: that of PyTorch.")] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Seconds to measure each engine.")] = 4.0,
    against: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Engines to compare with: eager, compile, onnxruntime, openvino in float32, and torchao, "
            "onnxruntime-int8, openvino-int8, openvino-int8-f32, or int8 for these four.",
        ),
    ] = "eager",
    data: Data = None,
    example_shape: Shape = None,
    float_model: Annotated[
        str | None, typer.Option("--float", metavar="MODULE:NAME", help="The float model, if TARGET is a saved file.")
    ] = None,
    isa: Isa = None,
    memory: Annotated[bool, typer.Option(help="Measure the memory of each engine in a process of its own.")] = True,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Time the int8 model, float engines and int8 engines of others in alternation, and measure their memory."""
    import intaglio.cli.commands.bench as command
    from intaglio.cli.show import show

    with reserved_output(json, quiet):
        names = _names(against) or ()
        result = command.run(
            target, batch, threads, seconds, names, data, example_shape or (), float_model, isa, memory
        )
    show(result, json, command.render, quiet)


def _names(text: str | None) -> tuple[str, ...] | None:
    """Return the names of a list with commas; ``None`` without a list."""
    return tuple(name.strip() for name in text.split(",") if name.strip()) if text else None


app.add_typer(sharing)
