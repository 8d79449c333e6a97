"""Concatenations behind tensors of the caller: which a plan finds, and what its text says."""

import pytest

from intaglio.kernels import ISAS
from intaglio.plan import CacheSizes, Plan, plan_graph, schedule_plan
from support.growing_programs import cached_attention, earlier, one_head
from support.integer_graphs import H, N, Net, W


def planned(program) -> Plan:
    net = Net()
    return plan_graph(net.graph(*program(net)))


@pytest.mark.parametrize("program", [cached_attention, one_head])
def test_keys_and_values_of_a_cache_grow(program):
    plan = planned(program)
    assert sorted(plan.growing.values()) == ["x3", "x4"]
    assert {op.kind for op in plan.graph.ops if op.output in plan.growing} == {"cat"}


def test_the_text_of_a_plan_says_which_tensors_grow():
    plan = schedule_plan(planned(cached_attention), ISAS["avx2"], CacheSizes())
    assert "    copies only the new values, behind %x3, in calls with memory there" in plan.text().splitlines()


def tokens_of(net: Net) -> tuple[str, str, str]:
    """Queries, keys of earlier tokens, and keys of new ones."""
    q = net.quantize(net.input(N, 2, W, 8))
    new = net.centred(net.quantize(net.input(N, 2, W, 8), zero_point=128))
    return q, earlier(net, new), new


def returned(net: Net) -> tuple[str, ...]:
    """All keys are a result, too."""
    q, before, new = tokens_of(net)
    every = net.join([before, new], axis=2)
    return net.dequantize(net.attention(q, every, every)), net.dequantize(every)


def in_front(net: Net) -> tuple[str, ...]:
    """New keys come before the earlier ones."""
    q, before, new = tokens_of(net)
    every = net.join([new, before], axis=2)
    return (net.dequantize(net.attention(q, every, every)),)


def queries(net: Net) -> tuple[str, ...]:
    """Attention reads them as queries."""
    _, before, new = tokens_of(net)
    every = net.join([before, new], axis=2)
    return (net.dequantize(net.attention(every, new, new)),)


def along_heads(net: Net) -> tuple[str, ...]:
    """They are more heads, not more tokens."""
    q = net.quantize(net.input(N, 4, W, 8))
    new = net.centred(net.quantize(net.input(N, 2, H, 8), zero_point=128))
    every = net.join([earlier(net, new), new], axis=1)
    return (net.dequantize(net.attention(q, every, every)),)


def twice(net: Net) -> tuple[str, ...]:
    """Two concatenations extend one tensor; only one may."""
    q, before, new = tokens_of(net)
    other = net.centred(net.quantize(net.input(N, 2, W, 8), zero_point=128))
    net.types[other] = net.types[new]
    first, second = net.join([before, new], axis=2), net.join([before, other], axis=2)
    return (net.dequantize(net.attention(q, first, second)),)


@pytest.mark.parametrize("program", [returned, in_front, queries, along_heads])
def test_other_concatenations_are_copied(program):
    assert not planned(program).growing


def test_one_concatenation_extends_a_tensor():
    assert len(planned(twice).growing) == 1
