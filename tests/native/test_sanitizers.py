"""Exported programs under AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize` runs all networks)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch

from intaglio import stages
from intaglio.errors import InputError, UnsupportedError
from intaglio.runtime import QuantizedModel
from support import nets
from support.exported_program import arguments, executable, expected
from support.matmul_library import RUNNABLE_ISAS
from support.nets import randomize
from support.project_files import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from bits.cases import CASES, Case
from bits.flows import FLOWS

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
pytestmark = pytest.mark.slow(reason="a build with sanitizers takes ten seconds; make sanitize runs them")


@cache
def has_sanitizers() -> bool:
    """Return whether the compiler links and runs a program with sanitizers."""
    if shutil.which("g++") is None:
        return False
    command = ["g++", *FLAGS, "-x", "c++", "-", "-o", "/dev/null"]
    return subprocess.run(command, input="int main() {}", text=True, capture_output=True).returncode == 0


def compiled(case: Case) -> QuantizedModel:
    torch.manual_seed(0)
    model, batches = randomize(case.net()).eval(), [case.inputs(call) for call in case.calibration]
    with torch.set_grad_enabled(case.flow.startswith("trained")):
        reference, _ = FLOWS[case.flow](case, model, batches)
    return stages.compile(stages.requantize(reference))


TINY = {
    net.__name__: Case(net, lambda batch, net=net: (nets.example(net(), batch),))
    for net in nets.ALL
    if net is not nets.CrossNet  # nothing in it is quantized
}
NETWORKS = {**CASES, **TINY}
# Eager models have several programs, and the C interface returns what `Integers` stand for as floats.
EXPORTED = [name for name, case in NETWORKS.items() if case.flow != "eager" and name != "int8_outputs"]


@pytest.mark.parametrize("name", EXPORTED)
def test_programs_read_and_write_their_own_memory_only(name, tmp_path):
    if not has_sanitizers():
        pytest.skip("needs g++ with AddressSanitizer")
    case = NETWORKS[name]
    model = compiled(case)
    for isa in RUNNABLE_ISAS:
        folder = tmp_path / isa
        try:
            model.export_c(folder, isa=isa)
        except UnsupportedError as error:
            pytest.skip(str(error))
        run = executable(folder, flags=FLAGS)
        calls = [inputs for inputs in map(case.inputs, case.calls) if _fits(model, inputs)]
        for call, inputs in enumerate(calls or [case.inputs(case.calibration[0])]):
            for threads in (1, 2):
                command = [str(run), *arguments(folder, inputs, tmp_path, threads)]
                found = subprocess.run(command, capture_output=True, check=False)
                assert (found.returncode, found.stderr.decode()[:4000]) == (0, ""), (isa, call, threads)
                assert found.stdout == expected(model, inputs), (isa, call, threads)


def _fits(model: QuantizedModel, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a model whose sizes are fixed takes these inputs."""
    try:
        model(*inputs)
    except InputError:
        return False
    return True
