"""`intaglio inspect`: operators, fusions, sites, operators in float with reasons, and the matches of a selector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import RenderableType
from torch import nn

from intaglio import stages
from intaglio.cli import targets
from intaglio.cli.show import (
    Result,
    coverage_parts,
    coverage_result,
    floats_parts,
    list_modules,
    macs_cell,
    macs_in_int8,
    name_value_table,
    table,
)
from intaglio.formatting.number_text import count_text
from intaglio.fxgraph.node_info import origin
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.selectors import matches


def run(
    target: str,
    stage: str | None,
    selectors: Sequence[str],
    data: str | None,
    shapes: Sequence[str],
    skip: Sequence[str],
    only: Sequence[str],
    recipe: str | None,
) -> dict[str, Any]:
    """Inspect a saved file or a float model, and return the result for JSON."""
    model = targets.load_saved(target)
    if model is None:
        chosen = targets.recipe(recipe).with_selection(skip, only)
        return _of_module(targets.float_model(target), stage, selectors, data, shapes, chosen)
    for option, given in (("--match", selectors), ("--skip", skip), ("--only", only), ("--recipe", recipe)):
        if given:
            problem = "a saved file is quantized already; selectors apply to the float model, MODULE:NAME"
            raise typer.BadParameter(problem, param_hint=option)
    if stage is not None:
        return {"model": model.model_info.name, "stage": stage, "text": model.text(stage)}
    return {"model": repr(model), "coverage": coverage_result(model.coverage), "stages": list(model.model_info.texts)}


def _of_module(
    model: nn.Module,
    stage: str | None,
    selectors: Sequence[str],
    data: str | None,
    shapes: Sequence[str],
    recipe: Recipe,
) -> dict[str, Any]:
    """Capture and annotate a float model, and return a summary or the text of a stage."""
    (args, kwargs), batches = targets.call_and_batches(model, data, shapes)
    captured = stages.capture(model, args, example_kwargs=kwargs)
    name = captured.model_info.name
    if stage == "captured":
        return {"model": name, "stage": stage, "text": captured.text()}
    annotations = stages.annotate(captured, Quantizer(recipe))
    if stage == "sites":
        return {"model": name, "stage": stage, "text": annotations.text()}
    if stage is not None:
        prepared = stages.prepare(captured, Quantizer(recipe))
        quantized = stages.compile(stages.convert(prepared, stages.calibrate(prepared, batches)))
        return {"model": name, "stage": stage, "text": quantized.text(stage)}
    operators = _operators(annotations)
    return {
        "model": name,
        "macs": sum(op["macs"] for op in operators),
        "macs_int8": sum(op["macs"] for op in operators if op["int8"]),
        "operators": operators,
        "fusions": _fusions(annotations),
        "sites": dict(Counter(site.role for site in annotations.sites)),
        "notes": list(captured.notes),
        "matches": {selector: _matches(selector, annotations, captured.classes) for selector in selectors},
    }


def _operators(annotations: Annotations) -> list[dict[str, Any]]:
    """Return every operator on floating-point tensors, in execution order."""
    position = {node.name: index for index, node in enumerate(annotations.module.graph.nodes)}
    found = {}
    for region in annotations.regions:
        for node in region.computed:
            found[node.name] = _operator(origin(node), macs(node), fusion=region.name)
    for skip in annotations.skipped:
        found[skip.node] = _operator(skip.origin, skip.macs, reason=skip.reason)
    return [found[name] for name in sorted(found, key=position.__getitem__)]


def _operator(where: Any, work: int, fusion: str | None = None, reason: str | None = None) -> dict[str, Any]:
    return {
        "path": where.path,
        "operator": where.operator,
        "source": where.source,
        "macs": work,
        "int8": reason is None,
        "fusion": fusion,
        "reason": reason,
    }


def _fusions(annotations: Annotations) -> list[dict[str, Any]]:
    """Return the operators of each kernel, anchor first."""
    return [
        {
            "fusion": region.name,
            "operators": [origin(node).operator for node in region.computed],
            "path": origin(region.anchor).path,
            "source": origin(region.anchor).source,
            "macs": sum(macs(node) for node in region.computed),
        }
        for region in annotations.regions
    ]


def _matches(selector: str, annotations: Annotations, classes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the operators that a selector matches. Raise `SelectorError`, with the nearest names, if it matches
    none."""
    operators = _operators(annotations)
    by_place = {(op["path"], op["operator"], op["source"]): op for op in operators}
    nodes = [node for node in annotations.module.graph.nodes if node.op == "call_function"]
    Recipe.of({selector: None}).check((origin(node) for node in nodes), classes)
    origins = [origin(node) for node in nodes]
    chosen = {(o.path, o.operator, o.source) for o in origins if matches(selector, o, classes) is not None}
    return [op for key, op in by_place.items() if key in chosen]


def render(result: Result) -> Iterator[RenderableType]:
    """Yield the printed parts of a result."""
    if "text" in result:
        yield result["text"].rstrip("\n")
        return
    if "coverage" in result:
        yield result["model"]
        yield from coverage_parts(result["coverage"])
        yield f"--stage STAGE prints the text of one stage: {', '.join(result['stages'])}"
        return
    operators = result["operators"]
    sites = ", ".join(f"{count} {role}" for role, count in result["sites"].items())
    yield name_value_table(
        (
            ("model", result["model"]),
            ("MACs", macs_in_int8(result["macs_int8"], result["macs"])),
            ("operators", f"{sum(op['int8'] for op in operators)} of {len(operators)} in int8"),
            ("sites", f"{sites} (values that get a scale and a zero point)" if sites else "none"),
        )
    )
    if result["matches"]:
        for selector, found in result["matches"].items():
            yield _match_table(selector, found)
        return
    yield table(("operator", "in int8", "in float", "MACs"), _by_operator(operators), "Operators")
    groups: dict[str, list[Result]] = {}
    for kernel in result["fusions"]:
        groups.setdefault(" + ".join(map(_short, kernel["operators"])), []).append(kernel)
    rows = [
        (joined, list_modules(kernels), len(kernels), macs_cell(sum(k["macs"] for k in kernels)))
        for joined, kernels in groups.items()
    ]
    if rows:
        columns = ("operators that run as one int8 kernel", "modules", "count", "MACs")
        yield table(columns, rows, "Int8 kernels", text=2)
    yield from floats_parts([op for op in operators if not op["int8"]], "Operators in float")
    for note in result["notes"]:
        yield f"note: {note}"


def _by_operator(operators: Sequence[Result]) -> Iterator[tuple[object, ...]]:
    for name in dict.fromkeys(op["operator"] for op in operators):
        matching = [op for op in operators if op["operator"] == name]
        integer = sum(op["int8"] for op in matching)
        yield name, integer or "", len(matching) - integer or "", macs_cell(sum(op["macs"] for op in matching))


def _match_table(selector: str, found: Sequence[Result]) -> RenderableType:
    total = sum(op["macs"] for op in found)
    title = f"{selector}: {len(found)} operator{'s' * (len(found) != 1)}, {count_text(total)} MACs"
    rows = [
        (op["path"] or op["source"] or "model", op["operator"], op["reason"] or "int8", macs_cell(op["macs"]))
        for op in found
    ]
    return table(("module", "operator", "int8, or why it stays in float", "MACs"), rows, title, text=3)


def _short(operator: str) -> str:
    return operator.removeprefix("aten.").rpartition(".")[0]
