"""Plans: their text shows every decision and its reason, and the verifier finds seeded faults."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from intaglio.ir import VerifyError, symbol
from intaglio.kernels import ISAS
from intaglio.plan import PLAN_PASSES, CacheSizes, Plan, Step, TensorView, plan_graph, schedule_plan, verify_plan
from support.integer_graphs import Net


def classifier(net: Net) -> str:
    """A convolution, another one with a sum behind it, a mean, a linear layer."""
    x = net.quantize(net.input(symbol("n"), 16, 32, 32), zero_point=0)
    y = net.conv(x, 32, 3, padding=1, low=0)
    z = net.conv(y, 32, 3, padding=1, add=y)
    pooled = net.mean("adaptive_avg_pool2d", z, size=(1, 1))
    return net.linear(net.same("reshape", pooled, shape=(symbol("n"), 32)), 10, f32=True)


def heads(net: Net) -> str:
    """Attention whose operands are permuted views of products, and whose result is permuted back."""
    n = symbol("n")
    x = net.quantize(net.input(n, 5, 32))
    made = [net.centred(net.linear(x, 32, low=1)) for _ in range(3)]
    split = [net.same("reshape", value, shape=(n, 5, 2, 16)) for value in made]
    q, k, v = (net.same("permute", value, order=(0, 2, 1, 3)) for value in split)
    y = net.same("permute", net.attention(q, k, v), order=(0, 2, 1, 3))
    return net.linear(net.same("reshape", y, shape=(n, 5, 32)), 8, f32=True)


def parts(net: Net) -> str:
    """Two convolutions that write into a concatenation."""
    x = net.quantize(net.input(symbol("n"), 8, 9, 9), zero_point=0)
    a, b = net.conv(x, 8, 1, zero_point=3), net.conv(x, 16, 1, zero_point=3)
    net.types[b] = replace(net.types[b], q=net.types[a].q)
    return net.conv(net.join([a, b]), 8, 1, f32=True)


def planned(program: Callable[[Net], str]) -> Plan:
    net = Net()
    return plan_graph(net.graph(program(net)))


def test_the_text_of_a_plan_shows_every_decision_and_its_reason(golden):
    golden(schedule_plan(planned(classifier), ISAS["avx2"], CacheSizes(l2=1 << 16)).text())


def test_the_text_of_a_plan_shows_views(golden):
    lines = planned(heads).text().splitlines()
    golden("\n".join(line for line in lines if line.startswith(("view", "copy", "    view"))))


def test_each_pass_of_the_plan_is_idempotent():
    plan = planned(classifier)
    last = {name: getattr(plan, name) for name in ("steps", "buffers", "lifetimes", "external", "row_major", "views")}
    for plan_pass in PLAN_PASSES[-4:]:
        plan = plan_pass(plan)
    assert last == {name: getattr(plan, name) for name in last}


def halved_lifetime(plan: Plan) -> Plan:
    first, *others = plan.lifetimes
    return replace(plan, lifetimes=(replace(first, last=first.first), *others))


def late_lifetime(plan: Plan) -> Plan:
    first, *others = plan.lifetimes
    return replace(plan, lifetimes=(replace(first, first=first.last), *others))


def no_place(plan: Plan) -> Plan:
    return replace(plan, lifetimes=plan.lifetimes[1:])


def placed_twice(plan: Plan) -> Plan:
    return replace(plan, lifetimes=(*plan.lifetimes, plan.lifetimes[0]))


def without_halo(plan: Plan) -> Plan:
    return replace(plan, buffers={name: replace(one, halo=(0, 0)) for name, one in plan.buffers.items()})


def with_halo(plan: Plan) -> Plan:
    name = plan.steps[-2].partition.output
    return replace(plan, buffers={**plan.buffers, name: replace(plan.buffers[name], halo=(1, 1))})


def no_barriers(plan: Plan) -> Plan:
    return replace(plan, steps=tuple(Step(partition) for partition in plan.partitions))


def swapped_steps(plan: Plan) -> Plan:
    first, second, *others = plan.steps
    return replace(plan, steps=(first, replace(others[0], barrier_group=second.barrier_group), second, *others[1:]))


def missing_step(plan: Plan) -> Plan:
    return replace(plan, steps=(*plan.steps[:1], *plan.steps[2:]))


def repeated_step(plan: Plan) -> Plan:
    return replace(plan, steps=(*plan.steps, plan.steps[-1]))


def segments_out_of_order(plan: Plan) -> Plan:
    return replace(plan, steps=(replace(plan.steps[0], segment=1), *plan.steps[1:]))


def shared_memory(plan: Plan) -> Plan:
    """The second convolution writes over its own residual operand."""
    first, second = (plan.steps[index].partition.output for index in (1, 2))
    return replace(plan, buffers={**plan.buffers, second: replace(plan.buffers[second], alias=first)})


def alias_of_nothing(plan: Plan) -> Plan:
    name = next(name for name, buffer in plan.buffers.items() if buffer.alias)
    return replace(plan, buffers={**plan.buffers, name: replace(plan.buffers[name], alias="nothing")})


def view_for_a_convolution(plan: Plan) -> Plan:
    name = plan.steps[1].partition.output
    view = TensorView(plan.steps[0].partition.output, 0, (1, 1, 1, 1))
    buffers = {other: one for other, one in plan.buffers.items() if other != name}
    return replace(plan, views={name: view}, buffers=buffers)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (halved_lifetime, "uses it in barrier group 2, but it lives from 1 to 1"),
        (late_lifetime, "uses it in barrier group 1, but it lives from 2 to 2"),
        (no_place, "it has no place in memory"),
        (placed_twice, "a buffer has two places"),
        (without_halo, "its halo is 0x0, its readers need (1, 1)"),
        (with_halo, "its halo is 1x1, its readers need (0, 0)"),
        (no_barriers, "before its barrier group 0 ends"),
        (swapped_steps, "before its barrier group"),
        (missing_step, "no partition computes it"),
        (repeated_step, "2 partitions compute it"),
        (segments_out_of_order, "comes after"),
        (shared_memory, "overwrites what"),
        (alias_of_nothing, "an alias of %nothing, which has no memory of its own"),
        (view_for_a_convolution, "does not support strides"),
    ],
)
def test_the_verifier_finds_a_seeded_fault(fault, message):
    plan = planned(classifier)
    broken = fault(plan)
    assert broken != plan
    with pytest.raises(VerifyError) as raised:
        verify_plan(broken)
    assert message in str(raised.value)


def test_the_verifier_finds_operands_of_a_concatenation_that_overlap():
    plan = planned(parts)
    name = next(name for name, buffer in plan.buffers.items() if buffer.first_channel == 8)
    buffers = {**plan.buffers, name: replace(plan.buffers[name], first_channel=4)}
    with pytest.raises(VerifyError, match="overwrites what"):
        verify_plan(replace(plan, buffers=buffers))


def test_the_verifier_finds_a_view_of_what_has_no_memory():
    plan = planned(heads)
    assert plan.views
    views = {name: replace(view, root="nothing") for name, view in plan.views.items()}
    with pytest.raises(VerifyError, match="is a view of %nothing, which has no memory"):
        verify_plan(replace(plan, views=views))
