"""Figures that the README, the landing page and the benchmarks page show, chosen from the recorded results.

The rule, for a network at a batch size and a number of threads:

1. A line of results/models.jsonl or results/race.jsonl counts if the machine was idle and intaglio was measured.
2. The int8 figures are those of the line with the most int8 engines; of several such lines the newest one counts.
3. The float32 figures are those of the newest line that has compiled or eager PyTorch. They are compared with intaglio
   in that same line, because only engines that took turns in one run are comparable.

The time of an engine is that of its best block. Accuracy is that of the newest line of results/accuracy.jsonl that has
the network and the engine. `python benchmarks/picture.py` writes all tables and the picture.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cost_tables
import decoder_tables
import zoo_tables
from zoo_tables import Line

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE_NAMES = ("index", "corrections", "deploying", "mixed_precision", "zoo")
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs" / f"{name}.md" for name in PAGE_NAMES))
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
"""Text between two comments, which `fill` writes. The first comment names the row of `TABLES`."""

NETWORKS = {
    ("resnet50", None): "ResNet-50",
    ("resnet18", None): "ResNet-18",
    ("mobilenet_v2", None): "MobileNetV2",
    ("mobilenet_v3_large", None): "MobileNetV3-Large",
    ("efficientnet_b0", None): "EfficientNet-B0",
    ("shufflenet_v2_x1_0", None): "ShuffleNetV2",
    ("regnet_y_400mf", None): "RegNet-Y-400MF",
    ("squeezenet1_0", None): "SqueezeNet",
    ("googlenet", None): "GoogLeNet",
    ("densenet121", None): "DenseNet-121",
    ("resnext50_32x4d", None): "ResNeXt-50",
    ("convnext_tiny", None): "ConvNeXt-T",
    ("vgg11_bn", None): "VGG-11-BN",
    ("cifar_resnet20", None): "CIFAR ResNet-20",
    ("cifar_resnet56", None): "CIFAR ResNet-56",
    ("bert", 128): "BERT-base (128 tokens)",
    ("bert", 384): "BERT-base (384 tokens)",
    ("minilm", 128): "MiniLM-L6 (128 tokens)",
    ("vit_b_16", None): "ViT-B/16",
}
"""Network and number of tokens, in the order of the tables, and the name that readers know."""
TRANSFORMERS = ("bert", "minilm", "vit_b_16")
INT8 = {"openvino_int8": "OpenVINO int8", "onnxruntime_int8": "ONNX Runtime int8", "torchao": "torchao int8"}
FLOAT = {"inductor": "torch.compile, float32", "eager": "PyTorch, float32"}
ACCURACY = {
    "eager": "PyTorch, float32",
    "intaglio": "**intaglio**",
    "intaglio_accurate": '**intaglio**, `recipe="accurate"`',
    **INT8,
}
PACKAGES = {
    "intaglio": ("torch", "PyTorch"),
    "openvino_int8": ("openvino", "OpenVINO"),
    "onnxruntime_int8": ("onnxruntime", "ONNX Runtime"),
    "torchao": ("torchao", "torchao"),
    "executorch": ("executorch", "ExecuTorch"),
    "zentorch": ("zentorch", "zentorch"),
}
"""Package of an engine, and its name; intaglio runs in PyTorch."""
NO_SHARED_CACHE_NS = 300
"""Latency between two cores from which they share no cache."""
CORES = {(25, 1): "Zen 3", (25, 17): "Zen 4", (26, 2): "Zen 5", (6, 167): "AMX", (6, 207): "AMX, 2.9 GHz"}
"""Microarchitecture, or the extension that its kernels use, by family and model of the processor."""
NOT_MEASURED = "–"


@dataclass(frozen=True)
class Run:
    """One recorded race. ``best_ms``: milliseconds of a call in the best block of each engine."""

    network: str
    tokens: int | None
    batch: int
    threads: int
    date: str
    cpu: dict[str, Any]
    versions: dict[str, str]
    limit_ms: float | None
    best_ms: dict[str, float]
    sqnr_db: dict[str, float]
    core_latencies_ns: tuple[float, ...] = ()

    @property
    def shares_no_cache(self) -> bool:
        """Return whether the cores share no cache, judged by the median of the latencies."""
        found = self.core_latencies_ns
        return bool(found) and statistics.median(found) > NO_SHARED_CACHE_NS

    @property
    def core_latency(self) -> str:
        """The lowest and the highest latency between the cores during the race."""
        found = self.core_latencies_ns
        return f"{min(found):.0f}–{max(found):.0f}" if found else NOT_MEASURED

    @property
    def title(self) -> str:
        return NETWORKS[self.network, self.tokens]

    @property
    def processor(self) -> str:
        return f"{self.cpu['model']} ({self.core_kind})"

    @property
    def core_kind(self) -> str:
        family, model, _ = self.cpu["family"]
        return CORES.get((family, model), f"family {family}, model {model}")

    @property
    def has_amx(self) -> bool:
        return "amx_int8" in self.cpu.get("flags", ())

    def relative(self, engine: str) -> float | None:
        """Time of an engine divided by the time of intaglio in this run."""
        return self.best_ms[engine] / self.best_ms["intaglio"] if engine in self.best_ms else None


# -- choosing ---------------------------------------------------------------------------------------------------------


def recorded(name: str) -> list[dict[str, Any]]:
    """Lines of results/{name}.jsonl, oldest first."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def idle_runs(lines: Iterable[dict[str, Any]]) -> list[Run]:
    """Races of an idle machine in which intaglio was measured, at the usual size of images."""
    found = []
    for line in lines:
        given, results = line["arguments"], line["results"]
        engines = results["engines"]
        best = {engine: min(one["blocks_ms"]) for engine, one in engines.items() if one.get("blocks_ms")}
        tokens = given.get("sequence") if given["network"] in ("bert", "minilm") else None
        known = (given["network"], tokens) in NETWORKS and given["image"] == 224
        if results["idle"] and "intaglio" in best and known:
            shared = (given["network"], tokens, given["batch"], given["threads"], line["date"])
            sqnr = {engine: engines[engine]["sqnr_db"] for engine in best}
            latencies = tuple(filter(None, results.get("core_latency_ns", ())))
            found.append(Run(*shared, line["cpu"], line["versions"], results["limit_ms"], best, sqnr, latencies))
    return found


