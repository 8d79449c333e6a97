"""Loops and products quantize their results before these are moved, so that bytes are copied."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from intaglio.plan.graph_passes.earlier_quantizes import quantize_before_movement
from support.integer_graphs import N, Net
from support.lowering import quantized
from support.matmul_library import BEST_ISA_PARAMS
from support.nets import Body, randomize
from support.programs import assert_bits_compiled_and_loaded, assert_same_bits, built

PLACES = torch.tensor([4, 0, 0, 3, -1, 2, 1])
X = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0))


def rotated(x):
    first, second = x.chunk(2, -1)
    angles = torch.arange(x.shape[1])[:, None, None] * 0.3
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attention_of_selected(m, x):
    """Queries and keys come from loops, through permutations, and values from a product."""
    q, k, v = m.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
    q, k = (rotated(one).transpose(1, 2)[:, :, PLACES] for one in (q, k))
    found = scaled_dot_product_attention(q, k, v[:, PLACES].transpose(1, 2))
    return m.out(found.transpose(1, 2).flatten(2))


@pytest.fixture(scope="module")
def lowered():
    return quantized(randomize(Body(attention_of_selected, qkv=nn.Linear(12, 48), out=nn.Linear(16, 5))), X)[1]


def indexed_types(lowered):
    """The element types of values that an index selects from."""
    graph = lowered.graph
    return [str(graph.types[op.inputs[0]].dtype) for op in graph.ops if op.kind == "index"]


def test_results_of_loops_are_selected_as_bytes(lowered):
    assert indexed_types(lowered) == ["u8", "u8", "f32"]
    assert quantize_before_movement(lowered.graph)[1] == 0


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_programs_have_the_bits_of_the_interpreter(isa, lowered, tmp_path):
    assert_bits_compiled_and_loaded(lowered, isa, (X, X[:1]), tmp_path)


def test_values_with_other_readers_are_selected_as_floats():
    def read_twice(m, x):
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
        q, k = rotated(q)[:, PLACES].transpose(1, 2), rotated(k).transpose(1, 2)
        return m.out(scaled_dot_product_attention(q, k, v.transpose(1, 2)).transpose(1, 2).flatten(2)), q

    model = randomize(Body(read_twice, qkv=nn.Linear(12, 48), out=nn.Linear(16, 5)))
    assert indexed_types(quantized(model, X)[1]) == ["f32"]


def transposed_heads(net: Net) -> tuple[str, ...]:
    """The result of a layer with scales per token becomes two heads, which are quantized after their transposition."""
    made = net.linear_rows(*net.quantize_rows(net.input(N, 5, 12)), 16)
    heads = net.same("reshape", made, shape=(N, 5, 2, 8))
    return (net.dequantize(net.quantize(net.same("permute", heads, order=(0, 2, 1, 3)))),)


def test_products_with_scales_per_token_quantize_before_a_transposition():
    _, plain = built(transposed_heads)
    graph, count = quantize_before_movement(plain.graph)
    assert count == 1
    assert [str(graph.types[op.inputs[0]].dtype) for op in graph.ops if op.kind == "permute"] == ["u8"]


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_products_that_quantize_have_the_bits_of_the_interpreter(isa, tmp_path):
    net, plain = built(transposed_heads)
    moved = replace(plain, graph=quantize_before_movement(plain.graph)[0])
    inputs = net.batch(3)
    assert_same_bits(moved(*inputs), plain(*inputs))
    assert_bits_compiled_and_loaded(moved, isa, (*inputs, *net.batch(1)), tmp_path)
