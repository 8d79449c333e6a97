"""Indexing, scattering, cumulative sums and places of extrema in programs, without an island."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio import stages
from support import lowering
from support.lowering import quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_same_bits

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(3, 10, 6, generator=DRAW)
IDS = torch.randint(1, 9, (3, 10), generator=DRAW)


def tokens(m, ids):
    """Positions that skip padding in int32, buckets of distances, and the rows of the largest ids."""
    mask = ids.ne(1).int()
    places = (torch.cumsum(mask, 1).type_as(mask) * mask).long() + 1
    distance = torch.sign(places - 5) * torch.abs(ids - 7)
    bucket = torch.where(distance > 3, torch.clamp(distance, max=9), places)
    h = m.a(m.table(places) + m.table(bucket.clamp(0, 11)))
    return m.b(h[torch.arange(h.shape[0]), ids.argmax(-1)]), places, torch.argmin(h, 1, keepdim=True)


def elements(m, x):
    h = m.a(x)
    places = (h[..., 0] * 3).abs().long().clamp(max=4)
    wide, zeros = places.unsqueeze(-1).repeat(1, 1, 8), torch.zeros(x.shape[0], 5, 8)
    sums = torch.scatter_add(zeros, 1, wide, h)
    largest = torch.scatter_reduce(zeros - 1, 1, wide, h, "amax")
    last, slices = torch.scatter(zeros, 1, wide, h), zeros.index_add(1, places[0] * 0 + 2, h)
    taken = torch.gather(h, 2, wide), h.index_select(1, places[0]), h[:, torch.tensor([0, -2, 1])]
    return m.b(sums), largest, last, slices, *taken, torch.cumsum(h, 1), h[:, places[0], places[0]]


@pytest.fixture(scope="module")
def models():
    parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 5)}
    of_tokens = randomize(Body(tokens, table=nn.Embedding(12, 8), **parts))
    of_elements = randomize(Body(elements, a=nn.Linear(6, 8), b=nn.Linear(8, 5)))
    transformer = intaglio.Recipe.named("transformer")
    return [(model, x, *quantized(model, x, recipe=transformer)) for model, x in ((of_tokens, IDS), (of_elements, X))]


@pytest.mark.slow(reason="compiles, saves and loads a program for each model; the interpreter computes them below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_have_the_bits_of_the_interpreter(isa, models, tmp_path):
    for model, x, _, lowered in models:
        assert not lowered.islands
        compiled = stages.compile(lowered, isa=isa)
        compiled.save(tmp_path / "m")
        for run in (compiled, intaglio.load(tmp_path / "m", isa=isa)):
            for batch in (x, x[:1]):
                assert_same_bits(run(batch), lowered(batch))
                assert [one.dtype for one in run(batch)] == [one.dtype for one in model(batch)]


def test_the_interpreter_computes_what_the_reference_does(models):
    for _, x, reference, lowered in models:
        for found, expected in zip(lowered(x), reference(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [9, -10, 2**40])
def test_an_index_outside_of_its_axis_is_an_error_as_in_torch(wrong):
    model = randomize(Body(lambda m, x, ids: m.a(x)[:, ids], a=nn.Linear(6, 4)))
    x, ids = X[:, :9], torch.tensor([0, 8, -9])
    _, lowered = quantized(model, x, ids)
    compiled = stages.compile(lowered)
    assert_same_bits([compiled(x, ids)], [lowered(x, ids)])
    ids[1] = wrong
    for run in (compiled, lowered):
        with pytest.raises(IndexError, match="index out of range"):
            run(x, ids)


def writes(m, x):
    h = m.a(x)
    filled = torch.zeros(x.shape[0], 1, 8) + torch.ones_like(h)
    written = h.clone()
    written[:, 1:3] = h[:, :2] * 2
    written[:, 0] = 0.5
    unfolded = F.unfold(h.transpose(1, 2).unsqueeze(-1), (3, 1), padding=(1, 0))
    windows = h.unfold(1, 2, 2), h.unfold(1, 3, 2)
    repeated = h.repeat(2, 1, 1), h.repeat(1, 2, 3), m.token.repeat(x.shape[0], 1, 1)
    joined = torch.cat([h, h[..., 8:]], -1)
    heads = F.scaled_dot_product_attention(h, h * 2, h + 1)
    return filled, written, unfolded, *windows, *repeated, joined, heads, torch.softmax(h, -1, dtype=torch.float32)


def test_movement_without_a_record_needs_no_island():
    """Fills of a free size, writes into slices, windows, repeats, and attention without an axis of heads."""
    model = randomize(Body(writes, a=nn.Linear(6, 8), token=nn.Parameter(torch.randn(1, 2, 8))))
    reference, lowered = quantized(model, X, recipe=intaglio.Recipe.named("transformer"))
    assert not lowered.islands
    for batch in (X, X[:1]):
        for found, expected in zip(lowered(batch), reference(batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-2)
        assert [one.shape for one in lowered(batch)] == [one.shape for one in model(batch)]


@pytest.mark.slow(reason="compiles windows of a free size; other movement needs no island above")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_windows_of_sequences_of_any_length_need_no_island(isa):
    def windows(m, x):
        h = m.a(x).transpose(1, 2).unsqueeze(-1)
        rows = F.unfold(h, (3, 1), padding=(1, 0)).transpose(1, 2)
        return m.b(rows), F.unfold(h, (2, 1), dilation=(2, 1))

    model = randomize(Body(windows, a=nn.Linear(6, 8), b=nn.Linear(24, 5)))
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    captured = stages.capture(model.eval(), (X,), dynamic_shapes=((free,),))
    reference, low = lowering.lowered(captured, X, recipe=intaglio.Recipe.named("transformer"))
    assert not low.islands
    compiled = stages.compile(low, isa=isa)
    for batch in (X, X[:1, :7], torch.cat([X, X], 1)):
        assert_same_bits(compiled(batch), low(batch))
        for found, expected in zip(low(batch), reference(batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-2)
        assert [one.shape for one in low(batch)] == [one.shape for one in model(batch)]


def selections(m, x):
    """Rows that a condition selects, and what is computed of them, on both sides of a layer."""
    h = m.a(x)
    keep = h[:, 0] > 0
    rows, part = torch.nonzero(keep)[:, 0], h[keep]
    y = m.b(torch.zeros_like(h).index_add(0, rows, part * 2))
    return m.b(y.index_add(0, rows, part.softmax(-1))), part.sum(0)


@pytest.mark.slow(reason="another model, with islands; the other operators need none")
def test_islands_compute_values_again_whose_size_depends_on_values():
    model = randomize(Body(selections, a=nn.Linear(6, 8), b=nn.Linear(8, 8)))
    x = X[0]
    reference, lowered = quantized(model, x)
    assert lowered.macs[0] == lowered.macs[1]
    compiled = stages.compile(lowered)
    for batch in (x, X[1], -x[:4]):
        assert_same_bits(compiled(batch), lowered(batch))
        for found, expected in zip(lowered(batch), reference(batch), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-2)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_constant_is_repeated_a_free_number_of_times(isa):
    """Relative positions of each head are repeated for each text."""
    model = Body(lambda m, x: m.a(x) * m.table.repeat(x.shape[0], 1, 1)[: x.shape[0]], a=nn.Linear(6, 8))
    model.table = nn.Parameter(torch.randn(4, 10, 8, generator=DRAW))
    _, lowered = quantized(randomize(model), X, recipe=intaglio.Recipe.named("transformer"))
    assert not lowered.islands
    compiled = stages.compile(lowered, isa=isa)
    for batch in (X, X[:1]):
        assert_same_bits([compiled(batch)], [lowered(batch)])


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_cumulative_sums_of_negative_zeros_are_zeros(isa):
    model = randomize(Body(lambda m, x: torch.round(m.a(x) * 0.01).cumsum(1), a=nn.Linear(6, 8)))
    _, lowered = quantized(model, X)
    program = stages.compile(lowered, isa=isa)
    assert not lowered.islands
    assert torch.signbit(torch.round(model.a(X) * 0.01)).any()
    assert_same_bits(program(X), lowered(X))
    assert not torch.signbit(program(X)).any()
