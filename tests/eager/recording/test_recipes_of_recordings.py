"""Define-by-run: selectors of a recipe are checked against all recordings, not against each."""

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager
from intaglio.errors import SelectorError
from support.eager_models import warnings_of


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.near = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if x.mean().item() > 0.8:
            return self.near(x)
        return self.near(torch.tanh(self.second(x)))


def batch(scale: float) -> Tensor:
    return scale * torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


LONG, SHORT = 0.5, 5.0


@pytest.mark.parametrize("selector", ["second", "sec*", "re:second", "op:aten.tanh"])
@pytest.mark.parametrize("first", [LONG, SHORT])
def test_a_selector_may_match_operators_of_one_recording(selector: str, first: float, caplog) -> None:
    torch.manual_seed(0)
    prepared = eager.prepare(EarlyExit().eval(), batch(first), recipe={selector: {"method": "minmax"}})
    for scale in (LONG, SHORT):
        prepared(batch(scale))
    model = eager.convert(prepared)
    assert eager.coverage(model).macs == 1
    assert not [line for line in warnings_of(caplog) if "selector" in line]


@pytest.mark.parametrize("selector", ["seconds", "type:Conv2d", "re:third"])
def test_a_selector_that_matches_no_module_is_an_error_of_prepare(selector: str) -> None:
    with pytest.raises(SelectorError, match=f"'{selector}': matches no operator"):
        eager.prepare(EarlyExit().eval(), batch(SHORT), recipe={selector: {"weights_dtype": "s4"}})


def test_a_selector_of_an_operator_that_never_ran_is_an_error_of_convert() -> None:
    torch.manual_seed(0)
    prepared = eager.prepare(EarlyExit().eval(), batch(SHORT), recipe={"op:aten.tanh": {"method": "minmax"}})
    prepared(batch(SHORT))
    with pytest.raises(SelectorError, match=r"'op:aten\.tanh': matches no operator"):
        eager.convert(prepared)


def test_a_selector_of_a_module_that_never_ran_is_logged(caplog) -> None:
    torch.manual_seed(0)
    prepared = eager.prepare(EarlyExit().eval(), batch(SHORT), recipe={"second": {"weights_dtype": "s4"}})
    prepared(batch(SHORT))
    eager.convert(prepared)
    assert "selector 'second' matches no operator that calibration has run" in warnings_of(caplog)
