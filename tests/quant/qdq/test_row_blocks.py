"""Blocks of rows: results are those of the whole weight, for any size of a block and any number of threads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio import numerics
from intaglio.quant.qdq import row_blocks
from intaglio.quant.qdq.weight_grid import channel_scales, weight_grid
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import datatype_of


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 150),
    block=st.integers(1, 700),
    kind=st.sampled_from(["s8", "s4", "s2"]),
    group=st.sampled_from([0, 8, 32]),
    seed=st.integers(0, 2**31),
)
def test_scales_multiples_and_weights_are_those_of_the_reference_implementation(
    rows, columns, block, kind, group, seed
):
    kind = datatype_of(kind, Role.WEIGHT)
    group = 0 if kind.multiples < 2 else group
    make = np.random.default_rng(seed)
    weight = (make.standard_normal((rows, columns)) * np.exp2(make.uniform(-6, 6, (rows, 1)))).astype(np.float32)
    weight[make.random(rows) < 0.1] = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_blocks, "BLOCK", block)
        scales = channel_scales(weight, kind, group)
        grid = weight_grid(weight, scales, kind, group)
        quantized = grid.nearest(weight)
        stored = grid.as_s8(quantized)

    bounds, multiples = (kind.qmin, kind.qmax), np.ones((rows, columns), np.int32)
    if group:
        groups = np.pad(weight, ((0, 0), (0, -columns % group))).reshape(rows, -1, group)
        expected = numerics.group_scale(groups, *bounds, kind.multiples)
        found = numerics.group_multiples(groups, expected, *bounds, kind.multiples)
        multiples = np.repeat(found, group, axis=1)[:, :columns]
    elif kind.squares:
        expected = numerics.least_squares(weight, *bounds)
    else:
        expected = numerics.symmetric_scale(np.abs(weight).max(1), kind.qmax)
    steps = expected[:, None] * multiples.astype(np.float32)
    np.testing.assert_array_equal(scales, expected)
    np.testing.assert_array_equal(
        np.broadcast_to(grid.steps(weight.shape), weight.shape), np.broadcast_to(steps, weight.shape)
    )
    np.testing.assert_array_equal(quantized, numerics.quantize(weight, steps, 0, *bounds))
    np.testing.assert_array_equal(stored, (quantized * multiples).astype(np.int8))


def test_an_error_in_a_block_is_raised(monkeypatch):
    def fail_behind_the_first(rows):
        if rows[0, 0]:
            raise ValueError("a later block")
        return rows

    monkeypatch.setattr(row_blocks, "BLOCK", 2)
    with pytest.raises(ValueError, match="a later block"):
        row_blocks.by_row_blocks(fail_behind_the_first, np.arange(6.0).reshape(3, 2))


def test_arrays_with_another_number_of_rows_are_passed_whole(monkeypatch):
    monkeypatch.setattr(row_blocks, "BLOCK", 2)
    weight, step = np.arange(6.0).reshape(3, 2), np.full((1, 1), 0.5)
    found = row_blocks.by_row_blocks(np.multiply, weight, step)
    np.testing.assert_array_equal(found, weight * 0.5)
