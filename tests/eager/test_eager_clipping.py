"""Define-by-run: values outside of the calibrated range, as an unseen branch makes them, are reported."""

import pytest
import torch
from torch import Tensor, nn

from intaglio import eager
from intaglio.errors import InputError, UnsupportedError
from support.eager_models import warnings_of


class Branches(nn.Module):
    """Calibrated on the branch whose values are positive, run on the one whose values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.relu(self.a(x)) if x.mean() > 0 else torch.tanh(self.b(x)))


def rows(seed: int = 0, sign: float = 1.0) -> Tensor:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
    return x - x.mean() + sign * 0.1


def converted(strict: bool = False) -> nn.Module:
    torch.manual_seed(0)
    prepared = eager.prepare(Branches().eval(), rows())
    for seed in range(3):
        prepared(rows(seed))
    return eager.convert(prepared, strict=strict)


def test_a_strict_model_takes_the_data_of_its_calibration():
    """All of it is at the ends of a symmetric range, which are half a step beyond the outermost quantized values."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    batches = [(0.54 * torch.randn(64, 16)).clamp(-0.27, 0.27) for _ in range(8)]
    prepared = eager.prepare(net, batches[0])
    for batch in batches:
        prepared(batch)
    model = eager.convert(prepared, strict=True)
    for batch in batches:
        model(batch)
    assert "model" not in {value.path for value in eager.clipping(model).values}


def test_the_layer_behind_an_unseen_branch_is_named_once(caplog):
    model = converted()
    for seed in range(3):
        model(rows(seed))
    assert warnings_of(caplog) == []
    for seed in (7, 8):
        model(rows(seed, -1.0))
    (found,) = [text for text in warnings_of(caplog) if "calibrated range" in text]
    assert found.startswith("o: ")
    (value,) = eager.clipping(model).values
    assert (value.path, value.calls) == ("o", 2)
    assert 0.3 < value.share < 0.7
    assert any("o (%" in note for note in eager.coverage(model).notes)


def test_strict_models_raise(caplog):
    model = converted(strict=True)
    model(rows(1))
    with pytest.raises((UnsupportedError, InputError)):
        model(rows(7, -1.0))


def test_a_strict_model_raises_for_inputs_outside_of_the_range():
    model = converted(strict=True)
    with pytest.raises(InputError, match=r"a: .* calibrated range"):
        model(10 * rows(1))


def test_prepared_models_have_no_report_yet():
    prepared = eager.prepare(Branches().eval(), rows())
    with pytest.raises(InputError, match="prepared, not converted"):
        eager.clipping(prepared)
