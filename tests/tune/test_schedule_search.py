"""`tune=True`: what may be tried, what is chosen, what is remembered. No test looks at the real clock's verdict."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import intaglio
from intaglio import build, stages
from intaglio.build.check import check_schedules
from intaglio.errors import InputError
from intaglio.ir import Schedule
from intaglio.kernels import ISAS
from intaglio.plan import (
    CacheSizes,
    GemmProblem,
    Geometry,
    Target,
    analytic_schedule,
    geometries,
    order_candidates,
    plan_graph,
    tile_candidates,
    unsupported_reason,
)
from intaglio.tune import first_sample, random_sample, search
from intaglio.tune.schedule_cache import ScheduleCache
from intaglio.tune.schedule_search import best_times, fastest, unflatten_call
from support import nets
from support.integer_graphs import H, N, Net, W
from support.matmul_cases import LINE_PIXELS, case_data, cases, run
from support.matmul_library import BEST_ISA_PARAMS, RUNNABLE_ISAS

CACHES = CacheSizes(l1=1 << 10, l2=4000)
"""Small, so that chunks of the images here differ."""


def block(net: Net) -> tuple[str, ...]:
    """Convolutions of two geometries, one of them twice, with a residual operand; one depthwise; a linear layer."""
    x = net.conv(net.quantize(net.input(N, 5, 9, 7)), 96, 3, padding=1)
    y = net.conv(net.conv(x, 96, 1), 96, 1)
    y = net.conv(net.conv(y, 96, 1, add=x), 96, 3, padding=1, groups=96)
    y = net.mean("adaptive_avg_pool2d", y, size=(1, 1))
    return (net.linear(net.same("reshape", y, shape=(N, 96)), 70, f32=True),)


@pytest.fixture(scope="module")
def lowered():
    net = Net()
    return net.lowered(*block(net))


@pytest.fixture
def nothing_known(tmp_path, monkeypatch):
    """An empty memory; compiled programs stay where they are."""
    monkeypatch.setattr(ScheduleCache, "folder", tmp_path / "schedules")


@pytest.fixture
def narrow_is_fast(monkeypatch):
    """A clock by which a layer takes as long as its tile has blocks; the list of its races."""
    races = []

    def clock(programs, call):
        races.append(programs)
        taken = [program.artifact.program.notes["schedules"] for program in programs]
        return [{value: (s.tile_columns, s.tile_columns) for value, s in chosen.items()} for chosen in taken]

    monkeypatch.setattr("intaglio.tune.schedule_search.best_times", clock)
    return races


# ---- what may be tried


def candidates(layer: Geometry, problem: GemmProblem, isa: str, threads: int) -> list[Schedule]:
    start = analytic_schedule(problem, Target.of(ISAS[isa], CACHES))
    tiles = [start, *tile_candidates(start, layer, ISAS[isa])]
    return [*tiles, *(one for tile in tiles for one in order_candidates(tile, layer, CACHES, threads))]


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
@given(st.data())
def test_every_schedule_candidate_is_bit_identical(isa, data):
    case = data.draw(cases(isa, results=("u8", "add")))
    case = replace(case, images=max(case.images, 1))
    assume(case.height * case.width * case.per_group * case.per_group_out * case.groups * case.taps[1] < 1 << 18)
    drawn = case_data(case)
    outputs = len(drawn.weight)
    layer = Geometry(
        kinds=("conv2d", "requantize"),
        weight=drawn.weight.shape,
        attrs=(("groups", case.groups),),
        read=drawn.x.shape,
        written=drawn.expected.shape,
        halos=(),
        pixels_apart=(),
    )
    problem = GemmProblem(outputs, case.per_group_out, layer.pixels, drawn.expected.shape[3], flat=False)
    for schedule in candidates(layer, problem, isa, case.threads):
        assert unsupported_reason(schedule, ISAS[isa]) is None
        taken = replace(
            case,
            rows=schedule.tile_rows,
            lines=min(case.lines, schedule.tile_rows // LINE_PIXELS),
            blocks=schedule.tile_columns,
            chunk_bytes=schedule.chunk_bytes,
            split_channels_below=schedule.split_channels_below,
        )
        assert np.array_equal(run(isa, taken, drawn).values, drawn.expected), schedule


@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_candidates_are_a_handful_and_all_different(isa, lowered):
    planned = plan_graph(lowered.graph)
    for layer in geometries(planned, {"n": 64}).values():
        start = analytic_schedule(
            GemmProblem(layer.weight[0], layer.weight[0], 1, 1, False), Target.of(ISAS[isa], CACHES)
        )
        for found in (tile_candidates(start, layer, ISAS[isa]), order_candidates(start, layer, CACHES, 2)):
            assert len({start, *found}) == len(found) + 1 <= 5


@pytest.mark.parametrize(
    ("outputs", "depth", "width", "columns"),
    [(512, 4608, 7, 3), (512, 4608, 8, 3), (512, 4608, 14, 4), (512, 4608, 6, 4), (512, 4608, 9, 4), (192, 192, 7, 4)],
)
def test_large_weights_are_read_once_for_a_short_line(outputs, depth, width, columns):
    problem = GemmProblem(outputs, outputs, width * width, width, False, weights=outputs * depth)
    found = analytic_schedule(problem, Target.of(ISAS["avx512vnni"], CacheSizes()))
    assert found.tile_columns == columns
    assert found.tile_rows == ISAS["avx512vnni"].max_tile_rows[columns]


@pytest.mark.parametrize(
    ("depth", "width", "flat", "rows"),
    [(576, 56, False, 6), (576, 7, False, 7), (576, 7, True, 6), (1152, 28, False, 7), (1024, 196, True, 6)],
)
def test_tiles_of_avxvnni_are_as_tall_as_lines_and_weights_suggest(depth, width, flat, rows):
    problem = GemmProblem(64, 64, width * width, width, flat, weights=64 * depth)
    assert analytic_schedule(problem, Target.of(ISAS["avxvnni"], CacheSizes())).tile_rows == rows


def test_equal_layers_have_one_geometry_and_depthwise_ones_none(lowered):
    found = geometries(plan_graph(lowered.graph), {"n": 2})
    assert len(found) == 5
    kinds = [(layer.kinds, layer.weight[1:]) for layer in found.values()]
    assert kinds[1] == kinds[2] == (("conv2d", "requantize"), (96, 1, 1))
    first, second, third = list(found.values())[1:4]
    assert first == second != third
    assert first.pixels == 2 * 9 * 7


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(0, 1),
        Schedule(99, 1),
        Schedule(1, 0),
        Schedule(1, 99),
        Schedule(1, 1, -1, 0),
        Schedule(1, 1, 0, 1 << 41),
    ],
)
@pytest.mark.parametrize("isa", ISAS)
def test_a_schedule_without_kernels_is_refused(isa, schedule, lowered):
    assert unsupported_reason(schedule, ISAS[isa]) is not None
    planned = plan_graph(lowered.graph)
    value = next(iter(geometries(planned, {"n": 1})))
    check_schedules({isa: {value: Schedule(1, 1)}}, planned)
    with pytest.raises(ValueError, match=value):
        check_schedules({isa: {value: schedule}}, planned)


# ---- what is chosen


@pytest.mark.slow(reason="compiles a program for each candidate; what is faster is chosen from given times below")
@pytest.mark.parametrize("isa", BEST_ISA_PARAMS)
def test_the_faster_candidate_is_taken_layer_by_layer(isa, lowered, nothing_known, narrow_is_fast):
    inputs = random_sample(lowered.signature)
    chosen = search(lowered, isa, inputs)
    analytic_model = build.compile(lowered, isa=isa)
    tuned = build.compile(lowered, isa=isa, schedules=chosen)
    wide = {v: s for v, s in analytic_model.artifact.program.notes["schedules"].items() if s.tile_columns > 1}
    layers = geometries(plan_graph(lowered.graph), {"n": 1})
    assert set(chosen) == set(wide) & set(layers)
    assert all(schedule.tile_columns == 1 for schedule in chosen.values())
    x = torch.randn(3, 5, 9, 7)
    assert torch.equal(tuned(x)[0], analytic_model(x)[0])


@pytest.mark.parametrize(
    ("second", "third", "best"),
    [
        ((99, 99), (99, 99), 0),
        ((90, 90), (95, 95), 1),
        ((90, 99), (95, 95), 2),
        ((90, 90), (80, 101), 1),
        ((101, 101), (102, 102), 0),
    ],
)
def test_a_schedule_is_taken_that_is_faster_by_the_margin_in_both_halves(second, third, best, lowered):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    options = [Schedule(rows, 1) for rows in (1, 2, 3)]
    spent = [(100, 101), second, third]
    times = {(layer, option): halves for option, halves in zip(options, spent, strict=True)}
    assert fastest({layer: options}, times) == {layer: options[best]}


def test_every_step_of_every_program_is_timed(lowered, nothing_known, monkeypatch):
    monkeypatch.setattr("intaglio.tune.schedule_search.ROUNDS", range(2, 3))
    programs = [build.compile(lowered, isa=isa) for isa in RUNNABLE_ISAS[:2]]
    found = best_times(programs, unflatten_call(lowered.signature, random_sample(lowered.signature)))
    assert len(found) == len(programs)
    values = {step.partition.output for step in plan_graph(lowered.graph).steps}
    assert all(set(times) == values and all(0 <= min(t) <= max(t) < 1e9 for t in times.values()) for times in found)


# ---- what is remembered


def test_a_second_search_measures_nothing(lowered, nothing_known, narrow_is_fast):
    inputs = random_sample(lowered.signature)
    first = search(lowered, RUNNABLE_ISAS[0], inputs)
    count = len(narrow_is_fast)
    assert search(lowered, RUNNABLE_ISAS[0], inputs) == first
    assert len(narrow_is_fast) == count


@pytest.mark.slow(reason="searches twice; a second search measures nothing above")
def test_only_new_layers_are_timed(lowered, nothing_known, narrow_is_fast):
    inputs = random_sample(lowered.signature)
    search(lowered, RUNNABLE_ISAS[0], inputs)
    net = Net()
    x = net.conv(net.quantize(net.input(N, 5, 9, 7)), 96, 3, padding=1)
    more = net.lowered(net.dequantize(net.conv(x, 160, 1)))
    old, new = geometries(plan_graph(more.graph), {"n": 1}).items()
    assert old[1] in geometries(plan_graph(lowered.graph), {"n": 1}).values()
    stored = ScheduleCache(RUNNABLE_ISAS[0], torch.get_num_threads()).load(old[1])
    narrow_is_fast.clear()
    search(more, RUNNABLE_ISAS[0], inputs)
    tried = [program.artifact.program.notes["schedules"] for race in narrow_is_fast for program in race]
    assert {schedules[old[0]] for schedules in tried} == {stored}
    assert len({schedules[new[0]] for schedules in tried}) > 1


def test_schedules_are_keyed_by_threads_sizes_and_instruction_set(lowered, nothing_known):
    small, large = (next(iter(geometries(plan_graph(lowered.graph), {"n": n}).values())) for n in (1, 2))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 2)
    schedule_cache.store({small: Schedule(2, 1, 3, 4)})
    assert schedule_cache.load(small) == Schedule(2, 1, 3, 4)
    assert schedule_cache.load(large) is None
    assert ScheduleCache(RUNNABLE_ISAS[0], 3).load(small) is None
    assert ScheduleCache("portable" if RUNNABLE_ISAS[0] != "portable" else "avx2", 2).load(small) is None


def test_schedules_are_keyed_by_processor_and_generator(lowered, nothing_known, monkeypatch):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    monkeypatch.setattr("intaglio.tune.schedule_cache.GENERATOR", 0)
    assert schedule_cache.load(layer) is None
    monkeypatch.undo()
    monkeypatch.setattr("intaglio.native.cpu.cpu_name", lambda: "another")
    assert schedule_cache.load(layer) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"key": 1, "schedule": {}}',
        b'{"schedule": {"tile_rows": "2"}}',
        b'{"schedule": {"rows": 2}}',
        b'{"schedule": {}}',
    ],
)
def test_a_damaged_entry_is_a_warning_and_is_timed_again(content, lowered, nothing_known, caplog):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    schedule_cache.path(layer).write_bytes(content)
    with caplog.at_level(logging.WARNING, "intaglio"):
        assert schedule_cache.load(layer) is None
    assert str(schedule_cache.path(layer)) in caplog.text
    schedule_cache.store({layer: Schedule(1, 1)})
    assert schedule_cache.load(layer) == Schedule(1, 1)


def test_an_entry_with_a_schedule_no_kernel_has_is_not_used(lowered, nothing_known, caplog):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    for numbers_ in ({"tile_rows": 99}, {"tile_rows": 1.5}, {"tile_columns": True}, {"chunk_bytes": None}):
        schedule_cache.store({layer: Schedule(1, 1)})
        entry = json.loads(schedule_cache.path(layer).read_text())
        entry["schedule"] |= numbers_
        schedule_cache.path(layer).write_text(json.dumps(entry))
        assert schedule_cache.load(layer) is None, numbers_
    assert "does not contain a schedule" in caplog.text


CHANGES = {
    "a link": lambda path: (path.rename(path.with_name("elsewhere")), path.symlink_to(path.with_name("elsewhere"))),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "writable by all": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_entry_that_others_may_have_written_is_timed_again(change, lowered, fresh_cache, caplog):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    change(schedule_cache.path(layer))
    assert schedule_cache.load(layer) is None
    assert str(schedule_cache.path(layer)) in caplog.text
    schedule_cache.store({layer: Schedule(1, 1)})
    assert schedule_cache.load(layer) == Schedule(1, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_schedule_of_another_user_is_timed_again(lowered, fresh_cache, caplog):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    os.chown(schedule_cache.path(layer), 65534, 65534)
    assert schedule_cache.load(layer) is None
    assert "belongs to user 65534" in caplog.text


def test_schedules_of_a_folder_that_others_can_write_are_not_used(lowered, fresh_cache, caplog):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    (fresh_cache / "schedules").chmod(0o777)
    assert schedule_cache.load(layer) is None
    schedule_cache.store({layer: Schedule(2, 1)})
    assert caplog.text.count("schedules of this folder are not used") == 2
    (fresh_cache / "schedules").chmod(0o755)
    assert schedule_cache.load(layer) == Schedule(1, 1)


def test_entries_are_writable_for_their_user_only_whatever_the_umask_is(lowered, tmp_path, monkeypatch):
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path / "a"))
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    before = os.umask(0)
    try:
        schedule_cache.store({layer: Schedule(1, 1)})
    finally:
        os.umask(before)
    assert not any(path.stat().st_mode & 0o022 for path in (tmp_path / "a").rglob("*"))


def test_drafts_of_killed_processes_are_removed_by_the_next_store(lowered, fresh_cache):
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    (fresh_cache / "schedules").mkdir(mode=0o700)
    (fresh_cache / "schedules" / ".intaglio-0123.tmp").touch()
    schedule_cache.store({layer: Schedule(1, 1)})
    assert os.listdir(fresh_cache / "schedules") == [schedule_cache.path(layer).name]


def test_a_folder_that_cannot_be_written_is_a_warning(lowered, fresh_cache, monkeypatch, caplog):
    Path(fresh_cache, "schedules").write_text("not a folder")
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    schedule_cache.store({layer: Schedule(1, 1)})
    assert "schedules cannot be saved" in caplog.text
    assert schedule_cache.load(layer) is None


def test_the_least_recently_used_schedule_is_evicted_first(lowered, nothing_known, monkeypatch):
    monkeypatch.setattr("intaglio.config.cache_limit_bytes", lambda: 2 * 16 * 4096)
    layer = next(iter(geometries(plan_graph(lowered.graph), {"n": 1}).values()))
    layers = [replace(layer, read=(size,)) for size in range(4)]
    schedule_cache = ScheduleCache(RUNNABLE_ISAS[0], 1)
    for age, one in enumerate(layers[:3]):
        schedule_cache.store({one: Schedule(1, 1)})
        if schedule_cache.path(one).exists():
            os.utime(schedule_cache.path(one), (1000 + age, 1000 + age))
    schedule_cache.load(layers[1])
    schedule_cache.store({layers[3]: Schedule(1, 1)})
    assert [schedule_cache.load(one) is not None for one in layers] == [False, True, False, True]


# ---- the verbs


def convolutions() -> nn.Module:
    return nets.randomize(nn.Sequential(nn.Conv2d(3, 80, 3, padding=1), nn.ReLU(), nn.Conv2d(80, 70, 1)).eval())


def test_quantize_measures_one_image_of_the_first_batch(nothing_known, narrow_is_fast, monkeypatch):
    model, x = convolutions(), torch.randn(4, 3, 8, 8)
    seen = []
    monkeypatch.setattr(
        "intaglio.backends.native_backend.search", lambda lowered, isa, inputs: seen.append((isa, *inputs)) or {}
    )
    plain, tuned = (
        intaglio.quantize(model, [x]),
        intaglio.quantize(model, [x], options=intaglio.CompileOptions(tune=True)),
    )
    ((isa, given_x),) = seen
    assert isa == tuned.artifact.program.isa
    assert torch.equal(given_x, x[:1])
    assert plain.artifact.program.source == tuned.artifact.program.source


@pytest.mark.slow(reason="compiles a model three times; every candidate has the same bits above")
def test_a_tuned_model_has_the_same_bits_and_keeps_its_schedules(nothing_known, narrow_is_fast, tmp_path):
    model, x = convolutions(), torch.randn(4, 3, 8, 8)
    plain, tuned = (
        intaglio.quantize(model, [x]),
        intaglio.quantize(model, [x], options=intaglio.CompileOptions(tune=(x[:2],))),
    )
    assert torch.equal(plain(x), tuned(x))
    differ = plain.artifact.program.source != tuned.artifact.program.source
    assert differ == bool(tuned.schedules) == (ISAS[tuned.artifact.program.isa].blocks > 1)
    tuned.save(tmp_path / "with")
    tuned.save(tmp_path / "without", library=False)
    for path, trust in (("with", False), ("with", True), ("without", False)):
        loaded = intaglio.load(tmp_path / path, trust=trust)
        assert loaded.artifact.program.source == tuned.artifact.program.source
        assert loaded.schedules == tuned.schedules
        assert torch.equal(loaded(x), plain(x))
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    other = intaglio.quantize(
        nets.randomize(convolutions(), seed=5), [x], options=intaglio.CompileOptions(tune=(x[:2],))
    )
    other.load_state_dict(state)
    assert torch.equal(other(x), plain(x))
    assert other.artifact.program.source == tuned.artifact.program.source


def test_without_tune_stored_schedules_are_not_used(nothing_known, narrow_is_fast):
    model, x = convolutions(), torch.randn(4, 3, 8, 8)
    before = intaglio.quantize(model, [x])
    intaglio.quantize(model, [x], options=intaglio.CompileOptions(tune=True))
    after = intaglio.quantize(model, [x])
    assert before.artifact.program.source == after.artifact.program.source
    assert not after.schedules


@pytest.mark.parametrize("tune", [None, 1, "yes", (torch.zeros(1),), (torch.zeros(1, 3, 8, 8), 2)])
def test_invalid_tune_arguments_are_refused_before_calibration(tune, monkeypatch):
    monkeypatch.setattr("intaglio.api.calibrate", lambda *args, **options: pytest.fail("calibrated"))
    with pytest.raises(InputError):
        intaglio.quantize(convolutions(), [torch.randn(4, 3, 8, 8)], options=intaglio.CompileOptions(tune=tune))


def test_tuning_with_dynamic_sizes_needs_a_call(nothing_known, narrow_is_fast):
    net = Net()
    free = net.lowered(net.dequantize(net.conv(net.quantize(net.input(N, 3, H, W)), 80, 3)))
    with pytest.raises(InputError, match="h, w") as raised:
        stages.compile(free, tune=True)
    assert "tune=(x,)" in str(raised.value)
    x = torch.randn(2, 3, 11, 12)
    assert torch.equal(stages.compile(free, tune=(x,))(x)[0], stages.compile(free)(x)[0])


def test_random_samples_and_first_samples_fit_the_signature(lowered):
    (made,) = random_sample(lowered.signature)
    assert made.shape == (1, 5, 9, 7)
    x = torch.randn(3, 5, 9, 7)
    (image,) = first_sample(lowered.signature, [x], ())
    assert torch.equal(image, x[:1])
