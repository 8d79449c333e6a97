"""Depthwise tiles: which products they take, in which registers, from which memory."""

import re
from itertools import product

import numpy as np
import pytest

from intaglio.codegen.emitters.emit_depthwise import pack_depthwise
from intaglio.kernels import ISAS
from intaglio.kernels.avx512vnni.vnni_depthwise import emit
from intaglio.kernels.depthwise_spec import channel_order
from intaglio.plan.kernel_records import DepthwiseKernel
from intaglio.plan.scheduling.convolution_pieces import Piece
from intaglio.plan.scheduling.kernel_selection import cheapest_depthwise_tile, depthwise_kernel

SHAPES = [(taps, stride) for taps in product((1, 2, 3, 5, 7, 9), repeat=2) for stride in product((1, 2, 3), repeat=2)]


@pytest.mark.parametrize(("taps", "stride"), [((3, 3), (1, 1)), ((3, 3), (2, 2)), ((5, 5), (1, 1)), ((7, 7), (1, 1))])
def test_packed_weights_hold_every_tap_of_every_row_once(taps, stride):
    spec, draw = cheapest_depthwise_tile(taps, stride), np.random.default_rng(0)
    weight = draw.integers(-127, 128, (50, 1, *taps)).astype(np.int8)
    packed = pack_depthwise(weight, spec).reshape(-1, taps[1], spec.channels, 4)
    order = channel_order(spec.lanes)
    for channel in range(50):
        column = int(np.flatnonzero(order == channel)[0])
        for row in range(spec.rows):
            parts = [index for index, (r, _) in enumerate(spec.pairs()) if r == row]
            rows = np.concatenate([packed[index, :, column].T for index in parts])
            first = row * stride[0] - 4 * spec.pairs()[parts[0]][1]
            assert np.array_equal(rows[first : first + taps[0]], weight[channel, 0])
            assert not rows[:first].any()
            assert not rows[first + taps[0] :].any()


def test_every_tile_fits_the_registers_and_reads_no_other_row(subtests):
    for taps, stride in SHAPES:
        with subtests.test(taps=taps, stride=stride):
            spec = cheapest_depthwise_tile(taps, stride)
            assert spec.fits
            text = emit(spec)
            assert max(int(n) for n in re.findall(r"%[yz]mm(\d+)", text)) < 32
            assert text.count("vpdpbusd") == 4 * len(spec.pairs()) * taps[1] * spec.columns
            weights = [int(at) for at in re.findall(r"(\d+)\(%rsi\)", text)]
            assert len(weights) == 4 * len(spec.pairs()) * taps[1] * len(spec.groups())
            assert set(weights) == set(range(0, len(spec.pairs()) * taps[1] * 4 * 64, 64))


def test_a_remainder_of_half_a_vector_uses_half_a_vector():
    for channels, lanes in ((144, [4, 4, 2]), (112, [4, 4]), (32, [2]), (33, [4])):
        piece = Piece("weight", (channels, 1, 3, 3), np.array, (1, 1), (1, 1), (0, 0))
        kernel, _ = depthwise_kernel(piece, "u8", False, False, False, ISAS["avx512vnni"])
        assert isinstance(kernel, DepthwiseKernel)
        assert [*[kernel.tile.lanes] * (kernel.blocks - 1), kernel.last.lanes] == lanes


def test_the_cheapest_three_by_three_tile_interleaves_each_column_once():
    """Two output rows from four input rows, two output columns, and two columns of the tile before: 8 cycles a pixel
    for 12 dot products and 4 multiplications."""
    spec = cheapest_depthwise_tile((3, 3), (1, 1))
    assert (spec.rows, spec.columns, spec.carried) == (2, 2, 2)
    cycles, _ = spec.cost
    assert cycles == 8
