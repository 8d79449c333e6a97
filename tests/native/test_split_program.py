"""Texts of programs are divided into parts, which are compiled at the same time to one library."""

import re

import pytest
import torch
from torch import nn

from intaglio import stages
from intaglio.native import compile as compiler
from intaglio.native import split_program
from support.lowering import quantized
from support.nets import randomize
from support.programs import assert_same_bits

X = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(0))
DEFINED = re.compile(r"^(?:static )?void (p\d+_\w*)\(.*\) \{$", re.MULTILINE)


@pytest.fixture(scope="module")
def lowered():
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.LayerNorm(8))]
    _, made = quantized(randomize(nn.Sequential(*layers)), X)
    return made


@pytest.mark.parametrize("most", [2, 3, 100])
def test_every_step_is_defined_once(lowered, monkeypatch, most):
    source = stages.compile(lowered).text("program")
    monkeypatch.setattr(split_program, "LEAST_BYTES", 1)
    parts = split_program.split_program(source, most)
    steps = DEFINED.findall(source)
    assert len(parts) == min(most, split_program.MOST_PARTS, len(steps))
    assert sorted(name for part in parts for name in DEFINED.findall(part)) == sorted(steps)
    assert ["segment0(" in part for part in parts] == [True] + [False] * (len(parts) - 1)


def test_a_short_text_and_one_without_steps_stay_whole(lowered):
    source = stages.compile(lowered).text("program")
    assert split_program.split_program(source, 8) == [source]
    text = "int f() { return 1; }\n" * 10_000
    assert split_program.split_program(text, 8) == [text]


def test_the_library_of_parts_has_the_bits_of_the_whole(lowered, monkeypatch, tmp_path):
    whole = stages.compile(lowered)(X)
    monkeypatch.setattr(split_program, "LEAST_BYTES", 1)
    monkeypatch.setattr(compiler.os, "sched_getaffinity", lambda process: {0, 1, 2})
    monkeypatch.setenv("INTAGLIO_CACHE_DIR", str(tmp_path))
    assert_same_bits(stages.compile(lowered)(X), whole)
    assert [path.suffix for path in (tmp_path / "kernels").glob("Sequential-*.o")] == []
