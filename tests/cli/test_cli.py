"""The command line: every command from end to end on a small model, what it prints, and how it fails."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import intaglio
from intaglio.cli import engines
from intaglio.cli.commands import bench, doctor
from intaglio.cli.engine_memory import EngineProcess
from intaglio.cli.options import TextStage
from intaglio.cli.show import show
from intaglio.errors import InputError, IntaglioError
from intaglio.native import cpu as machine
from intaglio.native import peak_throughput as limits
from intaglio.reporting.timing import measure_speed
from intaglio.runtime.saved.savable_model import SavableModel
from support.command_line import runner

BROUGHT = """
import intaglio
import torch
from torch import nn

print("imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.layer2 = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.cumsum(self.layer2(self.layer1(x)), 2).mean((2, 3)))

net = Net()
batches = [torch.randn(4, 3, 8, 8) for _ in range(2)]

example = batches[0]

def build():
    return Net()

def loader():
    return iter(batches)

def calibrate(model):
    for batch in batches:
        model(batch)

def accuracy(model):
    if isinstance(model, intaglio.QuantizedModel) and "skipped layer2 (aten.conv2d" not in model.text("sites"):
        return 0.5
    return 0.8

def broken(size):
    return Net()

number = 3
"""
MODULE = "brought_for_cli"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with a module of the user's in it."""
    (tmp_path / f"{MODULE}.py").write_text(BROUGHT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """`run(*words)`: exit code, stdout, stderr."""
    monkeypatch.setattr(bench, "PAUSE", 0)
    monkeypatch.setattr(measure_speed, "BLOCK_SECONDS", 0)
    return runner(capsys)


def ok(result):
    code, out, err = result
    assert code == 0, err
    return out


def parsed(result):
    return json.loads(ok(result))


# -- starting ---------------------------------------------------------------------------------------------------------


def fresh(text, *words):
    """A Python process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(intaglio.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", text, *words], capture_output=True, text=True, env=environment)


NO_TORCH = """
import runpy, sys
try:
    runpy.run_module("intaglio", run_name="__main__", alter_sys=True)
finally:
    assert "torch" not in sys.modules, "torch"
"""


@pytest.mark.parametrize("words", [("--help",), ("bench", "--help"), ("--version",)])
def test_help_does_not_wait_for_torch(words):
    ended = fresh(NO_TORCH, *words)
    assert ended.returncode == 0, ended.stderr
    assert "intaglio" in ended.stdout


def test_every_command_has_help(run):
    text = ok(run("--help"))
    shown = (
        "demo",
        "doctor",
        "quantize",
        "inspect",
        "compare",
        "report",
        "explain",
        "diff",
        "export",
        "verify",
        "bench",
    )
    for command in shown:
        assert command in text
        assert "--json" in ok(run(command, "--help"))


WITHOUT_TYPER = """
import runpy, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.parametrize(
    "start", ["runpy.run_module('intaglio', run_name='__main__')", "from intaglio.cli import main; main()"]
)
def test_without_typer_one_line_names_the_extra(start):
    ended = fresh(WITHOUT_TYPER + start, "--help")
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "intaglio[cli]" in line


@pytest.mark.slow(reason="a process that imports all of PyTorch; help does without it below")
def test_public_names_are_imported_at_first_use():
    text = """
import sys, intaglio
assert "torch" not in sys.modules
import intaglio.quant, intaglio.tune.compare_models
assert callable(intaglio.compare) and callable(intaglio.stages.capture)
assert all(hasattr(intaglio, name) for name in intaglio.__all__) and set(intaglio.__all__) <= set(dir(intaglio))
assert not hasattr(intaglio, "quantise")
"""
    ended = fresh(text)
    assert ended.returncode == 0, ended.stderr


# -- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("quantise",), "quantise"),
        (("inspect", "nothing"), "does not have the form MODULE:NAME"),
        (("inspect", "no_such_module:Net", "--example-shape", "1,3,8,8"), "no_such_module"),
        (("inspect", f"{MODULE}:Nett", "--example-shape", "1,3,8,8"), "nearest: Net"),
        (("inspect", f"{MODULE}.py:Net", "--example-shape", "1,3,8,8"), "is a file"),
        (("inspect", f"{MODULE}:number", "--example-shape", "1,3,8,8"), "cannot be called"),
        (("inspect", f"{MODULE}:broken", "--example-shape", "1,3,8,8"), "needs arguments"),
        (("inspect", f"{MODULE}:loader", "--example-shape", "1,3,8,8"), "must return an nn.Module"),
        (("inspect", f"{MODULE}:Net"), "--example-shape"),
        (("inspect", f"{MODULE}:Net", "--example-shape", "1,three"), "is not a shape"),
        (("inspect", f"{MODULE}:Net", "--stage", "sights"), "sights"),
        (("inspect", f"{MODULE}:Net", "--data", f"{MODULE}:calibrate"), "needs batches"),
        (("bench", f"{MODULE}:Net", "--against", "tensorrt"), "unknown engine tensorrt"),
    ],
)
def test_an_invalid_command_exits_with_2(run, words, said):
    code, _, err = run(*words)
    assert code == 2
    assert said in " ".join(err.replace("│", "").split())


