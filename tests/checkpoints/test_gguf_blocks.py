"""Blocks of GGUF files have the values of their definition, to the bit."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from intaglio.checkpoints.gguf_blocks import BLOCK_TYPES
from support.gguf_files import (
    half,
    q4_0_block,
    q4_1_block,
    q4_k_block,
    q5_0_block,
    q5_1_block,
    q5_k_block,
    q6_k_block,
    q8_0_block,
)

SCALES = st.integers(0, 2**16 - 1).map(lambda bits: struct.unpack("<e", struct.pack("<H", bits))[0]).filter(np.isfinite)


def integers(count: int, low: int, high: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(low, high), min_size=count, max_size=count)


def blocks(kind: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, BLOCK_TYPES[kind].octets)


def assert_values(kind: str, data: bytes, exact: list[float], group: int) -> None:
    """Values that are computed one by one in float64, which is exact, and rounded once, are those of the block."""
    found = BLOCK_TYPES[kind].groups(blocks(kind, data))
    assert found.size == group
    assert found.quantized.dtype == np.int8
    np.testing.assert_array_equal(found.values()[0], np.array(exact, np.float32))


SYMMETRIC = {"Q4_0": (q4_0_block, -8, 7), "Q5_0": (q5_0_block, -16, 15), "Q8_0": (q8_0_block, -128, 127)}
ASYMMETRIC = {"Q4_1": (q4_1_block, 15), "Q5_1": (q5_1_block, 31)}
IN_EIGHT_GROUPS = {"Q4_K": (q4_k_block, 15), "Q5_K": (q5_k_block, 31)}


@pytest.mark.parametrize("kind", SYMMETRIC)
@given(data=st.data())
def test_blocks_with_a_scale(kind, data):
    write, low, high = SYMMETRIC[kind]
    scale, values = data.draw(SCALES), data.draw(integers(32, low, high))
    assert_values(kind, write(scale, values), [scale * value for value in values], 32)


@pytest.mark.parametrize("kind", ASYMMETRIC)
@given(data=st.data())
def test_blocks_with_a_scale_and_an_offset(kind, data):
    write, high = ASYMMETRIC[kind]
    scale, offset, values = data.draw(SCALES), data.draw(SCALES), data.draw(integers(32, 0, high))
    assert_values(kind, write(scale, offset, values), [scale * value + offset for value in values], 32)


@pytest.mark.parametrize("kind", IN_EIGHT_GROUPS)
@given(data=st.data())
def test_blocks_of_eight_groups(kind, data):
    write, high = IN_EIGHT_GROUPS[kind]
    scale, least = data.draw(SCALES), data.draw(SCALES)
    scales, minima = data.draw(integers(8, 0, 63)), data.draw(integers(8, 0, 63))
    values = data.draw(integers(256, 0, high))
    exact = [scale * scales[i // 32] * value - least * minima[i // 32] for i, value in enumerate(values)]
    assert_values(kind, write(scale, least, scales, minima, values), exact, 32)


@given(SCALES, integers(16, -128, 127), integers(256, -32, 31))
def test_q6_k_blocks(scale, scales, values):
    exact = [scale * scales[i // 16] * value for i, value in enumerate(values)]
    assert_values("Q6_K", q6_k_block(scale, scales, values), exact, 16)


def test_a_q4_k_block_written_by_hand():
    """The first scale is 1, the last 0b110001, the last minimum 0b100010; integers count from 0 to 15 repeatedly."""
    packed = bytes([1, 0, 0, 0b11000000, 0, 0, 0, 0b10000000, 0, 0, 0, 0b00100001])
    fields = bytes(i % 16 | i % 16 << 4 for i in range(128))
    found = BLOCK_TYPES["Q4_K"].groups(blocks("Q4_K", half(0.5) + half(2.0) + packed + fields)).values()[0]
    np.testing.assert_array_equal(found[:32], [0.5 * (i % 16) for i in range(32)])
    np.testing.assert_array_equal(found[32:224], np.zeros(192))
    np.testing.assert_array_equal(found[224:], [0.5 * 0b110001 * (i % 16) - 2 * 0b100010 for i in range(32)])


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_all_numbers_of_16_bits(kind, dtype):
    bits = np.arange(2**16, dtype="<u2")
    found = BLOCK_TYPES[kind].floats(blocks(kind, bits.tobytes()))
    exact = torch.from_numpy(bits.view(np.int16)).view(dtype).to(torch.float32).numpy()
    np.testing.assert_array_equal(found.reshape(-1), exact)
