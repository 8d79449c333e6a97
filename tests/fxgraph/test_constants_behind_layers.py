"""Arithmetic with constants per channel behind convolutions and linear layers is folded into their weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import intaglio
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.overloads import ARITHMETIC_TARGETS
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES, QAT_PASSES
from intaglio.tracing import capture, run
from support import nets
from support.lowering import sqnr
from support.nets import Body

OTHER_ARITHMETIC = ("aten.addcmul.default", "aten.mul.Scalar")
X = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(1))
GAIN, SHIFT = (nn.Parameter(torch.randn(6, generator=torch.Generator().manual_seed(seed))) for seed in (2, 3))


class FrozenBatchNorm(nn.Module):
    """As torchvision and the detection models of transformers define it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.rand(channels) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.reshape(1, -1, 1, 1) * (self.running_var.reshape(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.reshape(1, -1, 1, 1) - self.running_mean.reshape(1, -1, 1, 1) * scale)


class WithConstants(nn.Module):
    """A layer, and a function of its result and two constants with six values each."""

    def __init__(self, layer: nn.Module, body) -> None:
        super().__init__()
        self.layer, self.body, self.gain, self.shift = layer, body, nn.Parameter(GAIN.clone()), nn.Parameter(SHIFT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), self.gain, self.shift)


def image(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, 1, 1)


def passed(model: nn.Module, x: torch.Tensor, passes=PTQ_PASSES):
    """The graph after the passes, which compute what the captured graph does, and the number of folded operators."""
    captured = capture(model.eval(), x)
    module = copy_graph(captured.module)
    counts = run(module, passes.recipe)
    torch.testing.assert_close(module(x)[0], captured.module(x)[0], rtol=1e-4, atol=1e-4)
    return module, counts.get("fold_constants_after", 0)


def arithmetic(module) -> int:
    return sum(operator(n) in (*ARITHMETIC_TARGETS, *OTHER_ARITHMETIC) for n in module.graph.nodes)


CONV = nn.Conv2d(8, 6, 3)
FOLDED = {
    "a product": (CONV, lambda y, g, s: y * image(g), X, 1),
    "a sum": (CONV, lambda y, g, s: image(s) + y, X, 1),
    "a layer scale": (nn.Linear(9, 6), lambda y, g, s: y * g, X, 1),
    "without bias": (nn.Linear(9, 6, bias=False), lambda y, g, s: y * g + s, X, 2),
    "a difference": (CONV, lambda y, g, s: y - image(s), X, 1),
    "a difference from a constant": (CONV, lambda y, g, s: image(s) - y, X, 1),
    "a quotient": (CONV, lambda y, g, s: y / image(g), X, 1),
    "a factor of the constant": (CONV, lambda y, g, s: torch.sub(y, image(s), alpha=3), X, 1),
    "three in a row": (CONV, lambda y, g, s: (y * image(g) - image(s)) * image(s), X, 3),
    "one dimension": (nn.Conv1d(8, 6, 3), lambda y, g, s: y * g[:, None], X[:, :, 0], 1),
    "transposed, groups": (
        nn.ConvTranspose2d(8, 6, 3, 2, groups=2, bias=False),
        lambda y, g, s: y * image(g) + image(s),
        X,
        2,
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_constants_per_channel_are_folded(name):
    layer, body, x, count = FOLDED[name]
    module, folded = passed(WithConstants(layer, body), x)
    assert (arithmetic(module), folded) == (0, count)


LARGE = nn.Conv2d(8, 6, 3, bias=False)
LARGE.weight.data *= 1000
KEPT = {
    "a constant per column": (nn.Conv2d(8, 5, (3, 4)), lambda y, g, s: y * g, X),
    "a constant per row of tokens": (nn.Linear(9, 6), lambda y, g, s: y[:, :, :6] * image(g)[:, 0], X),
    "another reader": (CONV, lambda y, g, s: y * image(g) + y.sum(), X),
    "a number": (CONV, lambda y, g, s: y * 2.5, X),
    "a divided constant": (CONV, lambda y, g, s: image(g) / (y * y + 1), X),
    "factors that are too large": (LARGE, lambda y, g, s: y * ((image(g).abs().clamp(max=1) + 1) * 1e38), X * 1e-38),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_arithmetic_is_kept(name):
    layer, body, x = KEPT[name]
    module, folded = passed(WithConstants(layer, body), x)
    assert folded == 0
    assert arithmetic(module) >= 1


def test_constants_stay_in_training():
    module, folded = passed(WithConstants(CONV, lambda y, g, s: y * image(g)), X, QAT_PASSES)
    assert (arithmetic(module), folded) == (1, 0)


def test_a_weight_that_an_embedding_reads_is_not_needed_twice():
    model = Body(lambda m, x: F.linear(m.e(x), m.e.weight) * m.n.weight, e=nn.Embedding(6, 9), n=nn.LayerNorm(6))
    model.n.weight.data += torch.randn(6)
    _, folded = passed(model, torch.tensor([[0, 3, 5]]))
    assert folded == 0


def test_a_layer_called_twice_with_the_same_constant_has_one_weight():
    model = Body(lambda m, x: m.n(m.c(F.relu(m.n(m.c(x))))), c=nn.Conv2d(8, 8, 3, padding=1), n=FrozenBatchNorm(8))
    module, folded = passed(nets.randomize(model), X)
    assert folded == 4
    assert len({n.args[1].target for n in module.graph.nodes if operator(n).startswith("aten.conv2d")}) == 1


def test_networks_with_frozen_batch_norms_are_as_accurate_as_with_batch_norms():
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)]
    norms = [FrozenBatchNorm(8) for _ in layers]
    frozen = nn.Sequential(*[nn.Sequential(c, n, nn.ReLU()) for c, n in zip(layers, norms, strict=True)]).eval()
    learned = []
    for norm in norms:
        learned.append(nn.BatchNorm2d(8))
        learned[-1].load_state_dict(norm.state_dict(), strict=False)
    normed = nn.Sequential(*[nn.Sequential(c, n, nn.ReLU()) for c, n in zip(layers, learned, strict=True)]).eval()
    data = [torch.randn(2, 8, 9, 9) for _ in range(4)]
    found = [intaglio.quantize(model, data, progress=False) for model in (frozen, normed)]
    assert all("affine" not in model.text("integer") for model in found)
    errors = [sqnr(model(data[0]), normed(data[0])) for model in found]
    assert errors[0] > errors[1] - 0.5


def test_integers_with_a_constant_per_channel_are_computed_exactly():
    """Hashes of tokens are larger than float32 holds exactly."""
    primes = torch.arange(3, 11) * 10**9 + 7

    def forward(m, x, tokens):
        small = tokens.int() * primes.remainder(100).int()
        return (
            m.first(x),
            (tokens * primes + primes) * 5 - primes,
            small - primes.int(),
            tokens.double() * primes.double(),
        )

    model = Body(forward, first=nn.Linear(4, 4))
    x, tokens = torch.randn(6, 4), torch.randint(10**6, 10**7, (6, 8))
    found = intaglio.quantize(model.eval(), [(x, tokens)], progress=False)
    for exact, result in zip(model(x, tokens)[1:], found(x, tokens)[1:], strict=True):
        assert result.dtype is exact.dtype
        assert torch.equal(result, exact)
