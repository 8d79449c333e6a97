"""Scripts of benchmarks/: what they print of figures they have, and that every kernel they time can be called."""

import argparse
import html
import importlib.util
import json
import math
import sys

import numpy as np
import pytest

from intaglio.kernels import ISAS
from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits
from intaglio.native.compile import load
from support.project_files import ROOT

FOLDER = ROOT / "benchmarks"
MEASURED = [isa for isa in machine.isas() if isa in ISAS and isa != "portable"]


def script(name):
    """A script as a module; its name in a list of modules is not that of a helper of the tests."""
    sys.path.append(str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def models():
    return script("models")


def line(network="resnet18", batch=1, threads=2, *, commit="abc", idle=True, image=224, limit=4.0, **best):
    engines = {engine: {"best_ms": ms} if ms else {"failed": "it died"} for engine, ms in best.items()}
    arguments = {"network": network, "batch": batch, "threads": threads, "image": image, "anyway": False}
    return {"commit": commit, "arguments": arguments, "results": {"idle": idle, "limit_ms": limit, "engines": engines}}


def test_benchmark_tables_are_grouped_by_batch_and_threads(models):
    lines = [line(intaglio=4.5, openvino_int8=5.25), line("vgg11", batch=16, intaglio=70.0, openvino_int8=64.0)]
    assert (
        models.tables(lines)
        == """\
Batch 1, 2 threads, best in ms

| network | limit | intaglio | of the limit | OpenVINO int8 |
| --- | --- | --- | --- | --- |
| resnet18 | 4 | **4.5** | 89 % | 5.25 |

Batch 16, 2 threads, best in ms

| network | limit | intaglio | of the limit | OpenVINO int8 |
| --- | --- | --- | --- | --- |
| vgg11 | 4 | 70 | 6 % | **64** |
"""
    )


def test_the_last_record_of_a_cell_counts(models):
    text = models.tables([line(intaglio=9.0), line(intaglio=8.0, commit="later")])
    assert "**8**" in text
    assert "9" not in text


def test_a_disturbed_run_has_no_winner_and_a_failed_engine_says_so(models):
    text = models.tables([line(idle=False, image=64, intaglio=5.0, torchao=None)])
    assert "| resnet18, 64 pixels * | 4 | 5 | 80 % | failed |" in text


def test_a_cell_is_done_when_this_commit_has_all_its_engines(models, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "LINES", tmp_path / "models.jsonl")
    models.LINES.write_text(json.dumps(line(intaglio=5.0, torchao=None)) + "\n")
    cell = argparse.Namespace(network="resnet18", batch=1, threads=2, image=224, engines="intaglio")
    assert models.is_done(cell, "abc")
    assert not models.is_done(cell, "later")
    assert not models.is_done(argparse.Namespace(**{**vars(cell), "batch": 16}), "abc")
    assert not models.is_done(argparse.Namespace(**{**vars(cell), "engines": "intaglio,inductor"}), "abc")


def test_a_changed_source_is_never_done(models, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "LINES", tmp_path / "models.jsonl")
    models.LINES.write_text(json.dumps(line(commit="abc+", intaglio=5.0)) + "\n")
    cell = argparse.Namespace(network="resnet18", batch=1, threads=2, image=224, engines="intaglio")
    assert not models.is_done(cell, "abc+")


def test_a_summary_has_best_median_and_spread_of_blocks(models):
    found = models.summary({"blocks_ms": [2.0, 3.0, 2.5], "build_s": 1.0})
    assert (found["best_ms"], found["median_ms"], found["spread"]) == (2.0, 2.5, 0.4)
    assert models.summary({"failed": "it died"}) == {"failed": "it died"}


# -- what the pages show ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    return script("published")


@pytest.fixture(scope="module")
def picture():
    return script("picture")


def race_line(date, *, network="resnet18", idle=True, tokens=128, batch=1, **best):
    """A line of results/race.jsonl with one block per engine."""
    arguments = {"network": network, "batch": batch, "threads": 2, "image": 224, "sequence": tokens}
    engines = {engine: {"blocks_ms": [ms + 1, ms], "sqnr_db": 40.0} for engine, ms in best.items()}
    cpu = {"model": "AMD EPYC", "family": [25, 17, 1]}
    results = {"idle": idle, "limit_ms": 1.0, "engines": engines}
    return {"date": date, "cpu": cpu, "versions": {"torch": "2.13.0+cpu"}, "arguments": arguments, "results": results}


ALL = {"openvino_int8": 6.0, "onnxruntime_int8": 7.0, "torchao": 8.0}


def test_the_newest_idle_run_with_the_most_int8_engines_counts(published):
    lines = [
        race_line("2026-01-01", intaglio=5.0, **ALL),
        race_line("2026-01-02", intaglio=4.0, **ALL),
        race_line("2026-01-03", intaglio=3.0, openvino_int8=6.0),
        race_line("2026-01-04", intaglio=2.0, idle=False, **ALL),
        race_line("2026-01-05", **ALL),
    ]
    (run,) = published.int8_runs(published.idle_runs(lines))
    assert (run.date, run.best_ms["intaglio"], run.relative("openvino_int8")) == ("2026-01-02", 4.0, 1.5)


def test_the_newest_idle_run_with_float_pytorch_counts(published):
    lines = [
        race_line("2026-01-01", intaglio=5.0, inductor=40.0),
        race_line("2026-01-02", intaglio=4.0, inductor=40.0),
        race_line("2026-01-03", intaglio=3.0, **ALL),
        race_line("2026-01-04", intaglio=2.0, inductor=90.0, idle=False),
    ]
    (run,) = published.float_runs(published.idle_runs(lines))
    assert (run.date, run.relative("inductor")) == ("2026-01-02", 10.0)


def test_races_with_amx_have_a_table_of_their_own(published, monkeypatch):
    lines = [
        race_line(f"2026-01-0{day}", intaglio=ms, **ALL, openvino_int8_default=5.0) for day, ms in ((1, 5.0), (2, 4.0))
    ]
    lines.append(race_line("2026-01-04", intaglio=3.0, executorch=1.0))  # with fewer engines
    lines.append(race_line("2026-01-02", batch=16, intaglio=4.0, executorch=6.0))
    for line in lines:
        line["cpu"] = {**line["cpu"], "flags": ["amx_int8"]}
    plain = race_line("2026-01-03", intaglio=9.0, **ALL)
    monkeypatch.setattr(published, "recorded", lambda name: [*lines, plain] if name == "race" else [])
    assert [run.date for run in published.all_runs()] == ["2026-01-03"]
    assert published.amx_table(published.amx_runs()).splitlines()[2:] == [
        "| ResNet-18 | 1 | **4.000** | 5.000 | 6.000 | 7.000 | – | 1.25 |",
        "| ResNet-18 | 16 | **4.000** | – | – | – | 6.000 | 1.50 |",
    ]


def test_engines_that_were_raced_once_have_the_newest_race_with_all_of_them(published, monkeypatch):
    others = dict.fromkeys(("ncnn", "mnn", "tract"), 9.0)
    lines = [race_line(f"2026-01-0{day}", intaglio=float(day), executorch=5.0, **others) for day in (1, 2)]
    lines.append(race_line("2026-01-03", intaglio=3.0, executorch=1.0))
    monkeypatch.setattr(published, "recorded", lambda name: lines if name == "race" else [])
    assert published.once_table().splitlines()[2:] == ["| ResNet-18 | **2.000** | 5.000 | 9.000 | 9.000 | 9.000 |"]


def test_texts_of_several_lengths_are_several_networks(published):
    lines = [race_line("2026-01-01", network="bert", tokens=n, intaglio=5.0, openvino_int8=6.0) for n in (384, 128)]
    titles = [run.title for run in published.int8_runs(published.idle_runs(lines))]
    assert titles == ["BERT-base (128 tokens)", "BERT-base (384 tokens)"]


def test_a_table_has_the_fastest_engine_in_bold_and_a_dash_for_one_that_was_not_measured(published):
    (run,) = published.idle_runs([race_line("2026-01-01", intaglio=5.0, openvino_int8=4.0, torchao=12.345678)])
    row = published.speed_table([run]).splitlines()[-1]
    assert row == "| ResNet-18 | 5.000 | **4.000** | – | 12.35 | 20 % |"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/zoo.md", "benchmarks/README.md"])
def test_pages_have_the_tables_of_the_recorded_results(page, published):
    assert ROOT / page in published.PAGES
    text = (ROOT / page).read_text(encoding="utf-8")
    assert published.REGION.search(text)
    assert text.count("<!-- table: ") == text.count("<!-- end of table -->") == len(published.REGION.findall(text))
    assert published.fill(text) == text, "the results have changed: run `python benchmarks/picture.py`"


def test_a_table_of_decoders_has_the_fastest_setting_of_each_engine_in_idle_runs():
    tables = script("decoder_tables")
    measured = {"intaglio": 4.0, "llama_cpp": 8.0, "llama_cpp_pure": 5.0}
    engines = {name: {"step_ms": [ms, 9.0], "bytes": 3e6, "sqnr_db": ms} for name, ms in measured.items()}
    shared = {"gb_per_s": 1.0, "engines": engines | {"openvino_32": {"failed": "it died"}}}
    arguments = {"network": "qwen3_06b", "bits": 4, "threads": 2}
    lines = [{"arguments": arguments, "results": shared | {"idle": idle}} for idle in (True, False)]
    head, rows = tables.steps(lines)
    assert head[3:] == ("intaglio", "llama.cpp", "OpenVINO", "fastest other / intaglio")
    assert rows == [("Qwen3-0.6B", "4", "2", "**4.00 (75 %)**", "5.00 (60 %)", tables.NOTHING, "1.25")]
    assert tables.steps(lines[1:])[1] == []


def test_another_number_in_a_table_is_found(published):
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    changed = text.replace("81.03 % | – | – |", "82.03 % | – | – |")
    assert published.fill(changed) == text != changed


def test_every_table_is_on_a_page(published):
    text = "".join(page.read_text(encoding="utf-8") for page in published.PAGES)
    assert {name for _, name in published.REGION.findall(text)} == set(published.TABLES)


def test_the_picture_has_the_recorded_numbers(published, picture):
    text = html.unescape(picture.FILE.read_text(encoding="utf-8"))
    expected = picture.description(published.all_runs())
    assert expected in text, "the results have changed: run `python benchmarks/picture.py`"


@pytest.mark.slow(reason="imports matplotlib and draws; the numbers in the picture are tested without it")
def test_the_picture_is_drawn_from_the_recorded_results(published, picture, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra docs has it")
    drawn = tmp_path / "speed.svg"
    picture.save(published.all_runs(), drawn)
    kept = picture.FILE.read_text(encoding="utf-8")
    if picture.creator() not in kept:
        pytest.skip(f"the picture was not drawn by {picture.creator()}")
    assert drawn.read_text(encoding="utf-8") == kept


# -- running scripts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", MEASURED)
def test_every_kind_of_kernel_is_timed(isa, monkeypatch):
    """The smallest tile of each result, and a depthwise one: what they count, not how fast they are."""
    kernels = script("microkernels")
    monkeypatch.setattr(kernels, "BLOCK_SECONDS", 1e-5)
    table = ISAS[isa]
    tiles = [spec for spec in table.specs() if (spec.rows, spec.blocks) in ((2, 1), (1, 4)) and not spec.clamps_float]
    depthwise = kernels.depthwise_specs(table)[:1]
    library = load(kernels.built(table, tiles, depthwise, "benchmark_kernels"))
    multiply = library.kernels_multiply
    multiply.restype, multiply.argtypes = kernels.ctypes.c_double, (kernels.ctypes.c_int64,)
    cases = [kernels.tile_case(library, index, spec, 64) for index, spec in enumerate(tiles)]
    cases += [kernels.depthwise_case(library, index, spec) for index, spec in enumerate(depthwise)]
    for case in cases:
        found = kernels.measure(case, limits.int8_counter(isa), multiply, 1)
        assert case.macs == case.outputs * case.bytes > 0
        assert all(math.isfinite(found[key]) and found[key] > 0 for key in ("gmacs", "share", "cycles_per_64"))


@pytest.mark.slow(reason="runs a benchmark; what it sums up is tested above")
def test_alternating_lengths_are_compared_with_repeated_lengths(capsys):
    """A few short ones; the figures themselves are the machine's."""
    script("lengths").main(["stack", "--count", "3", "--least", "2", "--most", "6", "--rounds", "1", "--threads", "1"])
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert found["islands"] == 0
    assert len(found["ratios"]) == len(found["milliseconds"]) == 3
    assert all(ratio > 0 for ratio in (found["ratio"], found["first"], *found["ratios"].values()))


@pytest.fixture(scope="module")
def zoo():
    return script("zoo_tables")


REPORT = """\
98.0 % of 2.5 M MACs and 7 of 12 operators in int8
2 float islands:
  aten.topk.default: no int8 kernel for this operator (model.gate)
  aten.sort.default x 2: no int8 kernel for this operator (model.gate, model.head)
1 float operator in the program:
  aten.add.Tensor: no operator next to it is quantized (model.head)"""


def zoo_line(model, *, quick=False, date="2026-01-01", **found):
    taken = {
        "family": "text",
        "most_used": False,
        "unedited": True,
        "macs_int8": 1.0,
        "islands": 0,
        "sqnr_db": [30.0, 20.5],
        "saved": True,
        "seconds": 12.3,
        "batch 1": [30.0],
        "report": "0 float islands",
    }
    return {"date": date, "arguments": {"quick": quick}, "results": {"model": model, **taken, **found}}


def test_the_newest_line_of_a_model_counts(zoo):
    ((title, (_, rows)),) = zoo.tables([zoo_line("bert", islands=3), zoo_line("bert", date="2026-01-02", quick=True)])
    assert title == zoo.FAMILIES["text"]
    assert rows == [("bert", "100.00 %", "0", "20.5", "–", "yes", "same bits", "12\\*")]


@pytest.mark.parametrize(
    ("saved", "cell"), [(True, "same bits"), (False, "**differs**"), ("ArtifactError: an operator of a library", "no")]
)
def test_models_that_cannot_be_saved_do_not_differ(zoo, saved, cell):
    ((_, (_, (row,))),) = zoo.tables([zoo_line("mixtral", saved=saved)])
    assert row[6] == cell


def test_calls_that_fail_are_named(zoo):
    ((_, (_, (row,))),) = zoo.tables([zoo_line("bert", **{"batch 3": "InputError: no", "40 tokens": [None]})])
    assert row[5] == "no: batch 3, 40 tokens"


def test_reasons_of_islands_are_listed_with_their_models(zoo):
    head, rows = zoo.islands([zoo_line("mixtral", islands=2, report=REPORT), zoo_line("bert")])
    assert head == ("reason", "operators", "models")
    assert rows == [("no int8 kernel for this operator", "`sort.default`, `topk.default`", "mixtral")]


def test_models_taken_blind_are_shown_as_found_and_as_they_are_now(zoo):
    found = zoo_line("blind/aria", family="blind", unedited=False, error="CaptureError: sizes\n  remedy: none")
    now = zoo_line("blind/aria", family="blind", date="2026-01-02", islands=1)
    island = zoo_line("blind/halonet", family="blind", islands=2, report=REPORT)
    _, rows = zoo.blind([found, now, island, zoo_line("bert")])
    assert rows[0] == ("aria", "**no**", "–", "–", "yes", "100.00 %", "1", "CaptureError: sizes")
    assert rows[1][1:7] == ("yes", "100.00 %", "2") * 2
    assert rows[1][7].startswith("`topk.default`: no int8 kernel for this operator, `sort.default`")
    assert "takes 1 of 1 models" in zoo.summary([found, zoo_line("bert")])


def test_failures_have_the_remedy_of_the_error(zoo):
    error = "CaptureError: LSTM: it has a size | that depends\n  remedy: use intaglio.eager"
    _, rows = zoo.failures([zoo_line("tagger", unedited=False, error=error), zoo_line("bert")])
    assert rows == [("tagger", "CaptureError: LSTM: it has a size / that depends", "use intaglio.eager")]


@pytest.mark.parametrize(("quick", "note"), [(False, ""), (True, "1 models (\\*) were quantized without")])
def test_the_summary_counts_models_that_are_taken(quick, note, zoo):
    text = zoo.summary([zoo_line("bert", most_used=True, quick=quick), zoo_line("tagger", unedited=False, macs_int8=0)])
    assert "takes 1 of 2 models unedited" in text
    assert note in text


def test_the_table_of_searches_takes_the_newest_run_of_an_idle_machine():
    def run(idle: bool, ms: float) -> dict:
        one = {"ms": ms, "db": 21.0}
        figures = {"target_db": 20.0, "int8": one, "greedy": one, "search": {**one, "seconds": 60.0}}
        return {"results": {"idle": idle, "minilm": figures}}

    head, rows = script("cost_tables").mixed_precision([run(True, 3.0), run(True, 2.0), run(False, 1.0)])
    reached = "2.000 ms, 21.0 dB"
    assert rows == [("MiniLM-L6 (128 tokens)", "20.0 dB", reached, reached, reached, "60 s")]
    assert len(head) == len(rows[0])


def test_the_table_of_accuracy_control_has_the_newest_run_of_an_idle_machine_for_each_metric():
    def run(idle: bool, ms: float, **arguments: str) -> dict:
        one = {"validation": 99.5, "agreement": 99.25, "top1": 80.0, "best_ms": ms}
        searches = {"intaglio": {"seconds": 60.0}, "nncf": {"seconds": 200.0}}
        engines = dict.fromkeys(("intaglio", "nncf", "nncf_default"), one)
        results = {"cifar_resnet20": {"searches": searches, "idle": idle, **engines}}
        return {"arguments": arguments, "results": results}

    lines = [run(True, 3.0), run(True, 2.0), run(True, 4.0, metric="labels"), run(False, 1.0, metric="classes")]
    head, rows = script("cost_tables").accuracy_aware(lines)
    assert rows == [
        ("ResNet-20", "labels", "`intaglio.search`", "99.50 %", "80.00 %", "4.000", "60 s"),
        ("", "", "NNCF, run by OpenVINO", "99.50 %", "80.00 %", "4.000 / 4.000", "200 s"),
        ("ResNet-20", "classes", "`intaglio.search`", "99.50 %", "99.25 %", "2.000", "60 s"),
        ("", "", "NNCF, run by OpenVINO", "99.50 %", "99.25 %", "2.000 / 2.000", "200 s"),
    ]
    assert len(head) == len(rows[0])


def test_the_table_of_few_samples_has_the_newest_run_of_each_network_with_all_numbers():
    tables = script("cost_tables")

    def run(network: str, decibels: float, *counts: int) -> dict:
        figures = {"sqnr_db": decibels, "agreement": 98.0}
        return {"results": {f"{network}/{n}/{recipe}": figures for n in counts for recipe in tables.CORRECTIONS}}

    lines = [
        run("minilm", 20.0, *tables.COUNTS),
        run("minilm", 25.0, *tables.COUNTS),
        run("minilm", 30.0, 1, 8),
        run("cifar_resnet20", 35.0, 64),
    ]
    head, rows = tables.few_samples(lines)
    cells = ["25.0 dB, 98.0 %"] * len(tables.CORRECTIONS)
    assert [row[:2] for row in rows] == [("MiniLM-L6", "1"), ("", "8"), ("", "64"), ("", "512")]
    assert all(list(row[2:]) == cells for row in rows)
    assert len(head) == len(rows[0])


def test_files_of_ncnn_have_int8_weights_and_scales(tmp_path):
    files = script("ncnn_files")
    lines = [
        "7767517",
        "5 5",
        "Input in0 0 1 in0",
        "Convolution a 1 1 in0 1 0=2 1=1 5=1 6=4",
        "ReLU r 1 1 1 2",
        "Convolution b 1 1 2 3 0=1 1=3 6=18 3=1 4=1",
        "InnerProduct c 1 1 3 out0 0=1 1=0 2=3",
    ]
    (tmp_path / "model.ncnn.param").write_text("\n".join(lines))
    first, second, third = np.float32([[1, -2], [0, 0.5]]), np.ones(18, np.float32), np.float32([1, 2, 3])
    mark, bias = bytes(4), np.float32([7, 8])
    stored = [mark, first.tobytes(), bias.tobytes(), mark, second.tobytes(), mark, third.tobytes()]
    (tmp_path / "model.ncnn.bin").write_bytes(b"".join(stored))
    head, layers = files.read_layers(tmp_path / "model.ncnn.param")
    param, weights = files.write_int8(tmp_path, layers, head, {"in0": 2.0, "2": 4.0, "3": 127.0})
    written = param.read_text().splitlines()
    assert written[3:] == [f"{lines[3]} 8=2", lines[4], f"{lines[5]} 8=2", f"{lines[6]} 8=2"]
    data = weights.read_bytes()
    assert data[:4] == np.uint32(files.INT8).tobytes()
    assert [*np.frombuffer(data, np.int8, 4, 4)] == [64, -127, 0, 127]
    scales = np.float32([127 / 2, 127 / 0.5, 127 / 2.0])
    assert data[8:28] == bias.tobytes() + scales.tobytes()
    assert [*np.frombuffer(data, np.int8, 18, 32)] == [31] * 18, "6 bits for Winograd's algorithm"

    layers = [files.Layer.of(line) for line in (*lines[2:4], "Split s 1 2 1 x y", "Convolution b 1 1 x 3 0=1 1=3 6=18")]
    assert files.value_read_in_int8(layers[1], layers) == "x"
    layers.append(files.Layer.of("BinaryOp add 2 1 3 y 4"))
    assert files.value_read_in_int8(layers[1], layers) is None
