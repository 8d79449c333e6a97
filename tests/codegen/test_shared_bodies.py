"""Bodies of steps that differ in names and numbers only are one function, which has the bits of separate functions."""

import re

import pytest
import torch
from torch import nn

from intaglio import stages
from intaglio.codegen import shared_bodies
from intaglio.codegen.shared_bodies import with_shared_bodies
from intaglio.native.cpu import isas
from support.lowering import quantized
from support.nets import randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params_except

STEP = """// {value}: loop
enum : int64_t {{ p{number}_values = {offset} }};
static void p{number}_{value}(const struct Run* r, int thread, int threads) {{
    const int64_t size = {size}, rows = 3;
    const float* const v_{value}_at = (const float*)(r->arena + r->offsets[{place}]);
    const float* const v2_at = (const float*)(constant<uint8_t>(r, p{number}_values));
    for (int64_t i = 0; i < size; ++i) v_{value}_at[i] = v2_at[i] * -{scale}f + (int32_t){zero};
    add_clipped(r->clipped, {count}, v_{value}_at);
}}
"""


def step(number, **changes):
    given = {"value": f"norm_{number}", "offset": 64 * number, "size": 8, "place": number, "scale": "0x1.8p+1"}
    return STEP.format(number=number, **{**given, "zero": 3, "count": number, **changes})


@pytest.fixture(autouse=True)
def _short_bodies(monkeypatch):
    monkeypatch.setattr(shared_bodies, "LEAST_LENGTH", 1)


def expanded(text, calls):
    """The function of a step with the body that it calls, and the numbers of the call in it."""
    name, given = re.search(r"(p\d+_\w+_body)\(r, thread, threads(.*?)\);", text).groups()
    parameters, body = re.search(rf"SHARED static void {name}\((.*?)\) \{{\n(.*?)^\}}\n", calls, re.M | re.S).groups()
    labels = re.findall(r"given_\d+", parameters)
    values = dict(zip(labels, given.strip(", ").split(", "), strict=True))
    return re.sub(r"given_\d+", lambda label: values[label[0]], body)


def body(text):
    return re.search(r"threads\) \{\n(.*?)^\}\n", text, re.M | re.S)[1]


def test_steps_that_differ_in_numbers_call_one_body():
    steps = [step(1), step(2, scale="0x1.9p+1"), step(3, zero=-7)]
    found = with_shared_bodies(steps)
    text = "".join(found)
    assert text.count("SHARED static") == 1
    for number, (plain, shared) in enumerate(zip(steps, found, strict=True), 1):
        assert plain.split("static void")[0] in shared  # comments and constants stay
        assert expanded(shared.replace(f"norm_{number}_at", "norm_1_at"), text) == body(plain).replace(
            f"norm_{number}_at", "norm_1_at"
        )


def test_numbers_that_are_equal_in_all_steps_stay_literals():
    text = "".join(with_shared_bodies([step(1), step(2)]))
    assert "* -0x1.8p+1f + (int32_t)3;" in text
    assert re.search(r"_body\(r, thread, threads, 2, p2_values, 2\);", text)


@pytest.mark.parametrize("other", [{"size": 9}, {"scale": "0x1.8p+1f + 0x1.0p+0"}], ids=["size", "operations"])
def test_steps_of_other_sizes_or_operations_are_separate(other):
    steps = [step(1), step(2, **other)]
    assert with_shared_bodies(steps) == steps


def test_short_bodies_are_separate(monkeypatch):
    monkeypatch.setattr(shared_bodies, "LEAST_LENGTH", 10_000)
    assert with_shared_bodies([step(1), step(2)]) == [step(1), step(2)]


@pytest.mark.parametrize(
    "isa",
    slow_params_except(*isas()[:1], of=isas(), reason="bodies are shared in the text of every set of instructions"),
)
def test_shared_bodies_have_the_bits_of_separate_functions(isa, monkeypatch):
    layers = [layer for _ in range(4) for layer in (nn.Linear(40, 40), nn.LayerNorm(40))]
    model = randomize(nn.Sequential(*layers))
    x = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0))
    _, lowered = quantized(model, x)
    shared = stages.compile(lowered, isa=isa)
    assert shared.text("program").count("SHARED static") == 2  # of linear layers and of norms
    monkeypatch.setattr(shared_bodies, "LEAST_LENGTH", 1 << 30)
    separate = stages.compile(lowered, isa=isa)
    assert "SHARED" not in separate.text("program")
    assert_same_bits(shared(x), separate(x))
