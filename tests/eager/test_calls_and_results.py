"""Define-by-run: objects as arguments and results, calls of strict models, tensors that a call leaves behind."""

import dataclasses
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager
from intaglio.errors import InputError
from support.eager_models import integers
from support.lowering import sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except


@dataclasses.dataclass
class Scores:
    logits: Tensor
    classes: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedScores:
    logits: Tensor


class Nested:
    def __init__(self, logits: Tensor) -> None:
        self.entries = [{"logits": logits}]

    @property
    def logits(self) -> Tensor:
        return self.entries[0]["logits"]


class Slotted:
    __slots__ = ("__logits",)

    def __init__(self, logits: Tensor) -> None:
        self.__logits = logits

    @property
    def logits(self) -> Tensor:
        return self.__logits


class Asked(Nested):
    def __call__(self) -> Tensor:
        return self.logits


KINDS = {
    "dataclass": Scores,
    "dataclass with slots": SlottedScores,
    "namespace": lambda y: SimpleNamespace(logits=y),
    "own class": Nested,
    "class with slots": Slotted,
    "object that can be called": Asked,
}


def rows(seed: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


def layers(forward: Any) -> nn.Module:
    torch.manual_seed(0)
    return Body(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 4)).eval()


def converted(model: nn.Module, *calls: Any, **options: Any) -> nn.Module:
    prepared = eager.prepare(model, calls[0])
    for call in calls:
        prepared(*call)
    return eager.convert(prepared, **options)


@pytest.mark.parametrize(
    "kind",
    slow_params_except(Scores, Nested, Asked, of=KINDS.values(), reason="another class whose attributes are tensors"),
    ids=list(KINDS),
)
def test_a_result_may_be_an_object(kind):
    model = layers(lambda m, x: kind(m.b(torch.relu(m.a(x)))))
    found = converted(model, (rows(),), (rows(1),), strict=True)
    assert integers(found).count("aten.linear.default") == 2
    result, expected = found(rows(1)), model(rows(1))
    assert type(result) is type(expected)
    assert type(result.logits) is Tensor
    assert 20 < sqnr(result.logits, expected.logits) < 100


@pytest.mark.parametrize(
    "kind",
    slow_params_except(Scores, Nested, Asked, of=KINDS.values(), reason="another class whose attributes are tensors"),
    ids=list(KINDS),
)
def test_an_argument_may_be_an_object(kind):
    model = layers(lambda m, x: m.b(torch.relu(m.a(x.logits))))
    found = converted(model, (kind(rows()),), (kind(rows(1, 3)),), strict=True)
    assert integers(found).count("aten.linear.default") == 2
    assert 20 < sqnr(found(kind(rows())), model(kind(rows()))) < 100


def pair(m: Any, x: Tensor) -> tuple[Tensor, Any]:
    """Return a result, and a function that returns another one."""
    first, second = m.b(torch.relu(m.a(x))), m.b(x)
    return first, lambda: second


RESULTS_TO_OPEN = {
    "set": (lambda y: {y}, lambda found: next(iter(found))),
    "frozenset": (lambda y: frozenset([y]), lambda found: next(iter(found))),
    "read-only dictionary": (lambda y: MappingProxyType({"y": y}), lambda found: found["y"]),
    "function": (lambda y: lambda: y, lambda found: found()),
    "partial function": (lambda y: partial(torch.Tensor.clone, y), lambda found: found()),
    "parameter": (nn.Parameter, torch.Tensor.detach),
    "parameter list": (lambda y: nn.ParameterList([y]), lambda found: found[0].detach()),
    "list in a namespace in a function": (
        lambda y: partial(getattr, SimpleNamespace(found=[y]), "found"),
        lambda f: f()[0],
    ),
}


@pytest.mark.parametrize(
    "kind",
    slow_params_except(
        "function",
        "partial function",
        "read-only dictionary",
        of=RESULTS_TO_OPEN,
        reason="another class that holds tensors",
    ),
)
def test_a_result_may_hold_tensors_anywhere(kind, caplog):
    close, read = RESULTS_TO_OPEN[kind]
    model = layers(lambda m, x: close(m.b(torch.relu(m.a(x)))))
    found = converted(model, (rows(),), (rows(1),), strict=True)
    assert integers(found).count("aten.linear.default") == 2
    eager.assert_int8(found)
    result = read(found(rows(1)))
    assert type(result) is Tensor
    assert 20 < sqnr(result, read(model(rows(1)))) < 100
    assert sqnr(intaglio.stages.compile(eager.rewrite(found))(rows(1))[0], result) > 100


@pytest.mark.slow(reason="records one more result; functions hold results above")
def test_a_function_beside_another_result():
    model = layers(pair)
    found = converted(model, (rows(),), strict=True)
    assert integers(found).count("aten.linear.default") == 3
    for result, expected in zip(found(rows()), model(rows()), strict=True):
        tensor, wanted = (value if isinstance(value, Tensor) else value() for value in (result, expected))
        assert type(tensor) is Tensor
        assert 20 < sqnr(tensor, wanted) < 100


