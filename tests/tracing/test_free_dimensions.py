"""Sizes that a model takes for equal, which are equal for multiples of a dimension only."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

from intaglio import stages
from intaglio.errors import InputError
from intaglio.ir import evaluate, symbol
from intaglio.tracing import capture
from intaglio.tracing.sizes.free_dimensions import common_multiples
from support.lowering import lowered
from support.slow_params import slow_params

STEPS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 6)), min_size=1, max_size=4)
"""Added number and divisor of each step, as convolutions with strides have them."""
FREE_IMAGE = ({0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO},)


def divided(size, steps):
    for added, divisor in steps:
        size = (size + added) // divisor
    return size


@given(STEPS, STEPS, st.integers(1, 4), st.integers(1, 480))
def test_the_smallest_multiple_makes_sizes_equal(first, second, scale, example):
    n = symbol("n")
    a, b = divided(n, first) * scale, divided(n, second)
    factor = common_multiples([(a, b)], {"n": example}).get("n")

    def equal(divisor):
        values = [divisor * k for k in range(2000)]
        return all(evaluate(a, {"n": v}) == evaluate(b, {"n": v}) for v in values)

    if factor is not None:
        assert example % factor == 0
        assert equal(factor)
    if a != b:
        divisors = [d for d in range(1, example + 1) if example % d == 0 and (factor is None or d < factor)]
        assert not any(map(equal, divisors))


def test_all_compared_sizes_are_equal_for_the_common_multiple():
    n, other = symbol("n"), symbol("m")
    pairs = [((n + 1) // 2, n // 2), ((n + 2) // 3, n // 3), (other // 2, n // 2), (n // 4, n)]
    assert common_multiples(pairs, {"n": 24, "m": 24}) == {"n": 6}
    assert common_multiples(pairs, {"n": 24, "m": 24}, excluded={"n"}) == {}


def test_two_dimensions_get_factors_together():
    h, w, n = symbol("h"), symbol("w"), symbol("n")
    pairs = [(h * w // 4 * 4 * n, h * w * n)]
    assert common_multiples(pairs, {"h": 8, "w": 8, "n": 4}, excluded={"n"}) == {"h": 2, "w": 2}
    assert common_multiples(pairs, {"h": 8, "w": 5, "n": 4}, excluded={"n"}) == {"h": 4}
    assert common_multiples(pairs, {"h": 3, "w": 2, "n": 4}, excluded={"n"}) == {}


class Areas(nn.Module):
    """Divides the pixels of an image into four areas and back, as attention of YOLO12 does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 4, 1)
        self.inside = nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        batch, channels, height, width = y.shape
        areas = y.flatten(2).transpose(1, 2).reshape(batch * 4, height * width // 4, channels)
        pixels = self.inside(areas).reshape(batch, height, width, channels)
        return self.last(y + pixels.permute(0, 3, 1, 2))


@pytest.mark.slow(reason="captures an image model twice, as its sizes are multiples")
def test_an_image_that_is_divided_into_areas_has_free_sizes():
    model, x = Areas().eval(), torch.randn(2, 3, 16, 16)
    captured = capture(model, (x,), dynamic_shapes=FREE_IMAGE)
    assert not captured.notes
    for size in [(3, 3, 8, 12), (1, 3, 20, 4)]:
        torch.testing.assert_close(captured(torch.ones(size)), model(torch.ones(size)))
    with pytest.raises(InputError, match="x"):
        captured(torch.ones(2, 3, 6, 10))  # 15 pixels


class Neighbours(nn.Module):
    """Adds what a linear layer computes of the neighbours of each node, as graph convolutions do."""

    def __init__(self):
        super().__init__()
        self.message, self.own = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x, edges):
        messages = self.message(x)[edges[0]]
        return self.own(x) + torch.zeros(x.shape[0], 8).index_add(0, edges[1], messages)


def test_graphs_have_any_number_of_nodes_and_edges():
    """A single node, or three, cannot have the edges of the example."""
    model, x, edges = Neighbours().eval(), torch.randn(20, 6), torch.randint(20, (2, 50))
    captured = capture(model, (x, edges))
    assert not captured.notes
    for nodes, count in [(7, 9), (20, 50), (35, 200)]:
        some = torch.randn(nodes, 6), torch.randint(nodes, (2, count))
        torch.testing.assert_close(captured(*some), model(*some))


