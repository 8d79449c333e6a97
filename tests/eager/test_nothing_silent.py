"""Define-by-run: what stays in float is as little as possible, and is reported."""

import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import eager
from intaglio.errors import InputError, UnsupportedError
from support.eager_models import integers, warnings_of
from support.lowering import sqnr
from support.nets import Body
from support.slow_params import slow_params, slow_params_except


class Head(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(16, 16), nn.Linear(16, 4), function
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self, torch.relu(self.a(x))))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def converted(model: nn.Module, **options: Any) -> nn.Module:
    prepared = eager.prepare(model, rows())
    for seed in (1, 2):
        prepared(rows(seed))
    return eager.convert(prepared, **options)


RANDOM = {
    "rand": lambda m, x: x + 0 * torch.rand(4, 16),
    "rand_like": lambda m, x: x + 0 * torch.rand_like(x),
    "a generator": lambda m, x: x + 0 * torch.randn((4, 16), generator=m.generator),
    "dropout": lambda m, x: F.dropout(x, 1e-6, training=True),
    "normal_": lambda m, x: x + 0 * torch.empty(4, 16).normal_(),
    "uniform_": lambda m, x: x + 0 * torch.empty_like(x).uniform_(),
    "bernoulli": lambda m, x: x * torch.bernoulli(torch.ones_like(x)),
}


@pytest.mark.parametrize(
    "name",
    slow_params_except("a generator", "dropout", of=RANDOM, reason="the same draws by other functions"),
)
def test_a_random_operator_leaves_the_rest_in_int8(name, caplog):
    torch.manual_seed(0)
    model = Head(RANDOM[name]).eval()
    found = converted(model, strict=True)
    assert integers(found).count("aten.linear.default") == 2
    assert len(eager.session_of(found).segments) == 1
    assert 20 < sqnr(found(rows(1)), model(rows(1))) < 100
    assert not warnings_of(caplog)


def test_a_random_operator_draws_new_numbers_in_every_call():
    torch.manual_seed(0)
    found = converted(Head(lambda m, x: x + torch.rand(4, 16)).eval())
    assert not torch.equal(found(rows()), found(rows()))