def test_an_error_of_intaglio_is_text_on_stderr_and_1(run):
    code, out, err = run("inspect", f"{MODULE}:Net", "--example-shape", "2,3,8,8", "--match", "layr1", "--json")
    assert (code, out) == (1, "")
    assert "layr1" in err
    assert "layer1" in err
    assert "Traceback" not in err


# -- inspect ----------------------------------------------------------------------------------------------------------

INSPECT = ("inspect", f"{MODULE}:Net", "--example-shape", "2,3,8,8")


def test_inspect_lists_operators_kernels_sites_and_reasons(run):
    found = parsed(run(*INSPECT, "--json"))
    by_operator = {op["operator"]: op for op in found["operators"]}
    assert by_operator["aten.relu.default"]["int8"]
    assert not by_operator["aten.cumsum.default"]["int8"]
    assert by_operator["aten.cumsum.default"]["reason"]
    assert ["aten.conv2d.default", "aten.relu.default"] in [kernel["operators"] for kernel in found["fusions"]]
    assert found["sites"]["weight"] == 3
    assert found["macs"] == 8 * 8 * 8 * 3 * 9 + 6 * 6 * 8 * 8 * 9 + 8 * 4
    text = ok(run(*INSPECT))
    assert "aten.cumsum.default" in text
    assert "conv2d + relu" in text


@pytest.mark.case("problem 35")
@pytest.mark.parametrize(
    ("selector", "paths"),
    [
        ("layer1", {"layer1.0", "layer1.1"}),
        ("layer1.*", {"layer1.0", "layer1.1"}),
        ("re:layer[12].*", {"layer1.0", "layer1.1", "layer2"}),
        ("type:Linear", {"head"}),
        ("op:aten.cumsum", {""}),
    ],
)
def test_match_lists_what_a_selector_selects(run, selector, paths):
    found = parsed(run(*INSPECT, "--match", selector, "--json"))["matches"][selector]
    assert {op["path"] for op in found} == paths
    assert selector in ok(run(*INSPECT, "--match", selector))


def test_inspect_obeys_the_selection(run, folder):
    (folder / "recipe.toml").write_text('["head"]\nquantize = false\n')
    for words in (("--skip", "head"), ("--recipe", "recipe.toml"), ("--only", "layer1", "--only", "layer2")):
        operators = parsed(run(*INSPECT, *words, "--json"))["operators"]
        assert [op["int8"] for op in operators if op["path"] == "head"] == [False]


def test_a_recipe_has_a_name_or_is_a_file(run, folder):
    assert parsed(run(*INSPECT, "--recipe", "accurate", "--json"))["operators"]
    code, _, said = run(*INSPECT, "--recipe", "acurate")
    assert code == 2
    assert "'acurate' is neither a file nor the name of a recipe" in " ".join(said.replace("│", "").split())


@pytest.mark.parametrize(
    ("stage", "said"), [("captured", "aten.cumsum.default"), ("sites", "layer2"), ("integer", "u8["), ("program", "{")]
)
def test_inspect_prints_a_stage(run, stage, said):
    assert said in ok(run(*INSPECT, "--stage", stage))
    found = parsed(run(*INSPECT, "--stage", stage, "--json"))
    assert found["stage"] == stage
    assert said in found["text"]


def test_inspect_names_kernels_by_their_operators_alone(run):
    text = ok(run(*INSPECT))
    assert "operators that run as one int8 kernel" in text
    assert not [word for word in ("fusion row", "anchor", "product_") if word in text]


# -- quantize, and files ----------------------------------------------------------------------------------------------

