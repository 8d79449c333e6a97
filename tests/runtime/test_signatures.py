"""Calls and data as users have them: structures, memory, modes; the int8 part inside a float model; bad input."""

import collections
import copy
import dataclasses
import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.data import DataLoader, TensorDataset

import intaglio
from intaglio import stages
from intaglio.errors import CalibrationError, CaptureError, InputError, UnsupportedError
from intaglio.ir import Expression
from intaglio.quant.calibrate.batches import binder_for
from support import nets
from support.int8_models import assert_same, built, picture
from support.lowering import quantized, sqnr
from support.nets import Body
from support.slow_params import slow_params

X = picture(4, size=8)


def conv(inputs: int = 3, outputs: int = 4) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def int8(model: nn.Module, data, **settings) -> intaglio.QuantizedModel:
    return intaglio.quantize(nets.randomize(model), data, progress=False, **settings)


# ---- structures


class Open(nn.Module):
    """forward takes what it does not name, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.c = conv()

    def forward(self, x: Tensor, **kwargs: Tensor) -> Tensor:
        return self.c(x) + kwargs.get("shift", 0)


@pytest.mark.case("problem 28")
def test_keyword_arguments_after_kwargs_keep_the_batch_dynamic():
    model = nets.randomize(Open())
    captured = stages.capture(model, (X,), example_kwargs={"shift": torch.ones(4, 4, 8, 8)})
    assert not captured.notes
    assert all(isinstance(entry.type.shape[0], Expression) for entry in captured.signature.inputs)
    shift = torch.randn(3, 4, 8, 8)
    torch.testing.assert_close(captured(X[:3], shift=shift), model(X[:3], shift=shift))


def test_extra_keys_of_a_dictionary_batch_are_ignored_and_logged():
    binder = binder_for(Open())
    with pytest.warns(UserWarning, match=r"forward takes \*\*kwargs, but does not name idx"):
        assert binder({"x": X, "idx": torch.arange(4)}) == ((X,), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert binder_for(Open())({"x": X, "labels": torch.arange(4)}) == ((X,), {})


@pytest.mark.case("problem 6")
def test_the_label_of_a_pair_is_never_an_optional_keyword():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            return x * scale

    class Needs(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            return x * mask

    assert binder_for(Scaled())({"x": X, "scale": 2.0}) == ((X,), {"scale": 2.0})
    with pytest.warns(UserWarning, match="if they are scale, pass dictionaries"):
        assert binder_for(Scaled())((X, torch.arange(4))) == ((X,), {})
    assert binder_for(Needs())((X, X)) == ((X,), {"mask": X})


@dataclasses.dataclass
class Features:
    logits: Tensor
    maps: list[Tensor]


torch.export.register_dataclass(Features)


def test_dataclasses_that_torch_export_knows_go_in_and_come_out():
    def body(m: nn.Module, given: Features) -> Features:
        y = m.c(given.maps[0])
        return Features(y.mean((2, 3)) + given.logits, [y])

    model, lowered = built(body, Features(torch.ones(4, 3), [picture()]))
    found = model(Features(torch.ones(2, 3), [picture(2)]))
    assert type(found) is Features
    assert_same(found, lowered(Features(torch.ones(2, 3), [picture(2)])))


def test_a_dataclass_that_torch_export_does_not_know_is_refused_with_the_call_that_registers_it():
    @dataclasses.dataclass
    class Unknown:
        y: Tensor

    with pytest.raises(CaptureError) as raised:
        stages.capture(nets.randomize(Body(lambda m, x: Unknown(m.c(x)), c=conv())), X)
    assert "register_dataclass" in raised.value.remedy


Pair = collections.namedtuple("Pair", "left right")


def test_nested_results_keep_their_classes():
    def body(m: nn.Module, x: Tensor) -> collections.OrderedDict:
        y = m.c(x)
        return collections.OrderedDict(pair=Pair(y, [x.shape[0], None]), rest=({"y": y},))

    model, _ = built(body, picture())
    found = model(picture(2))
    assert type(found) is collections.OrderedDict
    assert type(found["pair"]) is Pair
    assert found["pair"].right == [2, None]
    assert torch.equal(found["pair"].left, found["rest"][0]["y"])


class Encoding(collections.UserDict):
    """What tokenizers return: a mapping that is no dict."""


@pytest.mark.case("problem 6")
def test_mappings_with_labels_and_unknown_keys_are_valid_batches(caplog):
    """Problem 6: the whole way with batches as dictionaries, labels and an index among them."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = conv()

        def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
            return self.c(left) if right is None else self.c(left) + self.c(right)

    batches = [Encoding(right=X, left=2 * X, labels=torch.arange(4), idx=torch.arange(4)) for _ in range(2)]
    with caplog.at_level(logging.INFO, "intaglio"):
        model = int8(Two(), batches)
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 1
    assert said[0] == "batches are dictionaries: ['left', 'right'] go to forward; left out: idx, labels"
    assert model(left=X[:1], right=X[:1]).shape == (1, 4, 8, 8)


