"""Tables of races of decoders, from the lines of results/decoder_race.jsonl.

The newest line of a network, number of bits and number of threads counts, if the machine was idle. An engine with
several settings has the fastest of them in each cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zoo_tables import NOTHING, Line, Table

NETWORKS = {
    "qwen25_05b": "Qwen2.5-0.5B",
    "qwen3_06b": "Qwen3-0.6B",
    "llama32_1b": "Llama-3.2-1B, 8 of 16 layers",
}
ENGINES = {
    "intaglio": "intaglio",
    "llama_cpp": "llama.cpp",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
"""First word of the names of settings, and the name of the engine."""


def newest(lines: Iterable[Line]) -> list[Line]:
    """Return the lines that count, in the order of the tables."""
    found = {}
    for line in lines:
        given = line["arguments"]
        if line["results"]["idle"]:
            found[-given["threads"], list(NETWORKS).index(given["network"]), given["bits"]] = line
    return [found[key] for key in sorted(found)]


def steps(lines: Iterable[Line]) -> Table:
    """Milliseconds of a token after 512 others, and the share of the time that memory needs for the weights."""

    def cell(one: dict[str, Any], line: Line) -> str:
        best = min(one["step_ms"])
        bound = 1e3 * one["bytes"] / (line["results"]["gb_per_s"] * 1e9)
        return f"{best:.2f} ({100 * bound / best:.0f} %)"

    return _race(lines, "step_ms", cell)


def texts(lines: Iterable[Line]) -> Table:
    """Milliseconds of a text of 512 tokens."""
    return _race(lines, "text_ms", lambda one, line: f"{min(one['text_ms']):.0f}")


def _race(lines: Iterable[Line], key: str, cell: Any) -> Table:
    head = ("network", "weights", "threads", *ENGINES.values(), "fastest other / intaglio")
    rows = []
    for line in newest(lines):
        given, best = line["arguments"], _fastest(line["results"]["engines"], key)
        first = min(best, key=lambda name: min(best[name][key]))
        cells = [
            f"**{cell(best[name], line)}**" if name == first else cell(best[name], line) if name in best else NOTHING
            for name in ENGINES
        ]
        ratio = min(min(best[name][key]) for name in best if name != "intaglio") / min(best["intaglio"][key])
        start = (NETWORKS[given["network"]], f"{given['bits']} bits", str(given["threads"]))
        rows.append((*start, *cells, f"{ratio:.2f}"))
    return head, rows


def _fastest(settings: dict[str, dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
    """Engine -> its setting with the least time."""
    found = {}
    for name in ENGINES:
        own = [one for setting, one in settings.items() if setting.startswith(name) and "failed" not in one]
        if own:
            found[name] = min(own, key=lambda one: min(one[key]))
    return found
