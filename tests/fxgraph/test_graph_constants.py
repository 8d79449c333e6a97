"""Large constants of a graph in temporary files."""

import copy
import os
import tempfile
import warnings

import pytest
import torch

from intaglio.fxgraph.graph_constants import LARGE_CONSTANT, in_file

ROWS = LARGE_CONSTANT // 4096


def _mapped_files() -> int:
    with open("/proc/self/maps") as maps:
        return sum("(deleted)" in line and tempfile.gettempdir() in line for line in maps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64, torch.bool])
def test_large_tensors_keep_their_values(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(0, 2, (4096, ROWS)).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored = in_file(tensor)
    assert torch.equal(stored, tensor)
    assert stored.dtype is dtype


def test_the_result_is_contiguous() -> None:
    for rows in (4, ROWS):
        tensor = torch.randn(rows, 4096).t()
        assert torch.equal(in_file(tensor), tensor)
        assert in_file(tensor).is_contiguous()


def test_small_tensors_stay_in_memory() -> None:
    tensor = torch.randn(4, 4)
    assert in_file(tensor) is tensor


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads the mapped files of the process in /proc")
def test_the_file_ends_with_the_tensor() -> None:
    before = _mapped_files()
    stored = in_file(torch.randn(ROWS, 1024))
    view = stored[1:]
    del stored
    assert _mapped_files() == before + 1
    del view
    assert _mapped_files() == before


def test_writes_stay_in_the_tensor_and_copies_are_independent() -> None:
    stored = in_file(torch.zeros(ROWS, 1024))
    copied = copy.deepcopy(stored)
    stored.add_(1)
    assert stored.eq(1).all()
    assert copied.eq(0).all()


def test_without_space_for_a_file_the_tensor_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    tensor = torch.randn(ROWS, 1024)
    assert in_file(tensor) is tensor
