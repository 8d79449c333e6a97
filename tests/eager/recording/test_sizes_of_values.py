"""Define-by-run: layers behind operators whose sizes depend on values run in int8."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager
from support.eager_models import warnings_of
from support.slow_params import slow_params_except


@torch.library.custom_op("sizes_of_values::kept", mutates_args=())
def kept(x: Tensor, mask: Tensor) -> Tensor:
    return x[mask].clone()


@kept.register_fake
def _(x: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty([torch.library.get_ctx().new_dynamic_size(), *x.shape[1:]])


class Selecting(nn.Module):
    """Two layers with a function between them, which selects rows by a mask that is given."""

    def __init__(self, select: Callable[["Selecting", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.select = nn.Linear(8, 8), nn.Linear(8, 8), select
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.select(self, torch.relu(self.first(x)), mask)


def scattered(model: Selecting, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    found[mask] = model.second(x[mask])
    return found


def scattered_into_a_constant(model: Selecting, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.zeros(16, 8)
    found[mask] = model.second(x[mask])
    return found


def by_experts(model: Selecting, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.zeros_like(x)
    for layer, own in ((model.first, mask), (model.second, ~mask)):
        (rows,) = torch.where(own)
        found.index_add_(0, rows, layer(x[rows]))
    return found


SELECTIONS = {
    "mask": lambda m, x, mask: m.second(x[mask]),
    "mask of columns": lambda m, x, mask: m.second(x.T[:, mask].T),
    "mask of a buffer": lambda m, x, mask: m.second(x.view(2, 8, 8)[:, m.mask]),
    "masked_select": lambda m, x, mask: m.second(torch.masked_select(x, mask[:, None]).view(-1, 8)),
    "nonzero": lambda m, x, mask: m.second(x[torch.nonzero(mask)[:, 0]]),
    "where": lambda m, x, mask: m.second(x.index_select(0, torch.where(mask)[0])),
    "repeat_interleave": lambda m, x, mask: m.second(torch.repeat_interleave(x, mask.long() + 1, dim=0)),
    "unique": lambda m, x, mask: m.second(x)[torch.unique(mask)[-1:].long()],
    "an operator of a library": lambda m, x, mask: m.second(kept(x, mask)),
    "only its sum": lambda m, x, mask: m.second(x) + x[mask].sum(0),
    "scattered": scattered,
    "scattered into a constant": scattered_into_a_constant,
    "by experts": by_experts,
}


def call(selected: int, seed: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(16, dtype=torch.bool)
    mask[:selected] = True
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)), mask


def near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 0.1 * b.norm())


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "mask", "nonzero", "scattered", "mask of columns", of=SELECTIONS, reason="other functions take the same ways"
    ),
)
def test_layers_behind_it_run_in_int8(name: str, caplog) -> None:
    torch.manual_seed(0)
    net = Selecting(SELECTIONS[name]).eval()
    prepared = eager.prepare(net, call(9, 0))
    for seed in range(4):
        assert torch.allclose(prepared(*call(9, seed)), net(*call(9, seed)), atol=1e-5)
    model = eager.convert(prepared, strict=True)
    for selected in (9, 5, 1, 16):
        (x, _), (_, mask) = call(9, 1), call(selected, 0)
        found = model(x, mask)
        assert near(found, net(x, mask))
        assert not torch.equal(found, net(x, mask))
    assert model(*call(0, 1)).shape == net(*call(0, 1)).shape
    assert eager.coverage(model).macs == 1
    assert not warnings_of(caplog)


def test_an_example_that_selects_nothing_is_recorded() -> None:
    net = Selecting(SELECTIONS["mask"]).eval()
    prepared = eager.prepare(net, call(0, 0))
    for seed in range(3):
        prepared(*call(7, seed))
    model = eager.convert(prepared)
    assert near(model(*call(7, 1)), net(*call(7, 1)))
    assert not torch.equal(model(*call(7, 1)), net(*call(7, 1)))


class Selected(nn.Module):
    """Returns rows that its own values select, and reads them in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        y = self.layer(x)
        keep = y.sum(1) > 0
        return y[keep], len(keep.tolist())


def test_coverage_and_reports_name_the_operator() -> None:
    torch.manual_seed(0)
    net, batches = Selected().eval(), [call(0, seed)[0] for seed in range(4)]
    prepared = eager.prepare(net, batches[0])
    for batch in batches:
        prepared(batch)
    model = eager.convert(prepared)
    eager.assert_int8(model, macs=1)
    (part,) = [part for part in eager.coverage(model).floats if "getitem" in part.operator]
    assert part.reason == "a size in it depends on the values of a tensor"
    assert "layer" in str(intaglio.explain(model, "layer"))
    assert "3 operators" in repr(intaglio.report(net, model, batches))
    assert intaglio.compare(net, model, batches).rows


def test_numbers_that_a_program_makes_are_not_written_to() -> None:
    """The graph may hold one zero for all elements of a tensor, or the tensor itself as a constant."""
    torch.manual_seed(0)
    for select in (scattered, scattered_into_a_constant):
        net = Selecting(select).eval()
        prepared = eager.prepare(net, call(9, 0))
        prepared(*call(9, 0))
        model = eager.convert(prepared)
        for selected in (16, 3):
            assert near(model(*call(selected, 0)), net(*call(selected, 0)))
            assert torch.equal(model(*call(selected, 0))[selected:], torch.zeros(16 - selected, 8))
