"""Define-by-run: what stays in float is as little as possible, and is reported."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import intaglio
from intaglio import eager
from support.eager_models import integers, warnings_of
from support.lowering import sqnr


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


@pytest.mark.parametrize("name", RANDOM)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
