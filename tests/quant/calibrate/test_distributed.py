"""Several ranks give the bits of one process: simulated as threads, and as processes that talk through gloo."""

import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from intaglio.annotation import Annotation, CustomObserver, annotate_node
from intaglio.errors import CalibrationError
from intaglio.fxgraph.nodes import operator
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.distributed import Group, merge_statistics, share
from intaglio.quant.calibrate.prepare import prepare
from intaglio.quant.calibrate.range_methods import METHODS
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.correct.correct_weights import correct
from intaglio.quant.equalization.equalize import equalize
from intaglio.quant.qdq.convert import convert
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.tracing import capture
from support import nets
from support.lowering import captured_net
from support.project_files import ROOT
from support.slow_params import slow_params

MODEL, CAPTURED = captured_net(nets.MaxPoolNet, uneven=True)
BATCHES = [nets.example(MODEL, 1 + index % 3, seed=index) * 2.0 ** (index % 4) for index in range(7)]
STEADY = [nets.example(MODEL, 10 + index % 3, seed=index) for index in range(7)]
"""Enough samples of the same size to give factors."""


class Ranks:
    """Groups for threads of this process; the exchange all others are built from is a list with a place for each."""

    def __init__(self, size: int) -> None:
        self.size, self.items, self.barrier = size, [None] * size, threading.Barrier(size, timeout=60)

    def run(self, work: Callable[[Group], object]) -> list:
        """What ``work`` gives or raises on every rank."""
        results: list = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = work(_Rank(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class _Rank(Group):
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank, self.size = ranks, rank, ranks.size

    def gather(self, item):
        self.ranks.items[self.rank] = item
        self.ranks.barrier.wait()
        items = list(self.ranks.items)
        self.ranks.barrier.wait()
        return items


# ---- exchanges


def test_a_single_process_needs_no_process_group():
    group = Group.current()
    assert (group.rank, group.size) == (0, 1)
    assert group.gather("x") == ["x"]
    assert group.total(np.array([3], np.int64)) == 3
    assert list(share(iter(range(3)))) == [0, 1, 2]
    with pytest.raises(KeyError):
        group.run_on_all_ranks(lambda: {}["missing"])


def test_sums_are_exact_and_of_integers():
    numbers = [np.array([2**62, rank - 2**62], np.int64) for rank in range(2)]
    for found in Ranks(2).run(lambda group: group.total(numbers[group.rank])):
        np.testing.assert_array_equal(found, numbers[0] + numbers[1])
    with pytest.raises(TypeError, match="float32"):
        Group().total(np.zeros(2, np.float32))


def test_extrema_are_merged_over_ranks():
    found = Ranks(3).run(lambda group: [f(np.array([group.rank, -1.0])) for f in (group.lowest, group.highest)])
    for lowest, highest in found:
        assert (lowest.tolist(), highest.tolist()) == ([0, -1], [2, -1])


def test_a_rank_that_fails_stops_all_and_is_named():
    def work(group: Group) -> None:
        def step() -> None:
            if group.rank == 1:
                raise OSError("disk")

        group.run_on_all_ranks(step)

    first, second, third = Ranks(3).run(work)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, CalibrationError)
        assert "rank 1: failed, so all ranks stopped: OSError: disk" in str(error)


def test_other_sites_are_an_error_on_every_rank():
    names = [["a", "b"], ["a", "b"], ["a", "c"]]
    for error in Ranks(3).run(lambda group: group.agree(names[group.rank], "sites")):
        assert "rank 2: its sites differ from those of rank 0: only one of them has b, c" in str(error)


@given(st.integers(0, 12), st.sampled_from([1, 2, 3, 8]))
def test_each_rank_gets_whole_batches_alternately_without_repeats(count, size):
    shares = [list(share(range(count), rank)) for rank in (_Rank(Ranks(size), index) for index in range(size))]
    assert sorted(index for part in shares for index in part) == list(range(count))
    assert [index for part in zip(*shares, strict=False) for index in part] == list(range(min(map(len, shares)) * size))


# ---- statistics and calibration


@pytest.mark.slow(reason="draws shards; sums and extrema over ranks are compared above")
@pytest.mark.case("calibration 27")
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 8]))
def test_statistics_of_uneven_and_empty_shards_in_any_order_are_those_of_one_process(seed, size):
    rng = random.Random(seed)
    arrays = [np.random.default_rng(seed + n).standard_normal((n, 3)).astype(np.float32) * 2.0**n for n in range(1, 9)]
    of_rank = [rng.randrange(max(1, size - 1)) for _ in arrays]
    order = rng.sample(range(len(arrays)), len(arrays))

    def work(group: Group) -> Statistics:
        found = Statistics()
        for index in order:
            if of_rank[index] == group.rank:
                found.update(arrays[index], batch=index, channels=1)
        return merge_statistics(group, {"site": found})["site"]

    whole = Statistics()
    for index, array in enumerate(arrays):
        whole.update(array, batch=index, channels=1)
    for found in Ranks(size).run(work):
        assert found.to_dict() == whole.to_dict()
        assert [method(found, 0, 255) for method in METHODS.values()] == [
            method(whole, 0, 255) for method in METHODS.values()
        ]


