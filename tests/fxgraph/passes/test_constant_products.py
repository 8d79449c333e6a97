"""Batched products with constant matrices, as relative positions have them, are layers with int8 weights."""

import pytest
import torch
from torch import nn

import intaglio
from support.nets import Body, randomize
from support.side_by_side import SideBySide
from support.slow_params import slow_params, slow_params_except

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(5, 6, 4, 8, generator=DRAW)
BODIES = {
    "the last operand": lambda m, x: torch.einsum("bhwc,hkc->bhwk", x, m.constant[:, :, :8]),
    "the first operand": lambda m, x: torch.bmm(m.constant[:, :4].transpose(1, 2), x.permute(1, 2, 0, 3).flatten(2)),
    "one matrix for all": lambda m, x: m.constant[0, :, :6] @ x.reshape(x.shape[0], 4, 6, 8),
    "one matrix in front of another": lambda m, x: m.constant[1, :, :8].mm(x.flatten(0, 2).t()),
    "attention with relative positions": lambda m, x: torch.einsum("bhwc,hkc->hkbw", x.relu(), m.constant[:, :, :8]),
}


def with_matrices(name: str) -> nn.Module:
    model = Body(lambda m, x: BODIES[name](m, m.first(x)), first=nn.Linear(8, 8))
    model.register_buffer("constant", torch.randn(6, 5, 9 if name != "the first operand" else 3, generator=DRAW))
    return randomize(model)


@pytest.mark.parametrize(
    "recipe", ["default", *slow_params("transformer", reason="the same products beside sums in float")]
)
def test_products_with_constant_matrices_are_int8(recipe, subtests):
    """Each beside the others, behind a layer of its own."""
    model = SideBySide({name: (with_matrices(name), [X]) for name in BODIES}).eval()
    found = intaglio.quantize(model, [X], recipe=recipe, progress=False)
    assert not found.coverage.islands
    assert found.coverage.macs == 1
    for batch in (X, X[:2]):
        ours, floats = found(batch), model(batch)
        for name, exact in floats.items():
            with subtests.test(name, batch=len(batch)):
                assert (ours[name] - exact).square().sum() < 1e-3 * exact.square().sum()


def test_one_matrix_that_is_expanded_to_the_batch_is_the_weight_of_a_linear_layer():
    model = Body(lambda m, x: torch.bmm(m.first(x), m.matrix.expand(x.shape[0], -1, -1)), first=nn.Linear(8, 8))
    model.matrix = nn.Parameter(torch.randn(1, 8, 5, generator=DRAW))
    x = torch.randn(4, 7, 8, generator=DRAW)
    found = intaglio.quantize(randomize(model), [x], progress=False)
    assert "expand" not in found.text("integer")
    for batch in (x, x[:1]):
        exact = model(batch)
        assert (found(batch) - exact).square().sum() < 1e-3 * exact.square().sum()


@pytest.mark.parametrize("padding", [0, *slow_params(2, reason="the same with padding")])
def test_convolutions_with_time_first_are_int8(padding):
    """PyTorch's operator takes contiguous inputs only, which the result of a convolution in front of it is not."""

    def forward(m, x):
        return torch.conv_tbc(m.first(x).permute(2, 0, 1).contiguous(), m.taps, m.offsets, padding)

    model = Body(forward, first=nn.Conv1d(8, 8, 3))
    model.taps = nn.Parameter(torch.randn(3, 8, 5, generator=DRAW))
    model.offsets = nn.Parameter(torch.randn(5, generator=DRAW))
    x = torch.randn(4, 8, 9, generator=DRAW)
    found = intaglio.quantize(randomize(model), [x], progress=False)
    assert not found.coverage.islands
    assert found.coverage.macs == 1
    exact = model(x)  # torch.export fixes all sizes of conv_tbc
    assert (found(x) - exact).square().sum() < 1e-3 * exact.square().sum()


EXPANDED = {
    "to more axes": ((8, 5), lambda m, x: torch.matmul(m.first(x).sum(0), m.constant.expand(x.shape[0], 8, 5))),
    "to more rows": ((1, 5), lambda m, x: torch.matmul(m.first(x).sum(-1).t(), m.constant.expand(x.shape[0], 5))),
    "to a vector": ((1,), lambda m, x: torch.matmul(m.first(x).sum(-1).t(), m.constant.expand(x.shape[0]))),
}


@pytest.mark.parametrize("name", slow_params_except("to a vector", of=EXPANDED, reason="expansions to other ranks"))
def test_expansions_that_a_product_needs_are_kept(name):
    shape, forward = EXPANDED[name]
    model = Body(forward, first=nn.Linear(8, 8))
    model.register_buffer("constant", torch.randn(shape, generator=DRAW))
    x = torch.randn(4, 7, 8, generator=DRAW)
    found = intaglio.quantize(randomize(model), [x, x[:2]], progress=False)  # sums over fewer samples may be larger
    for batch in (x, x[:2]):
        exact = model(batch)
        assert found(batch).shape == exact.shape
        assert (found(batch) - exact).square().sum() < 1e-3 * exact.square().sum()


VECTORS = {
    "matmul": lambda m, x: m.first(x).softmax(-1) @ m.constant,
    "mv": lambda m, x: torch.mv(m.first(x.flatten(0, 2)).softmax(-1), m.constant),
    "of a map": lambda m, x: torch.matmul(m.first(x).permute(0, 2, 1, 3).relu(), m.constant).relu(),
}


def with_vector(body) -> nn.Module:
    model = randomize(Body(body, first=nn.Linear(8, 8)))
    model.register_buffer("constant", torch.arange(8.0))
    return model


@pytest.mark.slow(reason="a network of further products; those with matrices are int8 above")
def test_products_with_a_constant_vector_are_linear_layers(subtests):
    """Each beside the others."""
    model = SideBySide({name: (with_vector(body), [X]) for name, body in VECTORS.items()}).eval()
    found = intaglio.quantize(model, [X], progress=False)
    assert found.coverage.operators_int8
    assert not found.coverage.islands
    assert found.coverage.macs == 1
    for batch in (X, X[:2]):
        ours, floats = found(batch), model(batch)
        for name, exact in floats.items():
            with subtests.test(name, batch=len(batch)):
                assert ours[name].shape == exact.shape
                assert (ours[name] - exact).square().sum() < 1e-3 * exact.square().sum()
