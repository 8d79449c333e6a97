"""Tables of docs/zoo.md, from the lines of results/zoo.jsonl. The newest line of a model counts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from typing import Any

Line = dict[str, Any]
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

FAMILIES = {
    "classifiers": "Image classifiers of torchvision",
    "dense_vision": "Segmentation, detection, video and optical flow of torchvision, and Ultralytics",
    "timm_vision": "timm",
    "text": "Text models of transformers",
    "multimodal": "Vision and multimodal models of transformers",
    "audio": "Speech and audio",
    "tables_and_graphs": "Tables, series, graphs and recurrent networks",
    "generation": "Diffusion, generators and PyTorch's own transformer",
}
BLIND = "blind"
"""Family of the models that were taken blind, which have a table of their own."""
HEAD = ("model", "MACs in int8", "islands", "SQNR, dB", "noise, dB", "other sizes", "saved file", "seconds")
NOTHING = "–"
ISLAND = re.compile(
    r"^  (?:aten\.)?(?P<operator>\S+?)(?: x \d+)?: (?P<reason>.*?)(?: \[[^]]* MACs\])?(?: \([^()]*\))?$", re.MULTILINE
)


def newest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return what the newest line of each model found, with its date and whether corrections were left out."""
    found: dict[str, Line] = {}
    for line in lines:
        found[line["results"]["model"]] = line["results"] | {"quick": line["arguments"]["quick"], "date": line["date"]}
    return found


def oldest(lines: Iterable[Line]) -> dict[str, Line]:
    """Return what the oldest line of each model found."""
    return newest(sorted(lines, key=lambda line: line["date"], reverse=True))


