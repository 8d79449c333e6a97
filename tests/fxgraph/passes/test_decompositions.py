"""Operators that become others which kernels and loops compute: no island is left, and the results are the same."""

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F

import intaglio
from intaglio import stages
from support.lowering import quantized
from support.nets import Body, randomize
from support.side_by_side import SideBySide
from support.slow_params import slow_params, slow_params_except

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(2, 12, 8, generator=DRAW)


def parts(image, *sizes):
    """The channels of an image in parts of these sizes."""
    return image.reshape(image.shape[0], *sizes)


def image(h):
    return h.transpose(1, 2).reshape(h.shape[0], 8, 3, 4)


def rotated(h):
    """Pairs of channels turned by angles of their positions, as complex numbers."""
    angles = torch.arange(h.shape[1]).float()[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    turns = torch.polar(torch.ones_like(angles), angles) * 1.5
    pairs = torch.view_as_complex(parts(h, 12, 4, 2)) * turns.unsqueeze(0)
    weighed = torch.view_as_real(pairs * h.sum(-1, keepdim=True)).flatten(2)
    return weighed + pairs.transpose(1, 2).transpose(2, 1).imag.repeat(1, 1, 2)


def combined(h):
    """Sums, differences, conjugates and quotients of complex numbers, of real tensors and of numbers."""
    turns = torch.polar(torch.ones(4), torch.arange(4.0))
    pairs = torch.view_as_complex(parts(h, 12, 4, 2))
    both = torch.stack([(pairs.conj() * turns * turns + turns - pairs * (1 + 2j)) / 2, 0.5 - pairs + h[..., :4]])
    turned = torch.cat([both * 1j - h[:, :1, :4], both - (2 - 1j)], -1).sum(0)
    return torch.view_as_real(turned).flatten(2) + (h[..., :1] - pairs).imag.mean(1, keepdim=True)[..., :1]


def written(h):
    """Every third row is changed in place, from the third on and from the first on, and some columns."""
    rows = h.clone()
    rows[:, 2::3] = rows[:, 2::3].sigmoid()
    rows[:, 0::3] = rows[:, 0::3] * 2 + h[:, :4]
    rows[..., 1:-1:2] = rows[..., 1:-1:2].abs()
    return rows


BODIES = {
    "products of five axes": lambda h: parts(h, 2, 3, 2, 4, 2) @ parts(h, 2, 3, 2, 2, 4),
    "products of six axes": lambda h: parts(h, 2, 3, 4, 2, 2) @ parts(h, 2, 3, 4, 2, 2),
    "attention of five axes": lambda h: F.scaled_dot_product_attention(*[parts(h, 2, 3, 2, 4, 2)] * 3),
    "a gated linear unit": lambda h: F.glu(h),
    "a gated linear unit of another axis": lambda h: F.glu(h, 1),
    "instance norm": lambda h: F.instance_norm(image(h)),
    "values of max": lambda h: h.max(1)[0] + h.min(1, keepdim=True).values[:, 0],
    "repeated neighbours": lambda h: h.repeat_interleave(3, 1)[:, :, :5] + h.repeat_interleave(2, -1)[:, :1, :5],
    "clamps by wider tensors": lambda h: torch.clamp(h.mean(1, True), h.amin(1, True), h),
    "clamps by tensors": lambda h: h.clamp(min=h[:, :1], max=h.amax(-1, True)) + torch.clamp(h, max=h[:, 3:4]),
    "complex numbers": rotated,
    "arithmetic of complex numbers": combined,
    "writes into every second or third element": written,
    "resized masks of all images": lambda h: (
        F.interpolate(h[None], size=(5, 3))[0][:, :, :1] + F.interpolate(h[None], (5, 4), mode="bilinear")[0, ..., 1:2]
    ),
    "padding with other numbers": lambda h: (
        F.pad(h, (1, 2, 3, 0), value=1.5) * F.pad(h > 0, (0, 3, 0, 3), value=True)
        + F.pad(h.argmax(-1), (3, 0), value=-2)[..., None]
    ),
    "fold": lambda h: F.fold(h.transpose(1, 2)[:, :, :4].reshape(h.shape[0], 8, 4), (3, 3), (2, 2)),
    "fold with strides": lambda h: F.fold(parts(h.flatten(1)[:, :54], 9, 6), (5, 4), 3, padding=1, stride=2),
    "fold with pixels behind the last window": lambda h: F.fold(parts(h, 24, 4)[:, :8], 5, 2, stride=2),
}


def between_layers(body):
    return randomize(Body(lambda m, x: (body(torch.tanh(m.a(x)) + x), m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 3)))


@pytest.mark.slow(reason="a program of all bodies; groups of a free size run below")
def test_the_program_computes_them(subtests):
    """All bodies side by side, each behind a layer of its own."""
    model = SideBySide({name: (between_layers(body), [X]) for name, body in BODIES.items()})
    reference, lowered = quantized(model, X, recipe=intaglio.Recipe.named("transformer"))
    assert not lowered.islands, lowered.skipped
    for batch in (X, X[:1]):
        ours, simulated, floats = lowered(batch), reference(batch), model(batch)
        for name in BODIES:
            with subtests.test(name, batch=len(batch)):
                exact = floats[name][0]
                # A probability between two of its 256 values is rounded either way, which results of attention show.
                attends = "attention" in name
                bounds = (
                    {"rtol": 0, "atol": exact.abs().max().item() / 255} if attends else {"rtol": 1e-5, "atol": 1e-5}
                )
                for found, expected in zip(ours[name], simulated[name], strict=True):
                    torch.testing.assert_close(found, expected, **bounds)
                assert ours[name][0].shape == exact.shape
                assert (ours[name][0] - exact).square().sum() < 1e-3 * exact.square().sum()


ISLANDS = {
    "spectra of Fourier transforms": lambda h: torch.view_as_real(
        torch.fft.rfft(h) * torch.ones(5, dtype=torch.cfloat)
    ),
    "products of complex numbers with spectra": lambda h: (
        (
            torch.view_as_complex(parts(h, 12, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0)) * 2j
            + torch.fft.rfft(h[..., :6])
        ).imag
    ),
    "products with spectra": lambda h: (torch.fft.rfft(h) * torch.complex(h[..., :5], h[..., 3:])).real,
    "clamps of other element types": lambda h: h.argmax(1).clamp(h[:, 0], h[:, 1]),
}


@pytest.mark.parametrize("name", ISLANDS)
def test_what_cannot_be_decomposed_is_an_island(name):
    body = ISLANDS[name]
    model = randomize(Body(lambda m, x: (body(m.a(x)), m.b(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 3)))
    reference, lowered = quantized(model, X, recipe=intaglio.Recipe.named("transformer"))
    assert lowered.islands
    torch.testing.assert_close(lowered(X)[0], reference(X)[0], rtol=1e-5, atol=1e-5)


class Normalized(nn.Module):
    """Convolutions around a norm, whose groups have a free size."""

    def __init__(self, norm, *, two=False):
        super().__init__()
        kind = nn.Conv2d if two else nn.Conv1d
        self.first, self.norm, self.last = kind(2, 8, 3, 2), norm, kind(8, 3, 1)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


NORMS = {
    "a group for each channel": lambda: Normalized(nn.GroupNorm(8, 8)),
    "groups of sounds": lambda: Normalized(nn.GroupNorm(2, 8)),
    "groups of images": lambda: Normalized(nn.GroupNorm(4, 8), two=True),
    "instance norm": lambda: Normalized(nn.InstanceNorm2d(8), two=True),
}


BOTH = [
    "default",
    *slow_params("transformer", reason="the bodies above are quantized with it, too"),
]


@pytest.mark.parametrize("recipe", BOTH)
@pytest.mark.parametrize("name", slow_params_except("instance norm", of=NORMS, reason="other groups of the same sums"))
def test_groups_of_a_free_size_are_normalized_in_the_program(name, recipe):
    model = randomize(NORMS[name]())
    axes = model.first.weight.dim()
    x = torch.randn(4, 2, *[41, 37][: axes - 2], generator=DRAW)
    shapes = ({axis: Dim.AUTO for axis in range(axes) if axis != 1},)
    found = intaglio.quantize(model, [x], dynamic_shapes=shapes, recipe=recipe, progress=False)
    assert not found.coverage.islands
    for batch in (x, x[..., :21]):
        exact = model(batch)
        assert (found(batch) - exact).square().sum() < 2e-2 * exact.square().sum()


class Grid(nn.Module):
    """Places of an image's pixels, as detectors compute their anchors."""

    def __init__(self, indexing):
        super().__init__()
        self.layer, self.indexing = nn.Conv2d(2, 3, 3, 2), indexing

    def forward(self, x):
        y = self.layer(x)
        rows, columns = torch.arange(y.shape[2]) + 0.5, torch.arange(y.shape[3]) * 2.0
        first, second = torch.meshgrid(rows, columns, indexing=self.indexing)
        depth = torch.meshgrid(rows, columns, torch.arange(2.0), indexing=self.indexing)[2]
        return y, first - second, depth + first[..., None]


@pytest.mark.slow(reason="a program of free sizes; padding by infinity keeps its range in test_identities.py")
@pytest.mark.parametrize("recipe", BOTH)
def test_padding_with_a_large_number_of_a_free_size_keeps_the_range_of_values(recipe):
    def body(m, x):
        y = F.pad(m.a(x), (2, 1), value=-1e4)
        return m.b(y.sigmoid()[..., 2:-1]), F.pad(x.argmax(-1), (0, 1, 3, 0), value=-1)

    model = randomize(Body(body, a=nn.Conv1d(2, 8, 3), b=nn.Conv1d(8, 3, 1)))
    x = torch.randn(4, 2, 17, generator=DRAW)
    shapes = (({0: Dim.AUTO, 2: Dim.AUTO},),)
    found = intaglio.quantize(model, [x], dynamic_shapes=shapes, recipe=recipe, progress=False)
    assert not found.coverage.islands
    for batch in (x, x[..., :9]):
        (ours, places), (exact, wanted) = found(batch), model(batch)
        assert torch.equal(places, wanted)
        assert (ours - exact).square().sum() < 1e-3 * exact.square().sum()


@pytest.mark.parametrize("indexing", ["ij", *slow_params("xy", reason="the same grids with two axes transposed")])
def test_grids_of_a_free_size_are_computed_in_the_program(indexing):
    model = randomize(Grid(indexing))
    x = torch.randn(2, 2, 13, 9, generator=DRAW)
    shapes = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)
    found = intaglio.quantize(model, [x], dynamic_shapes=shapes, progress=False)
    assert not found.coverage.islands
    for batch in (x, x[..., :7, :]):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found(batch)[1:], model(batch)[1:], strict=True))


def test_a_split_into_sizes_that_the_model_computes_stays_a_split():
    def divided(m, x, sizes):
        return [m.last(part) for part in m.first(x).split(sizes.tolist())]

    model = randomize(Body(divided, first=nn.Linear(8, 8), last=nn.Linear(8, 4)))
    x, sizes = torch.randn(6, 8, generator=DRAW), torch.tensor([2, 4])
    prepared = stages.prepare(stages.capture(model, (x, sizes)))
    reference = stages.convert(prepared, stages.calibrate(prepared, [(x, sizes)]))
    for part, expected in zip(reference(x, sizes), model(x, sizes), strict=True):
        assert part.shape == expected.shape
        torch.testing.assert_close(part, expected, rtol=0, atol=0.1)