def all_runs() -> list[Run]:
    """Races on processors with AVX512-VNNI and without AMX, which most tables are about, but for those of a table with
    both settings of OpenVINO (`runs_on`)."""
    others = [run for run in _idle_races() if not run.has_amx and run.core_kind != "Zen 3"]
    return [run for run in others if not _is_run_on(run, "Zen 5")]


def runs_on(kind: str) -> list[Run]:
    """The newest race, on cores of a kind, of each network, batch size and number of threads, with and without a shared
    cache, that has both settings of OpenVINO."""
    order = list(NETWORKS.values())
    newest = {
        (run.batch, -run.threads, order.index(run.title), run.shares_no_cache): run
        for run in sorted(_idle_races(), key=lambda run: run.date)
        if _is_run_on(run, kind)
    }
    return [newest[key] for key in sorted(newest)]


def _is_run_on(run: Run, kind: str) -> bool:
    """Return whether a race ran on cores of a kind and has both settings of OpenVINO."""
    return run.core_kind == kind and run.best_ms.keys() >= OPENVINO_SETTINGS


def behind_operators_runs() -> list[Run]:
    """The newest race of each network in which PyTorch computed something before each call."""
    order = list(NETWORKS.values())
    newest = {run.title: run for run in idle_runs(recorded("race_behind_operators"))}
    return sorted(newest.values(), key=lambda run: order.index(run.title))


def amx_runs() -> list[Run]:
    """The race of each network and batch size on processors with AMX, on two threads, that has the most engines of the
    table; of these the newest."""

    def engines(run: Run) -> int:
        return len(AMX_ENGINES.keys() & run.best_ms.keys())

    compared = [run for run in _idle_races() if run.has_amx and run.threads == 2 and engines(run)]
    newest = {(run.title, run.batch): run for run in sorted(compared, key=lambda run: (engines(run), run.date))}
    order = list(NETWORKS.values())
    return sorted(newest.values(), key=lambda run: (run.batch, order.index(run.title)))