@pytest.mark.case("calibration 27")
@pytest.mark.parametrize("size", [3, *slow_params(2, 8, reason="other numbers of ranks")])
def test_calibration_by_ranks_gives_the_file_and_the_parameters_of_one_process(size):
    """Eight ranks for seven batches: one has none."""
    alone = prepare(CAPTURED)
    ranges = calibrate(alone, BATCHES)
    prepared = [prepare(CAPTURED) for _ in range(size)]
    found = Ranks(size).run(lambda group: calibrate(prepared[group.rank], share(BATCHES, group), group=group))
    assert [one.to_json() for one in found] == [ranges.to_json()] * size
    for one in prepared:
        assert convert(one).qparams == convert(alone).qparams
        assert convert(one.with_method("ema:0.3")).qparams == convert(alone.with_method("ema:0.3")).qparams
    assert {one.observer_state.batch for one in prepared} == {len(BATCHES)}


@pytest.mark.case("calibration 27")
@pytest.mark.parametrize(
    "setting",
    [{}, *slow_params({"rounding": "nearest", "bias": "outputs"}, reason="biases are sums over ranks as moments are")],
    ids=str,
)
@pytest.mark.parametrize("size", [3, *slow_params(2, 8, reason="other numbers of ranks")])
def test_corrections_by_ranks_are_those_of_one_process_to_the_bit(size, setting):
    """Equalization, integers of weights and biases too; eight ranks for seven batches: one has none."""
    quantizer = Quantizer(Recipe(default=Setting(**setting)))

    def parameters(group: Group) -> str:
        data = share(STEADY, group)
        model = equalize(prepare(CAPTURED, quantizer), data, group=group)
        ranges = calibrate(model, data, group=group)
        return convert(model, ranges, correct(model, ranges, data, group=group)).parameters.to_json()

    alone = parameters(Group())
    assert "factors" in alone
    assert Ranks(size).run(parameters) == [alone] * size


def test_samples_count_over_all_ranks():
    even = [X[:2] for X in BATCHES if len(X) > 1] * 3
    alone = calibrate(prepare(CAPTURED), even, samples=7)
    for found in Ranks(3).run(lambda group: calibrate(prepare(CAPTURED), share(even, group), samples=7, group=group)):
        assert found.to_json() == alone.to_json()


def test_bad_data_on_one_rank_is_an_error_on_all_and_changes_nothing():
    bad = [*BATCHES[:4], BATCHES[4] * float("nan"), *BATCHES[5:]]
    prepared = [prepare(CAPTURED) for _ in range(3)]
    errors = Ranks(3).run(lambda group: calibrate(prepared[group.rank], share(bad, group), group=group))
    assert "batch 4, #0/input.x" in str(errors[1])
    assert all("rank 1: failed" in str(errors[rank]) and "#0/input.x" in str(errors[rank]) for rank in (0, 2))
    assert all(observer.statistics.count == 0 for one in prepared for observer in one.observers.values())


