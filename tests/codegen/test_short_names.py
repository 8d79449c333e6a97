"""Programs of equal layers have equal texts, which are compiled once."""

import re

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.codegen.short_names import ShortNames
from intaglio.parts.part_module import alone
from support.recipes import UNCORRECTED

FUNCTIONS = "static void p01_stack_layers_0_up(r) { v_stack_layers_0_up = 1; } // stack.layers.0.up of stack.layers.0"
SHORT = "static void p01_up(r) { v_up = 1; } // up of layer"


@pytest.mark.parametrize(
    ("paths", "path"),
    [
        ({"stack.layers.0.up", "stack.layers.0.down", ""}, "stack.layers.0"),
        ({"stack.layers.0.up"}, "stack.layers.0"),
        ({"stack.layers.0.up", "stack.layers.0.up.norm"}, "stack.layers.0"),
        ({"stack.layers.0.up.a", "stack.layers.0.up.b"}, "stack.layers.0"),
        ({"stack.layers.0", "stack.layers.0.up"}, "stack.layers.0"),
    ],
)
def test_the_path_of_the_layer_is_removed(paths, path):
    names = ShortNames(paths, FUNCTIONS)
    assert names.path == path
    assert names.of(FUNCTIONS) == SHORT
    assert names.of("p01_stack_layers_0_up") == "p01_up"
    kept = "p02_stack_layers_01, p02_haystack_layers_0_up, haystack.layers.0.up, stack.layers.01"
    assert names.of(f"p02_stack_layers_0, {kept}") == f"p02_layer, {kept}"


@pytest.mark.parametrize(
    "paths",
    [
        {"stack.layers.0.up", "head"},
        {"stack.up.a", "stack.up.b"},
        {"stack.layers.0", "stack.layers.1"},
        {"0.1"},
        {""},
        (),
    ],
)
def test_other_programs_keep_their_names(paths):
    assert ShortNames(paths, FUNCTIONS).of(FUNCTIONS) == FUNCTIONS


def test_names_that_would_become_equal_are_kept():
    source = f"{FUNCTIONS} static void p01_up(r);"
    assert ShortNames({"stack.layers.0.up"}, source).of(source) == source


class Block(nn.Module):
    """A network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)) * x.sum())


@pytest.mark.parametrize("name", ["", ".block"])
def test_equal_layers_have_equal_programs(name):
    torch.manual_seed(0)
    x, recipe = torch.randn(3, 8), intaglio.Recipe.of({**UNCORRECTED, "type:Linear": {"activations": "token"}})
    programs = []
    for number in range(2):
        path = f"stack.layers.{number}{name}"
        prepared = stages.prepare(stages.capture(alone(Block(), path), x), stages.Quantizer(recipe))
        ranges = stages.calibrate(prepared, [x], progress=False)
        programs.append(stages.compile(stages.requantize(stages.convert(prepared, ranges))).artifact.program)
        assert {step.path for step in programs[-1].steps if step.path} == {path, f"{path}.up", f"{path}.down"}
    assert programs[0].source == programs[1].source
    assert not re.search(r"layers.\d", programs[0].source)
    functions = {step.kernel for step in programs[0].steps if re.match(r"p\d\d", step.kernel)}
    assert functions
    assert all(f"static void {function}(" in programs[0].source for function in functions)