QUANTIZE = ("quantize", f"{MODULE}:build", "--data", f"{MODULE}:loader", "--out", "net.intaglio")
SEARCH = ("search", *QUANTIZE[1:], "--evaluate", f"{MODULE}:accuracy")
WRITTEN: list[bytes] = []


@pytest.fixture
def written(run, folder):
    """The file that QUANTIZE writes, in the current folder; the command runs once for all tests."""
    if not WRITTEN:
        ok(run(*QUANTIZE))
        WRITTEN.append((folder / "net.intaglio").read_bytes())
    (folder / "net.intaglio").write_bytes(WRITTEN[0])


@pytest.mark.slow(reason="benchmarks a file; a saved file is compared below")
def test_quantize_writes_a_file_that_inspect_and_bench_read(run, folder):
    found = parsed(run(*QUANTIZE, "--samples", "4", "--skip", "head", "--json"))
    assert found["file_bytes"] == (folder / "net.intaglio").stat().st_size
    assert found["coverage"]["macs"] < 1
    seen = parsed(run("inspect", "net.intaglio", "--json"))
    assert seen["coverage"]["macs"] == found["coverage"]["macs"]
    assert "the recipe leaves it in float" in ok(run("inspect", "net.intaglio"))
    assert "u8[" in ok(run("inspect", "net.intaglio", "--stage", "integer"))
    alone = parsed(run("bench", "net.intaglio", "--seconds", "0.01", "--no-memory", "--json"))
    assert list(alone["engines"]) == ["int8"]
    words = ("bench", "net.intaglio", "--float", f"{MODULE}:net", "--seconds", "0.01", "--no-memory", "--json")
    with_float = parsed(run(*words))
    assert set(with_float["engines"]) == {"int8", "eager"}
    code, _, err = run("inspect", "net.intaglio", "--match", "head")
    assert code == 2
    assert "MODULE:NAME" in err


@pytest.mark.slow(reason="prints twelve stages; four are printed above")
def test_every_stage_that_a_file_has_can_be_printed(run, written):
    listed = parsed(run("inspect", "net.intaglio", "--json"))["stages"]
    assert {"quantizer", "parameters", "corrections"} <= set(listed)
    assert set(listed) <= {stage.value for stage in TextStage}
    for stage in listed:
        assert ok(run("inspect", "net.intaglio", "--stage", stage)).strip()


def test_compare_names_the_worst_operators_of_a_saved_file(run, written):
    words = ("compare", "net.intaglio", "--float", f"{MODULE}:net", "--data", f"{MODULE}:batches")
    text = ok(run(*words, "--samples", "4", "--worst", "2"))
    assert "over 4 samples" in text
    assert "layer1.0 (aten.conv2d.default)" in text
    assert text.count("--skip ") == 2
    assert "leaves in float: " in text
    assert "verdict: " in text
    found = parsed(run(*words, "--json"))
    assert found["samples"] == 8
    assert {row["path"] for row in found["rows"]} >= {"layer1.0", "layer2", "head"}
    assert set(found["skip"]) <= {"layer1.0", "layer2", "head", "op:aten.mean.dim"}


@pytest.mark.slow(reason="measures and writes a report; its parts are tested in reporting")
def test_report_writes_a_page_and_a_summary(run, folder, written):
    words = ("report", "net.intaglio", "--float", f"{MODULE}:net", "--data", f"{MODULE}:batches", "--calls", "2")
    text = ok(run(*words, "--tries", "1", "--model-explorer", "explorer"))
    assert "explorer holds the graphs and node data of Model Explorer" in text
    assert {path.name for path in (folder / "explorer").iterdir()} >= {"graph.json", "precision.json"}
    assert "<!DOCTYPE html>" in (folder / "report.html").read_text(encoding="utf-8")
    assert "verdict: " in text
    assert "best change that was tried: " in text
    assert "report.html" in text
    found = parsed(run(*words, "--tries", "0", "--samples", "4", "--json"))
    assert found["version"] == 1
    assert found["comparison"]["samples"] == 4
    (folder / "before.json").write_text(json.dumps(found))
    assert ok(run(*words, "--tries", "0", "--against", "before.json", "--out", "both.html", "--quiet")) == ""
    assert "So far there" in (folder / "both.html").read_text(encoding="utf-8")