def test_an_observer_with_its_own_conversion_cannot_be_distributed():
    """What it saw cannot be merged, and every rank would convert to another model."""

    class Annotator:
        def annotate(self, module):
            node = next(node for node in module.graph.nodes if operator(node) == "aten.conv2d.default")
            annotate_node(node, Annotation({node.args[0]: CustomObserver(torch.nn.Identity)}))

    all_stages = [prepare(CAPTURED, Annotator()) for _ in range(2)]
    for error in Ranks(2).run(lambda group: calibrate(all_stages[group.rank], share(BATCHES, group), group=group)):
        assert isinstance(error, CalibrationError)
        assert "the results of custom observers (x) cannot be merged over 2 ranks" in str(error)


def test_no_data_on_any_rank_is_an_error_on_all():
    for error in Ranks(2).run(lambda group: calibrate(prepare(CAPTURED), [], group=group)):
        assert "0 batches without a single sample" in str(error)


def test_another_model_on_one_rank_is_named():
    other = capture(nets.randomize(nets.Linears()), torch.zeros(2, 16))
    captured = [CAPTURED, other]
    for error in Ranks(2).run(lambda group: calibrate(prepare(captured[group.rank]), BATCHES, group=group)):
        assert isinstance(error, CalibrationError)
        assert "rank 1: its sites differ from those of rank 0" in str(error)


def test_a_sampler_that_repeats_samples_is_warned_of():
    data = TensorDataset(torch.cat(BATCHES)[:9])
    sampler = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    with pytest.warns(UserWarning, match="repeats 1 samples"):
        calibrate(prepare(CAPTURED), DataLoader(data, batch_size=3, sampler=sampler))


# ---- processes

SCRIPT = """
    import datetime, os, sys
    sys.path[:0] = {paths}
    import torch
    import torch.distributed as dist
    from intaglio.errors import CalibrationError
    from intaglio.quant.calibrate.calibration_loop import calibrate
    from intaglio.quant.calibrate.distributed import share
    from intaglio.quant.calibrate.prepare import prepare
    from support import nets
    from support.lowering import captured_net

    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{{folder}}/meeting", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=120),
    )
    model, captured = captured_net(nets.MaxPoolNet, uneven=True)
    batches = [nets.example(model, 1 + index % 3, seed=index) * 2.0 ** (index % 4) for index in range(7)]
    prepared = prepare(captured)
    calibrate(prepared, share(batches)).save(f"{{folder}}/{{rank}}.json")
    try:
        calibrate(prepared, share([batches[0], "broken", *batches[2:]]))
    except CalibrationError as error:
        print(error, flush=True)
    if rank == 1:
        os._exit(3)
    try:
        calibrate(prepared, share(batches))
    except CalibrationError as error:
        print(error, flush=True)
        os._exit(0)
"""


@pytest.mark.slow(reason="starts processes; ranks in threads show the same sums")
@pytest.mark.case("calibration 27")
@pytest.mark.parametrize("size", [2, *slow_params(3, reason="three processes that import PyTorch")])
def test_ranks_give_the_file_of_one_process_and_do_not_wait_for_failed_ones(tmp_path, size):
    code = textwrap.dedent(SCRIPT).format(paths=[str(ROOT / "src"), str(ROOT / "tests")])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(size), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    told = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0 if rank != 1 else 3 for rank in range(size)], told
    expected = calibrate(prepare(CAPTURED), BATCHES).to_json()
    for rank, (printed, _) in enumerate(told):
        assert Ranges.load(tmp_path / f"{rank}.json").to_json() == expected
        assert "data: a batch is of type str" in printed
        assert (
            rank == 1
            or "rank 1: failed, so all ranks stopped: CalibrationError: data: a batch is of type str" in printed
        )
        assert rank == 1 or f"rank 1: no answer any more, which rank {rank} waited for" in printed
