"""Models that run: prepared, fed, converted, and compared with the float model call by call."""

import copy
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from intaglio import eager
from support.lowering import sqnr

Call = tuple[Any, ...]


def prepared_on(model: nn.Module, calls: Sequence[Call], recipe: Any = None, **options: Any) -> nn.Module:
    """Prepared on the first call, fed all of them; every result is the float model's, and so is what it does to
    tensors it is given."""
    prepared = eager.prepare(model, copy.deepcopy(calls[0]), recipe, **options)
    for call in calls:
        assert_like(prepared, model, call, same)
    return prepared


def converted_on(model: nn.Module, calls: Sequence[Call], recipe: Any = None, **options: Any) -> nn.Module:
    return eager.convert(prepared_on(model.eval(), calls, recipe, **options))


def assert_like(running: nn.Module, model: nn.Module, call: Call, compare: Any) -> None:
    """Results and changed arguments are the float model's; nothing that is ours comes out."""
    ours, theirs = copy.deepcopy(call), copy.deepcopy(call)
    with torch.no_grad():
        found, expected = running(*ours), model(*theirs)
    assert_same_kind(found, expected)
    for (place, mine), its in zip(
        pytree.tree_leaves_with_path((found, ours)), pytree.tree_leaves((expected, theirs)), strict=True
    ):
        if isinstance(mine, Tensor):
            try:
                compare(mine, its)
            except AssertionError as error:
                raise AssertionError(f"(results, arguments){pytree.keystr(place)}: {error}") from error


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def assert_same_kind(found: Any, expected: Any) -> None:
    """Structure, classes, element types, shapes; everything that is no tensor is equal."""
    left, right = (pytree.tree_flatten(value) for value in (found, expected))
    assert left[1] == right[1]
    for mine, its in zip(left[0], right[0], strict=True):
        assert type(mine) is type(its)
        if isinstance(its, Tensor):
            assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        else:
            assert mine == its


def same(mine: Tensor, its: Tensor) -> None:
    """Up to the order of sums: a folded batch norm rounds otherwise."""
    if its.is_floating_point():
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4 * float(its.abs().max()) if its.numel() else 0.0)
    else:
        assert torch.equal(mine, its)


def near(mine: Tensor, its: Tensor) -> None:
    """As int8 is."""
    if not torch.equal(mine, its):
        assert its.is_floating_point()
        assert sqnr(mine, its) > 20


def assert_near(converted: nn.Module, model: nn.Module, calls: Sequence[Call]) -> None:
    for call in calls:
        assert_like(converted, model, call, near)


def integers(converted: nn.Module) -> list[str]:
    """Operators of the integer graphs that its calls had built."""
    segments = eager.session_of(converted).segments
    return [
        str(node.target) for segment in segments if segment.reference for node in segment.reference.module.graph.nodes
    ]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "intaglio" and r.levelno >= logging.WARNING]