def test_report_without_data_says_what_is_missing(run, folder, written):
    text = ok(run("report", "net.intaglio", "--calls", "0"))
    assert "note: errors were not measured" in text
    assert run("report", "net.intaglio", "--float", f"{MODULE}:net")[0] == 2
    code, _, err = run("report", "net.intaglio", "--out", "nowhere/report.html")
    assert code == 1
    assert "choose a file in an existing folder" in err


def test_explain_prints_what_the_explanation_says(run, folder, written):
    text = ok(run("explain", "net.intaglio", "layer2", "--calls", "0"))
    assert re.search(r"^  Module +layer2$", text, re.MULTILINE)
    assert "note: errors were not measured" in text
    words = ("net.intaglio", "layer2", "--float", f"{MODULE}:net", "--data", f"{MODULE}:batches", "--calls", "0")
    found = parsed(run("explain", *words, "--json"))
    (one,) = found["operators"]
    assert "Own error" in [fact["label"] for fact in one["facts"]]
    assert one["changes"][0]["python"] == "skip=['layer2']"
    (folder / "report.json").write_text(ok(run("report", "net.intaglio", "--calls", "0", "--json")))
    assert ok(run("explain", "report.json", "layer2")) == text
    assert run("explain", "net.intaglio", "layer2", "--data", f"{MODULE}:batches")[0] == 2
    code, _, err = run("explain", "net.intaglio", "layer3")
    assert code == 1
    assert "nearest: " in err


def test_quantize_prints_coverage_and_size(run):
    text = ok(run(*QUANTIZE))
    assert "MACs" in text
    assert "calibration data: " in text
    assert "0.00 MB" not in text
    found = parsed(run(*QUANTIZE, "--json"))["accuracy"]
    assert found["samples"] == 8
    assert found["sqnr_db"] > 20
    assert found["verdict"] in " ".join(text.split())
    assert "net.intaglio" in text


def test_quantize_tunes_when_asked(run, monkeypatch):
    asked = []
    monkeypatch.setattr("intaglio.backends.native_backend.search", lambda lowered, isa, inputs: asked.append(isa) or {})
    ok(run(*QUANTIZE))
    assert not asked
    ok(run(*QUANTIZE, "--tune"))
    assert len(asked) == 1


@pytest.mark.slow(reason="a search; its function and the options of the command are tested apart")
def test_search_reaches_a_metric_and_writes_the_recipe_and_the_journal_of_it(run, folder):
    words = ("--max-drop", "0.01", "--minimize", "size", "--recipe-out", "found.toml", "--journal", "found.jsonl")
    text = ok(run(*SEARCH, *words))
    assert "metric of the float model: 0.8; accepted from 0.792 on" in text
    assert "chosen: metric 0.8" in text
    found = parsed(run(*SEARCH, *words, "--json"))
    assert found["search"]["changes"]["layer2"] is None
    assert found["search"]["trials"][0]["metric"] == 0.5
    assert (folder / "found.jsonl").exists()
    again = parsed(run(*QUANTIZE, "--recipe", "found.toml", "--json"))
    assert again["coverage"] == found["coverage"]


def test_a_search_without_a_metric_is_refused(run):
    code, _, err = run("search", *QUANTIZE[1:])
    assert code == 2
    assert "--evaluate" in err


@pytest.mark.slow(reason="quantizes with a function as data; quantize prints its coverage above")
def test_data_may_be_a_function_that_runs_the_model(run, folder):
    words = ("quantize", f"{MODULE}:net", "--data", f"{MODULE}:calibrate", "--out", "net.intaglio")
    code, _, err = run(*words)
    assert code == 2
    assert "pass --example" in " ".join(err.replace("│", "").split())
    ok(run(*words, "--example", f"{MODULE}:example"))
    assert (folder / "net.intaglio").exists()


def test_a_folder_that_is_missing_is_found_before_the_work(run):
    code, _, err = run(*QUANTIZE[:-1], "nowhere/net.intaglio")
    assert code == 2
    assert "nowhere" in err
    assert "--out" in err
    code, _, err = run(*SEARCH, "--recipe-out", "elsewhere/found.toml")
    assert code == 2
    assert "elsewhere" in err
    assert "--recipe-out" in err
    assert MODULE not in sys.modules


def test_a_version_without_save_is_an_error_before_the_work(run, monkeypatch):
    monkeypatch.delattr(SavableModel, "save")
    code, out, err = run(*QUANTIZE)
    assert (code, out) == (1, "")
    assert "cannot write files" in err
    assert MODULE not in sys.modules


