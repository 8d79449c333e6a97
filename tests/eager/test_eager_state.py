"""Define-by-run: copies, pickles, state dictionaries, parameters from files, the explicit graph, judging."""

import copy
import functools
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import eager, stages
from intaglio.errors import ArtifactError, CalibrationError, InputError
from support import nets
from support.project_files import TESTS
from support.slow_params import slow_params, slow_params_except


class Residual(nn.Module):
    """Modules, functions, tensors held by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3) / 8)
        self.head = nn.Linear(8, 5)
        self.register_buffer("shift", torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(F.conv2d(x, self.kernel, padding=1) + x) + self.shift
        return self.head(x.mean((2, 3)))


class EarlyExit(nn.Module):
    """Two recordings behind the first: which one depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.near, self.far = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.first(x))
        if x.mean().item() > 1:
            return {"y": self.near(x.mean((2, 3)))}
        return {"y": self.far(F.relu(self.second(x)).mean((2, 3)))}


class Recurrent(nn.Module):
    """A loop over time, and a result of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = c = x.new_zeros(x.size(0), 8)
        found = []
        for step in range(x.size(1)):
            h, c = self.cell(x[:, step], (h, c))
            found.append(self.out(h))
        return torch.stack(found, 1), [h, c]


def images(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) * scale


def sequences(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed)) * scale


MODELS = {"residual": (Residual, images), "early exit": (EarlyExit, images), "recurrent": (Recurrent, sequences)}
SCALES = (1.0, 30.0, 0.5)


def calibrated(name: str = "residual", first: int = 0, **options) -> tuple[nn.Module, nn.Module]:
    """The float model, and a prepared one that has run with batches from seed ``first`` on."""
    kind, batch = MODELS[name]
    torch.manual_seed(0)
    model = nets.randomize(kind())
    prepared = eager.prepare(model, batch(99), **options)
    for seed, scale in enumerate(SCALES):
        prepared(batch(first + seed, scale))
    return model, prepared


def outputs(model: nn.Module, name: str = "residual") -> list[Tensor]:
    results = [model(MODELS[name][1](50 + seed, scale)) for seed, scale in enumerate(SCALES)]
    return torch.utils._pytree.tree_leaves(results)


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def differ(a: list[Tensor], b: list[Tensor]) -> bool:
    return any(not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_and_loaded(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def counts(prepared: nn.Module) -> dict[str, int]:
    segments = eager.session_of(prepared).segments
    return {
        f"{index} {name}": observer.statistics.count
        for index, segment in enumerate(segments)
        for name, observer in segment.prepared.observers.items()
    }


# -- copies and pickles -----------------------------------------------------------------------------------------------


@functools.cache
def converted_once(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A converted model that is copied and not changed, and its results."""
    converted = eager.convert(calibrated(name)[1])
    return converted, outputs(converted, name)


@pytest.mark.case("frontends B11")
@pytest.mark.parametrize("name", slow_params_except("early exit", of=MODELS, reason="other models take the same ways"))
@pytest.mark.parametrize(
    "way",
    [
        *slow_params(copy.deepcopy, reason="copies and pickles hold the same state as a saved file"),
        saved_and_loaded,
        *slow_params(
            lambda m: pickle.loads(pickle.dumps(m)), reason="copies and pickles hold the same state as a saved file"
        ),
    ],
)
def test_a_copy_of_a_converted_model_gives_the_same_bits(name, way):
    """B11: whatever way it was copied, and so does a copy of the copy that has not run."""
    converted, expected = converted_once(name)
    twin = way(converted)
    assert_same(outputs(way(twin), name), expected)
    assert_same(outputs(twin, name), expected)
    assert twin is not converted
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in converted.parameters())


