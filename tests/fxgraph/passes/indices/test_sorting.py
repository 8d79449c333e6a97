"""Sorts, selections of the largest, counts and inverse permutations: programs compute what PyTorch does."""

import pytest
import torch
from torch import nn

import intaglio
from intaglio import stages
from intaglio.fxgraph.passes.indices.sorting import MAX_COUNTED
from support.lowering import kinds, quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_same_bits
from support.slow_params import slow_params

X = torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(0))


def ids(h, limit=5):
    """Integers from 0 to below a limit, of which many are equal, on one axis."""
    return (h.abs() * 7).long().clamp(max=limit - 1).flatten()


def counted(h, bins=5, low=0.0):
    return torch.histc(ids(h).float(), bins, low, low + bins - 1)


def permutation(h):
    order = torch.sort(ids(h), stable=True).indices
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return order, inverse, h.flatten()[order][inverse]


BODIES = {
    "sorted values and places": lambda h: torch.sort(h, -1),
    "descending along another axis": lambda h: torch.sort(h, 1, descending=True),
    "a stable sort of integers": lambda h: torch.sort(ids(h), stable=True),
    "an argsort": lambda h: (torch.argsort(ids(h), stable=True), torch.argsort(h, 0, descending=True)),
    "a sort of booleans": lambda h: [part.float() for part in torch.sort(h > 0, dim=1, stable=True)],
    "a sort of int32": lambda h: (torch.sort(ids(h).int() * 2, stable=True)[0].long(),),
    "the largest": lambda h: torch.topk(h, 3),
    "the smallest along another axis": lambda h: torch.topk(h, 2, 1, largest=False),
    "the largest of all, and places only": lambda h: (torch.topk(h, 6).values, h.topk(1, 0).indices),
    "the largest in any order": lambda h: torch.topk(h, 3, sorted=False)[0].sum(-1),
    "maxima and minima with places": lambda h: (*torch.max(h, 1), *torch.min(h, 2, keepdim=True)),
    "counts": lambda h: (counted(h), counted(h, 3, 1.0), counted(h, 9, -2.0)),
    "ends of groups": lambda h: torch.cumsum(counted(h), 0, dtype=torch.int32).long() * 3,
    "sums of other types": lambda h: (
        ((h > 0).cumsum(1, dtype=torch.int32) + 1).long(),
        (h > 0).cumsum(1, dtype=torch.float32),
        ids(h).cumsum(0, dtype=torch.int64),
    ),
    "an inverse permutation": permutation,
    "sums of integers": lambda h: (
        (h * 3).long().sum(1),
        (h * 3).long().int().sum((0, -1), keepdim=True),
        (h > 0).sum(-1, dtype=torch.int32).long(),
        (h > 0).sum().reshape(1),
    ),
    "numbers at indices": lambda h: (
        torch.zeros_like(h).scatter(1, h.argmax(1, keepdim=True), 1.0),
        h.scatter(-1, h.topk(2).indices, float("-inf")),
        torch.zeros_like(h).long().scatter(2, h.argmin(2, keepdim=True), 3.7),
    ),
}


def flat(value):
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


FEW = (
    "sorted values and places",
    "a stable sort of integers",
    "a sort of booleans",
    "the smallest along another axis",
    "maxima and minima with places",
    "counts",
    "an inverse permutation",
    "numbers at indices",
)


def some_bodies(m: nn.Module, x: torch.Tensor) -> tuple[dict[str, tuple], torch.Tensor]:
    h = m.a(x)
    return {name: flat(BODIES[name](h)) for name in m.names}, h


@pytest.fixture(
    scope="module",
    params=[FEW, *slow_params((tuple(BODIES),), reason="other axes, types and ends of the same operators")],
    ids=["few", "all"],
)
def graphs(request):
    """The reference and the integer graph of all of them in one model."""
    model = randomize(Body(some_bodies, a=nn.Linear(6, 6), names=request.param))
    return quantized(model, X, recipe=intaglio.Recipe.named("transformer"))


@pytest.mark.slow(reason="a program of many loops; the order of elements is compared in the tests below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_compute_all_of_them(graphs, isa, subtests):
    reference, lowered = graphs
    assert not lowered.islands, lowered.skipped
    compiled = stages.compile(lowered, isa=isa)
    for batch in (X, X[:1]):
        results, h = lowered(batch)
        (simulated, _), (programs, _) = reference(batch), compiled(batch)
        for name in results:
            with subtests.test(name):
                assert_same_bits(programs[name], results[name])
                for found, near, exact in zip(results[name], simulated[name], flat(BODIES[name](h)), strict=True):
                    assert found.dtype is exact.dtype
                    torch.testing.assert_close(found, near)
                    torch.testing.assert_close(found, exact)


def test_the_largest_are_found_without_sorting_all():
    model = randomize(Body(lambda m, x: m.a(x).topk(2).indices, a=nn.Linear(6, 6)))
    _, lowered = quantized(model, X)
    (sort,) = [op for op in lowered.graph.ops if op.kind == "argsort"]
    assert sort.attrs["count"] == 2
    assert "slice" not in kinds(lowered)


def test_equal_elements_keep_their_order():
    model = randomize(
        Body(lambda m, x: (m.a(x), x.topk(3).indices, x.topk(3, largest=False).indices), a=nn.Linear(6, 2))
    )
    equal = torch.tensor([[1.0, 0.0, 1.0, -0.0, 1.0, 0.0]])
    _, lowered = quantized(model, equal)
    _, largest, smallest = stages.compile(lowered)(equal)
    assert largest.tolist() == [[0, 2, 4]]
    assert smallest.tolist() == [[1, 3, 5]]


def test_counts_of_any_number_of_bins_are_those_of_pytorch():
    """PyTorch computes the bin of an element in float32; up to this number it is that of the integer."""
    for bins in (2, 3, 7, 64, 1000, MAX_COUNTED - 1, MAX_COUNTED):
        drawn = torch.randint(-2, bins + 2, (4 * bins,), generator=torch.Generator().manual_seed(bins))
        inside = drawn[(drawn >= 0) & (drawn < bins)]
        exact = torch.bincount(inside, minlength=bins)
        assert torch.equal(torch.histc(drawn.float(), bins, 0, bins - 1).long(), exact)


@pytest.mark.parametrize(
    "histogram",
    [
        lambda h: torch.histc(h, 5, 0, 4),
        lambda h: torch.histc(ids(h).float(), 4, 0, 4),
        lambda h: torch.histc(ids(h).float(), 5, 0.5, 4.5),
    ],
    ids=["of floats", "of wider bins", "of other ends"],
)
def test_other_histograms_stay_in_pytorch_with_a_reason(histogram):
    model = randomize(Body(lambda m, x: (m.a(x), histogram(m.a(x))), a=nn.Linear(6, 6)))
    reference, lowered = quantized(model, X)
    assert len(lowered.islands) == 1
    assert any(skip.origin.operator == "aten.histc.default" and skip.reason for skip in lowered.skipped)
    torch.testing.assert_close(lowered(X)[1], reference(X)[1])