def _idle_races() -> list[Run]:
    return idle_runs([*recorded("models"), *recorded("race")])


def int8_runs(runs: Iterable[Run], batch: int = 1, threads: int = 2) -> list[Run]:
    """The run of each network that counts, by rule 2, in the order of `NETWORKS`."""
    chosen: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: (len(INT8.keys() & run.best_ms.keys()), run.date)):
        if (run.batch, run.threads) == (batch, threads) and INT8.keys() & run.best_ms.keys():
            chosen[run.title] = run
    return [chosen[title] for title in NETWORKS.values() if title in chosen]


def float_runs(runs: Iterable[Run]) -> list[Run]:
    """The run of each network that counts, by rule 3, at batch 1 on two threads."""
    chosen: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.date):
        if (run.batch, run.threads) == (1, 2) and FLOAT.keys() & run.best_ms.keys():
            chosen[run.title] = run
    return [chosen[title] for title in NETWORKS.values() if title in chosen]


def featured(runs: Iterable[Run]) -> list[Run]:
    """Runs of the picture: networks measured with every int8 engine, and transformers.

    The CIFAR networks are left out: they are tiny, and the table of accuracy has their times.
    """
    large = [run for run in int8_runs(runs) if not run.network.startswith("cifar")]
    return [run for run in large if INT8.keys() <= run.best_ms.keys() or run.network in TRANSFORMERS]


# -- tables -----------------------------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def milliseconds(run: Run, engine: str) -> str:
    """Return a cell with four significant digits, bold for the fastest engine of the run."""
    if engine not in run.best_ms:
        return NOT_MEASURED
    text = digits(run.best_ms[engine])
    return f"**{text}**" if run.best_ms[engine] == min(run.best_ms.values()) else text


def digits(ms: float, count: int = 4) -> str:
    """Return milliseconds with ``count`` significant digits, zeros at the end included."""
    return f"{ms:#.{count}g}".rstrip(".")


def listed(names: Iterable[str]) -> str:
    """Join names without repetitions."""
    return ", ".join(dict.fromkeys(names))


def dates(runs: Iterable[Run]) -> str:
    days = sorted({run.date[:10] for run in runs})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def source(runs: Iterable[Run], what: str = "Recorded") -> str:
    """Processors, versions and dates of runs, as sentences below their table."""
    processors: dict[str, list[Run]] = {}
    for run in runs:
        processors.setdefault(run.processor, []).append(run)
    usual, *others = sorted(processors, key=lambda name: -len(processors[name]))
    where = f"Processor: {usual}"
    for name in others:
        where += f"; for {', '.join(run.title for run in processors[name])}: {name}"
    return f"{where}. {versions(runs)}. {what} {dates(runs)}."


def versions(runs: Iterable[Run]) -> str:
    """Versions of the engines that were measured; several where runs differ."""
    found: dict[str, set[str]] = {}
    for run in runs:
        for package, title in (PACKAGES[engine] for engine in PACKAGES if engine in run.best_ms):
            found.setdefault(title, set()).add(run.versions[package].partition("+")[0])
    return ", ".join(f"{title} {' and '.join(sorted(numbers))}" for title, numbers in found.items())


def speed_table(runs: list[Run]) -> str:
    """Milliseconds per call of every int8 engine, and intaglio's share of the arithmetic limit."""
    head = ("network", "intaglio", *INT8.values(), "share of the limit")
    rows = (
        (run.title, *(milliseconds(run, engine) for engine in ("intaglio", *INT8)), share_of_limit(run)) for run in runs
    )
    return table(head, rows)


AMX_ENGINES = {
    "openvino_int8_default": "OpenVINO int8, as it comes",
    "openvino_int8": "OpenVINO int8, floats in f32",
    "onnxruntime_int8": "ONNX Runtime int8",
    "executorch": "ExecuTorch int8",
}