class TwoBranches(nn.Module):
    """Adds images that were made smaller by a strided convolution and by a pool, which round sizes differently."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1)
        self.second = nn.Conv2d(8, 8, 3, 2, 1)
        self.pool = nn.MaxPool2d(2, 2)

    def forward(self, x):
        y = self.first(x)
        return self.second(y) + self.pool(y)


class TwoScales(nn.Module):
    """Adds an image to a smaller one that was enlarged to its size."""

    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.enlarge = nn.Upsample(scale_factor=2.0, mode="nearest")

    def forward(self, x):
        fine = self.fine(x)
        return (fine + self.enlarge(self.coarse(fine))).relu()


@pytest.mark.parametrize("kind", [TwoBranches, *slow_params(TwoScales, reason="the same sum of other sizes")])
def test_sums_of_images_whose_sizes_round_differently_run_in_int8(kind):
    torch.manual_seed(0)
    model = kind().eval()
    example = torch.randn(2, 3, 32, 48)
    graph = lowered(capture(model, (example,), dynamic_shapes=FREE_IMAGE), example)[1]
    int8 = stages.compile(graph)
    assert int8.coverage.islands == 0
    x = torch.randn(3, 3, 20, 64)
    assert int8(x).shape == model(x).shape
    assert torch.equal(int8(x), graph(x))
    with pytest.raises(InputError, match=r"takes \[n, 3, n1\*4, n2\*4\]"):
        int8(torch.randn(1, 3, 21, 64))


def test_an_example_that_is_not_a_multiple_leaves_sizes_as_they_are():
    model, x = TwoBranches().eval(), torch.randn(2, 3, 31, 31)  # 31 divided by 4 is 8, however it is rounded
    captured = capture(model, (x,), dynamic_shapes=FREE_IMAGE)
    assert [str(dim) for dim in captured.signature.inputs[0].type.shape[2:]] == ["n1", "n2"]
    other = torch.randn(1, 3, 63, 32)
    assert torch.equal(captured(other), model(other))


def test_bounds_of_a_size_become_bounds_of_its_multiple():
    model = TwoBranches().eval()
    captured = capture(model, (torch.randn(2, 3, 32, 32),), dynamic_shapes=FREE_IMAGE)
    assert captured.signature.ranges == {"n1": (1, None), "n2": (1, None)}  # torch.export says at least 3 pixels
    smallest = torch.randn(1, 3, 4, 4)
    assert torch.equal(captured(smallest), model(smallest))


def test_the_batch_stays_free():
    class Halves(nn.Module):
        def forward(self, x):
            return x[::2] + x[1::2] if x.shape[0] > 1 else x

    captured = capture(Halves(), (torch.randn(4, 8),))
    assert captured.signature.inputs[0].type.shape[0] in (4, symbol("n"))


class Boxes(nn.Module):
    """Words with a box each, as models of documents read them, and a picture with as many channels as words."""

    def __init__(self):
        super().__init__()
        self.words, self.boxes, self.picture = nn.Embedding(16, 8), nn.Linear(4, 8), nn.Conv2d(6, 8, 3)

    def forward(self, ids, boxes, picture):
        return self.words(ids) + self.boxes(boxes) + self.picture(picture).mean((2, 3))[:, None]


def test_inputs_with_the_length_of_tokens_have_dynamic_lengths():
    call = torch.randint(16, (2, 6)), torch.rand(2, 6, 4), torch.rand(2, 6, 5, 5)
    captured = capture(Boxes().eval(), call)
    assert [str(entry.type.shape) for entry in captured.signature.inputs] == ["(n, n1)", "(n, n1, 4)", "(n, 6, 5, 5)"]
    assert not captured.model_info.notes


class PairsOfFrames(nn.Module):
    """Joins pairs of frames, so that their number is even; the mask is not read."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 4)

    def forward(self, frames, mask):
        return self.inside(frames.reshape(frames.shape[0], -1, 8)), mask


def test_frames_with_a_mask_have_a_dynamic_length():
    captured = capture(PairsOfFrames().eval(), (torch.rand(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)))
    frames = captured.signature.inputs[0].type.shape
    assert not isinstance(frames[1], int)
    assert captured.module(torch.rand(3, 10, 4), torch.ones(3, 10, dtype=torch.bool))[0].shape == (3, 5, 4)


@pytest.mark.parametrize("shapes", [torch.ones(2), np.zeros(3)])
def test_arrays_are_no_dynamic_shapes(shapes):
    with pytest.raises(InputError, match=r"dynamic_shapes is an? (tensor|array); it takes dimensions"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4),), dynamic_shapes=shapes)
