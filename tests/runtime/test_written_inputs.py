"""Models that write to their inputs: every stage of quantization does so too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager, stages
from intaglio.errors import InputError
from support.int8_models import assert_same
from support.lowering import sqnr
from support.nets import Body, randomize
from support.slow_params import slow_params

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Writes(nn.Module):
    """Scales its input and replaces two columns of it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.linear(x)
        x[:, 3:5] = y[:, :2]
        return y


MODEL = Writes().eval()


def stages_of(model: nn.Module, *inputs: Tensor) -> dict:
    """Return every form of a quantized model by name."""

    def copied() -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in inputs)

    captured = stages.capture(model, copied())
    data = copied()
    prepared = stages.prepare(captured)
    reference = stages.convert(prepared, stages.calibrate(prepared, [data]))
    assert all(map(torch.equal, data, inputs)), "calibration leaves its data unchanged"
    lowered = stages.requantize(reference)
    eager_model = eager.prepare(model, copied())
    eager_model(*copied())
    return {
        "captured": captured,
        "prepared": stages.prepare(captured),
        "reference": reference,
        "reference as a module": reference.as_module(),
        "lowered": lowered,
        "program": stages.compile(lowered),
        "training": stages.prepare(stages.capture(model, copied(), train=True), qat=True).eval(),
        "eager": eager.convert(eager_model),
    }


STAGES = ["captured", "prepared", "reference", "reference as a module", "lowered", "program", "training", "eager"]


@pytest.fixture(scope="module")
def made() -> dict:
    return stages_of(MODEL, X)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_writes_what_the_float_model_writes(made, stage):
    expected, found = X.clone(), X.clone()
    exact, result = MODEL(expected), made[stage](found)
    assert sqnr(result.detach(), exact.detach()) > 25
    assert sqnr(found.detach(), expected.detach()) > 25
    if stage in ("captured", "prepared"):
        assert_same(found, expected.detach())


def swap(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    before = x.clone()
    x.copy_(y)
    y.copy_(before)
    return m.linear(x)


def result_before_the_write(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    before = x.clone()
    x.add_(1)
    return before, m.linear(y)


def rotate(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = y[:, :4].clone()
    y[:, :4] = x[:, 4:]
    x[:, 4:] = z
    return m.linear(x)


@pytest.mark.parametrize(
    "body",
    [
        *slow_params(swap, reason="two inputs that are swapped; a result that is kept has the same copies"),
        result_before_the_write,
        *slow_params(rotate, reason="parts of what is swapped"),
    ],
)
def test_values_of_an_input_before_a_write_are_kept(body):
    model = randomize(Body(body, linear=nn.Linear(8, 8)))
    other = X.flip(0).contiguous()
    expected = X.clone(), other.clone()
    exact = [*torch.utils._pytree.tree_leaves(model(*expected)), *expected]
    for stage, form in stages_of(model, X, other).items():
        given = X.clone(), other.clone()
        found = [*torch.utils._pytree.tree_leaves(form(*given)), *given]
        assert min(sqnr(a.detach(), b.detach()) for a, b in zip(found, exact, strict=True)) > 25, stage


@pytest.mark.slow(reason="quantizes a model to all stages for one refusal")
def test_an_input_that_shares_memory_with_one_that_is_written_is_an_error():
    model = randomize(Body(lambda m, x, y: (x.add_(1), m.linear(y))[1], linear=nn.Linear(8, 8)))
    exact = model(shared := X.clone(), shared)
    for stage, form in stages_of(model, X, X.flip(0)).items():
        given = X.clone()
        if stage == "eager":
            assert sqnr(form(given, given), exact) > 15
            continue
        with pytest.raises(InputError, match=r"shares memory with input .*, which the model updates in place"):
            form(given, given[1:])
        assert torch.equal(given, X), "the input is unchanged"
        both = torch.cat([X, X])
        form(both[:16], both[16:])


def test_a_model_that_puts_tensors_into_a_list_is_quantized_in_parts():
    model = randomize(Body(lambda m, x, found: (found.append(m.linear(x)), m.linear(x) * 2)[1], linear=nn.Linear(8, 8)))
    with pytest.raises(intaglio.errors.CaptureError, match=r"argument 1\[0\]: the model puts a tensor"):
        stages.capture(model, (X, []))
    int8, found = intaglio.quantize(model, [(X, [])], progress=False), []
    int8(X, found)
    assert sqnr(found[0], model.linear(X)) > 25


def test_a_model_that_removes_entries_of_a_dictionary_has_a_note():
    model = randomize(Body(lambda m, batch: m.linear(batch.pop("x")), linear=nn.Linear(8, 8)))
    captured = stages.capture(model, ({"x": X},))
    assert any("removes or replaces entries" in note for note in captured.notes)