OPENVINO_SETTINGS = {"openvino_int8_default", "openvino_int8"}
ZEN_ENGINES = {**AMX_ENGINES, "torchao": "torchao int8", "zentorch": "zentorch int8, per token"}


def zen_table(runs: list[Run]) -> str:
    """Milliseconds per call on a Zen 3 or a Zen 5, the share of the limit, and the latency between the cores."""
    head = ("network", "batch", "threads", "intaglio", *ZEN_ENGINES.values(), "fastest other / intaglio")
    rows = (
        (
            run.title,
            str(run.batch),
            str(run.threads),
            *(milliseconds(run, engine) for engine in ("intaglio", *ZEN_ENGINES)),
            f"{nearest(run, ZEN_ENGINES):.2f}",
            share_of_limit(run),
            run.core_latency,
        )
        for run in runs
    )
    return table((*head, "share of the limit", "core-to-core latency, ns"), rows)


def amx_table(runs: list[Run]) -> str:
    """Milliseconds per call on processors with AMX, and how many times as long the fastest other engine takes."""
    head = ("network", "batch", "intaglio", *AMX_ENGINES.values(), "fastest other / intaglio")
    rows = (
        (
            run.title,
            str(run.batch),
            *(milliseconds(run, engine) for engine in ("intaglio", *AMX_ENGINES)),
            f"{nearest(run, AMX_ENGINES):.2f}",
        )
        for run in runs
    )
    return table(head, rows)


ONCE = {"executorch": "ExecuTorch", "ncnn": "ncnn, float32", "mnn": "MNN", "tract": "tract"}
"""Engines that were raced once."""
ONCE_INT8 = {
    "ncnn_int8": "ncnn",
    "mnn_int8": "MNN",
    "ncnn": "ncnn, float32",
    "mnn": "MNN, float32 activations",
    "openvino_int8": "OpenVINO",
}
"""Engines that were raced once with their int8 kernels, beside others."""


def once_table(engines: Mapping[str, str] = ONCE) -> str:
    """Milliseconds per call of the engines that were raced once, from the newest race of each network with all."""
    races = sorted(_idle_races(), key=lambda run: run.date)
    runs = {run.title: run for run in races if engines.keys() <= run.best_ms.keys()}
    head = ("network", "intaglio", *engines.values())
    titles = [title for title in NETWORKS.values() if title in runs]
    rows = ((title, *(milliseconds(runs[title], engine) for engine in ("intaglio", *engines))) for title in titles)
    return table(head, rows)


def nearest(run: Run, engines: Iterable[str]) -> float:
    """Time of the fastest of some engines divided by that of intaglio."""
    return min(filter(None, map(run.relative, engines)))


def share_of_limit(run: Run) -> str:
    return f"{100 * run.limit_ms / run.best_ms['intaglio']:.0f} %" if run.limit_ms else NOT_MEASURED


def float_table(runs: list[Run]) -> str:
    """Milliseconds per call beside float32 PyTorch, and how many times as long torch.compile takes."""
    head = ("network", "intaglio", *FLOAT.values(), "torch.compile / intaglio")
    rows = (
        (run.title, *(milliseconds(run, engine) for engine in ("intaglio", *FLOAT)), ratio(run, "inductor"))
        for run in runs
    )
    return table(head, rows)


def ratio(run: Run, engine: str) -> str:
    found = run.relative(engine)
    return f"{found:.2f}" if found else NOT_MEASURED


ELSEWHERE = {
    "intaglio_inductor": ("TorchInductor", "torchao", "torchao"),
    "intaglio_onnxruntime": ("ONNX Runtime", "onnxruntime_int8", "ONNX Runtime"),
    "intaglio_openvino": ("OpenVINO", "openvino_int8", "NNCF"),
}
"""Engines that run intaglio's reference model: their name, and the same engine with a model of other tools."""


