"""Linear layers that read weights in 4 bits have the bits of the interpreter, which multiplies int8 weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intaglio.codegen.int4_packing import StoredInt4, pack_int4, panel_line_bytes, stored_int4
from intaglio.codegen.weight_packing import packing
from intaglio.ir import Constants, DType, Graph, Op, Packing, StoredArray, TensorType
from intaglio.kernels import ISAS
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, INT4_MULTIPLES
from intaglio.ops.products.int4_linear import GROUP_STEP, INPUT_STEP, why_not_int4
from intaglio.runtime.saved.bit_packing import pack
from support.integer_graphs import N, Net
from support.matmul_library import RUNNABLE_ISAS
from support.programs import (
    assert_bits_of_the_interpreter,
    assert_same_bits,
    assert_stays_inside,
    built,
    compiled,
    threads,
)


def tails(net: Net) -> tuple[str, ...]:
    """Every tail of kernels, widths that are whole panels and not, groups of one and of several times 32 channels."""
    x = net.quantize(net.input(N, 128))
    wide = net.linear(x, 192, 32)
    floored = net.linear(wide, 64, 64, low=9, zero_point=9)
    summed = net.linear(floored, 192, 32, add=wide)
    looked_up = net.table(net.linear(summed, 70, 96))
    rows, scales = net.quantize_rows(net.linear(summed, 64, 32, f32=True))
    results = [net.linear(summed, outputs, 32, f32=True) for outputs in (1, 16, 33, 150)]
    return (*results, net.dequantize(looked_up), net.linear_rows(rows, scales, 81, 32))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_results_have_the_bits_of_the_interpreter(isa):
    net, lowered = built(tails)
    assert_bits_of_the_interpreter(net, lowered, compiled(tails, isa))


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_any_number_of_rows_has_these_bits(isa):
    """Rows of one kernel call, of several, and of more than a tile of int8 kernels has."""
    net, lowered = built(tails)
    model = compiled(tails, isa)
    for rows in (6, 7, 9, 16, 33, 100):
        inputs = net.batch(rows, seed=rows)
        expected = lowered(*inputs)
        for count in (1, 2, 3):
            with threads(count):
                assert_same_bits(model(*inputs), expected)


def many_inputs(net: Net) -> tuple[str, ...]:
    """A layer whose rows exceed the second-level cache: 1.4 MiB for 700 rows."""
    return (net.linear(net.quantize(net.input(N, 2112)), 70, 32, f32=True),)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_rows_that_exceed_the_second_cache_have_these_bits(isa):
    net, lowered = built(many_inputs)
    model, inputs = compiled(many_inputs, isa), net.batch(700, seed=0)
    expected = lowered(*inputs)
    for count in (1, 3):
        with threads(count):
            assert_same_bits(model(*inputs), expected)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_plans_name_the_layers_that_read_4_bits(isa):
    """Instruction sets without kernels for few rows read int8 weights, which are expanded when the program is built."""
    assert ("4-bit weights" in compiled(tails, isa).text("plan")) == bool(ISAS[isa].int4_tile_rows)


@pytest.mark.parametrize("isa", RUNNABLE_ISAS)
def test_kernels_stay_inside_their_memory(isa):
    net, lowered = built(tails)
    assert_stays_inside(net, lowered, compiled(tails, isa).artifact)


def unpacked(packed: np.ndarray, outputs: int, blocks: int) -> np.ndarray:
    """int8 weights of panels whose columns are in order, from the description of the layout."""
    rows = []
    while packed.size:
        width = min(blocks, -(-(outputs - len(rows)) // 16))
        lines = LINES * panel_line_bytes(width)
        panel, packed = packed[:lines].reshape(LINES, -1), packed[lines:]
        for column in range(16 * width):
            row = []
            for line in panel:
                for k in range(INT4_CHANNELS):
                    byte = line[INT4_MULTIPLES * width + k // 8 * 64 * width + 4 * column + k % 4]
                    value = int(byte >> 4 if k % 8 >= 4 else byte & 15) - 8
                    scales = line[column]
                    row.append(value * int(scales >> 4 if k >= INT4_GROUP else scales & 15))
            rows.append(row)
    return np.array(rows[:outputs])


LINES = 2


def test_conditions_are_those_of_the_layout():
    assert (GROUP_STEP, INPUT_STEP) == (INT4_GROUP, INT4_CHANNELS)


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**31))
def test_packed_weights_are_those_of_the_layout(outputs, blocks, seed):
    draw = np.random.default_rng(seed)
    inputs = LINES * INT4_CHANNELS
    values = draw.integers(-8, 8, (outputs, inputs)) * np.repeat(draw.integers(1, 16, (outputs, 2 * LINES)), 32, 1)
    plan = packing(outputs, inputs, 1, 1, 1, blocks, packed=False)
    assert np.array_equal(unpacked(pack_int4(values.astype(np.int8), plan), outputs, blocks), values)


@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**31))
def test_weights_in_a_file_are_packed_without_being_unpacked(outputs, blocks, seed):
    draw, inputs = np.random.default_rng(seed), LINES * INT4_CHANNELS
    values = draw.integers(-8, 8, (outputs, inputs)) * np.repeat(draw.integers(1, 16, (outputs, 2 * LINES)), 32, 1)
    weight, plan = values.astype(np.int8), packing(outputs, inputs, 1, 1, 1, blocks, packed=False)
    stored = in_file(weight, Packing(4, -8, 32))
    assert np.array_equal(pack_int4(stored, plan), pack_int4(weight, plan))
    assert np.array_equal(stored.sums(), values.sum(1))


def in_file(weight: np.ndarray, kind: Packing) -> StoredInt4 | None:
    """The weight as a file has it, or ``None`` if kernels cannot read it from there."""
    stored = StoredArray(weight.shape, weight.dtype, lambda: weight, lambda: pack(weight, kind))
    types = {"w": TensorType(weight.shape, DType.S8, packing=kind)}
    return stored_int4(Graph((), (), types, (), Constants({"w": stored})), "w")


def test_weights_in_other_groups_are_unpacked_first():
    weight = np.ones((3, 256), np.int8)
    assert in_file(weight, Packing(4, -8, 32)) is not None
    for kind in (Packing(4, -8, 128), Packing(4, -8), Packing(3, -4, 32)):
        assert in_file(weight, kind) is None
    assert in_file(weight[:, :96], Packing(4, -8, 32)) is None


def test_weights_of_another_size_than_their_shape_are_left_to_the_file():
    weight, kind = np.ones((3, 128), np.int8), Packing(4, -8, 32)
    values, multiples = pack(weight, kind)
    types = {"w": TensorType(weight.shape, DType.S8, packing=kind)}
    for found in ((values[:-1], multiples), (values, multiples[:-1]), (values.view(np.int8), multiples)):
        stored = StoredArray(weight.shape, weight.dtype, lambda: weight, lambda found=found: found)
        assert stored_int4(Graph((), (), types, (), Constants({"w": stored})), "w") is None


def test_multiples_in_a_file_that_kernels_do_not_hold_are_refused():
    values, multiples = np.zeros((3, 32), np.uint8), np.full((3, 1), 0xE0, np.uint8)
    plan = packing(3, INT4_CHANNELS, 1, 1, 1, 1, packed=False)
    assert pack_int4(StoredInt4(values, multiples), plan).any()
    for sixteen in (0xF0, 0x0F):
        with pytest.raises(ValueError, match="not multiples of 4-bit values"):
            pack_int4(StoredInt4(values, np.full((3, 1), sixteen, np.uint8)), plan)


def test_weights_of_more_bits_are_refused():
    weight = np.full((3, INT4_CHANNELS), 127, np.int8)
    with pytest.raises(ValueError, match="not multiples of 4-bit values"):
        pack_int4(weight, packing(3, INT4_CHANNELS, 1, 1, 1, 1, packed=False))


@pytest.mark.parametrize(
    ("inputs", "stored", "reason"),
    [
        (128, None, "does not have 4 bits"),
        (128, Packing(3, -4, 32), "does not have 4 bits"),
        (128, Packing(4, -8), "not multiples of 32"),
        (128, Packing(4, -8, 16), "not multiples of 32"),
        (96, Packing(4, -8, 32), "not a multiple of 64"),
        (128, Packing(4, -8, 32), None),
        (192, Packing(4, -8, 128), None),
    ],
)
def test_other_weights_are_read_in_8_bits_with_a_reason(inputs, stored, reason):
    types = {"w": TensorType((8, inputs), DType.S8, packing=stored)}
    found = why_not_int4(Op("linear", ("x", "w", "b"), ("y",), {}), types)
    assert (found is None) if reason is None else reason in found
