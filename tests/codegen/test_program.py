"""Whole generated programs against the interpreter, bit for bit, on every instruction set."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from intaglio import build, stages
from intaglio.codegen import EMITTERS, emit
from intaglio.ir import ModelInfo, Schedule, evaluate
from intaglio.kernels import ISAS
from intaglio.lower import Lowered
from intaglio.native import cpu as machine
from intaglio.ops import OPS
from intaglio.plan import plan_graph, schedule_plan
from support.integer_graphs import H, N, Net, W, sizes
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS, SLACK
from support.nets import Body, randomize
from support.program_texts import TEXTS, digests
from support.programs import (
    CACHES,
    FREE,
    PROGRAMS,
    assert_bits_of_the_interpreter,
    assert_same_bits,
    assert_stays_inside,
    built,
    compiled,
    joined,
    residual,
    threads,
    tokens,
    unjoined,
    weighed,
)
from support.slow_params import slow_params_except

OTHER_SET = pytest.mark.slow(reason="every program runs on one set of instructions, and every set runs programs")


@pytest.mark.case("problem 14", "problem 16")
@pytest.mark.parametrize(
    ("program", "isa"),
    [
        pytest.param(
            program, isa, marks=[OTHER_SET] * (place % len(RUNNABLE_ISAS) != i), id=f"{isa}-{program.__name__}"
        )
        for place, program in enumerate(PROGRAMS)
        for i, isa in enumerate(RUNNABLE_ISAS)
    ],
)
def test_a_program_has_the_bits_of_the_interpreter(program, isa):
    """For every batch, thread count and memory format, NaN and infinities included."""
    net, lowered = built(program)
    model = compiled(program, isa)
    assert_bits_of_the_interpreter(net, lowered, model)


@pytest.mark.parametrize(
    "program",
    slow_params_except(residual, tokens, of=FREE, reason="every program runs on one set of instructions elsewhere"),
    ids=lambda program: program.__name__,
)
def test_instruction_sets_agree_on_a_large_batch(program):
    inputs = built(program)[0].batch(9, seed=1)
    first, *others = [compiled(program, isa)(*inputs) for isa in RUNNABLE_ISAS]
    for other in others:
        assert_same_bits(other, first)


def test_the_comparison_detects_one_changed_constant():
    net, lowered = built(residual)
    graph = lowered.graph
    bias = next(op.inputs[2] for op in graph.ops if op.kind == "conv2d")
    changed = {**graph.constants, bias: graph.constants[bias] + 40 * np.eye(1, 70, 5, dtype=np.int32)[0]}
    wrong = Lowered(graph.replace(constants=changed), {}, lowered.signature)
    with pytest.raises(AssertionError):
        assert_same_bits(compiled(residual, RUNNABLE_ISAS[0])(*net.batch(2)), wrong(*net.batch(2)))


@pytest.mark.parametrize(
    "isa",
    slow_params_except(
        *RUNNABLE_ISAS[:1],
        of=RUNNABLE_ISAS,
        reason="schedules are chosen in the same way for every set of instructions",
    ),
)
def test_results_do_not_depend_on_the_schedule(isa):
    net, lowered = built(residual)
    expected = lowered(*net.batch(2))
    tails = [op.output for op in lowered.graph.ops if op.kind in ("requantize", "add")]
    for schedule in (Schedule(1, 1, 0, 1), Schedule(3, 1, 1 << 40, 100)):
        model = build.compile(lowered, isa=isa, schedules=dict.fromkeys(tails, schedule))
        with threads(2):
            assert_same_bits(model(*net.batch(2)), expected)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_a_linear_layer_on_four_axes_reads_the_last_one(isa):
    net = Net()
    x = net.quantize(net.input(N, 3, 4, 8))
    lowered = net.lowered(net.linear(x, 5, f32=True), net.dequantize(net.linear(x, 6)))
    assert_same_bits(build.compile(lowered, isa=isa)(*net.batch(2)), lowered(*net.batch(2)))


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_linear_layers_of_four_axes_meet_image_operators(isa):
    """conv2d -> linear over columns -> clamp -> conv2d, an add across both, a slice: copies between the layouts."""
    model = randomize(Body(_mixed, conv=nn.Conv2d(3, 8, 3, padding=1), mix=nn.Linear(6, 6), out=nn.Conv2d(8, 4, 3)))
    prepared = stages.prepare(stages.capture(model, torch.randn(2, 3, 5, 6)))
    lowered = stages.requantize(stages.convert(prepared, stages.calibrate(prepared, [torch.randn(8, 3, 5, 6)])))
    assert [op.kind for op in lowered.graph.ops].count("reshape") == 2
    x = torch.randn(3, 3, 5, 6)
    assert_same_bits(build.compile(lowered, isa=isa)(x), lowered(x))


def _mixed(net, x):
    y = net.conv(x)
    return net.out((y + net.mix(y)).relu())[:, :, 1:]


# ---- memory


@pytest.mark.parametrize(
    ("program", "isa"),
    [
        pytest.param(program, isa, marks=[OTHER_SET] * (PROGRAMS.index(program) % len(RUNNABLE_ISAS) != i))
        for program in FREE
        for i, isa in enumerate(RUNNABLE_ISAS)
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_programs_access_only_the_arena_constants_and_tensors(program, isa):
    net, lowered = built(program)
    assert_stays_inside(net, lowered, compiled(program, isa).artifact)


@pytest.mark.parametrize(
    "program",
    slow_params_except(residual, of=FREE, reason="plans of the other programs are checked by the verifier too"),
    ids=lambda program: program.__name__,
)
def test_buffers_alive_in_one_barrier_group_never_overlap(program, monkeypatch):
    """On a machine whose caches hold a whole batch: the buffers of batch tiles have places of their own."""
    monkeypatch.setattr(machine, "caches", lambda: machine.Caches(32 << 10, 64 << 20, 64 << 20))
    lowered = replace(built(program)[1], model_info=ModelInfo(program.__name__))
    planned, artifact = plan_graph(lowered.graph), build.compile(lowered, isa=RUNNABLE_ISAS[0]).artifact
    for batch in (0, 1, 7):
        layout = artifact.plan(sizes(batch))
        assert planned.arena().offsets(planned.buffers, sizes(batch)) == {
            lifetime.value: offset for lifetime, offset in zip(planned.lifetimes, layout.offsets, strict=False)
        }
        spans = []
        for lifetime, offset in zip(planned.lifetimes, layout.offsets, strict=False):
            size = evaluate(planned.buffers[lifetime.value].size(), sizes(batch))
            spans.append((lifetime, offset, offset + size + SLACK))
        for i, (a, start, end) in enumerate(spans):
            for b, other_start, other_end in spans[:i]:
                together = a.overlaps(b)
                assert not together or end <= other_start or other_end <= start, (a, b)


# ---- text


def test_operands_of_a_concatenation_are_written_in_their_place():
    """Those of convolutions and pools that nothing else reads; a concatenation of nothing else has no step."""
    planned = plan_graph(built(joined)[1].graph)
    cats = [op for op in planned.graph.ops if op.kind == "cat"]
    parts = [[planned.buffers[name].first_channel for name in op.inputs] for op in cats]
    assert parts == [[0, 24, 94, 127], [0, 116], [None, None]]
    assert [step.partition.anchor.kind for step in planned.steps].count("cat") == 2  # one of them for its halo


def test_a_channel_product_is_fused_into_the_convolution_after_it():
    """It has no buffer, and the convolution follows what the product reads at once."""
    planned = plan_graph(built(weighed)[1].graph)
    heads = [step.partition for step in planned.steps if step.partition.head is not None]
    quantized, total = ["requantize", "loop"], ["add", "loop"]  # the loops give the caller floats
    tails = (quantized, quantized, total, quantized, quantized, ["dequantize"])
    assert [[op.kind for op in partition.ops] for partition in heads] == [["mul", "conv2d", *tail] for tail in tails]
    for partition in heads:
        assert partition.head.output not in planned.buffers
        assert {*partition.head.inputs[:2]} <= {*partition.reads()}
    assert not any(step.partition.anchor.kind == "mul" for step in planned.steps)
    kinds = [step.kinds for step in compiled(weighed, RUNNABLE_ISAS[0]).artifact.program.steps]
    assert [kind for kind in kinds if "mul" in kind] == [" + ".join(["mul", "conv2d", *tail]) for tail in tails]


def test_products_that_cannot_be_fused_are_separate_steps():
    steps = plan_graph(built(unjoined)[1].graph).steps
    assert not any(step.partition.has_head for step in steps)
    assert sum(step.partition.anchor.kind == "mul" for step in steps) == 7


def test_every_operator_with_a_kernel_has_an_emitter():
    """A requantize is never an anchor: the accumulator it ends has one. Functions of one value become tables, sums with
    a factor per channel sums."""
    tails = {"requantize", "activate", "dequantize_rows"}
    records = [record for record in OPS.values() if record.kernel is not None and record.reference is not None]
    assert set(EMITTERS) == {record.emitter for record in records if record.name not in tails}


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_the_same_graph_gives_the_same_text_and_constants(isa):
    plans = (schedule_plan(plan_graph(built(residual)[1].graph), ISAS[isa], CACHES) for _ in range(2))
    first, second = (emit(plan, "same").packed() for plan in plans)
    assert first.source == second.source
    assert np.array_equal(first.constants, second.constants)


@pytest.mark.slow(reason="two processes import everything; a program is written twice in this process, too")
def test_every_process_gives_a_program_the_same_text_and_constants():
    """The text is the key of the library in the cache; the order of a set depends on the seed of its hashes."""
    command = [sys.executable, "-m", "support.program_texts"]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": seed}
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(other) == len(TEXTS)
    assert other == digests()


def test_the_program_text_of_a_tiny_net_is_the_same_for_every_instruction_set(golden):
    """But for names and heights of kernels, and what those need that configure registers."""
    net = Net()
    x = net.quantize(net.input(N, 3, 8, 8), 128)
    y = net.conv(x, 16, 3, padding=1, zero_point=0)
    window = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1), "ceil": False}
    y = net.conv(net.same("max_pool2d", y, **window), 8, 1, f32=True)
    general, texts = plan_graph(net.graph(y)), set[str]()
    for isa, table in ISAS.items():
        source = emit(schedule_plan(general, table, CACHES), "tiny").text.source.replace(f"for {isa}", "for ISA")
        heights = "|".join({str(table.max_tile_rows[1]), str(table.fast_tile_rows.get(1, table.max_tile_rows[1]))})
        source = re.sub(rf"\b(tile_rows=|m\.rows = )({heights})\b", r"\1TALLEST", source)
        if table.has_setup:
            source = re.sub(
                r"^ *(struct TileSetup setup|m\.tile\.setup|m\.lines|release_tiles).*\n", "", source, flags=re.M
            )
        texts.add(re.sub(r"\btiles_x1_(u8|f32)(_natural)?\b", r"tiles_\1", source))
    (text,) = texts
    golden(text)


def callers_levels(net: Net) -> tuple[str, ...]:
    """Quantized values come in, and quantized values that leave are read inside too: by convolutions that pad and by
    what does not."""
    x = net.input_levels(N, 5, H, W)
    plain, padded, deep = net.conv(x, 6, 3), net.conv(x, 6, 3, padding=1), net.conv(x, 5, 3, padding=1, groups=5)
    again = net.conv(padded, 7, (1, 3), padding=(0, 0, 1, 1))
    return plain, padded, net.dequantize(deep), net.dequantize(again), net.dequantize(x)


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_quantized_inputs_are_padded_like_internal_values(isa):
    """Its tensors have no halo: what stood there was whatever lay beside them."""
    net, lowered = built(callers_levels)
    model = build.compile(lowered, isa=isa)
    for size in (1, 2, 5):
        inputs = net.batch(size, seed=size)
        assert all(map(torch.equal, model(*inputs), lowered(*inputs)))
    assert "reshape" not in [op.kind for op in lowered.graph.ops]