def elsewhere_table(runs: list[Run]) -> str:
    """ResNet-50 of intaglio in other engines, from the newest run of each, beside models of their own tools."""
    rows = []
    for engine, (title, peer, tool) in ELSEWHERE.items():
        run = max((run for run in runs if {engine, peer} <= run.best_ms.keys()), key=lambda run: run.date)
        for name, key, model in ((title, engine, "**intaglio**"), ("", peer, tool)):
            own = f"{run.best_ms['intaglio']:.2f}" if name else ""
            rows.append((name, model, f"{run.best_ms[key]:.2f}", f"{run.sqnr_db[key]:.1f}", own))
    return table(("engine", "model of", "ms", "SQNR, dB", "intaglio's program, ms"), rows)


def accuracy(lines: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Network and engine to the date and the splits of the data, of the newest line that has them."""
    return {
        tuple(name.split("/")): {"date": line["date"], **found}
        for line in lines
        for name, found in line["results"].items()
    }


def accuracy_table(runs: list[Run], lines: list[dict[str, Any]]) -> str:
    """Accuracy of every engine on ten thousand images, beside its time per call at batch 1 on two threads.

    Networks that were never timed are left out.
    """
    timed = {run.network: run for run in int8_runs(runs)}
    found = {key: scores for key, scores in accuracy(lines).items() if key[0] in timed}
    rows = []
    for network in dict.fromkeys(network for network, _ in found):
        for engine, title in ACCURACY.items():
            if (network, engine) in found:
                scores, time = found[network, engine]["jpeg"], NOT_MEASURED
                if engine in timed[network].best_ms:
                    time = f"{digits(timed[network].best_ms[engine], 3)} ms"
                same = NOT_MEASURED if engine == "eager" else f"{scores['agreement']:.2f} %"
                name = timed[network].title if engine == "eager" else ""
                rows.append((name, title, f"{scores['top1']:.2f} %", same, time))
    body = table(("network", "engine", "top-1 accuracy", "same class as float32", "time per call"), rows)
    days = listed(sorted(scores["date"][:10] for scores in found.values()))
    times = [timed[network] for network, _ in found]
    return f"{body}\n\n{source(times, 'Times recorded')} Accuracy recorded {days}."


def claim(runs: list[Run]) -> str:
    """Say in a list how all networks compare."""
    shown = int8_runs(runs)
    ratios = {run.title: nearest(run, INT8) for run in shown}
    low, high = (select(ratios, key=ratios.__getitem__) for select in (min, max))
    amx = [nearest(run, AMX_ENGINES) for run in amx_runs() if run.batch == 1]
    zen3, zen5 = (
        [nearest(run, ZEN_ENGINES) for run in runs_on(kind) if (run.batch, run.threads) == (1, 2)]
        for kind in ("Zen 3", "Zen 5")
    )
    compiled = [run.relative("inductor") for run in float_runs(runs) if "inductor" in run.best_ms]
    smallest, largest = f"{ratios[low]:.2f} ({low})", f"{ratios[high]:.2f} ({high})"
    lines = (
        f"{smallest} to {largest} times as long as intaglio, over {len(shown)} networks;",
        f"{_times(zen5)} on cores with full 512-bit units (Zen 5);",
        f"{_times(amx)} on a processor with AMX, over {len(amx)} networks;",
        f"{_times(zen3)} on a processor without VNNI (Zen 3), over {len(zen3)} networks.",
    )
    return (
        "At batch 1 on two cores, the fastest other int8 engine takes per call:\n\n"
        + "".join(f"- {line}\n" for line in lines)
        + f"\nPyTorch's float32 models, compiled with `torch.compile`, take {min(compiled):.1f} to {max(compiled):.1f} "
        f"times as long as intaglio, on the {len(compiled)} networks where they were measured too."
    )


def _times(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f} times as long"


def with_source(runs: list[Run]) -> str:
    return f"{speed_table(runs)}\n\n{source(runs)}"


def decoder_lines(kind: str) -> list[Line]:
    """Races of decoders on cores of one kind, one of `CORES`."""
    (family,) = (family for family, name in CORES.items() if name == kind)
    return decoder_tables.of_cores(recorded("decoder_race"), family)


TABLES = {
    "claim": lambda: claim(all_runs()),
    "batch1_threads2": lambda: with_source(int8_runs(all_runs(), 1, 2)),
    "batch1_threads1": lambda: with_source(int8_runs(all_runs(), 1, 1)),
    "batch16_threads2": lambda: with_source(int8_runs(all_runs(), 16, 2)),
    "batch16_threads1": lambda: with_source(int8_runs(all_runs(), 16, 1)),
    "zen3": lambda: f"{zen_table(runs_on('Zen 3'))}\n\n{source(runs_on('Zen 3'))}",
    "zen5": lambda: f"{zen_table(runs_on('Zen 5'))}\n\n{source(runs_on('Zen 5'))}",
    "behind_operators": lambda: with_source(behind_operators_runs()),
    "amx": lambda: f"{amx_table(amx_runs())}\n\n{source(amx_runs())}",
    "once": once_table,
    "once_int8": partial(once_table, ONCE_INT8),
    "float32": lambda: f"{float_table(float_runs(all_runs()))}\n\n{source(float_runs(all_runs()))}",
    "elsewhere": lambda: elsewhere_table(all_runs()),
    "accuracy": lambda: accuracy_table(all_runs(), recorded("accuracy")),
    "zoo_summary": lambda: zoo_tables.summary(recorded("zoo")),
    "zoo": lambda: zoo_tables.page(recorded("zoo"), table),
    "zoo_blind": lambda: table(*zoo_tables.blind(recorded("zoo"))),
    "zoo_islands": lambda: table(*zoo_tables.islands(recorded("zoo"))),
    "quantizing": lambda: table(*cost_tables.quantizing(recorded("quantizing"))),
    "scaling": lambda: table(*cost_tables.scaling(recorded("scaling"))),
    "memory": lambda: table(*cost_tables.memory(recorded("memory"))),
    "throughput": lambda: table(*cost_tables.throughput(recorded("throughput"))),
    "mixed_precision": lambda: table(*cost_tables.mixed_precision(recorded("search"))),
    "accuracy_aware": lambda: table(*cost_tables.accuracy_aware(recorded("accuracy_aware"))),
    "hard_networks": lambda: table(*cost_tables.hard_networks(recorded("accuracy"))),
    "few_samples": lambda: table(*cost_tables.few_samples(recorded("few_samples"))),
    "decoder_steps": lambda: table(*decoder_tables.steps(decoder_lines("AMX"))),
    "decoder_texts": lambda: table(*decoder_tables.texts(decoder_lines("AMX"))),
    "decoder_accuracy": lambda: table(*decoder_tables.accuracy(decoder_lines("AMX"))),
    "decoder_source": lambda: decoder_tables.source(decoder_lines("AMX")),
    "slow_amx_decoder_steps": lambda: table(*decoder_tables.steps(decoder_lines("AMX, 2.9 GHz"))),
    "slow_amx_decoder_texts": lambda: table(*decoder_tables.texts(decoder_lines("AMX, 2.9 GHz"))),
    "slow_amx_decoder_source": lambda: decoder_tables.source(decoder_lines("AMX, 2.9 GHz")),
    "zen3_decoder_steps": lambda: table(*decoder_tables.steps(decoder_lines("Zen 3"))),
    "zen3_decoder_texts": lambda: table(*decoder_tables.texts(decoder_lines("Zen 3"))),
    "zen3_decoder_source": lambda: decoder_tables.source(decoder_lines("Zen 3")),
    "zen5_decoder_steps": lambda: table(*decoder_tables.steps(decoder_lines("Zen 5"))),
    "zen5_decoder_texts": lambda: table(*decoder_tables.texts(decoder_lines("Zen 5"))),
    "zen5_decoder_source": lambda: decoder_tables.source(decoder_lines("Zen 5")),
    "zoo_failures": lambda: table(*zoo_tables.failures(recorded("zoo"))),
}


def fill(markdown: str) -> str:
    """Return a page with its tables written again from the recorded results."""
    return REGION.sub(lambda region: f"{region[1]}\n{TABLES[region[2]]()}\n\n", markdown)
