"""The driver of drawn networks: what it draws, that it notices, and networks that failed once."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from fuzz import checking, findings
from fuzz.builder import Builder
from fuzz.checking import MismatchError, Seen, check, compare_reference, compare_regions, to_lowered
from fuzz.drawing import Options, draw_network
from fuzz.findings import FAILURES, Finding, examine, shrunk, stored
from fuzz.generators import COMPOSITIONS, GENERATORS, WITHOUT_GENERATOR
from fuzz.network import Input, Network
from intaglio.ops import BY_NAME
from support.slow_params import slow_params_except

SMALL = Network(
    (Input("x0", (3, 4, 6, 6)),),
    {"p0": "nn.Conv2d(4, 5, 3)", "p1": "nn.Conv2d(5, 3, 1)"},
    ("v0 = self.p0(x0)", "v1 = F.relu(v0)", "v2 = self.p1(v1)", "v3 = F.max_pool2d(v2, 2)"),
    ("",) * 4,
    ("v3",),
)


def test_every_record_has_a_generator_or_a_reason():
    assert set(BY_NAME) == set(GENERATORS) | set(WITHOUT_GENERATOR)
    assert not set(GENERATORS) & set(WITHOUT_GENERATOR)


def test_every_generator_draws_a_call():
    for name, generate in {**GENERATORS, **COMPOSITIONS}.items():
        builder = Builder(0)
        assert any(builder.attempt(generate, name) for _ in range(60)), name


def test_a_seed_gives_one_network_with_the_same_values():
    one, other = draw_network(7), draw_network(7)
    assert one == other == Network.from_json(one.to_json())
    for a, b in zip(one.run(one.example()), other.run(other.example()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow(reason="draws and compiles four networks; stored ones agree below")
def test_drawn_networks_agree_at_all_stages():
    assert not list(examine([draw_network(seed) for seed in range(4)], Options(shapes="fixed"), 0, Seen()))


def stored_cases():
    groups = defaultdict(list)
    for path in sorted(FAILURES.glob("*.json")):
        network, options = stored(path)
        groups[replace(options, isa="")].append((path.stem, network))
    return groups


@pytest.mark.parametrize(
    "options",
    slow_params_except(
        *(one for one in stored_cases() if one.outputs == "int8" or one.shapes == "sizes"),
        of=stored_cases(),
        reason="the larger groups of networks that failed",
    ),
    ids=lambda options: options.shapes,
)
def test_networks_that_failed_once_agree(options):
    """Those of equal options stand side by side."""
    names, networks = zip(*stored_cases()[options], strict=True)
    for wrong in check(networks, options, 0, Seen()):
        pytest.fail(f"{wrong}: {[names[place] for place in wrong.networks]}")


@pytest.mark.slow(reason="two processes import PyTorch; the stages of a module have tests of their own")
def test_the_command_logs_each_module(tmp_path):
    log, path = tmp_path / "log.jsonl", os.pathsep.join(sys.path)
    command = [sys.executable, "-m", "fuzz.graphs", "--count", "3", "--processes", "1", "--log", str(log)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("3 networks with ")
    (line,) = map(json.loads, log.read_text().splitlines())
    assert (line["index"], line["networks"], line["findings"]) == (0, 3, [])


def test_a_wrong_constant_is_noticed():
    case = to_lowered([SMALL, SMALL], Options(), Seen())
    multiplier = next(
        name for name in case.lowered.graph.constants if "multiplier" in name and name.startswith("models_1")
    )
    case.lowered.graph.constants[multiplier][:] *= 1.1
    with pytest.raises(MismatchError, match="interpreter") as found:
        compare_regions(case, Seen())
    assert found.value.networks == (1,)


def test_a_wrong_weight_of_the_reference_is_noticed():
    case = to_lowered([SMALL, SMALL], Options(), Seen())
    compare_reference(case, 0)
    weight = next(
        b for name, b in case.reference.module.named_buffers() if "models_1_p1" in name and b.dtype is torch.int8
    )
    weight.neg_()
    with pytest.raises(MismatchError, match="reference") as found:
        compare_reference(case, 0)
    assert found.value.networks == (1,)


def test_other_bits_of_a_program_are_noticed():
    case = to_lowered([SMALL], Options(), Seen())
    results = checking.call(case.lowered, checking.inputs_of([SMALL]))
    others = checking.call(case.lowered, checking.inputs_of([SMALL]))
    others[0][0][0].flatten()[3] += 1e-6
    with pytest.raises(MismatchError, match="program"):
        checking.compare_bits(case, results, others, "")


def test_a_failing_network_is_shrunk_to_the_call_that_fails(monkeypatch):
    def fails(network, finding, seed):
        return any("max_pool2d" in line for line in network.lines)

    monkeypatch.setattr(findings, "fails_alike", fails)
    found = shrunk(Finding(SMALL, Options(shapes="sizes"), "some", ""), 0)
    assert found.network.lines == ("v3 = F.max_pool2d(x0, 2)",)
    assert not found.network.parts
    assert found.options == Options()
    assert json.loads(found.to_json("why"))["note"] == "why"
