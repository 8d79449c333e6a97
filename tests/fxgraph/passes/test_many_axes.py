"""Sums and products of tensors with more axes than kernels take."""

import operator
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import tensor_type
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.quant.recipes.recipe import Recipe
from intaglio.tracing import capture, run
from support.lowering import quantized, sqnr
from support.nets import randomize


class Sum(nn.Module):
    def __init__(self, shapes, function) -> None:
        super().__init__()
        self.shapes, self.function = shapes, function

    def forward(self, left, right):
        a, b = (x.sin().reshape(shape) for x, shape in zip((left, right), self.shapes, strict=True))
        return self.function(a, b).reshape(-1).cos()


KINDS = st.sampled_from([(True, True), (True, False), (False, True)])
"""Which of two operands has all elements of an axis."""


@given(st.lists(st.tuples(KINDS, st.integers(1, 2)), min_size=7, max_size=9), st.data())
def test_merged_axes_compute_the_same(axes, data):
    shapes = [[size if kind[side] else 1 for kind, size in axes] for side in (0, 1)]
    leading = next((place for place, size in enumerate(shapes[1]) if size != 1), len(axes) - 1)
    shapes[1] = shapes[1][data.draw(st.integers(0, leading)) :]
    function = data.draw(st.sampled_from([operator.add, operator.sub, operator.mul]))
    inputs = [torch.randn(prod(shape), generator=torch.Generator().manual_seed(1)) for shape in shapes]
    captured = capture(Sum(shapes, function), tuple(inputs), dynamic_shapes=(None, None))
    module = copy_graph(captured.module)
    run(module, PTQ_PASSES.patterns)
    for found, expected in zip(module(*inputs), captured.module(*inputs), strict=True):
        assert torch.equal(found, expected)
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}, "idempotent"


def test_an_operand_that_has_the_merged_shape_is_not_reshaped():
    inputs = torch.randn(1), torch.randn(1)
    module = copy_graph(capture(Sum(([1] * 7, [1]), operator.add), inputs).module)
    run(module, PTQ_PASSES.patterns)
    assert "reshape" not in module.code
    assert set(run(module, PTQ_PASSES.patterns).values()) == {0}


class VideoPositions(nn.Module):
    """Attention scores of a video with relative positions along its three axes, as in MViT v2."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.rows, self.columns = nn.Parameter(torch.randn(3, 3, 8)), nn.Parameter(torch.randn(4, 4, 8))
        self.times = nn.Parameter(torch.randn(2, 2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, frames, height, width, channels = x.shape
        q, k = self.query(x), self.key(x).reshape(n, -1, channels)
        rows = torch.einsum("nthwc,hkc->nthwk", q, self.rows)
        columns = torch.einsum("nthwc,wkc->nthwk", q, self.columns)
        by_time = q.permute(1, 0, 2, 3, 4).reshape(frames, n * height * width, channels)
        times = torch.matmul(by_time, self.times.transpose(1, 2)).transpose(0, 1)
        times = times.view(n, height, width, frames, frames).permute(0, 3, 1, 2, 4)
        positions = rows[:, :, :, :, None, :, None] + columns[:, :, :, :, None, None, :] + times[..., None, None]
        scores = q.reshape(n, -1, channels) @ k.transpose(1, 2)
        scores = (scores + positions.reshape(scores.shape)).softmax(-1)
        return self.out(scores @ x.reshape(n, -1, channels))


@pytest.mark.slow(reason="quantizes attention of videos; merged axes are compared above")
def test_relative_positions_of_videos_leave_no_island():
    x = torch.randn(3, 2, 3, 4, 8, generator=torch.Generator().manual_seed(3))
    model = randomize(VideoPositions())
    reference, lowered = quantized(model, x, recipe=Recipe.named("transformer"))
    assert not lowered.islands, lowered.skipped
    kinds = [tensor_type(node) for node in reference.module.graph.nodes]
    assert max(len(kind.shape) for kind in kinds if kind is not None) <= 6
    for batch in (x, x[:1]):
        torch.testing.assert_close(lowered(batch), reference(batch), rtol=1e-4, atol=1e-4)
        assert sqnr(lowered(batch), model(batch)) > 20


@pytest.mark.parametrize("constant_first", [False, True])
def test_batched_products_with_constants_are_grouped_convolutions(constant_first):
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.weight, x) if constant_first else torch.matmul(x, self.weight)

    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    reference, lowered = quantized(randomize(Products()), x)
    assert not lowered.islands
    torch.testing.assert_close(lowered(x), reference(x), rtol=1e-4, atol=1e-4)
    assert any("conv1d" in str(node.target) for node in reference.module.graph.nodes)
