"""Public functions called with arguments that cannot be meant: each call ends in a result or in an error of intaglio.

Every argument of a valid call is replaced by each bad value. The slow test takes all functions and all values.
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import intaglio
from intaglio import annotation, calibration, eager, patterns, stages
from intaglio.errors import IntaglioError
from support.public_names import public_objects
from support.torchvision_stub import import_torchvision

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
DATA = [X, X + 1]
INTEGERS = torch.ones(4, 4, dtype=torch.int8)
QUANTIZED_WEIGHT = stages.QuantizedWeight.of(INTEGERS, torch.ones(4))


class Branching(nn.Module):
    """Runs a model or not, by the values of its input, so that only the model inside can be captured."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.abs().sum() > 0 else x


FEW_VALUES: dict[str, Any] = {
    "None": None,
    "an integer": 5,
    "a negative integer": -1,
    "NaN": float("nan"),
    "an empty string": "",
    "a path that does not exist": "~/nothere/nothere",
    "a long string": "x" * 5000,
    "a null character": "a\0b",
    "a misspelt name": "acurate",
    "a dictionary": {"x": 1},
    "a list of None": [None],
    "an object": object(),
    "a class": nn.Linear,
    "a tensor": X,
    "an empty tensor": X[:0],
}
MORE_VALUES: dict[str, Any] = {
    "zero": 0,
    "a huge integer": 2**70,
    "infinity": float("inf"),
    "a huge number": 1e300,
    "a complex number": 3 + 4j,
    "a NumPy number": np.float32(1),
    "True": True,
    "bytes": b"x",
    "a bracket": "[",
    "integers as keys": {1: 2},
    "an empty dictionary": {},
    "an empty list": [],
    "an empty tuple": (),
    "a nested list": [[]],
    "a set": set(),
    "a range": range(3),
    "an iterator": iter([]),
    "an exception": Exception,
    "a function": lambda *args: None,
    "a data type": torch.float32,
    "a number in a tensor": X[0, 0],
    "a tensor of NaN": X * float("nan"),
    "a ragged tensor": None,
    "an array": np.zeros(3),
    "an array of text": np.array("a"),
}
Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def stage() -> dict[str, Any]:
    """Return every stage of one small model, by name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    captured = stages.capture(model, (X,))
    prepared = stages.prepare(captured)
    ranges = stages.calibrate(prepared, DATA)
    reference = stages.convert(prepared, ranges)
    lowered = stages.requantize(reference)
    recorded = eager.prepare(model, (X,))
    recorded(X)
    return {
        "model": model,
        "captured": captured,
        "prepared": prepared,
        "ranges": ranges,
        "reference": reference,
        "lowered": lowered,
        "planned": stages.plan(lowered),
        "int8": stages.compile(lowered),
        "parted": intaglio.quantize(Branching(model).eval(), DATA, progress=False),
        "recorded": recorded,
        "converted": eager.convert(recorded),
    }


def quick_calls(stage: Mapping[str, Any]) -> Calls:
    """Return valid calls of functions that take no time, by name: function and keyword arguments."""
    node = next(iter(stage["captured"].module.graph.nodes))
    entries = stage["reference"].parameters
    name = next(iter(entries.entries))
    recipe, pattern = intaglio.Recipe(), patterns.op("conv2d")
    return {
        "CompileOptions": (intaglio.CompileOptions, {}),
        "Image": (intaglio.Image, {}),
        "Image.normalize": (intaglio.Image().normalize, {"pixels": X}),
        "Image.pixels": (intaglio.Image().pixels, {"channels": 3}),
        "Recipe": (intaglio.Recipe, {}),
        "Recipe.of": (intaglio.Recipe.of, {"entries": {"a": None}}),
        "a setting of Recipe.of": (lambda value: intaglio.Recipe.of({"a": value}), {"value": None}),
        "bits of Recipe.of": (lambda value: intaglio.Recipe.of({"a": {"bits": value}}), {"value": None}),
        "Recipe.named": (intaglio.Recipe.named, {"name": "default"}),
        "Recipe.given": (intaglio.Recipe.given, {"recipe": "default"}),
        "Recipe.with_selection": (recipe.with_selection, {"skip": "a"}),
        "Recipe.with_parameters": (recipe.with_parameters, {"parameters": None}),
        "Recipe.from_toml": (intaglio.Recipe.from_toml, {"text": ""}),
        "a value in TOML": (lambda value: intaglio.Recipe.from_toml(f"x = {value}"), {"value": 1}),
        "a table in TOML": (lambda value: intaglio.Recipe.from_toml(f"[parameters]\na = {value}"), {"value": 1}),
        "Recipe.load": (intaglio.Recipe.load, {"path": "recipe.toml"}),
        "Recipe.save": (recipe.save, {"path": "recipe.toml"}),
        "Setting": (intaglio.Setting, {}),
        "Quantizer": (stages.Quantizer, {}),
        "Quantizer.from_toml": (stages.Quantizer.from_toml, {"text": ""}),
        "COptions": (stages.COptions, {"folder": "c"}),
        "OnnxOptions": (stages.OnnxOptions, {"path": "a.onnx"}),
        "InductorOptions": (stages.InductorOptions, {}),
        "Ranges.load": (stages.Ranges.load, {"path": "ranges.json"}),
        "Ranges.from_json": (stages.Ranges.from_json, {"text": ""}),
        "Ranges.save": (stage["ranges"].save, {"path": "ranges.json"}),
        "Ranges.merge": (stage["ranges"].merge, {"other": stage["ranges"]}),
        "Ranges.merge_files": (stages.Ranges.merge_files, {"paths": []}),
        "Parameters": (stages.Parameters, {"entries": {}}),
        "Parameters.load": (stages.Parameters.load, {"path": "parameters.json"}),
        "Parameters.from_json": (stages.Parameters.from_json, {"text": ""}),
        "Parameters.save": (entries.save, {"path": "parameters.json"}),
        "scale of Parameters.changed": (entries.changed, {"name": name, "scale": 0.5}),
        "zero point of Parameters.changed": (entries.changed, {"name": name, "zero_point": 0}),
        "Parameters.split": (entries.split, {"names": []}),
        "Prepared.with_method": (stage["prepared"].with_method, {"method": "mse"}),
        "stages.plan": (stages.plan, {"lowered": stage["lowered"]}),
        "stages.requantize": (stages.requantize, {"reference": stage["reference"]}),
        "stages.Requantizer": (stages.Requantizer().requantize, {"reference": stage["reference"]}),
        "stages.imported_recipe": (stages.imported_recipe, {"model": stage["model"]}),
        "stages.read_checkpoint": (stages.read_checkpoint, {"path": "checkpoint"}),
        "QuantizedWeight": (stages.QuantizedWeight, {"quantized": INTEGERS, "steps": torch.ones(1, 4, 1), "group": 4}),
        "QuantizedWeight.of": (
            stages.QuantizedWeight.of,
            {"quantized": INTEGERS, "scales": torch.ones(4), "offsets": None, "activations": "float", "group": None},
        ),
        "eager.coverage": (eager.coverage, {"converted": stage["converted"]}),
        "eager.assert_int8": (eager.assert_int8, {"converted": stage["converted"], "macs": 0.0}),
        "eager.clipping": (eager.clipping, {"converted": stage["converted"]}),
        "eager.parameters": (eager.parameters, {"converted": stage["converted"]}),
        "eager.rewrite": (eager.rewrite, {"converted": stage["converted"]}),
        "eager.scriptable": (eager.scriptable, {"reference": stage["reference"]}),
        "load": (intaglio.load, {"path": "model.int8"}),
        "Report.load": (intaglio.Report.load, {"path": "report.json"}),
        "load_into": (intaglio.load_into, {"path": "model.int8", "float_model": stage["model"]}),
        "PartlyQuantizedModel.assert_int8": (stage["parted"].assert_int8, {"macs": 0.0}),
        "PartlyQuantizedModel.save": (stage["parted"].save, {"path": "parted.int8"}),
        "PartlyQuantizedModel.text": (stage["parted"].text, {"stage": "plan"}),
        "PartlyQuantizedModel.compare": (
            stage["parted"].compare,
            {"float_model": Branching(stage["model"]).eval(), "calls": [(X,)], "samples": 2},
        ),
        "QuantizedModel.save": (stage["int8"].save, {"path": "model.int8"}),
        "QuantizedModel.export_c": (stage["int8"].export_c, {"folder": "c"}),
        "QuantizedModel.text": (stage["int8"].text, {"stage": "plan"}),
        "QuantizedModel.assert_int8": (stage["int8"].assert_int8, {"macs": 0.0}),
        "QuantizedModel.warm": (lambda call: stage["int8"].warm(call), {"call": (X,)}),
        "a call of the int8 model": (lambda x: stage["int8"](x), {"x": X}),
        "a call of the captured model": (lambda x: stage["captured"](x), {"x": X}),
        "a call of the reference": (lambda x: stage["reference"](x), {"x": X}),
        "a call of the integer graph": (lambda x: stage["lowered"](x), {"x": X}),
        "patterns.builtin": (lambda name: patterns.builtin(name), {"name": "conv2d"}),
        "patterns.op": (lambda kinds, operand: patterns.op(kinds, operand), {"kinds": "add", "operand": pattern}),
        "patterns.seq": (lambda kinds: patterns.seq(kinds), {"kinds": "conv2d"}),
        "patterns.const": (patterns.const, {"name": "a"}),
        "patterns.wildcard": (patterns.wildcard, {"name": "a"}),
        "patterns.quantize": (patterns.quantize, {"x": 1.0, "scale": 1.0, "zero_point": 0, "low": 0, "high": 255}),
        "patterns.dequantize": (patterns.dequantize, {"q": 1.0, "scale": 1.0, "zero_point": 0}),
        "patterns.QuantizerPattern": (patterns.QuantizerPattern, {"name": "a", "pattern": pattern}),
        "patterns.Pattern": (patterns.Pattern, {}),
        "patterns.OpDef": (patterns.OpDef, {"name": "a"}),
        "patterns.Roles": (patterns.Roles, {}),
        "annotation.annotate_node": (annotation.annotate_node, {"node": node, "annotation": annotation.Annotation()}),
        "annotation.annotation_of": (annotation.annotation_of, {"node": node}),
        "annotation.Annotation": (annotation.Annotation, {}),
        "annotation.Composed": (annotation.Composed, {"annotators": []}),
        "annotation.CustomObserver": (annotation.CustomObserver, {"observer": nn.ReLU}),
        "annotation.Dynamic": (annotation.Dynamic, {"mode": "token"}),
        "annotation.Fixed": (annotation.Fixed, {"scale": 1.0, "zero_point": 0}),
        "annotation.Observed": (annotation.Observed, {}),
        "annotation.QuantizedAs": (annotation.QuantizedAs, {}),
        "annotation.SameAs": (annotation.SameAs, {"place": node}),
        "annotation.get_symmetric_quantization_config": (annotation.get_symmetric_quantization_config, {}),
        "annotation.get_default_x86_inductor_quantization_config": (
            annotation.get_default_x86_inductor_quantization_config,
            {},
        ),
        "X86Quantizer.set_global": (annotation.X86Quantizer().set_global, {"config": None}),
        "X86Quantizer.set_module_name": (annotation.X86Quantizer().set_module_name, {"name": "a", "config": None}),
        "X86Quantizer.set_module_type": (
            annotation.X86Quantizer().set_module_type,
            {"kind": nn.Linear, "config": None},
        ),
        "X86Quantizer.set_function_type": (
            annotation.X86Quantizer().set_function_type,
            {"function": torch.cat, "config": None},
        ),
        "calibration.DatasetManager": (
            lambda **given: list(calibration.DatasetManager(**given)),
            {"data": X, "batch_size": 2, "num_samples": 3, "columns": None},
        ),
        "calibration.share": (lambda **given: list(calibration.share(**given)), {"data": DATA}),
        "calibration.GlobalCalibrationCallback": (calibration.GlobalCalibrationCallback, {"scale": 1.0}),
        "calibration.AverageMaxCalibrationCallback": (calibration.AverageMaxCalibrationCallback, {}),
        "calibration.KLDivergenceCalibrationCallback": (calibration.KLDivergenceCalibrationCallback, {}),
    }


def long_calls(stage: Mapping[str, Any]) -> Calls:
    """Return valid calls of functions that capture, calibrate or compile, by name."""
    model, prepared, captured = stage["model"], stage["prepared"], stage["captured"]
    quiet = {"progress": False}
    return {
        "quantize": (intaglio.quantize, {"model": model, "data": DATA, **quiet}),
        "search": (intaglio.search, {"model": model, "data": DATA, "evaluate": lambda model: 1.0, **quiet}),
        "compare": (intaglio.compare, {"exact": model, "quantized": stage["int8"], "data": DATA}),
        "report": (
            intaglio.report,
            {"float_model": model, "model": stage["int8"], "data": DATA, "samples": 4, "calls": 1, "tries": 0},
        ),
        "explain": (
            intaglio.explain,
            {"model": stage["int8"], "where": "0", "float_model": model, "data": DATA, "samples": 4, "calls": 1},
        ),
        "stages.capture": (stages.capture, {"model": model, "example_inputs": (X,)}),
        "stages.annotate": (stages.annotate, {"captured": captured}),
        "stages.prepare": (stages.prepare, {"captured": captured}),
        "stages.calibrate": (
            stages.calibrate,
            {"prepared": prepared, "data": DATA, "samples": 4, "nonfinite": "error", "first_batch": 0, "group": None},
        ),
        "stages.correct": (stages.correct, {"prepared": prepared, "ranges": stage["ranges"], "data": DATA}),
        "stages.equalize": (stages.equalize, {"prepared": prepared, "data": DATA}),
        "stages.convert": (stages.convert, {"prepared": prepared, "ranges": stage["ranges"]}),
        "stages.with_weights": (stages.with_weights, {"model": model, "weights": {"0": QUANTIZED_WEIGHT}}),
        "from_checkpoint": (intaglio.from_checkpoint, {"path": "checkpoint", "data": DATA, "recipe": None}),
        "stages.from_qdq": (stages.from_qdq, {"model": model, "example_inputs": (X,)}),
        "stages.compile": (
            stages.compile,
            {"stage": stage["lowered"], "isa": None, "tune": False, "on_new_shape": "plan", "float_model": None},
        ),
        "a backend of stages.compile": (stages.compile, {"stage": stage["lowered"], "backend": "native"}),
        "the backend c": (stages.compile, {"stage": stage["lowered"], "backend": "c", "folder": "c"}),
        "the backend onnx": (
            stages.compile,
            {"stage": stage["reference"], "backend": "onnx", "path": "a.onnx", "sums": "uint8"},
        ),
        "eager.prepare": (eager.prepare, {"model": model, "example_inputs": (X,)}),
        "eager.convert": (eager.convert, {"prepared": stage["recorded"]}),
        "eager.fusions": (eager.fusions, {"model": model, "example_inputs": (X,)}),
        "calibration.Calibrator": (
            lambda **given: calibration.Calibrator(**given).calibrate(),
            {"prepared": prepared, "data": DATA, "cache": 0},
        ),
        "a quantizer given to prepare": (
            lambda **given: stages.prepare(captured, stages.Quantizer(**given)),
            dict.fromkeys(("input", "patterns", "operators", "annotator", "int8_buffers"), ()) | {"annotator": None},
        ),
    }


def arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> list[str]:
    """Return the names of a function's arguments that have no own test."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]
    return list(dict.fromkeys([*given, *own]))