def test_a_damaged_file_is_an_error_of_intaglio(run, folder):
    (folder / "net.intaglio").write_bytes(b"not a model")
    code, out, err = run("inspect", "net.intaglio")
    assert (code, out) == (1, "")
    assert "Traceback" not in err


# -- bench ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="times three engines; engines of others are raced below")
@pytest.mark.case("problem 23")
def test_bench_times_engines_alternately_and_names_missing_ones(run, monkeypatch):
    found_spec = bench.importlib.util.find_spec
    monkeypatch.setattr(
        bench.importlib.util, "find_spec", lambda name, *a: None if name == "openvino" else found_spec(name, *a)
    )
    words = (
        "bench",
        f"{MODULE}:net",
        "--data",
        f"{MODULE}:batches",
        "--seconds",
        "0.01",
        "--against",
        "eager,openvino",
        "--no-memory",
    )
    threads = torch.get_num_threads()
    found = parsed(run(*words, "--batch", "6", "--threads", "1", "--json"))
    assert torch.get_num_threads() == threads
    assert found["threads"] == 1
    assert found["inputs"] == [[6, 3, 8, 8]]
    assert len(found["engines"]["eager"]["blocks_ms"]) == len(found["engines"]["int8"]["blocks_ms"]) == bench.BLOCKS
    assert "openvino" in found["engines"]["openvino"]["absent"]
    assert found["sqnr_db"] > 20
    assert "openvino was not measured" in ok(run(*words))


def test_bench_races_int8_engines_of_others_calibrated_with_the_same_batches(run, monkeypatch):
    given = []

    def build(model, example, calibration, threads):
        given.append((example, calibration, threads))
        return lambda x: model(x) + 0.5

    monkeypatch.setitem(engines.ENGINES, "torchao", engines.peer_engine(build))
    monkeypatch.setitem(engines.PACKAGES, "torchao", ())
    for name in ("onnxruntime-int8", "openvino-int8", "openvino-int8-f32"):
        monkeypatch.setitem(engines.PACKAGES, name, ("no_such_package",))
    words = ("bench", f"{MODULE}:net", "--data", f"{MODULE}:batches", "--batch", "2", "--against", "int8")
    found = parsed(run(*words, "--seconds", "0.01", "--threads", "1", "--no-memory", "--json"))
    [(example, calibration, threads)] = given
    assert threads == 1
    assert len(calibration) > 1
    assert {inputs[0].shape for inputs in (example, *calibration)} == {example[0].shape}
    engine = found["engines"]["torchao"]
    assert engine["sqnr_db"] < found["engines"]["int8"]["sqnr_db"]
    shares = engine["percentiles_ms"]
    assert 0 < shares["50"] <= shares["90"] <= shares["99"]
    assert found["engines"]["openvino-int8"] == {"absent": "no_such_package not installed"}


def test_an_engine_of_others_refuses_inputs_by_name():
    engine = engines.peer_engine(lambda *arguments: None)
    with pytest.raises(InputError, match="passed by keyword"):
        engine(None, ((), {"x": 1}), 1, [], None)


def test_percentiles_are_times_of_calls():
    assert bench.percentiles([3.0, 1.0, 2.0]) == {"50": 2.0, "90": 3.0, "99": 3.0}
    assert bench.percentiles([float(number) for number in range(1, 101)]) == {"50": 50.0, "90": 90.0, "99": 99.0}


def test_compare_detects_a_float_model_with_other_weights(run, folder, written):
    (folder / "other.py").write_text(BROUGHT.replace("manual_seed(0)", "manual_seed(1)"))
    text = ok(run("bench", "net.intaglio", "--float", "other:net", "--seconds", "0.01", "--no-memory"))
    assert "little in common" in text
    sys.modules.pop("other")


def test_an_engine_that_fails_is_a_result(run, monkeypatch):
    def fail(model, call, threads, calibration, folder):
        raise ValueError("no such operator\nat line 3")

    monkeypatch.setitem(engines.ENGINES, "compile", fail)
    found = parsed(
        run(
            "bench",
            f"{MODULE}:net",
            "--example-shape",
            "2,3,8,8",
            "--seconds",
            "0.01",
            "--against",
            "compile",
            "--no-memory",
            "--json",
        )
    )
    assert found["engines"]["compile"] == {"failed": "ValueError: no such operator"}
    assert found["ratios"] == {}


