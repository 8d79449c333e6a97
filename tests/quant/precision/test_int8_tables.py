"""Embedding tables are int8 by default where that costs little in the results."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.quant.precision import int8_tables
from intaglio.quant.precision.int8_tables import MOST_DECIBELS
from intaglio.quant.recipes.recipe import Recipe
from support.lowering import sqnr
from support.nets import Body, randomize

DRAW = torch.Generator().manual_seed(11)
IDS = [torch.randint(0, 200, (16, 9), generator=DRAW) for _ in range(4)]


COARSE = {"*": {"weights_dtype": "s4"}}
"""Weights of 4 bits make so much noise that an int8 table adds little to it."""


def classifier() -> nn.Module:
    """A classifier of texts."""
    layers = (nn.Embedding(200, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
    words, first, second, last = (randomize(layer) for layer in layers)
    return Body(
        lambda m, ids: m.last(m.second(m.first(m.words(ids)).relu()).relu().mean(1)),
        words=words,
        first=first,
        second=second,
        last=last,
    )


def prepare(model: nn.Module) -> stages.Prepared:
    return stages.prepare(stages.capture(model, IDS[0]), stages.Quantizer(Recipe.given(COARSE)))


def equalized(model: nn.Module) -> stages.Prepared:
    return stages.equalize(prepare(model), IDS)


def tables_of(model: intaglio.QuantizedModel) -> list[str]:
    return [note for note in model.coverage.notes if note.startswith("table of")]


def test_a_table_that_costs_little_is_int8():
    torch.manual_seed(3)
    model = classifier()
    found = intaglio.quantize(model, IDS, recipe=COARSE, progress=False)
    (note,) = tables_of(found)
    assert "u8, a scale and a zero point for every row; that costs 0.0" in note
    plain = intaglio.quantize(model, IDS, recipe={"*": {**COARSE["*"], "embeddings": "float"}}, progress=False)
    assert not tables_of(plain)
    assert found.coverage.bytes_after < plain.coverage.bytes_after - 0.7 * 200 * 64 * 4
    ids = torch.randint(0, 200, (512, 9), generator=DRAW)
    assert sqnr(found(ids), model(ids)) > sqnr(plain(ids), model(ids)) - 2 * MOST_DECIBELS


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, ids: (m.last(m.words(ids)), m.words(ids)),
        lambda m, ids: (m.last(m.words(ids)), m.words(ids).sum(1)),
    ],
    ids=["rows are a result", "sums of rows are a result"],
)
def test_a_table_that_costs_much_stays_in_float(forward):
    torch.manual_seed(4)
    model = classifier()
    model = Body(forward, words=model.words, last=model.last)
    prepared = equalized(model)
    assert not prepared.equalization.tables
    assert not any(table.is_quantized for table in prepared.annotations.tables)


def chosen_tables(prepared: stages.Prepared) -> set[str]:
    return {str(table.node.args[0].target) for table in prepared.annotations.tables if table.is_quantized}


def test_tables_share_what_they_may_cost(monkeypatch):
    """The largest comes first, and the others may cost what it leaves."""
    torch.manual_seed(5)
    model = Body(
        lambda m, ids: m.last(m.middle(m.words(ids) + m.places(ids % 50)).relu().mean(1)),
        words=randomize(nn.Embedding(200, 64)),
        places=randomize(nn.Embedding(50, 64)),
        middle=randomize(nn.Linear(64, 64)),
        last=randomize(nn.Linear(64, 10)),
    )
    both = equalized(model)
    assert chosen_tables(both) == {"words_weight", "places_weight"}
    costs = sorted(both.equalization.tables.values())
    assert len(costs) == 2
    assert 0 < sum(costs) <= 1.01 * MOST_DECIBELS  # decibels of sums are a little less than sums of decibels
    monkeypatch.setattr(int8_tables, "MOST_DECIBELS", sum(costs) - costs[0] / 2)
    assert chosen_tables(equalized(model)) == {"words_weight"}
    monkeypatch.setattr(int8_tables, "MOST_DECIBELS", costs[0] / 2)
    assert not chosen_tables(equalized(model))


def test_parameters_keep_the_choice(tmp_path):
    torch.manual_seed(3)
    model = classifier()
    prepared = equalized(model)
    ranges = stages.calibrate(prepared, IDS)
    reference = stages.convert(prepared, ranges, stages.correct(prepared, ranges, IDS))
    assert reference.parameters.corrected.equalization.tables
    reference.parameters.save(tmp_path / "parameters.json")
    parameters = stages.Parameters.load(tmp_path / "parameters.json")
    assert parameters == reference.parameters
    again = stages.convert(prepare(model), parameters)
    found, kept = (stages.compile(stages.requantize(one)) for one in (reference, again))
    assert tables_of(kept) == tables_of(found) != []
    assert torch.equal(kept(IDS[1]), found(IDS[1]))


@pytest.mark.slow(reason="a further model with three tables; tables share what they may cost above")
def test_a_bag_and_shared_tables():
    torch.manual_seed(6)
    model = classifier()
    bag = randomize(nn.EmbeddingBag(200, 64))
    model = Body(
        lambda m, ids: m.last(
            m.second(m.first(m.words(ids)).relu().mean(1) + m.bag(ids) + m.words((ids[:, :2] + 1) % 200).sum(1)).relu()
        ),
        words=model.words,
        bag=bag,
        first=model.first,
        second=model.second,
        last=model.last,
    )
    prepared = equalized(model)
    assert chosen_tables(prepared) == {"words_weight", "bag_weight"}
    assert len(prepared.equalization.tables) == 3  # both readers of the words are named


def test_a_table_that_others_read_in_float_stays_in_float():
    """A gather reads the table in float. Two copies of the table would be stored."""
    torch.manual_seed(3)
    model = classifier()
    both = Body(
        lambda m, ids: m.last(
            m.second(m.first(m.words(ids)).relu().mean(1) + m.words.weight.gather(0, ids[:, :1].expand(-1, 64))).relu()
        ),
        words=model.words,
        first=model.first,
        second=model.second,
        last=model.last,
    )
    assert chosen_tables(equalized(model)) == {"words_weight"}
    assert not chosen_tables(equalized(both))
