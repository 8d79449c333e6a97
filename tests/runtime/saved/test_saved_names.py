"""Names of modules, inputs, dictionary keys and sources with any characters are saved and loaded, from end to end."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import intaglio
from intaglio import stages
from intaglio.errors import IntaglioError
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.recipe import Recipe
from support.int8_models import assert_same
from support.slow_params import slow_params

ODD = 'a\\\n\r\0"*/\u2028\udcff?>'
TEXTS = st.one_of(st.text(max_size=12), st.text("\\\n\r\0\"'*/?.\u2028\ud800 a{}%", max_size=6))
FEW = settings(max_examples=6)
"""Each example is captured and converted."""


class Named(nn.Module):
    """Takes and returns dictionaries with given keys, through a module of a given name."""

    def __init__(self, module: str, key: str | int, result: str | int) -> None:
        super().__init__()
        self.module, self.key, self.result = module, key, result
        self.add_module(module, nn.Linear(4, 3))

    def forward(self, given: dict[str | int, Tensor]) -> dict[str | int, Tensor]:
        y = torch.relu(self._modules[self.module](given[self.key]))
        return {self.result: y, "other": given["other"] + 1}


def converted(module: str, key: str | int, result: str | int) -> tuple[nn.Module, stages.Reference, Ranges, dict]:
    torch.manual_seed(0)
    model = Named(module, key, result).eval()
    call = {key: torch.randn(4, 4), "other": torch.randn(4, 2)}
    prepared = stages.prepare(stages.capture(model, call))
    ranges = stages.calibrate(prepared, lambda run: run(call))
    return model, stages.convert(prepared, ranges), ranges, call


@pytest.mark.parametrize(
    ("module", "key", "result"),
    [
        *slow_params(
            ("quote's", "back\\slash", 'line\nbreak"'), reason="other characters that are quoted in the same way"
        ),
        ("*/ evil", "null\0character", "\u2028"),
        ("straße", 7, True),
        *slow_params(("%", "", "{}"), reason="other characters that are quoted in the same way"),
    ],
)
def test_models_with_odd_names_are_loaded_as_they_were_saved(module, key, result, tmp_path):
    _, reference, _, call = converted(module, key, result)
    model = stages.compile(reference)
    model.save(tmp_path / "m", example=(call,))
    loaded = intaglio.load(tmp_path / "m")
    loaded.verify()
    found, expected = loaded(call), model(call)
    assert list(found) == list(expected) == [result, "other"]
    assert_same(list(found.values()), list(expected.values()))
    assert loaded.text("integer") == model.text("integer")
    assert loaded.coverage == model.coverage


def is_module_name(text: str) -> bool:
    """Return whether PyTorch takes the name of a module, and can print it into the code of a graph."""
    printable = text.isprintable() and not set(text) & {'"', "\\", "."}  # torch.fx writes it into Python code
    return bool(text) and printable and not hasattr(nn.Module(), text)


@pytest.mark.slow(reason="draws names and quantizes a model with each; odd names are loaded above")
@FEW
@given(TEXTS.filter(is_module_name), TEXTS, TEXTS)
@example("*/?>'", ODD, "result")
@example("\u00b5", "", "")  # Python reads this identifier as another letter
def test_parameters_ranges_and_recipes_with_odd_names_are_read_as_they_were_written(module, key, result):
    if "other" in (key, result):
        return
    _, reference, ranges, _ = converted(module, key, result)
    files = {
        "ranges": (ranges, Ranges),
        "parameters": (reference.parameters, Parameters),
        "recipe": (Recipe.of({f"op:{module}": {"bits": 7}}).with_parameters(reference.parameters), Recipe),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, (value, kind) in files.items():
            path = Path(folder, name)
            try:
                value.save(path)
            except IntaglioError:
                assert name == "recipe"  # TOML has no form for half of a surrogate pair
                assert not path.exists()
                continue
            assert kind.load(path) == value