@pytest.mark.slow(reason="a process imports PyTorch")
def test_bench_measures_the_memory_of_a_file_in_a_process_of_its_own(run, written):
    engines_of_file = parsed(run("bench", "net.intaglio", "--seconds", "0.01", "--json"))["engines"]
    assert list(engines_of_file) == ["int8"]
    memory = engines_of_file["int8"]["memory_mb"]
    assert 50 < memory["start"] < memory["resident"] <= memory["peak"] < 4000


@pytest.mark.slow(reason="three processes import PyTorch; the memory of a file is measured always")
def test_bench_measures_the_memory_of_each_engine_in_a_process_of_its_own(run):
    words = ("bench", f"{MODULE}:net", "--data", f"{MODULE}:batches", "--seconds", "0.01", "--against")
    found = parsed(run(*words, "eager,onnxruntime", "--json"))["engines"]
    assert set(found) == {"int8", "eager", "onnxruntime"}
    for engine in found.values():
        memory = engine["memory_mb"]
        assert 50 < memory["start"] < memory["resident"] <= memory["peak"] < 4000


@pytest.mark.slow(reason="a process imports PyTorch; the memory of a file is measured always")
def test_the_memory_of_a_process_grows_with_its_model(folder, tmp_path):
    (folder / "large.py").write_text("import torch\n\ndef net():\n    return torch.nn.Linear(8192, 8192)\n")
    process = EngineProcess("eager", "large:net", 1, "", str(tmp_path))
    found = process.memory(((torch.ones(1, 8192),), {}), ())
    weight = 4 * 8192**2 / 1e6
    assert weight < found["resident"] - found["start"] < 1.3 * weight


@pytest.mark.slow(reason="a process imports PyTorch; an engine that fails is a result above")
def test_an_engine_whose_process_fails_is_named_with_the_reason(folder, tmp_path):
    (folder / "broken.py").write_text("raise ValueError('no weights here')\n")
    with pytest.raises(IntaglioError, match="no weights here"):
        EngineProcess("eager", "broken:net", 1, "", str(tmp_path)).memory(((), {}), ())


def test_bench_prints_the_memory_and_what_it_is_of(capsys):
    engine = {"best_ms": 1.0, "median_ms": 1.0, "memory_mb": {"start": 230.4, "resident": 250.6, "peak": 300.2}}
    other = {"best_ms": 1.0, "median_ms": 1.0, "memory_problem": "its process ended"}
    result = {"threads": 2, "engines": {"int8": engine, "eager": other}, "ratios": {}}
    show(result, False, lambda result: bench.timing_parts(result, ""))
    printed = capsys.readouterr().out
    for part in ("resident MB", "251", "300", "of which 230 MB", "the memory of eager was not measured: its process"):
        assert part in printed


@pytest.mark.case("problem 19")
def test_a_ratio_needs_a_difference_larger_than_the_spread():
    assert bench.speedup([4.0, 4.2, 4.1], [1.0, 1.1, 1.0])["ratio"] == pytest.approx(4.1)
    assert bench.speedup([4.0, 9.0, 4.1], [1.0, 1.1, 1.0])["ratio"] is None
    assert bench.speedup([1.0, 1.0], [1.0, 1.0])["ratio"] is None


def test_bench_states_a_ratio_only_above_noise(capsys):
    engine = {"best_ms": 1.0, "median_ms": 1.0, "blocks_ms": [1.0]}
    for ratio, said in ((None, "may be noise"), (2.0, "int8 is 2.00 times as fast as eager"), (0.5, "slower")):
        ratios = {"eager": {"ratio": ratio, "difference_ms": 1.0, "spread_ms": 2.0}}
        result = {"threads": 2, "engines": {"int8": engine, "eager": engine}, "ratios": ratios}
        show(result, False, lambda result: bench.timing_parts(result, "batch 1"))
        assert said in capsys.readouterr().out


# -- demo and doctor --------------------------------------------------------------------------------------------------


def test_demo_quantizes_and_compares(run, monkeypatch):
    monkeypatch.setattr("intaglio.cli.commands.demo.DEMO_SECONDS", 0.01)
    monkeypatch.setattr("intaglio.cli.commands.demo.TRAINING_STEPS", 20)
    found = parsed(run("demo", "--json"))
    assert found["coverage"]["macs"] == 1
    assert found["same_answer"] > 0.9
    assert set(found["speed"]["engines"]) == {"int8", "eager"}