@pytest.mark.case("frontends B11")
@pytest.mark.parametrize("name", slow_params_except("early exit", of=MODELS, reason="other models take the same ways"))
@pytest.mark.parametrize(
    "way", [*slow_params(copy.deepcopy, reason="a saved and loaded model is a copy, too"), saved_and_loaded]
)
def test_a_copy_of_a_prepared_model_has_statistics_of_its_own(name, way):
    """B11: equal to those it was copied from, and counted on by itself."""
    prepared = calibrated(name)[1]
    twin = way(prepared)
    before = counts(prepared)
    assert counts(twin) == before
    assert min(before.values()) > 0
    expected = outputs(eager.convert(prepared), name)
    assert_same(outputs(eager.convert(twin), name), expected)
    for seed in range(3):
        twin(MODELS[name][1](seed, 100.0))
    assert counts(prepared) == before
    assert sum(counts(twin).values()) > sum(before.values())
    assert differ(outputs(eager.convert(twin), name), expected)


@pytest.mark.slow(reason="starts a process; copies in this process are pickled too")
@pytest.mark.case("frontends B11")
def test_another_process_loads_and_runs_it(tmp_path):
    """B11: functions are kept by name, graphs are made again."""
    converted = eager.convert(calibrated()[1])
    torch.save((converted, outputs(converted)), tmp_path / "model.pt")
    script = (
        "import importlib, sys, torch\n"
        "sys.path += sys.argv[3:]\n"
        "model, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "tests = importlib.import_module(sys.argv[2])\n"
        "tests.assert_same(tests.outputs(model), expected)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt"), __name__, str(TESTS), str(TESTS.parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.case("frontends B11")
def test_the_given_model_is_not_changed():
    """B11: training flags, attributes, hooks and state dictionary are as before."""
    model = Residual()
    model.train()
    model.stem[1].eval()
    flags = [module.training for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    eager.convert(run_once(eager.prepare(model, images(0))))
    assert [module.training for module in model.modules()] == flags
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert not any(m._state_dict_hooks or m._load_state_dict_pre_hooks for m in model.modules())
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def run_once(prepared: nn.Module) -> nn.Module:
    prepared(images(1))
    return prepared


def test_functions_of_pytorch_are_pickled_by_their_names():
    _, prepared = calibrated("early exit")
    before, after = (functions(each) for each in (prepared, pickle.loads(pickle.dumps(prepared))))
    assert before == after
    assert torch.Tensor.mean in after


def functions(model: nn.Module) -> set[object]:
    return {event.function for segment in eager.session_of(model).segments for event in segment.events}


# -- state dictionaries -----------------------------------------------------------------------------------------------


def fresh(name: str = "residual", **options) -> nn.Module:
    """Prepared with the same example, other weights, never run but the ways it can go."""
    kind, batch = MODELS[name]
    torch.manual_seed(1)
    prepared = eager.prepare(nets.randomize(kind(), seed=5), batch(99), **options)
    return prepared


def test_a_state_dictionary_has_the_models_names_and_ours():
    model, prepared = calibrated()
    for quantized in (prepared, eager.convert(prepared)):
        state = quantized.state_dict()
        assert list(state)[: len(model.state_dict())] == list(model.state_dict())
        ours = [name for name in state if name not in model.state_dict()]
        assert ours == ["_auto_quant_state.0", "_auto_quant_state.flow"]
        assert all(state[name].dtype == torch.uint8 for name in ours)
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.slow(reason="prepares a recurrent model three times; states of converted models are loaded below")
@pytest.mark.case("frontends A12")
@pytest.mark.parametrize("name", ["recurrent", *slow_params("residual", reason="the other model has a test like it")])
def test_a_prepared_model_with_a_loaded_state_converts_to_the_original(name):
    """A12: of a prepared model (statistics), and of a converted one (parameters)."""
    prepared = calibrated(name)[1]
    converted = eager.convert(prepared)
    expected = outputs(converted, name)
    for original in (prepared, converted):
        again = fresh(name)
        with pytest.raises(CalibrationError, match="never called"):
            eager.convert(again)
        again.load_state_dict(saved_and_loaded(original.state_dict()))
        assert_same(outputs(eager.convert(again), name), expected)


@pytest.mark.slow(reason="converts a network twice; weights that are loaded are noticed below")
@pytest.mark.case("frontends A12")
@pytest.mark.parametrize(
    "name", slow_params_except("residual", of=MODELS, reason="other models have the same kind of state")
)
def test_a_converted_model_of_other_data_becomes_the_original(name):
    """A12: outputs differ before and are equal after."""
    original = eager.convert(calibrated(name)[1])
    other = eager.convert(calibrated(name, first=20)[1])
    expected = outputs(original, name)
    assert differ(outputs(other, name), expected)
    other.load_state_dict(original.state_dict())
    assert_same(outputs(other, name), expected)
    assert_same(outputs(copy.deepcopy(other), name), expected)


@pytest.mark.slow(reason="calibrates twice; loaded statistics are converted in other tests")
def test_a_loaded_prepared_model_continues_calibration():
    _, prepared = calibrated()
    again = fresh()
    again.load_state_dict(prepared.state_dict())
    for model in (prepared, again):
        model(images(7))
    assert counts(again) == counts(prepared)
    assert_same(outputs(eager.convert(again)), outputs(eager.convert(prepared)))


def test_a_converted_model_inside_another_keeps_its_state_there():
    original = nn.Sequential(eager.convert(calibrated()[1]), nn.Softmax(-1))
    other = nn.Sequential(eager.convert(run_once(fresh())), nn.Softmax(-1))
    state = original.state_dict()
    assert "0._auto_quant_state.0" in state
    other.load_state_dict(state)
    assert_same(outputs(other), outputs(original))


MOVABLE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = torch.relu(self.f(x))
        torch.add(self.calls, 1, out=self.calls)
        return self.g(torch.relu(x - 0.1))
"""


@pytest.mark.slow(reason="imports and calibrates the same code in two folders")
def test_strict_does_not_depend_on_the_folder_of_the_code(tmp_path):
    """Turns and operators outside of recordings are known by path, operator and order, not by file."""

    def calibrated_in(folder: str, first_line: str) -> nn.Module:
        file = tmp_path / folder / "movable.py"
        file.parent.mkdir()
        file.write_text(first_line + MOVABLE)
        names = {"__name__": "movable"}
        exec(compile(file.read_text(), str(file), "exec"), names)
        torch.manual_seed(0)
        prepared = eager.prepare(names["Net"]().eval(), torch.randn(4, 8))
        for _ in range(3):
            prepared(torch.randn(4, 8))
        return eager.convert(prepared, strict=True)

    here, there = calibrated_in("here", ""), calibrated_in("there", "# moved down\n")
    there.load_state_dict(here.state_dict())
    x = torch.randn(4, 8)
    assert torch.equal(there(x), here(x))
    assert str(tmp_path) not in bytes(here.state_dict()["_auto_quant_state.flow"].tolist()).decode()


@pytest.mark.slow(reason="calibrates for the messages of load_state_dict")
def test_missing_and_unexpected_entries_are_reported_like_in_pytorch():
    model, prepared = calibrated()
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"_auto_quant_state.0\""):
        fresh().load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"extra\""):
        fresh().load_state_dict({**prepared.state_dict(), "extra": torch.ones(1)})
    found = fresh().load_state_dict(model.state_dict(), strict=False)
    assert found.missing_keys == ["_auto_quant_state.0", "_auto_quant_state.flow"]
    with pytest.raises(RuntimeError, match="_auto_quant_state"):
        Residual().load_state_dict(prepared.state_dict())


class Wider(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


@pytest.mark.slow(reason="a state of another shape is refused below")
def test_a_state_of_another_recording_is_refused():
    _, prepared = calibrated()
    other = eager.prepare(nets.randomize(Wider()), images(0))
    with pytest.raises(InputError, match=r"the operators differ: .*return.* in the state, .*sigmoid.* here"):
        other.load_state_dict(prepared.state_dict())
    model, both = calibrated("early exit")
    once = eager.prepare(model, images(99))
    with pytest.raises(InputError, match=r"_auto_quant_state\.\d: the model has no recording that begins with"):
        once.load_state_dict(both.state_dict())


def test_a_damaged_state_is_refused():
    _, prepared = calibrated()
    state = prepared.state_dict()
    for broken in (torch.zeros(5, dtype=torch.uint8), torch.zeros(2), 3):
        with pytest.raises(
            ArtifactError, match=r"_auto_quant_state\.0: it does not hold the state of a prepared or converted model"
        ):
            fresh().load_state_dict({**state, "_auto_quant_state.0": broken})
    later = torch.frombuffer(bytearray(b'{"version": 99}'), dtype=torch.uint8)
    with pytest.raises(ArtifactError, match="its version is 99"):
        fresh().load_state_dict({**state, "_auto_quant_state.0": later})


def test_statistics_are_refused_by_a_converted_model():
    _, prepared = calibrated()
    with pytest.raises(InputError, match="statistics of a prepared model, but this model is converted"):
        eager.convert(prepared).load_state_dict(prepared.state_dict())


# -- other weights ----------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="weights that are loaded into a submodule take the same way below")
def test_loaded_weights_are_quantized_again():
    """The model's own dictionary has weights only: parameters of activations stay, those of weights follow."""
    _, prepared = calibrated()
    converted = eager.convert(prepared)
    before = outputs(converted)
    other = nets.randomize(Residual(), seed=9)
    converted.load_state_dict(other.state_dict(), strict=False)
    wanted = eager.prepare(other, images(99))
    (given,) = eager.parameters(eager.convert(prepared))
    assert_same(outputs(converted), outputs(eager.convert(wanted, given.without_weights())))
    assert differ(outputs(converted), before)


def test_weights_loaded_into_a_submodule_are_noticed():
    converted = eager.convert(calibrated()[1])
    before = outputs(converted)
    state = copy.deepcopy(converted.head.state_dict())
    converted.head.load_state_dict({name: -tensor for name, tensor in state.items()})
    after = outputs(converted)
    assert differ(after, before)
    converted.head.load_state_dict(state)
    assert_same(outputs(converted), before)
    converted.load_state_dict({n: t.clone() for n, t in converted.state_dict().items()}, assign=True)
    assert_same(outputs(converted), before)


def test_statistics_of_other_weights_are_dropped(caplog):
    _, prepared = calibrated()
    prepared.load_state_dict(nets.randomize(Residual(), seed=9).state_dict(), strict=False)
    with pytest.raises(CalibrationError, match="never called"):
        eager.convert(prepared)
    assert "calibrate again" in caplog.text


# -- parameters -------------------------------------------------------------------------------------------------------


@pytest.mark.case("frontends B13")
@pytest.mark.parametrize(
    "name", ["residual", *slow_params("recurrent", reason="parameters of loops are those of their layers")]
)
def test_parameters_replace_calibration_data(name):
    """B13: in place of calibration; save, load, save gives the same text."""
    model, prepared = calibrated(name)
    converted = eager.convert(prepared)
    (found,) = eager.parameters(converted)
    again = eager.prepare(model, MODELS[name][1](99))
    assert_same(outputs(eager.convert(again, found), name), outputs(converted, name))
    assert_same(outputs(eager.convert(again, [found.without_weights()]), name), outputs(converted, name))
    assert stages.Parameters.from_json(found.to_json()).to_json() == found.to_json()


@pytest.mark.slow(reason="converts six times; parameters replace calibration above, too")
@pytest.mark.case("frontends B13")
def test_a_recipe_file_with_parameters_reproduces_outputs_without_data(tmp_path):
    """B13: save, load, save is identical; a changed entry takes effect; calibrating again overrides."""
    settings = {"stem.0": {"weights": "tensor"}, "head": {"method": "minmax"}}
    model, prepared = calibrated(recipe=settings)
    converted = eager.convert(prepared)
    recipe = intaglio.Recipe.of(settings).with_parameters(eager.parameters(converted)[0])
    recipe.save(tmp_path / "a.toml")
    loaded = intaglio.Recipe.load(tmp_path / "a.toml")
    loaded.save(tmp_path / "b.toml")
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()
    again = eager.prepare(model, images(99), loaded)
    assert_same(outputs(eager.convert(again)), outputs(converted))
    edited = loaded.with_parameters(loaded.parameters.changed("#0/input.x", scale=0.5))
    assert differ(outputs(eager.convert(eager.prepare(model, images(99), edited))), outputs(converted))
    again(images(3, 200.0))
    assert differ(outputs(eager.convert(again)), outputs(converted))


@pytest.mark.slow(reason="calibrates for one entry of a recipe")
@pytest.mark.case("frontends B13")
def test_an_operator_that_a_recipe_leaves_in_float_has_no_parameters():
    """B13: None for one operator takes effect."""
    _, prepared = calibrated(recipe={"head": {"quantize": False}})
    assert not any("head" in name for name in eager.parameters(eager.convert(prepared))[0].entries)
    assert any("head" in name for name in eager.parameters(eager.convert(calibrated()[1]))[0].entries)


@pytest.mark.slow(reason="the larger model; parameters of one recording are read above")
def test_parameters_of_several_recordings_are_given_one_by_one():
    _, prepared = calibrated("early exit")
    converted = eager.convert(prepared)
    found = eager.parameters(converted)
    assert len(found) == len(eager.session_of(prepared).segments) > 1
    assert_same(outputs(eager.convert(prepared, found), "early exit"), outputs(converted, "early exit"))
    with pytest.raises(InputError, match=r"they are for 1 recordings, but the prepared model has \d recordings\n  0: "):
        eager.convert(prepared, found[0])


# -- the explicit graph -----------------------------------------------------------------------------------------------


@pytest.mark.case("frontends B9")
def test_the_explicit_graph_has_the_operators_and_gives_the_bits():
    """B9: two convolutions, one linear, quantized on the way in and behind each region; compiled it is the same."""
    converted = eager.convert(calibrated()[1])
    reference = eager.rewrite(converted)
    names = [str(node.target) for node in reference.module.graph.nodes if node.op == "call_function"]
    assert names.count("aten.conv2d.default") == 2
    assert names.count("aten.linear.default") == 1
    assert not any("batch_norm" in name for name in names)
    quantizes = names.count("quantized_decomposed.quantize_per_tensor.default")
    assert quantizes == sum(site.role == "activation" for site in reference.annotations.sites)
    assert names.count("quantized_decomposed.dequantize_per_tensor.default") >= quantizes
    assert_same(outputs(stages.compile(reference)), outputs(converted))


@pytest.mark.slow(reason="scripts and traces; the explicit graph has the operators above")
@pytest.mark.case("frontends B9")
@pytest.mark.parametrize(
    "recipe", [None, *slow_params({"activations": "token"}, reason="scales made per call in the same script")]
)
def test_torchscript_takes_the_explicit_graph(recipe):
    """B9: scripted, and traced."""
    options = {} if recipe is None else {"recipe": intaglio.Recipe.named("int8_dynamic")}
    reference = eager.rewrite(eager.convert(calibrated(**options)[1]))
    module, x = eager.scriptable(reference), images(51)
    for made in (torch.jit.script(module), torch.jit.trace(module, x), saved_script(torch.jit.script(module))):
        assert torch.equal(made(x), reference(x))
    assert torch.equal(torch.jit.trace(reference.module, x)(x)[0], reference(x))


def saved_script(scripted: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


def test_rewrite_refuses_a_model_with_branches_and_names_them():
    converted = eager.convert(calibrated("early exit")[1])
    with pytest.raises(InputError, match=r"recordings\n  0: .*first.*test_eager_state.py:\d+, in forward\n  1: "):
        eager.rewrite(converted)
    with pytest.raises(InputError, match="prepared, not converted"):
        eager.rewrite(calibrated()[1])
    with pytest.raises(InputError, match="not prepared"):
        eager.rewrite(Residual())


# -- fusions ----------------------------------------------------------------------------------------------------------


def test_fusions_are_module_paths_and_functions_in_order():
    model = Residual()
    assert eager.fusions(model, images(0)) == [("stem.0", "stem.1", "stem.2"), ("::conv2d", "::add", "::relu")]
    assert model.training
    skipped = eager.fusions(model, images(0), {"stem.*": {"quantize": False}})
    assert skipped == [("::conv2d", "::add", "::relu")]


def test_fusions_lists_each_group_of_all_recordings_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.relu, self.drop, self.slope = nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Dropout(), nn.LeakyReLU()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.drop(self.relu(self.conv(x)))
            return self.slope(x)

    assert eager.fusions(Twice(), images(0)) == [("conv", "relu")]


# -- judging ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow(reason="compares by operator, as tests of compare do for graphs")
@pytest.mark.case("frontends B12")
def test_the_layer_that_was_made_bad_is_found():
    """B12: against the float model or the prepared one, the rows are those of the explicit graph."""
    model, prepared = calibrated()
    (found,) = eager.parameters(eager.convert(prepared))
    site = next(name for name in found.entries if name.startswith("stem.2"))
    bad = eager.convert(prepared, found.changed(site, scale=found.entries[site].scale[0] * 100))
    data = [images(60 + seed, scale) for seed, scale in enumerate(SCALES)]
    judged = intaglio.compare(model, bad, data)
    assert judged.worst.site == site
    assert judged.worst.path == "stem.2"
    assert "test_eager_state.py" in next(row.source for row in judged.rows if row.operator == "aten.conv2d.default")
    assert judged.samples == 6
    assert len(judged.results) == 1
    assert intaglio.compare(prepared, bad, data) == judged
    good = intaglio.compare(model, eager.convert(prepared), data)
    assert good.worst.alone > judged.worst.alone + 15
    assert all(math.isfinite(result) and result > 20 for result in good.results)
    assert {row.node for row in good.rows} == {row.node for row in judged.rows}


@pytest.mark.case("frontends B12")
def test_the_state_of_another_model_is_refused_by_name():
    """B12: a shape that differs names the operator."""
    converted = eager.convert(calibrated()[1])
    other = nets.randomize(Residual())
    other.head = nn.Linear(8, 6)
    with pytest.raises(InputError, match=r"head \(aten.linear.default\)"):
        intaglio.compare(other.eval(), converted, [images(0)])


@pytest.mark.slow(reason="prepares four models; another shape is refused above")
def test_a_state_of_other_modules_is_refused_when_it_is_loaded():
    def prepared(function: nn.Module) -> nn.Module:
        found = eager.prepare(nn.Sequential(nn.Linear(8, 8), function, nn.Linear(8, 4)).eval(), torch.randn(4, 8))
        found(torch.randn(4, 8))
        return found

    tanh, relu = prepared(nn.Tanh()), prepared(nn.ReLU())
    for given, own in ((tanh, relu), (eager.convert(tanh), eager.convert(relu)), (eager.convert(tanh), relu)):
        with pytest.raises(InputError, match="the module '1' is a Tanh in the state, and a ReLU here"):
            own.load_state_dict(given.state_dict())
        own(torch.randn(4, 8))
    prepared(nn.Tanh()).load_state_dict(tanh.state_dict())
