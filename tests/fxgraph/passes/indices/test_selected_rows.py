"""Rows that a condition selects: graph networks without a self loop, and what depends on the number of rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.passes.indices.selected_rows import keep_unselected_rows
from intaglio.fxgraph.passes.indices.sorting import scatter_without_self
from intaglio.tracing import run
from support.lowering import kinds, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params_except

NODES, EDGES = 7, 12
DRAW = torch.Generator().manual_seed(0)
X = torch.randn(NODES, 6, generator=DRAW)
ENDS = torch.randint(0, NODES, (2, EDGES), generator=DRAW)
ENDS[1, :3] = ENDS[0, :3]
TRANSFORMER = intaglio.Recipe.named("transformer")


def with_loops(ends: Tensor) -> Tensor:
    """Edges between nodes, and one of each node with itself."""
    loops = torch.arange(NODES).reshape(1, -1).repeat(2, 1)
    return torch.cat([ends[:, ends[0] != ends[1]], loops], 1)


def convolution(m: Body, x: Tensor, ends: Tensor) -> Tensor:
    """Sums of neighbours, weighed by the degrees of both ends."""
    start, end = with_loops(ends)
    weight = torch.ones(start.shape[0])
    degree = weight.new_zeros(NODES).scatter_add(0, end, weight).pow(-0.5)
    h = m.a(x)
    messages = (degree[start] * weight * degree[end]).reshape(-1, 1) * h.index_select(0, start)
    return m.b(torch.zeros_like(h).scatter_add(0, end.reshape(-1, 1).expand(-1, 8), messages))


def attention(m: Body, x: Tensor, ends: Tensor) -> Tensor:
    """Neighbours weighed by a softmax over the edges that end at a node."""
    start, end = with_loops(ends)
    h = m.a(x)
    score = F.leaky_relu(h.sum(-1)[start] - h[:, 0][end], 0.2)
    zeros = torch.zeros(NODES)
    largest = zeros.scatter_reduce(0, end, score, "amax", include_self=False)
    weight = (score - largest[end]).exp()
    weight = weight / (zeros.scatter_add(0, end, weight) + 1e-16)[end]
    return m.b(torch.zeros_like(h).index_add(0, end, weight.unsqueeze(-1) * h[start]))


def weighed(m: Body, x: Tensor, ends: Tensor) -> Tensor:
    """Edges with weights, which one condition selects together with their ends."""
    keep, weights = ends[0] != ends[1], m.weights.sigmoid()
    start, end = ends[:, keep]
    weight = torch.cat([weights[keep], torch.ones(NODES)])
    start, end = (torch.cat([half, torch.arange(NODES)]) for half in (start, end))
    h = m.a(x)
    return m.b(torch.zeros_like(h).index_add(0, end, weight[:, None] * h[start]))


def edges_alone(m: Body, x: Tensor, ends: Tensor) -> Tensor:
    """Edges that a score selects, with a layer of their own; a node without any keeps its value."""
    start, end = ends[:, ends[0] > ends[1]]
    messages = torch.relu(m.edge(x[start]))
    found = m.a(x).scatter_reduce(0, end.unsqueeze(-1).expand(-1, 8), messages, "amin", include_self=False)
    return m.b(found)


NETWORKS = {
    "convolution": convolution,
    "attention": attention,
    "weights of edges": weighed,
    "some edges": edges_alone,
}


def network(body) -> nn.Module:
    weights = nn.Parameter(torch.randn(EDGES, generator=DRAW))
    return randomize(Body(body, a=nn.Linear(6, 8), edge=nn.Linear(6, 8), b=nn.Linear(8, 3), weights=weights))


@pytest.fixture(
    scope="module",
    params=slow_params_except("some edges", of=NETWORKS, reason="other sums over the same rows"),
)
def models(request):
    model = network(NETWORKS[request.param])
    return model, *quantized(model, X, ENDS, recipe=TRANSFORMER)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_networks_of_graphs_are_one_program(isa, models):
    model, reference, lowered = models
    assert not lowered.islands
    assert lowered.macs[0] == lowered.macs[1]
    program = stages.compile(lowered, isa=isa)
    for ends in (ENDS, ENDS.flip(0), ENDS * 0 + 3, ENDS.sort(1).values):
        assert_same_bits([program(X, ends)], [lowered(X, ends)])
        torch.testing.assert_close(lowered(X, ends), reference(X, ends), rtol=1e-4, atol=1e-4)
    exact = model(X, ENDS)
    assert (lowered(X, ENDS) - exact).square().sum() < 1e-2 * exact.square().sum()


@pytest.fixture(
    scope="module",
    params=slow_params_except("convolution", of=NETWORKS, reason="as programs they run always"),
)
def rewritten(request):
    """The graph of a model, and the same with all rows."""
    captured = stages.capture(network(NETWORKS[request.param]), (X, ENDS))
    module = copy_graph(captured.module)
    assert run(module, (keep_unselected_rows, scatter_without_self))["keep_unselected_rows"] > 0
    return captured.module, module


@given(st.lists(st.tuples(*[st.integers(0, NODES - 1)] * 2), min_size=EDGES, max_size=EDGES))
def test_rows_that_are_not_selected_change_nothing(rewritten, edges):
    plain, module = rewritten
    ends = torch.tensor(edges).t().contiguous()
    torch.testing.assert_close(module(X, ends), plain(X, ends))


def rows_of(body):
    return lambda m, x, ends: (m.b(m.a(x)), body(m.a(x), ends[0] != ends[1], ends))


OTHERS = {
    "they are added up": lambda h, keep, ends: h[ends[0][keep]].sum(0),
    "they are put to indices of other rows": lambda h, keep, ends: torch.zeros(NODES, 8).index_add(
        0, torch.cat([torch.arange(NODES), ends[0][keep]]), torch.cat([h[ends[1][keep]], h])
    ),
    "their order changes": lambda h, keep, ends: torch.zeros(NODES, 8).index_add(
        0, ends[0][keep], h[ends[1][keep].sort().values]
    ),
    "a running sum passes them": lambda h, keep, ends: torch.zeros(NODES, 8).index_add(
        0, ends[0][keep], h[ends[1][keep]].cumsum(0)
    ),
    "their number is read": lambda h, keep, ends: h * ends[0][keep].shape[0],
}


@pytest.mark.parametrize(
    "name",
    slow_params_except(
        "their number is read", "they are added up", of=OTHERS, reason="another reader that needs the rows"
    ),
)
def test_rows_stay_selected_if(name):
    model = network(rows_of(OTHERS[name]))
    reference, lowered = quantized(model, X, ENDS, recipe=TRANSFORMER)
    assert "island" in kinds(lowered)
    for ends in (ENDS, ENDS.flip(0)):
        torch.testing.assert_close(lowered(X, ends)[1], reference(X, ends)[1], rtol=1e-4, atol=1e-4)
        exact = model(X, ends)[1]
        assert (lowered(X, ends)[1] - exact).square().sum() < 1e-2 * exact.square().sum()
