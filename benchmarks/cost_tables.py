"""Tables of calls a second, of memory, of the cost of quantizing and its accuracy, of few samples, and of searches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from zoo_tables import NOTHING, Line, Table

NETWORKS = {
    "resnet50": "ResNet-50",
    "wide_resnet50_2": "Wide-ResNet-50-2",
    "mobilenet_v2": "MobileNetV2",
    "yolov8n": "YOLOv8n (224 pixels)",
    "minilm": "MiniLM-L6 (128 tokens)",
    "llama_small": "Llama, 8 blocks of 512 channels",
    "bert": "BERT-base (128 tokens)",
}
ENGINES = {
    "intaglio": "intaglio",
    "openvino": "OpenVINO and NNCF",
    "onnxruntime_int8": "ONNX Runtime",
    "torchao": "torchao and Inductor",
}
SCALED = {
    "resnet50": "ResNet-50",
    "bert": "BERT-base (128 tokens)",
    "mobilenet_v2": "MobileNetV2",
    "shufflenet_v2_x1_0": "ShuffleNetV2",
}
MORE_THREADS = ("4", "8", "16", "32", "64")
LOADED = {
    "intaglio_exported": "**intaglio**, exported C from Python",
    "intaglio": "**intaglio**, `intaglio.load`",
    "onnxruntime_int8": "ONNX Runtime int8",
    "openvino_int8": "OpenVINO int8",
}
MEMORY = {
    "file": "files",
    "imported": "imported",
    "loaded": "loaded",
    "ran": "after calls",
    "above": "calls above imports",
    "resident": "resident",
}
SEARCHED = {
    "mobilenet_v3_large": "MobileNetV3-Large",
    "efficientnet_b0": "EfficientNet-B0",
    "vit_b_16": "ViT-B/16",
    "minilm": "MiniLM-L6 (128 tokens)",
}
TRAINED = {
    "cifar_resnet20": "ResNet-20",
    "cifar_resnet56": "ResNet-56",
    "efficientnet_lite0": "EfficientNet-Lite0",
}
FEW = TRAINED | {"minilm": "MiniLM-L6"}
COUNTS = (1, 8, 64, 512)
CORRECTIONS = {
    "plain": "none",
    "equalized": "equalization",
    "GPTQ": "GPTQ",
    "default": "both, the default",
    "accurate": '`recipe="accurate"`',
}
HARD = {
    "intaglio": "intaglio",
    "intaglio_accurate": 'intaglio, `recipe="accurate"`',
    "openvino_int8": "OpenVINO and NNCF",
    "onnxruntime_int8": "ONNX Runtime",
    "torchao": "torchao and Inductor",
}
AWARE = {"intaglio": ("intaglio",), "nncf": ("nncf", "nncf_default")}
AWARE_METRICS = {"labels": "top1", "classes": "agreement"}
"""Metrics of accuracy-aware searches -> the score of unseen images that corresponds to each."""
AWARE_TITLES = {"intaglio": "`intaglio.search`", "nncf": "NNCF, run by OpenVINO"}


def quantizing(lines: Iterable[Line]) -> Table:
    """Return seconds and GB of every engine, from the newest line of each network with OpenVINO and an idle machine.

    Lines of machines with AMX are left out, so that all cells of a row are from one kind of machine.
    """
    found: dict[str, Line] = {}
    for line in lines:
        results = line["results"]
        if "amx_int8" in line["cpu"].get("flags", ()):
            continue
        for network in NETWORKS:
            if results.get("idle") and f"{network}/openvino" in results:
                found |= {key: one for key, one in results.items() if key.startswith(f"{network}/")}
    rows = []
    for network, title in NETWORKS.items():
        own = found.get(f"{network}/intaglio")
        if own is not None:
            cells = (_cost(found.get(f"{network}/{engine}")) for engine in ENGINES)
            rows.append((title, f"{own['model_mb']:.0f} MB", *cells))
    return ("network", "float parameters", *ENGINES.values()), rows


def memory(lines: Iterable[Line]) -> Table:
    """Return MB of processes that run ResNet-50, and seconds of loading and the first call, from the newest line."""
    newest = max((line for line in lines if line["arguments"]["network"] == "resnet50"), key=lambda line: line["date"])
    engines = newest["results"]["engines_mb"]
    rows = [
        (title, *(f"{engines[key][column]:.1f}" for column in MEMORY), f"{engines[key]['first_call_s']:.3f}")
        for key, title in LOADED.items()
    ]
    return ("engine", *MEMORY.values(), "load and first call, s"), rows


def scaling(lines: Iterable[Line]) -> Table:
    """Return measured and predicted times on all cores, and predictions for more, from the newest line of each set."""
    newest: dict[str, Line] = {}
    for line in lines:
        if line["results"]["idle"]:
            newest[line["results"]["isa"]] = line
    rows = []
    for isa, line in newest.items():
        for key, one in line["results"]["networks"].items():
            name, _, batch = key.partition(", batch ")
            (threads, measured), predicted = list(one["measured_us"].items())[-1], one["predicted_us"]
            ratio = f"{measured / 1e3:.2f} / {predicted[threads] / 1e3:.2f} = {measured / predicted[threads]:.2f}"
            times = (f"{predicted[count] / 1e3:.2f}" for count in MORE_THREADS)
            rows.append((SCALED[name], batch, f"`{isa}`", f"{predicted['1'] / 1e3:.2f}", ratio, *times))
    rows.sort(key=lambda row: (list(SCALED.values()).index(row[0]), int(row[1]), row[2]))
    return ("network", "batch", "kernels", "1", "2, measured / predicted", *MORE_THREADS), rows


def _cost(found: Line | None) -> str:
    """Return the seconds and the largest memory of a process."""
    return NOTHING if found is None else f"{found['seconds']:.1f} s, {found['peak_mb'] / 1000:.2f} GB"


def throughput(lines: Iterable[Line]) -> Table:
    """Return calls a second of intaglio's pool and of OpenVINO's streams, from the newest line of an idle machine."""
    results = next((line["results"] for line in reversed(list(lines)) if line["results"]["idle"]), {})
    rows = []
    for network, title in NETWORKS.items():
        if network in results:
            best = {engine: max(found["rates"]) for engine, found in results[network].items()}
            others = [best["openvino_int8"], best["openvino_int8_default"]]
            ratio = f"{best['intaglio'] / max(others):.2f}"
            rows.append((title, *(f"{rate:.1f}" for rate in (best["intaglio"], *others)), ratio))
    head = ("network", "`Pool.fastest`", "OpenVINO, floats in float32", "OpenVINO, default", "intaglio / best other")
    return head, rows


def hard_networks(lines: Iterable[Line]) -> Table:
    """Return accuracy, seconds and memory of every engine on trained networks, from the newest line of each."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        for name, splits in line["results"].items():
            network, engine = name.split("/")
            if engine in HARD and network in TRAINED and "seconds" in splits["jpeg"]:
                found[network, engine] = splits["jpeg"]
    rows = []
    for network, title in TRAINED.items():
        for engine, name in HARD.items():
            if (network, engine) in found:
                figures = found[network, engine]
                accuracy = f"{figures['agreement']:.2f} %", f"{figures['sqnr_db']:.1f} dB"
                rows.append((title if engine == "intaglio" else "", name, *accuracy, _cost(figures)))
    return ("network", "engine", "same class as float32", "SQNR", "to quantize and compile"), rows


