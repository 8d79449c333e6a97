"""Norms, statistics, pooling and functions that become operators which kernels and loops compute."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import intaglio
from support.lowering import quantized
from support.nets import Body, randomize
from support.side_by_side import SideBySide

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 12, 8, generator=DRAW)
NORM = nn.LayerNorm((6, 12, 8))
CUBE = nn.Parameter(torch.tensor([3.0]))

IMAGES = {
    "adaptive max pooling of whole images": lambda h: h * F.adaptive_max_pool2d(h, 1),
    "adaptive max pooling": lambda h: F.adaptive_max_pool2d(h, (4, 2)).repeat_interleave(3, 2),
    "adaptive max pooling of sequences": lambda h: F.adaptive_max_pool1d(h.flatten(2), 8),
    "layer norms over several axes": lambda h: NORM(h) + F.layer_norm(h, (12, 8)),
    "generalized mean pooling": lambda h: h * F.avg_pool2d(h.clamp(min=1e-6).pow(CUBE), (12, 8)).pow(1 / CUBE),
    "local response norm": lambda h: F.local_response_norm(h, 3),
    "variances of several axes": lambda h: (
        h / (h.var((2, 3), keepdim=True) + h.std((1, 2, 3), False)[:, None, None, None])
    ),
    "variances with means": lambda h: torch.var_mean(h, (2, 3))[0] + torch.std_mean(h, -1, correction=0)[1].mean(-1),
    "images in reverse": lambda h: h.flip(-1) + h.flip((1, 2)),
    "upsampling of exact neighbours": lambda h: F.interpolate(h, scale_factor=(2, 3), mode="nearest-exact"),
    "triangles": lambda h: h.tril(-1) + h.triu(2),
}
FUNCTIONS = {
    "logarithms of sums": lambda h: h.logsumexp(1, keepdim=True) + h.logsumexp((2, 3))[..., None, None],
    "logarithms": lambda h: torch.log1p(h.square()) + (h.abs() + 1).log2() + (h.abs() + 0.5).log10(),
    "powers": lambda h: torch.exp2(h) + 1.5**h + (h.abs() + 0.1) ** 0.75 + (h.abs() + 1) ** -3 + h**6,
    "interpolation": lambda h: (
        torch.lerp(h, h.sigmoid(), 0.3) + torch.lerp(h, h.tanh(), 0.8) + torch.lerp(h, -h, h.sigmoid())
    ),
    "shrinkage": lambda h: F.softshrink(h, 0.2) + F.hardshrink(h * 2, 0.3),
    "distances": lambda h: (
        F.cosine_similarity(h[:, 1:], h[:, :1], dim=-1)
        + F.pairwise_distance(h[:, 1:], h[:, :1])
        + h.diff(dim=1).sum(-1)
    ),
}
BODIES = IMAGES | FUNCTIONS
QUICK = ("adaptive max pooling of whole images", "layer norms over several axes", "powers", "images in reverse")


def between_layers(body):
    parts = {"first": nn.Conv2d(3, 6, 1), "last": nn.Conv2d(3, 6, 3, padding=1)}
    return randomize(Body(lambda m, x: (body(m.first(x)), m.last(x)), **parts))


@pytest.mark.parametrize(
    "names",
    [QUICK, *[pytest.param(tuple(BODIES), marks=pytest.mark.slow(reason="a program of all bodies"))]],
    ids=["some", "all"],
)
def test_no_island_is_left_and_the_results_are_the_same(names, subtests):
    """All bodies side by side, each behind a layer of its own, and for another batch size."""
    model = SideBySide({name: (between_layers(BODIES[name]), [X]) for name in names})
    reference, lowered = quantized(model, X, recipe=intaglio.Recipe.named("transformer"))
    assert not lowered.islands, lowered.skipped
    program = intaglio.stages.compile(lowered)
    for batch in (X, X[:1]):
        ours, simulated, floats, compiled = lowered(batch), reference(batch), model(batch), program(batch)
        for name in names:
            with subtests.test(name, batch=len(batch)):
                exact = floats[name][0]
                torch.testing.assert_close(ours[name][0], simulated[name][0], rtol=1e-4, atol=1e-4)
                assert torch.equal(ours[name][0], compiled[name][0])
                assert ours[name][0].shape == exact.shape
                assert (ours[name][0] - exact).square().sum() < 3e-3 * exact.square().sum()


def test_the_maximum_of_images_of_a_free_size():
    model = randomize(
        Body(
            lambda m, x: m.last(F.adaptive_max_pool2d(m.first(x).relu(), 1)),
            first=nn.Conv2d(3, 6, 3),
            last=nn.Conv2d(6, 4, 1),
        )
    )
    sizes = {"args": ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)}
    found = intaglio.quantize(model.eval(), [X], dynamic_shapes=sizes, progress=False)
    assert not found.coverage.islands
    for shape in ((2, 3, 12, 8), (3, 3, 7, 15)):
        x = torch.randn(shape, generator=DRAW)
        exact = model(x)
        assert (found(x) - exact).square().sum() < 3e-3 * exact.square().sum()


@pytest.mark.parametrize("special", [float("inf"), -float("inf")])
def test_logarithms_of_sums_of_infinite_values_are_those_of_pytorch(special):
    model = Body(lambda m, x, y: (m.first(x), y.logsumexp(-1)), first=nn.Linear(4, 4)).eval()
    x, y = torch.randn(2, 4), torch.randn(2, 5)
    found = intaglio.quantize(model, [(x, y)], progress=False)
    y[0], y[1, 2] = special, special
    torch.testing.assert_close(found(x, y)[1], y.logsumexp(-1))


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda x, ids: ids.logsumexp(-1), id="logarithms of sums of integers"),
        pytest.param(lambda x, ids: torch.tril(x[:4], diagonal=ids.shape[1] - 4), id="lower triangles"),
        pytest.param(lambda x, ids: torch.triu(x[:4], diagonal=ids.shape[1] - 5), id="upper triangles"),
    ],
)
def test_integers_and_computed_diagonals_stay_in_pytorch(body):
    model = Body(lambda m, x, ids: (m.first(x), body(x, ids)), first=nn.Linear(5, 5)).eval()
    x, ids = torch.randn(5, 5, generator=DRAW), torch.randint(1, 9, (3, 6), generator=DRAW)
    found = intaglio.quantize(model, [(x, ids)], progress=False)
    torch.testing.assert_close(found(x, ids)[1], model(x, ids)[1])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(lambda h: F.adaptive_max_pool2d(h, 5), id="windows of several sizes"),
        pytest.param(lambda h: F.adaptive_max_pool2d(h, 2, return_indices=True)[1], id="places of maxima"),
        pytest.param(lambda h: h.var((0, 1, 2)), id="variances of other axes"),
        pytest.param(lambda h: h.abs() ** h.sigmoid(), id="powers of computed exponents"),
    ],
)
def test_what_has_no_such_form_is_an_island(body):
    reference, lowered = quantized(between_layers(body), X)
    assert lowered.islands
    torch.testing.assert_close(lowered(X)[0], reference(X)[0], rtol=1e-5, atol=1e-5)
