"""Files, processes, installation."""

import io
import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch

import intaglio
from intaglio import numerics, stages
from intaglio.quant.calibrate.tensor_statistics import Statistics
from support import nets
from support.int8_models import assert_same, compiled, picture
from support.lowering import captured_net, quantized
from support.project_files import ROOT


@pytest.mark.case("problem 30")
@pytest.mark.parametrize("net", [nets.Residual, nets.ConvThenUnsupported])
def test_torch_save_keeps_a_model_as_any_module(net):
    """Problem 30."""
    model, _ = compiled(net)
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    x = nets.example(net(), 3)
    assert_same(torch.load(memory, weights_only=False)(x), model(x))


@pytest.mark.case("problem 31")
def test_a_file_is_about_a_quarter_of_the_float_weights(tmp_path):
    """Problem 31: weights are in it once, as bytes."""
    float_model = nets.randomize(nets.Linears((128, 512, 256)))
    model = stages.compile(quantized(float_model, torch.randn(8, 128))[1])
    model.save(tmp_path / "m.intaglio", library=False)
    before = sum(p.nbytes for p in float_model.parameters())
    assert (tmp_path / "m.intaglio").stat().st_size < 0.35 * before
    assert model.coverage.bytes_before == before
    assert model.coverage.bytes_after < 0.3 * before


@pytest.mark.case("problem 34")
def test_loading_does_not_quantize_again(tmp_path, monkeypatch):
    """Problem 34: weights are read, not rounded; no step of quantization runs."""
    model, _ = compiled(nets.Residual)
    model.save(tmp_path / "m.intaglio")
    expected = model(picture())

    def never(*_, **__):
        raise AssertionError("a file holds integers; there is nothing to quantize")

    for name in ("quantize", "quantize_bias", "symmetric_scale", "affine_qparams", "fit_weight_scale"):
        monkeypatch.setattr(numerics, name, never)
    for trust in (True, False):
        assert_same(intaglio.load(tmp_path / "m.intaglio", trust=trust)(picture()), expected)


@pytest.mark.case("problem 39")
def test_dependencies_are_few_and_only_pytorch_has_an_upper_bound():
    """Problem 39."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[><=~;! ]", entry)[0] for entry in project["dependencies"]}
    assert names == {"torch", "numpy", "safetensors", "rich", "google-re2"}
    bounded = [entry for entry in project["dependencies"] if re.search(r"==|~=|<", entry)]
    assert bounded == ["torch>=2.13,<2.14"], "only PyTorch, whose private names we use, has an upper bound"
    assert "<" not in project["requires-python"]


@pytest.mark.slow(reason="a process imports PyTorch")
@pytest.mark.case("problem 26", "problem 39")
def test_importing_compiles_nothing_and_needs_no_compiler(tmp_path):
    """Problems 26 and 39."""
    environment = {**os.environ, "CXX": "/nowhere/g++", "INTAGLIO_CACHE_DIR": str(tmp_path / "cache")}
    code = "import intaglio; intaglio.quantize; intaglio.Recipe; intaglio.compare"
    environment["PYTHONPATH"] = str(ROOT / "src")
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.case("problem 39")
def test_statistics_have_one_size_however_much_data_they_saw():
    """Problem 39: calibration streams; what grows with the number of batches is the two extrema of each."""
    model, captured = captured_net(nets.MaxPoolNet)
    prepared = stages.prepare(captured)
    sizes = []
    counts = (1, 20)
    for batches in counts:
        stages.calibrate(prepared, (nets.example(model, 4, seed=seed) for seed in range(batches)))
        kept = [observer.statistics for observer in prepared.observers.values()]
        large = {"bins", "sketch", "history"}
        plain = [value for s in kept for name, value in vars(s).items() if name not in large]
        assert all(value is None or isinstance(value, (int, float)) for value in plain)
        assert all(len(ends) == 2 for s in kept for ends in s.history.values())
        assert max(len(s.history) for s in kept) == sum(counts[: len(sizes) + 1])
        sizes.append(sum(s.bins.nbytes + s.sketch.nbytes for s in kept))
    empty = Statistics()
    assert sizes[0] == sizes[1] == len(prepared.observers) * (empty.bins.nbytes + empty.sketch.nbytes)
