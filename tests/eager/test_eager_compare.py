"""B12: where a model that does not always run the same way loses its accuracy, operator by operator."""

import math

import pytest
import torch
from torch import Tensor, nn

import intaglio
from intaglio import eager, stages
from intaglio.errors import InputError
from support import nets
from support.eager_models import warnings_of
from support.nets import Body


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.near, self.far = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if x.mean().item() > 1:
            return self.near(x)
        return self.far(torch.relu(self.second(x)))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.tags = nn.GRUCell(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, found = x.new_zeros(x.size(0), 12), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(self.tags(state))
        return torch.stack(found, 1)


def rows(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(seed)) * scale


def sentences(seed: int, length: int) -> Tensor:
    return torch.randn(64, length, 8, generator=torch.Generator().manual_seed(seed))


def converted(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    prepared = eager.prepare(model, batches[0])
    for batch in batches:
        prepared(batch)
    return eager.convert(prepared)


SCALES = (1.0, 6.0, 1.5, 5.0)


@pytest.mark.case("frontends B12")
def test_branches_are_compared_where_they_ran(caplog):
    model = nets.randomize(EarlyExit())
    quantized = converted(model, [rows(seed, scale) for seed, scale in enumerate(SCALES)])
    both = intaglio.compare(model, quantized, [rows(9), rows(10, 6.0)])
    linear = {row.path for row in both.rows if row.operator == "aten.linear.default"}
    assert linear == {"first", "second", "near", "far"}
    assert both.samples == 64
    assert all(row.so_far > 20 for row in both.rows)
    assert all(math.isfinite(row.alone) for row in both.rows if row.operator == "aten.linear.default")
    one = intaglio.compare(model, quantized, [rows(9)])
    assert "near" not in {row.path for row in one.rows}
    assert len(one.results) == 1
    assert not warnings_of(caplog)


@pytest.mark.slow(reason="converts a model twice; branches are compared above")
@pytest.mark.case("frontends B12")
def test_accumulated_error_continues_across_recordings():
    """``so far`` of an operator of a later recording knows the noise of the earlier one; ``alone`` does not."""
    model = nets.randomize(EarlyExit())
    good = converted(model, [rows(seed, scale) for seed, scale in enumerate(SCALES)])
    first, *others = eager.parameters(good)
    site = "#0/relu.0"
    coarse = first.changed(site, scale=first.entries[site].scale[0] * 20)
    prepared = eager.prepare(model, rows(0))
    for seed, scale in enumerate(SCALES):
        prepared(rows(seed, scale))
    bad = eager.convert(prepared, [coarse, *others])
    data = [rows(9), rows(10, 6.0)]
    ours, theirs = (
        {r.path: r for r in intaglio.compare(model, m, data).rows if "linear" in r.operator} for m in (bad, good)
    )
    assert intaglio.compare(model, bad, data).worst.site == site
    assert all(ours[path].so_far < theirs[path].so_far - 6 for path in ("second", "far", "near"))
    assert ours["second"].alone == pytest.approx(theirs["second"].alone, abs=1)


@pytest.mark.slow(reason="three comparisons of a network with loops; every part of one is compared in the other tests")
@pytest.mark.case("frontends B12")
def test_a_loop_is_compared_over_all_its_iterations():
    """Rows for each turn that was recorded, the last with those behind; a loop of another length begins at the second
    turn, since the first one's zeros are a constant."""
    model = nets.randomize(Tagger())
    quantized = converted(model, [sentences(seed, length) for seed, length in enumerate((3, 2, 3))])
    for length, turns in ((3, 3), (2, 2), (5, 2)):
        judged = intaglio.compare(model, quantized, [sentences(20 + length, length)])
        tags = {row.path for row in judged.rows if row.operator == "aten.linear.default" and "tags" in row.path}
        assert len(tags) == turns
        assert all(row.so_far > 20 for row in judged.rows)
        assert 20 < judged.results[0] < 100


@pytest.mark.slow(reason="compares a model in two ways; branches are compared above")
@pytest.mark.case("frontends B12")
def test_a_single_recording_is_compared_like_its_explicit_graph():
    model = nets.randomize(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    data = [rows(seed) for seed in range(3)]
    quantized = converted(model, data)
    assert intaglio.compare(model, quantized, data).rows == intaglio.compare(model, eager.rewrite(quantized), data).rows


@pytest.mark.slow(reason="calibrates a model whose int8 form takes another branch")
@pytest.mark.case("frontends B12")
def test_a_call_with_another_branch_in_int8_is_compared_up_to_the_branch():
    """Numbers decide the way, and int8 has others: said, and no wrong pair is made."""

    def body(m, x, limit):
        y = torch.relu(m.first(x))
        return m.near(y) if y.sum().item() > limit else m.far(y)

    model = nets.randomize(Body(body, first=nn.Linear(8, 16), near=nn.Linear(16, 4), far=nn.Linear(16, 4)))
    prepared = eager.prepare(model, (rows(0), 1e9))
    for seed in range(4):
        prepared(rows(seed), (-1e9, 1e9)[seed % 2])
    quantized = eager.convert(prepared)
    with torch.no_grad():
        exact = torch.relu(model.first(rows(0))).sum().item()
        found = quantized.first(rows(0)).relu().sum().item()
    between = (exact + found) / 2
    judged = intaglio.compare(model, quantized, [(rows(0), between)])
    assert judged.parted == 1
    assert {row.path for row in judged.rows if "linear" in row.operator} == {"first"}
    assert "took another path in int8" in str(judged)
    assert intaglio.compare(model, quantized, [(rows(0), -1e9)]).parted == 0


@pytest.mark.case("frontends B12")
def test_the_state_of_another_branching_model_is_refused_by_name():
    quantized = converted(nets.randomize(EarlyExit()), [rows(seed, scale) for seed, scale in enumerate(SCALES)])
    other = nets.randomize(EarlyExit())
    other.far = nn.Linear(16, 5)
    with pytest.raises(InputError, match=r"far \(aten.linear.default\)"):
        intaglio.compare(other.eval(), quantized, [rows(0)])


@pytest.mark.slow(reason="compares a model with branches once more")
@pytest.mark.case("frontends B12")
def test_comparing_changes_neither_model():
    model = nets.randomize(EarlyExit())
    batches = [rows(seed, scale) for seed, scale in enumerate(SCALES)]
    prepared = eager.prepare(model, batches[0])
    for batch in batches:
        prepared(batch)
    quantized = eager.convert(prepared)
    before = [quantized(batch) for batch in batches]
    state = prepared.state_dict()
    assert intaglio.compare(prepared, quantized, batches) == intaglio.compare(model, quantized, batches)
    assert all(map(torch.equal, before, [quantized(batch) for batch in batches]))
    after = prepared.state_dict()
    assert all(torch.equal(state[name], after[name]) for name in state)


@pytest.mark.slow(reason="compares a recurrent model in both modes")
def test_gates_of_a_recurrent_cell_are_compared_in_both_modes():
    model = nets.randomize(Tagger())
    data = [sentences(seed, 3) for seed in range(3)]
    prepared = stages.prepare(stages.capture(model, data[0]))
    reference = stages.convert(prepared, stages.calibrate(prepared, data))
    judged = intaglio.compare(model, reference, data)
    assert {"cell", "tags"} <= {row.path.partition("@")[0] for row in judged.rows}
    assert all(row.so_far > 20 for row in judged.rows)