@pytest.mark.slow(reason="the demo once more, as text")
def test_demo_prints_what_it_finds(run, monkeypatch):
    monkeypatch.setattr("intaglio.cli.commands.demo.DEMO_SECONDS", 0.01)
    monkeypatch.setattr("intaglio.cli.commands.demo.TRAINING_STEPS", 20)
    assert "accuracy" in ok(run("demo"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(limits, "PEAK_SECONDS", 0.001)
    monkeypatch.setattr(limits, "SMALLEST_READ", 1 << 20)
    monkeypatch.setattr(machine, "caches", lambda: machine.Caches(1 << 15, 1 << 18, 1 << 19))
    monkeypatch.setattr(doctor, "busy_share", lambda: 0.0)


@pytest.mark.case("problem 22")
def test_doctor_measures_and_explains(run, quick):
    found = parsed(run("doctor", "--json"))
    assert found["compiler"]
    for kind in ("memory", *limits.best_probes()):
        assert math.isfinite(found["measured"][kind]["one_core"])
        assert found["measured"][kind]["one_core"] > 0
    assert [isa["name"] for isa in found["isas"]] == list(machine.isas_of_architecture())
    assert found["expect"].count(".") >= 1
    text = ok(run("doctor"))
    assert found["cpu"] in text
    assert "kernel cache" in text


def test_doctor_without_a_compiler_names_the_trap(run, monkeypatch, quick):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = parsed(run("doctor", "--json"))
    assert found["measured"] is None
    assert any("no C++ compiler" in trap for trap in found["traps"])
    assert "none" in ok(run("doctor"))


def test_doctor_measures_no_rates_on_a_busy_machine(run, monkeypatch, quick):
    monkeypatch.setattr(doctor, "busy_share", lambda: 0.6)
    monkeypatch.setattr(limits, "measure", lambda cores: pytest.fail("rates were measured"))
    found = parsed(run("doctor", "--json"))
    assert found["measured"] is None
    text = ok(run("doctor"))
    assert "other programs use 60 % of the processors, so no rates were measured" in text
    assert "G MAC/s" not in text


INT8_INSTRUCTIONS = {"amx_int8": "tdpbusd", "avx512vnni": "vpdpbusd", "avxvnni": "vpdpbusd ymm", "avx2": "vpmaddwd"}


@pytest.mark.parametrize("isa", [isa for isa in INT8_INSTRUCTIONS if isa in machine.isas()])
def test_every_probe_this_cpu_runs_gives_a_rate(isa, quick, monkeypatch):
    """Also the AVX2 probes on a CPU that has better ones."""
    worse = machine.isas()[machine.isas().index(isa) :]
    monkeypatch.setattr(machine, "isas", lambda: worse)
    measured = limits.measure(1)
    assert measured["int8"]["with"] == INT8_INSTRUCTIONS[isa]
    assert measured["fp32"]["one_core"] > 0


@pytest.mark.case("problem 22")
def test_a_machine_without_vector_units_measures_memory_only(quick, monkeypatch):
    monkeypatch.setattr(machine, "isas", lambda: ("portable",))
    measured = limits.measure(1)
    assert measured["int8"] is measured["fp32"] is None
    assert measured["memory"]["one_core"] > 0


HEALTHY = {
    "cores": 8,
    "cores_allowed": 8,
    "cgroup_cores": None,
    "torch_threads": 8,
    "busy": 0.0,
    "compiler": {"path": "g++"},
    "isas": [{"name": "avx2", "has": True, "kernels": True}],
    "cache": {"bytes": 0, "limit_bytes": 1},
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compiler": None}, "no C++ compiler"),
        ({"busy": 0.9}, "90 % of the processors"),
        ({"torch_threads": 16}, "torch.set_num_threads(8)"),
        ({"cgroup_cores": 2.0, "torch_threads": 2}, "CPU quota is 2 cores"),
        ({"cores": 16}, "8 of 16 cores"),
        ({"isas": [{"name": "portable", "has": True, "kernels": True}]}, "portable"),
        ({"cache": {"bytes": 1, "limit_bytes": 1}}, "nearly full"),
    ],
)
def test_each_trap_is_reported_by_itself(change, said):
    assert doctor.find_traps(HEALTHY) == []
    (trap,) = doctor.find_traps({**HEALTHY, **change})
    assert said in trap


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_is_read(tmp_path: Path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert doctor.cgroup_cores(tmp_path) == cores