def of_zoo(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of all models but those that were taken blind."""
    return [line for line in lines if line["results"].get("family") != BLIND]


def outcome(found: Line) -> tuple[str, str, str]:
    """Return three cells: whether `quantize` takes a model, its share in int8 and its islands."""
    if not found["unedited"]:
        return "**no**", NOTHING, NOTHING
    return "yes", f"{100 * found['macs_int8']:.2f} %", str(found["islands"])


def blind(lines: Iterable[Line]) -> Table:
    """Return the models that were taken blind, as they were found and as they are now."""
    lines = [line for line in lines if line["results"].get("family") == BLIND]
    now = newest(lines)
    rows = []
    for name, first in oldest(lines).items():
        reasons = [f"`{operator}`: {reason}" for operator, reason in island_reasons(first.get("report", ""))]
        failure = first.get("error", "").partition("remedy: ")[0][:220] or ", ".join(reasons)
        rows.append((name.partition("/")[2], *outcome(first), *outcome(now[name]), cell(failure) or NOTHING))
    head = ("model", "unedited", "MACs in int8", "islands", "unedited now", "MACs in int8 now", "islands now")
    return (*head, "what failed at first"), sorted(rows)


def worst(figures: Any) -> float | None:
    """Return the least ratio of several results, or ``None`` if there is none."""
    known = [figure for figure in figures or () if figure is not None] if isinstance(figures, list) else []
    return min(known) if known else None


def decibels(figures: Any) -> str:
    """Return the least ratio of several results as a cell."""
    ratio = worst(figures)
    if ratio is None:
        return NOTHING
    return "same values" if ratio > 900 else f"{ratio:.1f}"


def other_calls(found: Line) -> dict[str, Any]:
    """Return what calls of other sizes gave, by their names."""
    calls = {key: value for key, value in found.items() if isinstance(value, list | str) and " " in key}
    return {key: value for key, value in calls.items() if not key.endswith("_trace")}


def works(value: Any) -> bool:
    """Return whether a call gave results of the shapes of the float model."""
    return isinstance(value, list) and None not in value


def row(found: Line) -> tuple[str, ...]:
    """Return the row of a model that `quantize` takes."""
    calls = other_calls(found)
    failed = [name for name, value in calls.items() if not works(value)]
    return (
        f"**{found['model']}**" if found["most_used"] else found["model"],
        f"{100 * found['macs_int8']:.2f} %",
        str(found["islands"]),
        decibels(found.get("sqnr_db")),
        decibels(found.get("noise_db")),
        f"no: {', '.join(failed)}" if failed else "yes",
        {True: "same bits", False: "**differs**"}.get(found.get("saved"), "no"),
        f"{found['seconds']:.0f}" + "\\*" * found["quick"],
    )


def tables(lines: Iterable[Line]) -> list[tuple[str, Table]]:
    """Return a title and a table for each family."""
    found = newest(lines)
    by_family = {
        title: [row(one) for one in found.values() if one["unedited"] and one["family"] == family]
        for family, title in FAMILIES.items()
    }
    return [(title, (HEAD, rows)) for title, rows in by_family.items() if rows]


def cell(text: str) -> str:
    """Return text as a cell of a table: in one line, without separators."""
    return re.sub(r"\s+", " ", text).replace("|", "/").replace("<", "\\<").strip()


def failures(lines: Iterable[Line]) -> Table:
    """Return the models that `quantize` does not take, each with the reason and the remedy that the error says."""
    rows = []
    for found in newest(of_zoo(lines)).values():
        if not found["unedited"]:
            problem, _, remedy = found.get("error", "").partition("remedy: ")
            rows.append((found["model"], cell(problem[:300]), cell(remedy[:300]) or NOTHING))
    return ("model", "error", "what to do"), rows


def island_reasons(report: str) -> list[tuple[str, str]]:
    """Return operator and reason of each line about islands in a report."""
    lines = report.splitlines()
    first = next((i for i, line in enumerate(lines) if re.match(r"[1-9]\d* float islands?:", line)), None)
    if first is None:
        return []
    kept: list[str] = []
    for line in lines[first + 1 :]:
        if not line.startswith("  "):
            break
        kept.append(line)
    return [(m["operator"], m["reason"]) for m in ISLAND.finditer("\n".join(kept))]


def islands(lines: Iterable[Line]) -> Table:
    """Return the reasons of islands, each with its operators and models, the most frequent first."""
    models: dict[str, set[str]] = {}
    operators: dict[str, set[str]] = {}
    for found in newest(of_zoo(lines)).values():
        for operator, reason in island_reasons(found.get("report", "")):
            models.setdefault(reason, set()).add(found["model"])
            operators.setdefault(reason, set()).add(f"`{operator}`")
    order = sorted(models, key=lambda reason: (-len(models[reason]), reason))
    rows = [(cell(reason), ", ".join(sorted(operators[reason])), ", ".join(sorted(models[reason]))) for reason in order]
    return ("reason", "operators", "models"), rows


def summary(lines: Iterable[Line]) -> str:
    """Say in one paragraph what the zoo shows."""
    found = newest(of_zoo(lines)).values()
    taken = [one for one in found if one["unedited"]]
    used = [one for one in taken if one["most_used"]]
    most_used = [one for one in found if one.get("most_used")]
    shares, counts = [one["macs_int8"] for one in taken], [one["islands"] for one in taken]
    loads = sum(one.get("saved") is True for one in taken)
    sizes = sum(all(map(works, other_calls(one).values())) for one in taken)
    quick = sum(one["quick"] for one in taken)
    many, mean = sum(share >= 0.99 for share in shares), 100 * statistics.mean(shares)
    text = (
        f"`quantize` takes {len(taken)} of {len(found)} models unedited. {mean:.1f} % of their multiply-accumulates "
        f"run in int8 on average, at least 99 % in {many} models. "
        f"A model has {statistics.mean(counts):.2f} float islands on average; {counts.count(0)} models have none. "
        f"Of the {len(most_used)} most used models (bold), {len(used)} are taken, and "
        f"{sum(not one['islands'] for one in used)} of them have no island. {loads} saved models give the same bits "
        f"when they are loaded. {sizes} models take all other sizes that were tried."
    )
    if quick:
        text += f" {quick} models (\\*) were quantized without equalization and corrections, to save time."
    return text


def page(lines: Iterable[Line], table: Callable[..., str]) -> str:
    """Return the tables of all families with their headings."""
    return "\n\n".join(f"### {title}\n\n{table(*content)}" for title, content in tables(lines))
