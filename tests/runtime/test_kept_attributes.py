"""Int8 models keep plain attributes of the float model, and say what they do not keep."""

import copy
import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import intaglio
from intaglio.runtime.kept_attributes import KeptAttributes
from intaglio.runtime.saved.attribute_codec import decode_attributes, encode_attributes


@dataclass
class Settings:
    size: int
    mean: tuple[float, ...]


class Named(nn.Module):
    input_size = (3, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.names = {0: "cat", 1: "dog"}
        self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "url": None, "sizes": [1, 2.5]}
        self.settings = Settings(8, (0.5, float("inf")))
        self.text = "a name that the int8 model has, too"
        self.scale = nn.Parameter(torch.ones(4))
        self.tokenizer = object()
        self._private = 3

    def forward(self, x):
        return self.layer(x) * self.scale

    def predict(self, x):
        return self.forward(x)


@pytest.fixture(scope="module")
def int8_model():
    torch.manual_seed(0)
    return intaglio.quantize(Named().eval(), [torch.randn(16, 8)])


def saved_and_loaded(model, folder):
    model.save(folder / "model.intaglio", library=False)
    return intaglio.load(folder / "model.intaglio")


@pytest.mark.parametrize(
    "copied",
    [
        lambda model, _: model,
        lambda model, _: copy.deepcopy(model),
        lambda model, _: pickle.loads(pickle.dumps(model)),
        saved_and_loaded,
    ],
    ids=["itself", "copy", "pickle", "file"],
)
def test_plain_attributes_stay(int8_model, copied, tmp_path):
    model = copied(int8_model, tmp_path)
    assert model.names == {0: "cat", 1: "dog"}
    assert model.pretrained_cfg == {"mean": (0.5, 0.5, 0.5), "url": None, "sizes": [1, 2.5]}
    assert (model.settings.size, model.settings.mean) == (8, (0.5, float("inf")))
    assert model.input_size == (3, 8, 8)


def test_the_names_of_the_int8_model_come_first(int8_model):
    assert callable(int8_model.text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layer", r"a submodule \(Linear\)"),
        ("scale", "a parameter"),
        ("predict", "code"),
        ("tokenizer", "a value of type object"),
    ],
)
def test_other_attributes_say_what_they_were(int8_model, name, kind):
    assert not hasattr(int8_model, name)
    with pytest.raises(AttributeError, match=f"no '{name}', which is {kind} of the float model.*names, pretrained_cfg"):
        getattr(int8_model, name)


def test_unknown_and_private_names_are_ordinary_errors(int8_model):
    for name in ("absent", "_private"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(int8_model, name)


def test_values_are_copies():
    model = Named()
    kept = KeptAttributes.of(model)
    model.names[0] = "changed"
    assert kept.values["names"][0] == "cat"


def test_files_hold_dataclasses_as_namespaces_and_leave_out_classes_of_libraries():
    kept = KeptAttributes({"settings": Settings(8, (0.5,)), "config": object()}, {"layer": "a submodule"})
    found = decode_attributes(encode_attributes(kept))
    assert found.values == {"settings": SimpleNamespace(size=8, mean=(0.5,))}
    assert found.others == {"layer": "a submodule"}


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"values": {}, "others": {"layer": 3}},
        {"values": {"a": {"unknown": 1}}, "others": {}},
        {"values": {"a": {"mapping": [[[1], 2]]}}, "others": {}},
    ],
)
def test_malformed_entries_are_refused(entry):
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode_attributes(entry)