def raw_errors(calls: Calls, values: Mapping[str, Any]) -> Iterator[str]:
    """Call every function with every value for every argument; yield errors that are not intaglio's."""
    for name, (function, given) in calls.items():
        for argument in arguments(function, given):
            for label, value in values.items():
                try:
                    function(**{**given, argument: value})
                except IntaglioError:
                    continue
                except Exception as error:
                    yield f"{name}({argument}={label}): {type(error).__name__}: {str(error)[:200]}"


@pytest.fixture
def quiet(tmp_path, monkeypatch):
    """Run in an empty folder, which is the home folder too, without the messages of data checks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    logging.getLogger("intaglio").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("intaglio").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore")
def test_bad_arguments_give_results_or_errors_of_intaglio(stage):
    assert list(raw_errors(quick_calls(stage), FEW_VALUES)) == []


@pytest.mark.slow(reason="quantizes and compiles a model for each value that is allowed")
@pytest.mark.usefixtures("quiet")
@pytest.mark.filterwarnings("ignore")
def test_any_bad_argument_of_any_function_gives_a_result_or_an_error_of_intaglio(stage):
    values = {**FEW_VALUES, **MORE_VALUES, "a ragged tensor": torch.nested.nested_tensor([X[0], X[0, :2]])}
    values |= {f"the {name}": value for name, value in stage.items()}
    with contextlib.suppress(ImportError):
        import_torchvision()  # transformers, which reads checkpoints, imports it
    assert list(raw_errors({**quick_calls(stage), **long_calls(stage)}, values)) == []


def test_every_public_function_has_a_valid_call(stage):
    called = {name.removeprefix("stages.") for name in (*quick_calls(stage), *long_calls(stage))}
    called |= {name.partition(".")[0] for name in called} | {f"eager.{name}" for name in ("calls",)}
    functions = {name.removeprefix("stages.") for name, found in public_objects() if not isinstance(found, type)}
    assert functions - called - {"annotation.get_linear_dynamic_fp16_config"} == set()