@pytest.mark.parametrize("dtype", [*slow_params(torch.bfloat16, reason="the other half precision"), torch.float16])
def test_half_precision_runs_in_int8(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval().to(dtype)
    x = rows().to(dtype)
    prepared = eager.prepare(model, x)
    prepared(x)
    found = eager.convert(prepared, strict=True)
    y = found(x)
    assert y.dtype is dtype
    assert 20 < sqnr(y.float(), model(x).float()) < 100
    assert torch.equal(y, intaglio.stages.compile(eager.rewrite(found))(x))


@pytest.mark.slow(reason="a model with a branch; half precision runs in int8 above")
def test_half_precision_between_two_recordings():
    """The values that both recordings share keep the data type of the model."""

    def body(m: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > -1 else x

    torch.manual_seed(0)
    model = Head(body).eval().bfloat16()
    x = rows().bfloat16()
    prepared = eager.prepare(model, x)
    prepared(x)
    found = eager.convert(prepared, strict=True)
    assert found(x).dtype is torch.bfloat16
    assert 20 < sqnr(found(x).float(), model(x).float()) < 100


@pytest.mark.slow(reason="quantizes twice to compare two coverages")
def test_coverage_is_that_of_the_exported_model():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    model, images = nn.Sequential(*layers).eval(), torch.randn(4, 3, 9, 9)
    prepared = eager.prepare(model, images)
    prepared(images)
    found = eager.coverage(eager.convert(prepared))
    expected = intaglio.quantize(model, [images]).coverage
    assert str(found).splitlines()[0] == str(expected).splitlines()[0]
    assert (found.macs_int8, found.macs_total) == (expected.macs_int8, expected.macs_total) == (10_624, 10_624)
    assert found.operators_int8 == found.operators_total == expected.operators_total
    assert found.bytes_before == expected.bytes_before
    eager.assert_int8(eager.convert(prepared))


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Mixed(nn.Module):
    """Two recordings, and operators that no recording takes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.scaled, self.own = Scaled(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.scaled(torch.relu(self.a(x)) + 0 * torch.rand(4, 16))
        with torch.autocast("cpu"):
            x = self.own(x).float()
        return self.b(x) if x.sum().item() > 0 else self.c(x)


def test_coverage_lists_what_no_recording_takes():
    torch.manual_seed(0)
    model = converted(Mixed().eval())
    found = eager.coverage(model)
    reasons = {part.operator: (part.reason, part.path, part.macs) for part in found.floats}
    assert reasons["torch.rand"] == ("it draws random numbers", "", 0)
    assert reasons["Scaled"] == ("its class overrides the forward of a class of torch.nn", "scaled", 256)
    assert reasons["Linear"] == ("torch.autocast is on", "own", 256)
    assert all(part.path or "test_nothing_silent.py:" in part.source for part in found.floats)
    assert found.macs_total - found.macs_int8 == 512
    with pytest.raises(AssertionError, match=r"asked for 100.00 %\n(.|\n)*it draws random numbers"):
        eager.assert_int8(model)
    assert eager.coverage(pickle.loads(pickle.dumps(model))) == found


@pytest.mark.slow(reason="converts a model for two entries; what no recording takes is listed above")
def test_coverage_lists_leaf_classes_and_unseen_operators(caplog):
    def body(m: Any, x: Tensor) -> Tensor:
        return x.erf() if x.shape[0] == 3 else x

    torch.manual_seed(0)
    x = rows()
    prepared = eager.prepare(nn.Sequential(Head(body), Scaled(4, 4)).eval(), x, leaf_classes=(Scaled,))
    prepared(x)
    model = eager.convert(prepared)
    assert [part.reason for part in eager.coverage(model).floats] == ["its class is one of leaf_classes"]
    model(x[:3])
    assert "torch.Tensor.erf" in {part.operator for part in eager.coverage(model).floats}
    assert warnings_of(caplog)


LEAVES = {
    "LSTM": (nn.LSTM(16, 16, batch_first=True), lambda m, x: m.leaf(x[:, None])[0][:, 0], 4 * 16 * 32),
    "Bilinear": (nn.Bilinear(16, 16, 16), lambda m, x: m.leaf(x, x), 16 * 16 * 16),
    "TransformerEncoderLayer": (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        lambda m, x: m.leaf(x[:, None])[:, 0],
        16 * (4 * 16 + 2 * 32) + 2 * 16,
    ),
}
"""Class -> module, its call, and its multiply-accumulates."""


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "Bilinear",
        "TransformerEncoderLayer",
        of=LEAVES,
        reason="the work of a recurrent layer is counted in test_macs.py",
    ),
)
def test_coverage_counts_the_work_of_leaf_classes(name):
    leaf, call, macs = LEAVES[name]
    model = Head(call).eval()
    model.leaf = leaf.eval()
    prepared = eager.prepare(model, rows(), leaf_classes=(type(leaf),))
    prepared(rows())
    found = eager.coverage(eager.convert(prepared))
    assert {part.operator: part.macs for part in found.floats if part.macs} == {name: macs}


def test_coverage_of_a_prepared_model_is_an_error():
    with pytest.raises(InputError, match=r"call eager\.convert"):
        eager.coverage(eager.prepare(Head(lambda m, x: x).eval(), rows()))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("model", "reason", "remedy"),
    [
        (
            nn.Sequential(nn.Linear(16, 4)).double(),
            "its result is not a float32 tensor but f64",
            r"convert the model with model\.float\(\)",
        ),
        (nn.Sequential(nn.Softmax(-1)), "no int8 kernel for this operator", "check the recipe"),
    ],
    ids=["float64", "no layers"],
)
def test_a_model_that_stays_in_float_is_an_error(model, reason, remedy, strict):
    x = rows().to(next((p.dtype for p in model.parameters()), torch.float32))
    prepared = eager.prepare(model.eval(), x)
    prepared(x)
    with pytest.raises(UnsupportedError, match=f"nothing in it can be quantized: .*{reason}") as error:
        eager.convert(prepared, strict=strict)
    assert re.match(remedy, error.value.remedy)


class Sum(nn.Module):
    """A linear layer for every tensor of an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)

    def forward(self, values: Any) -> list[Tensor]:
        return [torch.relu(self.a(x)) for x in values]


@pytest.mark.parametrize(
    "kind",
    [*slow_params(iter, reason="a generator is an iterator"), lambda values: (x for x in values)],
    ids=["iterator", "generator"],
)
def test_tensors_that_an_iterator_yields_are_inputs(kind):
    torch.manual_seed(0)
    model = Sum().eval()
    prepared = eager.prepare(model, (kind([rows(0), rows(1)]),))
    prepared(kind([rows(1), rows(2)]))
    found = eager.convert(prepared)
    assert eager.coverage(found).operators == 1
    for mine, its in zip(found(kind([rows(1), rows(2)])), model(kind([rows(1), rows(2)])), strict=True):
        assert sqnr(mine, its) > 20


@pytest.mark.parametrize("write", [lambda x: x.mul_(3), lambda x: x[1:3].zero_(), lambda x: x.copy_(x + 1)])
@pytest.mark.parametrize("weak", [False, True], ids=["plain", "with a weak reference"])
def test_tensors_that_a_call_leaves_behind_can_be_written_to(write, weak):
    references: list[Any] = []

    def forward(m: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        y = torch.relu(m.a(x))
        kept.append(y)
        references.append(weakref.ref(y) if weak else y)
        return m.b(y)

    torch.manual_seed(0)
    model = Body(forward, a=nn.Linear(16, 16), b=nn.Linear(16, 4)).eval()
    prepared = eager.prepare(model, (rows(), []))
    prepared(rows(1), [])
    found, mine, its = eager.convert(prepared), [], []
    expected = found(rows(1), mine)
    model(rows(1), its)
    write(mine[0])
    write(its[0])
    assert sqnr(mine[0], its[0]) > 20
    assert torch.equal(found(rows(1), []), expected)


class Listed(nn.Module):
    """One of two paths has an operator that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x.sum() > 0 else torch.fake_quantize_per_tensor_affine(self.b(x), 0.1, 128, 0, 255)


def test_a_recording_that_stays_in_float_is_one_warning_with_the_reason(caplog):
    prepared = eager.prepare(Listed().eval(), rows().abs())
    prepared(-rows().abs())
    prepared(rows().abs())
    found = eager.convert(prepared)
    (text,) = [text for text in warnings_of(caplog) if "stays in float" in text]
    (part,) = [part for part in eager.coverage(found).floats if part.path == "b"]
    assert part.reason in text
    assert "in forward" in text
