"""Rows of constant tables, which are embeddings however the model reads them."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.errors import InputError
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from support.nets import Body
from support.slow_params import slow_params_except

DRAW = torch.Generator().manual_seed(0)
ROWS = 300
LOOKUPS = {
    "index_select": lambda m, ids: torch.index_select(m.table, 0, ids),
    "index_select of the first of two axes": lambda m, ids: m.table.index_select(-2, ids),
    "index": lambda m, ids: m.table[ids],
    "index with two axes of ids": lambda m, ids: m.table[ids.reshape(1, -1).repeat(3, 1)],
    "an embedding with one axis of ids": lambda m, ids: m.words(ids),
}


def model_of(name):
    model = Body(lambda m, ids: m.last(LOOKUPS[name](m, ids)), words=nn.Embedding(ROWS, 16), last=nn.Linear(16, 4))
    model.table = nn.Parameter(torch.randn(ROWS, 16, generator=DRAW))
    return model.eval()


def ids_of(count, low=0):
    return torch.randint(low, ROWS, (count,), generator=DRAW)


@pytest.mark.parametrize(
    "name",
    slow_params_except("index_select", of=LOOKUPS, reason="another spelling of the same lookup"),
)
def test_tables_that_are_looked_up_are_int8(name):
    model = model_of(name)
    found = intaglio.quantize(
        model, [ids_of(40) for _ in range(4)], recipe={"*": {"embeddings": "int8"}}, progress=False
    )
    assert f"u8[{ROWS}, 16]" in found.text("integer")
    assert not found.coverage.islands
    for batch in (ids_of(9), ids_of(1)):
        exact = model(batch)
        assert (found(batch) - exact).square().sum() < 1e-2 * exact.square().sum()


@pytest.mark.parametrize(
    "name",
    slow_params_except("an embedding with one axis of ids", of=LOOKUPS, reason="another spelling of the same lookup"),
)
def test_ids_behind_the_table_are_refused(name):
    found = intaglio.quantize(model_of(name), [ids_of(40)], progress=False)
    for ids in (torch.tensor([0, ROWS, 1]), torch.tensor([-ROWS - 1, 2])):
        with pytest.raises((InputError, IndexError)):
            found(ids)


def test_negative_ids_of_an_index_count_from_the_end():
    model = model_of("index")
    found = intaglio.quantize(model, [ids_of(40, -ROWS) for _ in range(4)], progress=False)
    ids = torch.tensor([-1, -ROWS, 5])
    assert torch.equal(found(ids), found(ids % ROWS))


@pytest.mark.parametrize(
    "body",
    [
        lambda m, ids: torch.index_select(m.table, 1, ids % 16),
        lambda m, ids: m.table[:, ids % 16],
        lambda m, ids: m.table[ids, ids % 16],
        lambda m, ids: torch.index_select(m.last(m.table + ids.sum()), 0, ids),
        lambda m, ids: torch.index_select(m.table[:, 0], 0, ids),
    ],
)
def test_other_indexing_stays_as_it_is(body):
    model = model_of("index")
    model.body = lambda m, ids: (m.last(m.table + ids.sum()), body(m, ids))
    prepared = stages.prepare(stages.capture(model, (ids_of(ROWS),)))
    assert not any(operator(node) == EMBEDDING_TARGET for node in prepared.module.graph.nodes)
