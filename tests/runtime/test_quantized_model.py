"""Life of a `QuantizedModel`: threads, processes, copies, builds, what it tells of itself."""

import copy
import multiprocessing
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import intaglio
from intaglio import stages
from intaglio.errors import BuildError
from intaglio.runtime import QuantizedModel
from support import nets
from support.int8_models import assert_same, compiled, picture

# ---- threads and processes


@pytest.mark.case("backend 33")
def test_eight_threads_with_different_shapes_get_the_results_of_one():
    model, lowered = compiled(nets.Residual)
    inputs = [picture(1 + i % 5, i) for i in range(40)]
    expected = [lowered(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for found in (pool.map(model, inputs), pool.map(model, reversed(inputs))):
            assert_same(list(found), expected)
            expected.reverse()


@pytest.mark.case("backend 33")
def test_two_models_run_at_once():
    pairs = [compiled(nets.Residual), compiled(nets.ConvThenUnsupported)] * 10
    inputs = [picture(2, i, size) for i, size in enumerate([12, 10] * 10)]
    expected = [lowered(x) for (_, lowered), x in zip(pairs, inputs, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        assert_same(list(pool.map(lambda pair, x: pair[0](x), pairs, inputs)), expected)


@pytest.mark.case("problem 23", "backend 34")
def test_the_number_of_threads_may_change_between_calls_and_exceed_the_cores(many_threads):
    model, lowered = compiled(nets.Residual)
    expected = lowered(picture())
    for count in (1, 3, 2, 64, 1, 200):
        many_threads(count)
        assert_same(model(picture()), expected)


def in_child(connection, model: QuantizedModel) -> None:
    connection.send(model(picture()).tolist())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_too(many_threads):
    model, lowered = compiled(nets.Residual)
    many_threads(2)
    model(picture())
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(there, model))
    child.start()
    assert here.poll(30), "the child hangs"
    assert_same(torch.tensor(here.recv()), lowered(picture()))
    child.join(30)
    assert child.exitcode == 0
    assert_same(model(picture()), lowered(picture()))


# ---- copies, plans, builds


COPIES = {"copy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.case("problem 30", "frontends B11")
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("net", [nets.Residual, nets.ConvThenUnsupported])
def test_a_copy_computes_the_same(copied, net):
    model, _ = compiled(net)
    x = nets.example(net())
    expected = model(x)
    other = copied(model)
    assert_same((other(x), model(x)), (expected, expected))
    assert other.text("program") == model.text("program")
    assert repr(other) == repr(model)


def test_the_least_recently_used_plans_are_dropped():
    model, lowered = compiled(nets.Linears)
    model = copy.deepcopy(model)
    model.max_plans = 16
    x = torch.randn(1, 16)
    kept = model._plan_for([x])
    for batch in range(2, 3 * model.max_plans):
        model(torch.randn(batch, 16))
        assert_same(model(x), lowered(x))
        assert len(model._plans) <= model.max_plans
    assert model._plan_for([x]) is kept


def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(BuildError, match=r"isa='sse9': there are no kernels for sse9; allowed are .*portable"):
        stages.compile(compiled(nets.Linears)[1], isa="sse9")


@pytest.mark.case("problem 33")
def test_a_missing_compiler_is_an_error_that_says_so(fresh_cache, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildError, match=r"CXX is '/nowhere/g\+\+', which is not a program"):
        stages.compile(compiled(nets.Linears)[1])


@pytest.mark.slow(reason="compiles with a compiler that counts; tests of the compile cache count, too")
@pytest.mark.case("problem 26")
def test_a_program_in_the_cache_is_not_compiled_again(fresh_cache, monkeypatch, tmp_path):
    log, compiler = tmp_path / "log", tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    lowered = compiled(nets.Linears)[1]
    first = stages.compile(lowered, isa="portable")
    calls = log.read_text().count("\n")
    second = stages.compile(lowered, isa="portable")
    assert calls >= 1
    assert log.read_text().count("\n") == calls
    assert first.artifact.path == second.artifact.path


# ---- reports


class Islands(nets.ConvThenUnsupported):
    """Two float parts with int8 between and beside them."""

    def forward(self, x):
        y = self.conv1(x)
        return self.conv2(torch.erf(y) + y).cumprod(1)


@pytest.mark.case("problem 5")
def test_float_parts_run_and_are_reported_with_reasons():
    for net, operator in ((nets.ConvThenUnsupported, "aten.erf"), (Islands, "aten.cumprod")):
        model, lowered = compiled(net)
        x = nets.example(net(), 3)
        assert_same(model(x), lowered(x))
        assert len(model.islands) == model.coverage.islands >= 1
        assert any(operator in part.operator and part.reason for part in model.coverage.floats)
        assert operator in str(model.coverage)


@pytest.mark.slow(reason="quantizes a residual network with a part in float")
@pytest.mark.case("problem 4", "problem 20")
def test_assert_int8_requires_a_share_of_int8_macs():
    half = intaglio.quantize(nets.randomize(nets.Residual()), [picture()], skip=["fc", "stem.0"], progress=False)
    assert 0 < half.coverage.macs < 1
    half.assert_int8(macs=half.coverage.macs)
    with pytest.raises(AssertionError, match=r"% of MACs in int8, asked for 100\.00 %[\s\S]*fc"):
        half.assert_int8()
    compiled(nets.Residual)[0].assert_int8()


def test_every_stage_has_a_text():
    model = intaglio.quantize(nets.randomize(nets.Linears()), [torch.randn(4, 16)], progress=False)
    for stage in ("captured", "sites", "reference", "integer", "plan", "program"):
        assert model.text(stage).strip()
    with pytest.raises(
        intaglio.errors.InputError, match="'assembly' is not a stage; allowed are captured, quantizer, sites"
    ):
        model.text("assembly")
    assert repr(model).startswith("QuantizedModel(Linears: 100.0 % of MACs in int8, 0 float islands, ")


@pytest.mark.case("frontends B24")
def test_training_mode_is_refused_with_a_warning():
    model, _ = compiled(nets.Linears)
    with pytest.warns(UserWarning, match="cannot be trained"):
        assert model.train() is model
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.eval() is model
    assert not model.training


@pytest.mark.case("frontends B23", "problem 15", "problem 28")
def test_one_program_serves_every_batch():
    """Quantized from batches of 2; at 1, 7 and 64 each image has the result it has alone."""
    model = intaglio.quantize(nets.randomize(nets.OptionA()), [nets.example(nets.OptionA(), 2)], progress=False)
    images = nets.example(nets.OptionA(), 64, seed=5)
    alone = torch.cat([model(image[None]) for image in images])
    assert model.artifact.path.exists()
    for batch in (1, 7, 64):
        assert torch.equal(model(images[:batch]), alone[:batch])
