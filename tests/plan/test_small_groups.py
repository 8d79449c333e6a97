"""Small barrier groups: one thread computes them without barriers, with the bits of the interpreter for all sizes."""

import pytest

from intaglio import build
from intaglio.kernels import ISAS
from intaglio.plan import BatchTiling, CacheSizes, plan_graph, schedule_plan
from intaglio.plan.plan_records import SMALL_WORK
from intaglio.runtime.calls import call_plans
from support.integer_graphs import N, Net
from support.matmul_library import RUNNABLE_ISAS
from support.programs import assert_same_bits, built, compiled


def short_steps(net: Net) -> tuple[str, ...]:
    """Steps that are small for few images: layers of one panel, a sum, a table, a reshape; then a wide layer."""
    x = net.quantize(net.input(N, 6, 8))
    y = net.linear(x, 24)
    z = net.table(net.linear(y, 8))
    mixed = net.same("permute", net.add(x, z), order=(0, 2, 1))
    flat = net.same("reshape", mixed, shape=(N, 48))
    wide = net.linear(flat, 400)
    return net.linear(wide, 7, f32=True), net.dequantize(net.linear(flat, 5))


def scheduled(program, batch_tiling=None):
    _, lowered = built(program)
    return schedule_plan(plan_graph(lowered.graph), ISAS["avx2"], CacheSizes(), batch_tiling=batch_tiling)


def test_groups_are_small_up_to_a_number_of_images():
    plan = scheduled(short_steps)
    assert len(plan.small_groups) > 4
    for work in plan.small_groups.values():
        assert work.total({"n": 1}) <= SMALL_WORK < work.total({"n": 1000})
    wide = next(step for step in plan.steps if "400" in str(plan.graph.types[step.partition.output]))
    assert wide.barrier_group not in plan.small_groups


def test_each_small_group_has_a_small_neighbor_in_its_segment():
    plan = scheduled(short_steps)
    for group in plan.small_groups:
        assert {group - 1, group + 1} & plan.small_groups.keys()


def test_groups_of_sub_batches_are_not_small():
    tiled = scheduled(short_steps, BatchTiling("n", 3, 1))
    assert tiled.small_groups
    assert min(tiled.small_groups) >= 3


def test_the_text_of_a_plan_says_up_to_which_work_one_thread_computes_a_step():
    text = scheduled(short_steps).text()
    assert f"one thread, without barriers to such groups, up to {SMALL_WORK} bytes and MACs: " in text


def test_there_is_no_barrier_between_small_groups():
    source = compiled(short_steps, RUNNABLE_ISAS[0]).artifact.program.source
    plan = scheduled(short_steps)
    pairs = [(group, group + 1) for group in plan.small_groups if group + 1 in plan.small_groups]
    assert pairs
    for first, second in pairs:
        assert f"if (team{first} + team{second} > 2) intaglio_barrier_wait(r->barrier, threads);" in source


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_programs_with_small_groups_have_the_bits_of_the_interpreter(isa, count, monkeypatch):
    net, lowered = built(short_steps)
    model = build.compile(lowered, isa=isa)
    monkeypatch.setattr(call_plans.threads, "thread_counts", lambda program, *rest: (count,) * program.segments)
    for images in (0, 1, 2, 9, 40, 300):  # below and above the limit of each group
        inputs = net.batch(images, seed=images)
        expected = lowered(*inputs)
        for _ in range(5):
            assert_same_bits(model(*inputs), expected)
