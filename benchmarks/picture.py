"""Draws docs/images/speed.svg and writes the tables of the pages again, from the recorded results.

    pip install 'intaglio[docs]'
    python benchmarks/picture.py

`published.py` says which results count. The picture has one group of bars for each large network that was measured with
every int8 engine, and for each transformer: the time per call at batch 1 on two threads, divided by the time of
intaglio in the same run. The bar of compiled float32 PyTorch is from the newest run that has one, divided by intaglio's
time in that run. Drawing the same results twice gives the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import published
from published import Run

FILE = published.ROOT / "docs" / "images" / "speed.svg"
BARS = {
    "intaglio": ("intaglio", "#0072b2"),
    "openvino_int8": ("OpenVINO int8", "#e69f00"),
    "onnxruntime_int8": ("ONNX Runtime int8", "#3aa585"),
    "torchao": ("torchao int8", "#c58bab"),
    "inductor": ("PyTorch float32, torch.compile", "#b3b9c2"),
}
"""Engines in the order of their bars: name and color, told apart by readers with any color vision."""
TITLE = "int8 inference on two CPU cores"
SUBTITLE = "Time per call at batch 1, relative to intaglio. Lower is better."
INK, FAINT, CARD, EDGE = "#1f2328", "#59636e", "#ffffff", "#d1d9e0"
BAR, GAP, WIDTH = 0.145, 0.14, 7.2
"""Inches: height of a bar, space between groups, width of the picture."""
TOP, BOTTOM, LEFT, RIGHT = 0.95, 1.15, 1.8, 0.3
"""Inches around the bars."""


def bars(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Network to engine to time per call, relative to intaglio."""
    floats = {run.title: run for run in published.float_runs(runs)}
    found: dict[str, dict[str, float]] = {}
    for run in published.featured(runs):
        sources = {engine: floats.get(run.title, run) if engine == "inductor" else run for engine in BARS}
        relative = {engine: source.relative(engine) for engine, source in sources.items()}
        found[run.title] = {engine: value for engine, value in relative.items() if value is not None}
    return found


def description(runs: list[Run]) -> str:
    """The numbers of the picture as text; the file carries it for screen readers and for its test."""
    times = {run.title: run.best_ms["intaglio"] for run in published.featured(runs)}
    lines = []
    for network, found in bars(runs).items():
        others = [f"{BARS[engine][0]} {value:.2f}" for engine, value in found.items() if engine != "intaglio"]
        lines.append(f"{network}: intaglio 1 ({published.digits(times[network])} ms), {', '.join(others)}")
    return SUBTITLE + " " + "; ".join(lines) + "."


def caption(runs: list[Run]) -> str:
    """What was measured, where, and with which versions."""
    shown = published.featured(runs)
    text = [run.processor for run in shown if run.network in published.TRANSFORMERS]
    image = [run.processor for run in shown if run.network not in published.TRANSFORMERS]
    machines = (
        f"Convolutional networks: two cores of {published.listed(image)}; transformers: two cores of "
        f"{published.listed(text)}; AVX512-VNNI. Batch 1, 2 threads, best block of calls."
    )
    engines = f"{published.versions(shown)}. torchao has no result for the transformers."
    titles = {run.title for run in shown}
    compiled = [run for run in published.float_runs(runs) if run.title in titles]
    days = published.dates([*shown, *compiled])
    turns = f"Recorded {days} on idle machines; int8 engines of a network took turns in one run."
    floats = "Compiled PyTorch is compared with intaglio in the newest run that has both. Weights are random."
    return "\n".join((machines, engines, turns, floats))


def draw(runs: list[Run]) -> Any:
    """Return the figure."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    matplotlib.rcParams.update({"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "intaglio"})
    groups = bars(runs)
    inches = sum(BAR * len(found) + GAP for found in groups.values()) - GAP
    height = TOP + inches + BOTTOM
    figure = Figure(figsize=(WIDTH, height), facecolor="none")
    card = FancyBboxPatch((0.03, 0.03), WIDTH - 0.06, height - 0.06, boxstyle="round,pad=0,rounding_size=0.1")
    card.set(facecolor=CARD, edgecolor=EDGE, transform=figure.dpi_scale_trans, zorder=-1)
    figure.add_artist(card)
    axes = figure.add_axes((LEFT / WIDTH, BOTTOM / height, (WIDTH - LEFT - RIGHT) / WIDTH, inches / height))
    draw_groups(axes, groups, {run.title: run for run in published.featured(runs)})
    axes.set(ylim=(inches, 0), xlim=(0, 1.12 * max(max(found.values()) for found in groups.values())))
    style(axes)
    title(figure, axes, height, caption(runs))
    return figure


def draw_groups(axes: Any, groups: dict[str, dict[str, float]], runs: dict[str, Run]) -> None:
    """One group of bars for each network, from the top down, in inches."""
    top = 0.0
    for network, found in groups.items():
        middle = top + BAR * len(found) / 2
        axes.text(-0.01, middle, network, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
        for engine, value in found.items():
            axes.barh(top, value, height=0.86 * BAR, align="edge", color=BARS[engine][1], zorder=2)
            label = f"{value:.2f}"
            if engine == "intaglio":
                label = f"1  ({published.digits(runs[network].best_ms[engine])} ms)"
            weight = "bold" if engine == "intaglio" else "normal"
            center = top + 0.43 * BAR
            axes.text(value + 0.05, center, label, va="center_baseline", fontsize=7, color=INK, weight=weight, zorder=3)
            top += BAR
        top += GAP


def style(axes: Any) -> None:
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=EDGE, linewidth=0.6, zorder=0)
    axes.tick_params(axis="x", length=0, labelsize=8, colors=FAINT)
    axes.axvline(1, color=BARS["intaglio"][1], linewidth=0.8, zorder=1)
    axes.set_xlabel("time per call, relative to intaglio (lower is better)", fontsize=8, color=FAINT)


def title(figure: Any, axes: Any, height: float, text: str) -> None:
    """Title and legend above the bars, caption below them."""
    from matplotlib.patches import Patch

    figure.text(0.2 / WIDTH, 1 - 0.32 / height, TITLE, fontsize=12.5, weight="bold")
    figure.text(
        0.2 / WIDTH,
        1 - 0.53 / height,
        "Time per call at batch 1, relative to intaglio. Lower is better.",
        fontsize=9,
        color=FAINT,
    )
    handles = [Patch(color=color, label=name) for name, color in BARS.values()]
    place = {"loc": "upper left", "bbox_to_anchor": (0.14 / WIDTH, 1 - 0.58 / height), "ncols": len(handles)}
    figure.legend(handles=handles, frameon=False, fontsize=7.5, columnspacing=1.1, handlelength=1.0, **place)
    figure.text(0.2 / WIDTH, 0.16 / height, text, fontsize=6.3, color=FAINT, va="bottom", linespacing=1.5)


def save(runs: list[Run], path: Path) -> None:
    metadata = {
        "Date": None,
        "Creator": creator(),
        "Title": TITLE,
        "Description": description(runs),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(runs).savefig(path, format="svg", metadata=metadata, transparent=True)


def creator() -> str:
    import matplotlib

    return f"Matplotlib {matplotlib.__version__}"


def main() -> None:
    runs = published.all_runs()
    save(runs, FILE)
    for page in published.PAGES:
        page.write_text(published.fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