def few_samples(lines: Iterable[Line]) -> Table:
    """Return accuracy by the number of calibration samples, from the newest line of each network with all numbers."""
    found: dict[str, Line] = {}
    for line in lines:
        results = line["results"]
        for network in FEW:
            if all(f"{network}/{count}/{name}" in results for count in COUNTS for name in CORRECTIONS):
                found[network] = results
    rows = []
    for network, title in FEW.items():
        for count in COUNTS if network in found else ():
            figures = (found[network][f"{network}/{count}/{name}"] for name in CORRECTIONS)
            cells = (f"{one['sqnr_db']:.1f} dB, {one['agreement']:.1f} %" for one in figures)
            rows.append((title if count == COUNTS[0] else "", str(count), *cells))
    return ("network", "samples", *CORRECTIONS.values()), rows


def mixed_precision(lines: Iterable[Line]) -> Table:
    """Return the ratio to reach, and what greedy skipping and the search reach it with, from the newest line of each
    network that was measured on an idle machine."""
    found: dict[str, Line] = {}
    for line in lines:
        if line["results"]["idle"]:
            found |= {name: line["results"][name] for name in SEARCHED if name in line["results"]}
    rows = []
    for name, title in SEARCHED.items():
        if name in found:
            figures, one = found[name], found[name]["search"]
            cells = (_reached(figures[method]) for method in ("int8", "greedy", "search"))
            rows.append((title, f"{figures['target_db']:.1f} dB", *cells, f"{one['seconds']:.0f} s"))
    return ("network", "target", "int8", "greedy skipping", "`search`", "duration of `search`"), rows


def _reached(figures: Line) -> str:
    """Return the latency of a model and its signal-to-noise ratio."""
    return f"{figures['ms']:.3f} ms, {figures['db']:.1f} dB"


def accuracy_aware(lines: Iterable[Line]) -> Table:
    """Return what NNCF's accuracy control and the search find on trained networks, from the newest line of each network
    and metric that was timed on an idle machine."""
    found: dict[tuple[str, str], Line] = {}
    for line in lines:
        metric = line["arguments"].get("metric", "classes")
        found |= {(name, metric): one for name, one in line["results"].items() if name in TRAINED and one["idle"]}
    rows = []
    for name, metric in itertools.product(TRAINED, AWARE_METRICS):
        for search, engines in AWARE.items() if (name, metric) in found else ():
            figures, cost = found[name, metric], found[name, metric]["searches"][search]
            best = figures[engines[0]]
            times = " / ".join(f"{figures[engine]['best_ms']:.3f}" for engine in engines)
            accuracy = (f"{best[key]:.2f} %" for key in ("validation", AWARE_METRICS[metric]))
            duration = f"{cost['seconds']:.0f} s"
            begin = (TRAINED[name], metric) if search == "intaglio" else ("", "")
            rows.append((*begin, AWARE_TITLES[search], *accuracy, times, duration))
    head = ("network", "metric", "search", "validation", "unseen", "ms a call", "duration of the search")
    return head, rows
