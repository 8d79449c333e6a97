"""Copies of a `QuantizedModel`: state_dict, pickles, torch.save, workers, forks; and what may not be done to it."""

import copy
import io
import os
import pickle
import signal
import time
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import intaglio
from intaglio import stages
from intaglio.errors import ArtifactError, InputError
from intaglio.native import cpu as machine
from support import nets
from support.int8_models import assert_same, built, compiled, picture
from support.lowering import quantized
from support.slow_params import slow_params


def retrained(net, isa=None):
    """The same network with other weights, calibrated on other data."""
    model = nets.randomize(net(), seed=7)
    lowered = quantized(model, nets.example(model, 4, seed=9))[1]
    return stages.compile(lowered, isa=isa)


def stored(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- state_dict


def test_a_state_dict_holds_the_integers_and_scales():
    model, lowered = compiled(nets.ConvThenUnsupported)
    state = model.state_dict()
    assert {"graph", "graph.conv1_weight", "graph.conv2_bias"} < set(state)
    for name, array in lowered.graph.constants.items():
        assert_same(state[f"graph.{name}"], torch.from_numpy(array.copy()))
    assert state["graph.conv1_weight"].dtype == torch.int8


def test_writing_into_a_state_dict_changes_no_model():
    model, lowered = compiled(nets.Linears)
    for tensor in model.state_dict().values():
        tensor.zero_()
    x = torch.randn(3, 16)
    assert_same(model(x), lowered(x))
    assert_same(stages.compile(lowered)(x), lowered(x))


PAIRS = [(nets.ConvThenUnsupported, machine.isas()[0])] + [(nets.Linears, isa) for isa in machine.isas()]


@pytest.mark.parametrize(("net", "isa"), PAIRS)
def test_a_state_loads_into_a_model_with_other_weights_and_scales(net, isa, tmp_path):
    source, target = compiled(net)[0], retrained(net, isa)
    x = nets.example(net(), 3)
    with pytest.raises(AssertionError):
        assert_same(target(x), source(x))
    assert str(target.load_state_dict(stored(source.state_dict()))) == "<All keys matched successfully>"
    assert_same(target(x), source(x))
    assert target.artifact.program.isa == isa
    assert target.text("integer") == source.text("integer")
    target.save(tmp_path / "m")
    assert_same(intaglio.load(tmp_path / "m")(x), source(x))
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


@pytest.mark.slow(reason="compiles a model with a float part")
def test_weights_of_float_parts_load_too():
    def body(m, x):
        return m.c(torch.cdist(m.c(x).flatten(2).transpose(1, 2), m.mix).transpose(1, 2).reshape(x.shape))

    class Mixed(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.c, self.mix = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.randn(3, 3))

        def forward(self, x):
            return body(self, x)

    source, target = (stages.compile(quantized(Mixed(seed).eval(), picture())[1]) for seed in (1, 2))
    assert any(key.startswith("islands.") for key in source.state_dict())
    target.load_state_dict(stored(source.state_dict()))
    assert_same(target(picture(2, 5)), source(picture(2, 5)))


def test_libraries_for_other_machines_follow_the_state(tmp_path):
    source, target = compiled(nets.Linears)[0], retrained(nets.Linears, machine.isas())
    target.load_state_dict(source.state_dict())
    target.save(tmp_path / "m")
    for isa in machine.isas():
        loaded = intaglio.load(tmp_path / "m", trust=True, isa=isa)
        assert loaded.artifact.path.name.startswith("trusted-")
        assert_same(loaded(torch.ones(2, 16)), source(torch.ones(2, 16)))


def test_a_copy_keeps_its_weights_when_the_original_loads_others():
    source, target = compiled(nets.Linears)[0], retrained(nets.Linears)
    x = torch.randn(3, 16)
    other, expected = copy.deepcopy(target), target(x)
    target.load_state_dict(source.state_dict())
    assert_same((other(x), target(x)), (expected, source(x)))


def test_loading_its_own_state_keeps_the_example_of_a_model(tmp_path):
    compiled(nets.Linears)[0].save(tmp_path / "m", example=torch.ones(2, 16))
    model = intaglio.load(tmp_path / "m")
    model.load_state_dict(stored(model.state_dict()))
    model.verify()
    model.load_state_dict(retrained(nets.Linears).state_dict())
    with pytest.raises(InputError, match="no stored example"):
        model.verify()
    with pytest.raises(InputError, match="'reference' is not a stage"):
        model.text("reference")


@pytest.mark.slow(reason="compiles a wider network; damaged states are refused below")
def test_the_state_of_another_model_is_refused_and_changes_nothing():
    target, lowered = compiled(nets.Residual)
    wider = compiled(lambda: nets.Residual(width=16))[0].state_dict()
    with pytest.raises(
        ArtifactError, match=r"state is that of another model: %stem_0_weight is s8\[8, 3, 3, 3\].* in this model, "
    ):
        target.load_state_dict(wider)
    with pytest.raises(
        ArtifactError,
        match=r"state is that of another model: %.* in this model, but missing in the state\n  remedy: load it into",
    ):
        target.load_state_dict(compiled(nets.Linears)[0].state_dict())
    assert_same(target(picture()), lowered(picture()))


def test_the_state_of_a_float_model_is_refused_by_key():
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*: "graph"[\s\S]*Unexpected key\(s\).*"fc\.weight"'):
        compiled(nets.Residual)[0].load_state_dict(nets.Residual().state_dict())


DAMAGE = {
    "a constant is missing": lambda s: s.pop("graph.0_weight"),
    "a constant has another type": lambda s: s.update({"graph.0_weight": s["graph.0_weight"].int()}),
    "a constant has another shape": lambda s: s.update({"graph.0_weight": s["graph.0_weight"][:4]}),
    "the text is cut off": lambda s: s.update(graph=s["graph"][:100]),
    "the text is none": lambda s: s.update(graph=torch.full((9,), 255, dtype=torch.uint8)),
    "scales are missing": lambda s: s.pop("graph.scales of channels"),
    "not a tensor": lambda s: s.update(graph="text"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_state_is_refused(damage):
    model, lowered = compiled(nets.Linears)
    state = dict(model.state_dict())
    damage(state)
    with pytest.raises(ArtifactError, match="does not contain an integer graph"):
        model.load_state_dict(state)
    x = torch.randn(3, 16)
    assert_same(model(x), lowered(x))


def test_a_model_inside_another_saves_and_loads_with_it():
    source, target = compiled(nets.Linears)[0], retrained(nets.Linears)
    outer, other = nn.Sequential(source, nn.Linear(10, 2)), nn.Sequential(target, nn.Linear(10, 2))
    x = torch.randn(3, 16)
    other.load_state_dict(stored(outer.state_dict()))
    assert_same(other(x), outer(x))
    head = {key: value for key, value in outer.state_dict().items() if key.startswith("1.")}
    other.load_state_dict(head, strict=False)
    assert_same(other(x), outer(x))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0\.graph"'):
        other.load_state_dict(head)


def test_a_state_dict_fits_into_safetensors():
    model, _ = compiled(nets.Linears)
    model.load_state_dict(safetensors.torch.load(safetensors.torch.save(model.state_dict())))


# ---- whole models


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_by_torch,
    "twice": lambda model: saved_by_torch(copy.deepcopy(saved_by_torch(model))),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("net", [nets.Residual, nets.ConvThenUnsupported])
def test_a_deep_copy_or_pickle_computes_the_same(copied, used, net):
    model, lowered = copy.deepcopy(compiled(net)[0]), compiled(net)[1]
    x = nets.example(net(), 3)
    if used:
        model(x)
    other = copied(model)
    assert_same((other(x), model(x), other(x)), (lowered(x),) * 3)
    assert repr(other) == repr(model)
    assert other.coverage == model.coverage


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_saved_to_the_same_file(copied, tmp_path):
    model = stages.compile(compiled(nets.Linears)[1], isa=machine.isas())
    other = copied(model)
    other.load_state_dict(model.state_dict())
    model.save(tmp_path / "first")
    other.save(tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_a_copy_inside_another_module_is_one_too():
    outer = nn.Sequential(compiled(nets.Linears)[0], nn.Linear(10, 2))
    x = torch.randn(3, 16)
    assert_same(saved_by_torch(copy.deepcopy(outer))(x), outer(x))


# ---- processes


class Features(Dataset):
    """A data set that computes with a model, wherever it is."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.model(picture(1, index))[0]


@pytest.mark.parametrize("way", ["fork", *slow_params("spawn", reason="starts processes that import everything")])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_data_loader_compute_too(way):
    model, lowered = compiled(nets.Residual)
    expected = torch.cat([lowered(picture(1, index)) for index in range(4)])
    assert_same(model(picture(1)), lowered(picture(1)))
    loader = DataLoader(Features(model), batch_size=2, num_workers=1, multiprocessing_context=way, timeout=60)
    assert_same(torch.cat(list(loader)), expected)
    assert_same(model(picture(1)), lowered(picture(1)))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_a_plain_fork_computes_in_both_processes(used):
    before, lowered = torch.get_num_threads(), compiled(nets.Residual)[1]
    model = copy.deepcopy(compiled(nets.Residual)[0])
    torch.set_num_threads(2)
    try:
        expected = lowered(picture())
        if used:
            assert_same(model(picture()), expected)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(model(picture()), expected) else 1)
        assert_same(model(picture()), expected)
        assert ended(child) == 0
        assert_same(model(picture(7, 3)), lowered(picture(7, 3)))
    finally:
        torch.set_num_threads(before)


def ended(child: int) -> int:
    """Exit code of a child; one that hangs is killed."""
    for _ in range(3000):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


# ---- what an nn.Module can be asked


UNCHANGED = {
    "cpu": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "eval": lambda model: model.eval(),
    "requires_grad_": lambda model: model.requires_grad_(False),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("asked", UNCHANGED.values(), ids=UNCHANGED)
@pytest.mark.parametrize("net", [nets.Linears, nets.ConvThenUnsupported])
def test_conversions_to_cpu_and_float32_return_the_model(asked, net):
    model, lowered = compiled(net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(model) is model
    assert_same(model(nets.example(net())), lowered(nets.example(net())))


MOVED = {
    "cuda": (lambda model: model.cuda(), "to: "),
    "to cuda": (lambda model: model.to("cuda:0"), "to: "),
    "meta": (lambda model: model.to("meta"), "to: an int8 model runs on the CPU and cannot be moved to device meta"),
    "half": (
        lambda model: model.half(),
        "to: the float parts of an int8 model are float32 and cannot be converted to torch.float16",
    ),
    "double": (
        lambda model: model.double(),
        "to: the float parts of an int8 model are float32 and cannot be converted to torch.float64",
    ),
    "to dtype": (lambda model: model.to(torch.bfloat16), "to: the float parts of an int8 model are float32"),
    "inside another": (lambda model: nn.Sequential(model).half(), "to: the float parts of an int8 model are float32"),
}


@pytest.mark.parametrize(("move", "text"), MOVED.values(), ids=MOVED)
@pytest.mark.parametrize("net", [nets.Linears, nets.ConvThenUnsupported])
def test_other_devices_and_types_are_refused_and_change_nothing(move, text, net):
    model, lowered = compiled(net)
    with pytest.raises(InputError) as raised:
        move(model)
    assert str(raised.value).startswith(text)
    assert raised.value.remedy.endswith("convert its inputs and results instead")
    assert_same(model(nets.example(net())), lowered(nets.example(net())))


def test_training_warns_and_changes_nothing():
    model, lowered = built(lambda m, x: m.c(x), picture())
    outer = nn.Sequential(model, nn.Dropout())
    with pytest.warns(UserWarning, match="cannot be trained"):
        outer.train()
    assert outer[1].training
    assert not model.training
    assert_same(model(picture()), lowered(picture()))
    assert not list(model.parameters())
