"""Grouped-query attention reads keys and values that a model repeats for several heads of queries without a copy."""

from dataclasses import replace

import pytest

from intaglio import build
from intaglio.ir.graph import prune
from intaglio.plan.graph_passes.shared_heads import share_heads
from support.integer_graphs import N, Net
from support.programs import assert_bits_of_the_interpreter

BATCH_ROWS = 5


def repeated(net: Net, value: str, times: int, before: bool = False) -> str:
    """The heads of a value, each ``times`` times in a row, or all of them ``times`` times."""
    batch, groups, rows, width = net.types[value].shape
    one, many = (1, times)
    sizes = [
        (batch, part, groups, rows, width) if before else (batch, groups, part, rows, width) for part in (one, many)
    ]
    split = net.same("reshape", value, shape=sizes[0])
    wide = net.same("expand", split, shape=sizes[1])
    return net.same("reshape", wide, shape=(batch, groups * times, rows, width))


def grouped_queries(net: Net, repeats: tuple[int, int] = (3, 3), groups: tuple[int, int] = (2, 2), **how: bool) -> str:
    heads = repeats[0] * groups[0]
    q = net.quantize(net.input(N, heads, BATCH_ROWS, 16))
    k, v = (net.centred(net.quantize(net.input(N, count, 7, 16), 128)) for count in groups)
    keys, values = (repeated(net, x, times, **how) for x, times in zip((k, v), repeats, strict=True))
    return net.dequantize(net.attention(q, keys, values))


def test_attention_reads_the_heads_before_they_are_repeated():
    net = Net()
    lowered = net.lowered(grouped_queries(net))
    graph, count = share_heads(lowered.graph)
    graph = prune(graph)
    (attention,) = (op for op in graph.ops if op.kind == "attention")
    assert count == 1
    assert [graph.types[name].shape[1] for name in attention.inputs[:3]] == [6, 2, 2]
    model = build.compile(replace(lowered, graph=graph))
    assert "reshape" not in model.text("plan")
    assert_bits_of_the_interpreter(net, lowered, model)


@pytest.mark.parametrize(
    "different", [{"before": True}, {"repeats": (3, 2), "groups": (2, 3)}], ids=["all heads in turn", "unequal groups"]
)
def test_other_repetitions_are_copied(different):
    """Heads that follow each other in another order, and keys and values of different groups."""
    net = Net()
    lowered = net.lowered(grouped_queries(net, **different))
    assert share_heads(lowered.graph)[1] == 0
    assert_bits_of_the_interpreter(net, lowered, build.compile(lowered))
