"""Loops of rotary position embedding read exchanged halves where they are, instead of a copy."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from intaglio.plan.graph_passes.exchanged_halves import exchange_halves
from support.lowering import quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_bits_compiled_and_loaded

X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


def exchanged(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def angles(x, size):
    half = torch.arange(x.shape[1])[:, None] * torch.linspace(0.1, 1, size // 2)
    return torch.cat([half, half], -1)


def rotary_attention(m, x):
    """Queries and keys of three heads with 10 channels are rotated in the layout of attention."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 3, 10)).permute(2, 0, 3, 1, 4)
    at = angles(x, 10)
    q, k = (one * at.cos() + exchanged(one) * at.sin() for one in (q, k))
    return m.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def partly_rotated(m, x):
    """The first four of eight channels of each head are rotated, before heads become an axis of their own."""
    x = m.first(x).unflatten(-1, (2, 8))
    turned, kept = x[..., :4], x[..., 4:]
    at = angles(x, 4)[:, None]
    return m.second(torch.cat([turned * at.cos() + exchanged(turned) * at.sin(), kept], -1).flatten(2))


NETS = {
    "rotary": (rotary_attention, {"qkv": nn.Linear(12, 90), "out": nn.Linear(30, 5)}, 2),
    "partial": (partly_rotated, {"first": nn.Linear(12, 16), "second": nn.Linear(16, 5)}, 1),
}


@pytest.fixture(scope="module", params=NETS)
def net(request):
    run, layers, loops = NETS[request.param]
    return quantized(randomize(Body(run, **layers)), X)[1], loops


def test_no_half_is_copied(net):
    lowered, loops = net
    kinds = [op.kind for op in lowered.graph.ops]
    assert kinds.count("flip") == loops
    assert kinds.count("loop") == loops
    assert not [op for op in lowered.graph.ops if op.kind == "cat" and lowered.graph.types[op.output].q is None]
    assert exchange_halves(lowered.graph)[1] == 0


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_have_the_bits_of_the_interpreter(isa, net, tmp_path):
    assert_bits_compiled_and_loaded(net[0], isa, (X, X[:1]), tmp_path)


def not_exchanged(m, x):
    """Each way in which a concatenation is not one of exchanged halves."""
    x = m.first(x)
    first, second = x.chunk(2, -1)
    third = torch.cat([-x[..., 6:], x[..., :6]], -1)  # other sizes
    same_order = torch.cat([-first, second], -1)
    positive = torch.cat([second * 2, first], -1)
    other = torch.cat([-m.other(x)[..., 8:], first], -1)
    return m.second((third + 1).relu() + same_order * x + positive * x.sin() + other * x.cos())


def test_other_concatenations_are_copied():
    layers = {"first": nn.Linear(12, 16), "other": nn.Linear(16, 16), "second": nn.Linear(16, 5)}
    lowered = quantized(randomize(Body(not_exchanged, **layers)), X)[1]
    assert "flip" not in [op.kind for op in lowered.graph.ops]


def test_a_concatenation_with_other_readers_is_copied():
    def read_twice(m, x):
        x = m.first(x)
        turned = exchanged(x)
        return m.second(x.cos() + turned * x.sin()), turned

    lowered = quantized(randomize(Body(read_twice, first=nn.Linear(12, 16), second=nn.Linear(16, 5))), X)[1]
    assert "flip" not in [op.kind for op in lowered.graph.ops]
