"""Tables of races of decoders, from the lines of results/decoder_race.jsonl.

The newest line of a network, number of bits and number of threads counts, if the machine was idle. An engine with
several settings has the fastest of them in each cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
    "torch": "PyTorch",
    "zentorch": "zentorch",
    "autoround": "AutoRound",
}
"""Beginning of the names of settings, and the name of the engine. Tables have those that were raced."""
PACKAGES = {
    "torch": "PyTorch",
    "llama_cpp_python": "llama-cpp-python",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "nncf": "NNCF",
    "torchao": "torchao",
    "zentorch": "zentorch",
    "auto_round_lib": "auto-round-lib",
}
START = ("network", "bits", "threads")


def of_cores(lines: Iterable[Line], kind: tuple[int, int]) -> list[Line]:
    """Return the lines of processors of a family and a model."""
    return [line for line in lines if tuple(line["cpu"]["family"][:2]) == kind]


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

    def cell(one: Line, line: Line) -> str:
        best = min(one["step_ms"])
        bound = 1e3 * one["bytes"] / (line["results"]["gb_per_s"] * 1e9)
        return f"{best:.2f} ({100 * bound / best:.0f} %)"

    return _race(lines, "step_ms", cell)


def texts(lines: Iterable[Line]) -> Table:
    """Milliseconds of a text of 512 tokens."""
    return _race(lines, "text_ms", lambda one, line: f"{min(one['text_ms']):.0f}")


def accuracy(lines: Iterable[Line]) -> Table:
    """Decibels of the logits of every engine, with the setting whose step is the fastest."""
    counted, rows = newest(lines), []
    raced = _raced(counted)
    for line in counted:
        best = _fastest(line["results"]["engines"], "step_ms")
        cells = (f"{best[name]['sqnr_db']:.1f}" if name in best else NOTHING for name in raced)
        rows.append((*_start(line), *cells))
    return (*START, *raced.values()), rows


def source(lines: Iterable[Line]) -> str:
    """Bandwidths, versions and dates of the lines, as sentences below their table."""
    counted = newest(lines)
    speeds: dict[int, list[float]] = {}
    for line in counted:
        speeds.setdefault(line["arguments"]["threads"], []).append(line["results"]["gb_per_s"])
    measured = " and ".join(
        f"{_range(found)} GB/s ({'one thread' if count == 1 else f'{count} threads'})"
        for count, found in speeds.items()
    )
    found, raced = dict[str, str](), _raced(counted)
    for line in counted:
        found |= line["versions"]
    needs = {"torchao": "torch", "zentorch": "zentorch", "auto_round_lib": "autoround"}  # the only engine that uses it
    listed = [package for package in PACKAGES if package in found and needs.get(package, "intaglio") in raced]
    named = ", ".join(f"{PACKAGES[package]} {found[package].partition('+')[0]}" for package in listed)
    days = sorted({line["date"][:10] for line in counted})
    return f"Memory: {measured}. {named}. Recorded {' to '.join(dict.fromkeys((days[0], days[-1])))}."


def _range(values: list[float]) -> str:
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values))))


def _race(lines: Iterable[Line], key: str, cell: Callable[[Line, Line], str]) -> Table:
    counted, rows = newest(lines), []
    raced = _raced(counted)
    head = (*START, *raced.values(), "fastest other / intaglio")
    for line in counted:
        best = _fastest(line["results"]["engines"], key)
        times = {name: min(one[key]) for name, one in best.items()}
        texts_of = {name: cell(one, line) for name, one in best.items()}
        first = min(times, key=times.__getitem__)
        texts_of[first] = f"**{texts_of[first]}**"
        ratio = min(time for name, time in times.items() if name != "intaglio") / times["intaglio"]
        rows.append((*_start(line), *(texts_of.get(name, NOTHING) for name in raced), f"{ratio:.2f}"))
    return head, rows


def _raced(lines: Iterable[Line]) -> dict[str, str]:
    """Return the engines that took part in at least one race, with their names."""
    settings = {name for line in lines for name in line["results"]["engines"]}
    return {name: title for name, title in ENGINES.items() if any(one.startswith(name) for one in settings)}


def _start(line: Line) -> tuple[str, ...]:
    given = line["arguments"]
    return NETWORKS[given["network"]], str(given["bits"]), str(given["threads"])


def _fastest(settings: dict[str, Line], key: str) -> dict[str, Line]:
    """Engine -> its setting with the least time."""
    found = {}
    for name in ENGINES:
        own = [one for setting, one in settings.items() if setting.startswith(name) and "failed" not in one]
        if own:
            found[name] = min(own, key=lambda one: min(one[key]))
    return found