ARGUMENTS = {
    "set": (lambda x: {x}, lambda given: next(iter(given))),
    "function": (lambda x: lambda: x, lambda given: given()),
    "read-only dictionary": (lambda x: MappingProxyType({"x": x}), lambda given: given["x"]),
    "parameter list": (lambda x: nn.ParameterList([x]), lambda given: given[0]),
    "path": (lambda x: Path("1"), lambda given: float(given.name)),
    "data type": (lambda x: torch.float32, lambda given: given.itemsize),
}


@pytest.mark.parametrize(
    "kind",
    slow_params_except(
        "read-only dictionary", "parameter list", "function", of=ARGUMENTS, reason="another class that holds tensors"
    ),
)
def test_an_argument_may_be_anything(kind):
    make, read = ARGUMENTS[kind]
    model = layers(lambda m, x, given: m.b(torch.relu(m.a(x + read(given)))))
    found = converted(model, (rows(), make(rows())), (rows(1), make(rows(1))), strict=True)
    assert integers(found).count("aten.linear.default") == 2
    assert 20 < sqnr(found(rows(), make(rows())), model(rows(), make(rows()))) < 100


def put_aside(m: Any, x: Tensor, kept: list[Tensor]) -> Any:
    kept.append(m.b(torch.relu(m.a(x))))


def beside(m: Any, x: Tensor, kept: list[Tensor]) -> Any:
    h = torch.relu(m.a(x))
    kept.append(m.b(h))
    return h


@pytest.mark.parametrize(
    "body", [put_aside, *slow_params(beside, reason="a result beside the one that is left behind")]
)
def test_layers_whose_results_a_call_leaves_behind_run_in_int8(body):
    model = layers(body)
    found, expected = list[Tensor](), list[Tensor]()
    int8 = converted(model, (rows(), []), strict=True)
    assert integers(int8).count("aten.linear.default") == 2
    result, wanted = int8(rows(), found), model(rows(), expected)
    assert 20 < sqnr(found[0], expected[0]) < 100
    assert type(result) is type(wanted)
    if result is not None:
        assert torch.equal(intaglio.stages.compile(eager.rewrite(int8))(rows(), []), result)


def test_a_result_may_be_an_iterator():
    model = layers(lambda m, x: iter([m.b(torch.relu(m.a(x)))]))
    found = converted(model, (rows(),))
    assert integers(found).count("aten.linear.default") == 2
    (result,), (expected,) = found(rows()), model(rows())
    assert type(result) is Tensor
    assert 20 < sqnr(result, expected) < 100


def masked(m: Any, x: Tensor, mask: Any = None, *, more: Any = None) -> Tensor:
    y = torch.relu(m.a(x))
    y = y if mask is None else y * mask
    return m.b(y if more is None else y + sum(more.values()))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, mask: Any = None, *, more: Any = None) -> Tensor:
        return masked(self, x, mask, more=more)


@pytest.mark.slow(reason="six forms of a call; a call that calibration did not have is named below")
def test_strict_accepts_every_call_that_calibration_had():
    model, mask = Masked().eval(), torch.ones(16)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((rows(), mask), {}),
        ((rows(),), {}),
        ((rows(),), {"more": {"a": mask, "b": mask}}),
        ((rows(),), {"more": {"b": mask}}),
    ]
    prepared = eager.prepare(model, calls[0][0])
    for args, kwargs in calls:
        prepared(*args, **kwargs)
    found = eager.convert(prepared, strict=True)
    spelled = [((), {"x": rows()}), ((rows(),), {"mask": mask}), ((rows(), None), {"more": None})]
    for args, kwargs in [*calls, *spelled]:
        assert 20 < sqnr(found(*args, **kwargs), model(*args, **kwargs)) < 100
    restored = eager.convert(prepared, strict=True)
    restored.load_state_dict(found.state_dict())
    restored(rows())


def test_strict_names_a_call_that_calibration_did_not_have():
    mask = torch.ones(16)
    prepared = eager.prepare(Masked().eval(), (rows(), mask))
    prepared(rows(), mask)
    found = eager.convert(prepared, strict=True)
    words = (
        r"nested as \(x: tensor, mask: None, more: \{'b': tensor\}\), but in calibration as \(x: tensor, mask: tensor"
    )
    with pytest.raises(InputError, match=words):
        found(rows(), more={"b": mask})


@pytest.mark.slow(reason="calls leave tensors behind above")
def test_tensors_that_a_call_leaves_behind_are_plain():
    def body(m: Any, x: Tensor, given: list[Tensor]) -> Tensor:
        m.last = torch.relu(m.a(x))
        given.append(m.last + 1)
        return m.b(m.last)

    model, seen = layers(body), list[Tensor]()
    model.b.register_forward_hook(lambda module, inputs, output: seen.extend(inputs))
    found = converted(model, (rows(), []))
    left = list[Tensor]()
    found(rows(), left)
    expected = torch.relu(model.a(rows()))
    for kept, wanted in ((found.last, expected), (left[0], expected + 1), (seen[-1], expected)):
        assert type(kept) is Tensor
        assert 20 < sqnr(kept, wanted) < 100