# ---- memory and modes


FORMS = {
    "requires grad": lambda x: x.clone().requires_grad_(),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "every second image": lambda x: x.repeat_interleave(2, 0)[::2],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "a parameter": lambda x: nn.Parameter(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_calibration_batches_of_any_memory_give_the_same_ranges(form):
    captured = stages.capture(nets.randomize(nn.Sequential(conv(), nn.ReLU())), X)
    plain = stages.calibrate(stages.prepare(captured), [X])
    found = stages.calibrate(stages.prepare(captured), [FORMS[form](X)])
    site = next(iter(plain.statistics))
    assert site.startswith("#0/input.")
    assert found.statistics[site] == plain.statistics[site]


@pytest.mark.case("calibration 24")
@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        *slow_params(torch.no_grad, torch.enable_grad, reason="another mode of gradients, of which nothing depends"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["inference", "no_grad", "enable_grad", "autocast"],
)
def test_autocast_and_grad_mode_around_quantize_change_nothing(mode):
    """Calibration case 24: under autocast too, the captured graph, ranges and integers are those without it."""
    model = nets.randomize(nn.Sequential(conv(), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    reference, lowered = quantized(model, X)
    with mode():
        again, inside = quantized(model, X.clone())
        assert torch.equal(inside(X), lowered(X))
        assert torch.equal(again(X), reference(X))
    assert again.text() == reference.text()


# ---- the int8 part in its float parent


class Detector(nn.Module):
    """A backbone of several maps and a head that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Body(lambda m, x: {"low": (y := m.a(x).relu()), "high": m.b(y)}, a=conv(), b=conv(4, 6))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = self.backbone(x)
        return [self.head(maps["high"].mean((2, 3)))] + [m for m in maps.values() if m.sum() > -1e9]


@pytest.mark.slow(reason="quantizes a part of a detector; parts are put back in tests of parts")
@pytest.mark.case("problem 7")
def test_a_submodule_is_quantized_and_put_back_into_its_float_parent():
    """Problem 7: the parent decides by its data, so it cannot be captured; its backbone can."""
    model = nets.randomize(Detector())
    exact = [y.detach() for y in model(X)]
    with pytest.raises(CaptureError):
        stages.capture(model, X)
    model.backbone = intaglio.quantize(model.backbone, [X], progress=False)
    found = model(X[:2])
    assert [y.shape for y in found] == [(2, 2), (2, 4, 8, 8), (2, 6, 8, 8)]
    assert all(sqnr(y, e[:2]) > 25 for y, e in zip(found, exact, strict=True))
    found[0].sum().backward()
    assert model.head.weight.grad is not None


@pytest.mark.case("problem 8")
def test_the_parent_of_an_int8_part_switches_modes_moves_and_copies():
    model = nets.randomize(Detector())
    model.backbone = intaglio.quantize(model.backbone, [X], progress=False)
    before = model(X)
    with pytest.warns(UserWarning, match="cannot be trained"):
        model.train()
    assert model.training
    assert not model.backbone.training
    copied = copy.deepcopy(model.eval().requires_grad_(False).to(torch.float32).cpu())
    assert_same(copied(X), before)
    own = {name for name in model.state_dict() if not name.startswith("backbone.")}
    assert own == {"head.weight", "head.bias"}
    copied.load_state_dict(model.state_dict())
    assert_same(copied(X), before)


@pytest.mark.case("calibration 48")
def test_a_model_with_an_int8_part_is_not_quantized_again():
    """Calibration case 48."""
    inner = int8(nn.Sequential(conv()), [X])
    for model in (inner, nn.Sequential(inner, nn.ReLU())):
        with pytest.raises(CaptureError, match="quantized already") as raised:
            intaglio.quantize(model, [X], progress=False)
        assert "quantize the float model" in raised.value.remedy


# ---- models as users have them


def test_hooks_are_part_of_the_model():
    model = nets.randomize(nn.Sequential(conv(), nn.ReLU()))
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] - 1,))
    model.register_forward_hook(lambda module, args, result: result + 3)
    reference, lowered = quantized(model, X)
    assert sqnr(reference(X), model(X)) > 25
    assert lowered.macs[0] == lowered.macs[1] > 0
    assert [len(m._forward_hooks) for m in model.modules()] == [1, 1, 0]


def test_parametrized_weights_are_constants():
    model = nn.Sequential(weight_norm(conv()), nn.ReLU(), spectral_norm(conv(4, 4)))
    names = [name for name, _ in model.named_parameters()]
    reference, lowered = quantized(model, X)
    assert not lowered.islands
    assert {"0.weight", "2.weight"} <= set(reference.qparams)
    assert sqnr(reference(X), model(X)) > 25
    assert [name for name, _ in model.named_parameters()] == names


class Standardized(nn.Conv2d):
    """Weight standardization, Qiao et al. 2019, as a model computes it: in forward."""

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation = self.weight.mean((1, 2, 3), True), self.weight.std((1, 2, 3), keepdim=True)
        return self._conv_forward(x, (self.weight - mean) / (deviation + 1e-6), self.bias)


def test_weights_computed_from_weights_are_constants():
    model = nets.randomize(nn.Sequential(Standardized(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    reference, lowered = quantized(model, X)
    assert not lowered.islands
    assert sqnr(reference(X), model(X)) > 25


def test_random_numbers_made_from_constants_are_no_constants():
    model = nets.randomize(Body(lambda m, x: (m.c(x), torch.bernoulli(m.p)), c=conv(), p=nn.Parameter(torch.ones(4))))
    with torch.no_grad():
        model.p.fill_(1.0)
    prepared = stages.prepare(stages.capture(model, X))
    assert "aten.bernoulli" in prepared.text()


def test_a_model_of_another_element_type_is_refused_by_it():
    with pytest.raises(UnsupportedError, match="not a float32 tensor but ") as raised:
        stages.prepare(stages.capture(nn.Sequential(conv()).double(), X.double()))
    assert "float32" in raised.value.remedy


@pytest.mark.parametrize("dtype", [torch.float16, *slow_params(torch.bfloat16, reason="the other half precision")])
def test_a_float16_model_keeps_float16_inputs_and_outputs(dtype):
    model = intaglio.quantize(nn.Sequential(conv()).to(dtype), [X.to(dtype)])
    assert model(X.to(dtype)).dtype is dtype


def test_a_model_on_another_device_is_refused_by_parameter():
    with pytest.raises(CaptureError, match=r"1\.weight: it is on device meta; models are quantized on the CPU"):
        stages.capture(nn.Sequential(nn.ReLU(), conv().to("meta")), X)


# ---- data that cannot be meant


BATCHES = {
    "on another device": (X.to("meta"), "example input 0: it is on device meta; the model runs on the CPU"),
    "sparse": (X.to_sparse(), "example input 0: its layout is torch.sparse_coo; the model takes dense tensors"),
    "ragged": (
        torch.nested.nested_tensor([X[0], X[1]]),
        "example input 0: it is a nested tensor; the model takes dense",
    ),
    "complex": (
        X.to(torch.complex64),
        "example input 0: its data type is torch.complex64; int8 models take real numbers",
    ),
    "integers": (X.long(), "the float model fails on the example inputs"),
    "labels only": (torch.arange(4), "the float model fails on the example inputs"),
}


def test_a_first_batch_of_another_float_type_is_refused_with_the_conversion():
    with pytest.raises(CaptureError, match="the float model fails") as raised:
        intaglio.quantize(nn.Sequential(conv()), [X.double()], progress=False)
    assert raised.value.remedy == "convert the inputs from torch.float64 with .to(torch.float32)"
    intaglio.quantize(nn.Sequential(conv()), [X.double().to(torch.float32)], progress=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", BATCHES)
def test_an_invalid_first_batch_is_refused_before_the_work(kind):
    batch, problem = BATCHES[kind]
    with pytest.raises(CaptureError, match=problem) as raised:
        intaglio.quantize(nn.Sequential(conv()), [batch], progress=False)
    assert raised.value.remedy


LATER = {
    "labels only": (
        torch.arange(4),
        "batch 1, input 'input': its data type is torch.int64; the model takes torch.float32",
    ),
    "on another device": (X.to("meta"), "batch 1, input 'input': it is on device meta; the model runs on the CPU"),
    "of another size": (
        X[:, :, :4],
        r"batch 1, input 'input': its shape is \[4, 3, 4, 8\]; the model takes \[n, 3, 8, 8\]",
    ),
    "sparse": (X.to_sparse(), "batch 1, input 'input': its layout is torch.sparse_coo"),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_later_batch_that_does_not_fit_is_named_by_its_number(kind):
    batch, problem = LATER[kind]
    prepared = stages.prepare(stages.capture(nets.randomize(nn.Sequential(conv())), X))
    with pytest.raises(CalibrationError, match=problem):
        stages.calibrate(prepared, [X, batch])


def test_a_ragged_last_batch_is_a_batch():
    prepared = stages.prepare(stages.capture(nets.randomize(nn.Sequential(conv())), X))
    assert stages.calibrate(prepared, DataLoader(TensorDataset(X, torch.arange(4)), batch_size=3)).samples == 4


WRONG_STAGE = {
    "annotate": (lambda s: stages.annotate(s["prepared"]), "takes a Captured, got a Prepared"),
    "prepare": (lambda s: stages.prepare(s["reference"]), "takes a Captured, got a Reference"),
    "calibrate": (lambda s: stages.calibrate(s["captured"], [X]), "takes a Prepared, got a Captured"),
    "convert": (lambda s: stages.convert(s["reference"]), "takes a Prepared, got a Reference"),
    "requantize": (lambda s: stages.requantize(s["prepared"]), "takes a Reference, got a Prepared"),
    "compile": (lambda s: stages.compile(s["captured"]), "takes a Lowered, got a Captured"),
}


@pytest.mark.case("calibration 48")
@pytest.mark.parametrize("verb", WRONG_STAGE)
def test_a_wrong_stage_is_refused_with_the_call_that_makes_the_right_one(verb):
    """Calibration case 48: converting or preparing twice is an error, not a second round of quantization."""
    captured = stages.capture(nets.randomize(nn.Sequential(conv())), X)
    prepared = stages.prepare(captured)
    stages.calibrate(prepared, [X])
    all_stages = {"captured": captured, "prepared": prepared, "reference": stages.convert(prepared)}
    call, problem = WRONG_STAGE[verb]
    with pytest.raises(InputError, match=problem) as raised:
        call(all_stages)
    assert raised.value.where == verb
    assert raised.value.remedy.endswith("which returns one")


@pytest.mark.case("calibration 48")
def test_a_graph_with_quantize_and_dequantize_in_it_is_not_quantized_again():
    """Calibration case 48: the weights of a reference's module come out of a dequantize; nothing there is float."""
    reference, _ = quantized(nets.randomize(nn.Sequential(conv(), nn.ReLU())), X)
    again = stages.capture(reference.module, X)
    assert again.text().count("quantize_per_tensor.default(") == reference.text().count("quantize_per_tensor.default(")
    for stage in (reference, "text"):
        with pytest.raises(CaptureError, match=r"not an nn\.Module"):
            intaglio.quantize(stage, [X])
